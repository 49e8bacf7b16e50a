"""Types of command-line arguments, the arguments that several commands take, and the parser."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import fields

import pytest

from autostream.cli.arguments import how_many, memory, positive, share, streams, whole
from autostream.cli.command import Command, Parser, add, argument
from autostream.cli.shared import PLANNING
from autostream.errors import OptionError
from autostream.options import Options

NO_NUMBERS = ["-1", "1.5", "many", "", "²"]


@pytest.mark.parametrize(
    ("parse", "texts", "said"),
    [
        (positive, ["0", "-1", "nan", "inf", "1000000", "soon", ""], "use a positive number below a million"),
        (
            memory,
            ["", "x", "-1", "-1.1", "nan", "1,1", "1e9", "64mb", "64 MiB", "1.1xB", "²", "lots"],
            "use a ratio to one stream such as 1",
        ),
        (whole, NO_NUMBERS, "use a whole number, 0 or more$"),
        (how_many, NO_NUMBERS, "use a whole number, or all$"),
        (share, ["1", "100%", "-1%", "nan", "some", "", "%"], r"write a share, such as 3% or 0\.03"),
    ],
)
def test_what_is_none_is_told(parse: Callable[[str], object], texts: list[str], said: str) -> None:
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=f"is not allowed: {said}"):
            parse(text)


def test_streams_may_be_any_text_for_options_know_what_is_allowed() -> None:
    assert [streams(text) for text in NO_NUMBERS] == NO_NUMBERS


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.1", 1.1), ("1.1x", 1.1), ("2x", 2.0), ("2.", 2.0), ("inf", math.inf),
        ("2", 2), ("100000000", 10**8), ("123456789012345679", 123456789012345679), ("7B", 7),
        ("64MiB", 2**26), ("1.5GB", 1_500_000_000), ("8kB", 8000), ("8KiB", 8192), ("0.5GiB", 2**29),
    ],
)  # fmt: skip
def test_memory_is_bytes_or_a_ratio(text: str, value: float) -> None:
    found = memory(text)
    assert (found, type(found)) == (value, type(value))


def test_what_is_not_told_is_what_optimize_takes() -> None:
    parser = Parser(prog="plan")
    add([Command("it", "", "", "it", PLANNING, lambda given: 0)], parser)
    given = vars(parser.parse_args(["it", "net"]))
    told = given.keys() & {field.name for field in fields(Options)}
    assert {"policy", "streams", "costs", "kernels", "tuning_seconds", "memory_budget", "seed"} == told
    assert {name: given[name] for name in told} == {name: getattr(Options(), name) for name in told}


def test_what_help_tells_of_a_memory_budget_is_taken() -> None:
    (budget,) = (each for each in PLANNING if "--memory-budget" in each.names)
    told = [memory(word) for word in ("1.1", "2x", "64MiB", "inf") if word in budget.settings["help"]]
    assert told == [1.1, 2.0, 64 * 2**20, math.inf]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("", r"the following arguments are required: COMMAND \(say --help says more\)"),
        ("greet", r"the following arguments are required: name \(say greet --help says more\)"),
        ("greet Ann --loud --softly", "argument --softly: not allowed with argument --loud"),
        ("greet Ann --lou", "unrecognized arguments: --lou"),
    ],
)
def test_what_a_command_does_not_take_is_one_line(argv: str, said: str) -> None:
    either = (argument("--loud", action="store_true"), argument("--softly", action="store_true"))
    parser = Parser(prog="say")
    add([Command("greet", "say hello", "", "greet Ann --loud", [argument("name"), either], lambda given: 0)], parser)
    with pytest.raises(OptionError, match=said):
        parser.parse_args(argv.split())
