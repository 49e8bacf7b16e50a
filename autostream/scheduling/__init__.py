"""From a graph and its costs to a schedule: pure functions of immutable values, without torch and without a device.

structure                                what the graph allows: bottom levels, critical path, width, branches
policies/                                OpGraph, Costs ─▶ Assignment (which stream, in which order)
coarsen                                  OpGraph, Costs ─▶ chains of short ops, which no policy splits
synchronize, releases                    Assignment ─▶ Schedule (where streams wait, where memory is given back)
footprint                                Timeline ─▶ what is in memory at a time
slack                                    Timeline ─▶ Timeline (all as late as it may be)
postpone                                 Schedule, Timeline ─▶ Assignment (what takes memory is launched later)
recycling                                Schedule, Timeline ─▶ Schedule (waits that take no time and save memory)
clocks                                   Schedule ─▶ what has happened before each launch
lifetimes, arena                         Schedule ─▶ when each storage is in use ─▶ Schedule (where storages lie)
verify                                   Schedule ─▶ nothing, or ScheduleError; shares no code with the above
simulate                                 Schedule ─▶ Timeline
losses, overlap                          Schedule ─▶ where its time goes; Timeline ─▶ what runs beside what
peak                                     Schedule ─▶ bytes
check                                    Costs ─▶ nothing, or CostError
"""
