"""What a call of an optimized model, or of a training step, runs.

============================  ==================  ================================================================
model                         step                question
============================  ==================  ================================================================
optimized_callable, _method   step_functions      What do users hold and call?
dispatcher, admission         step_graphs         What runs this call, and is one more schedule worth making?
cached_replays, replay        step_replay         Is it like a recent call? Then its graph is replayed (fast path).
..                            step_calls          By which key is it found? Why does no graph compute it?
entries                       captured_step       What is made of a call that is new?
captured_call                 captured_step       How does one graph run a call?
split_call                    ..                  How do several, at graph breaks?
eager_call                    step_functions      How does it run as it is written?
compiled_graph                ..                  One graph at all its signatures
scheduled_program, sections   the same            One program with its schedule, whole or in parts
============================  ==================  ================================================================

``steps`` is the step of ``train_step``, and ``children`` what ``Parallel`` runs. ``padding`` pads arguments to buckets
before all that; ``requirements`` checks what options ask of the machine; ``results`` finds out what a captured call
returns; ``paranoid`` compares each call with the model's own result.
"""
