"""Arguments that several commands take."""

from __future__ import annotations

import math
from dataclasses import fields

from autostream.cli.arguments import memory
from autostream.cli.command import Command, Parser, add
from autostream.cli.shared import PLANNING
from autostream.options import Options


def test_what_is_not_told_is_what_optimize_takes() -> None:
    parser = Parser(prog="plan")
    add([Command("it", "", "", "it", PLANNING, lambda given: 0)], parser)
    given = vars(parser.parse_args(["it", "net"]))
    ours = {field.name: getattr(Options(), field.name) for field in fields(Options)}
    told = given.keys() & ours.keys()
    assert {"policy", "streams", "costs", "kernels", "tuning_seconds", "memory_budget", "seed"} == told
    assert {name: given[name] for name in told} == {name: ours[name] for name in told}


def test_what_help_tells_of_a_memory_budget_is_taken() -> None:
    (budget,) = (each for each in PLANNING if "--memory-budget" in each.names)
    told = [memory(word) for word in ("1.1", "2x", "64MiB", "inf") if word in budget.settings["help"]]
    assert told == [1.1, 2.0, 64 * 2**20, math.inf]
