"""From a graph and its costs to a schedule: pure functions of immutable values, without torch and without a device.

structure                                what the graph allows: bottom levels, critical path, width, branches
policies/                                OpGraph, Costs ─▶ Assignment (which stream, in which order)
coarsen                                  OpGraph, Costs ─▶ chains of short ops, which no policy splits
synchronize                              Assignment ─▶ Schedule (where streams wait)
releases                                 Schedule ─▶ Schedule (where memory is released; waits that save memory)
lifetimes                                Schedule ─▶ what is over before each launch, when each storage is in use
postpone                                 Schedule, Timeline ─▶ Assignment (what takes memory is launched later)
arena                                    Schedule ─▶ Schedule (the offset of each storage in one block of memory)
verify                                   Schedule ─▶ nothing, or ScheduleError; shares no code with the above
simulate                                 Schedule ─▶ Timeline
losses, overlap                          Schedule ─▶ where its time goes; Timeline ─▶ what runs beside what
peak                                     Schedule or Timeline ─▶ bytes
check                                    Costs ─▶ nothing, or CostError
"""
