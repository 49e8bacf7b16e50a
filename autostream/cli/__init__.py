"""The command line: each command is one declaration (``command.py``), beside what it does.

planning.py    schedule, inspect, explain, trace, report: one model, planned
bench.py       bench: one model in several modes, checked and timed
compare.py     compare: two results of bench
demo.py        demo: GoogLeNet beside itself
machine.py     profile, env: what is here
program.py     all of them, and the exit code
"""

from autostream.cli.program import main

__all__ = ["main"]
