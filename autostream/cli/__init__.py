"""The command line. Each command is one declaration (``command.py``) beside its function.

planning.py    schedule, inspect, explain, trace, report: plans of one model
bench.py       bench: one model in several modes, checked and timed
compare.py     compare: two results of bench
demo.py        demo: GoogLeNet, optimized, compared with eager
machine.py     profile, env: this machine
program.py     all of them, and the exit code
"""

from autostream.cli.program import main

__all__ = ["main"]
