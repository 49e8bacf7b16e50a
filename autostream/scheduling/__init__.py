"""Scheduling: from a graph and its costs to a schedule, by pure functions that need neither torch nor a device.

structure                                OpGraph ─▶ bounds of every schedule: critical path, width, branches
policies/                                OpGraph, Costs ─▶ Assignment (which stream, in which order)
coarsen                                  OpGraph, Costs ─▶ chains of short ops, which no policy splits
synchronize                              Assignment ─▶ Schedule (where streams wait)
releases                                 Schedule ─▶ Schedule (where memory is released; waits that save memory)
lifetimes                                Schedule ─▶ what is over before each launch, and when storages are in use
postpone                                 Schedule, Timeline ─▶ Assignment (launched later, to save memory)
arena                                    Schedule ─▶ Schedule (the offset of each storage in one block of memory)
verify                                   Schedule ─▶ nothing, or ScheduleError; shares no code with the above
simulate                                 Schedule ─▶ Timeline
lost_time                                Schedule ─▶ what each cause adds to its time
overlap                                  Timeline ─▶ which ops run at the same time
peak                                     Schedule or Timeline ─▶ bytes of memory
cost_check                               Costs ─▶ nothing, or CostError
cut, turns                               OpGraph ─▶ parts that CUDA graphs can hold, and parts between them, in order
communication                            OpGraph ─▶ the collectives that all processes have to launch alike
partition, microbatches                  OpGraph, Costs ─▶ stages of a pipeline; its schedules
bitsets, matching                        sets of ops, and matchings, for the above
"""
