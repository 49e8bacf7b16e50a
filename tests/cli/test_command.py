"""Commands as values, and the parser made of them."""

from __future__ import annotations

import pytest

from autostream.cli.command import Command, Parser, add, argument
from autostream.errors import OptionError

GREET = Command(
    "greet",
    "say hello",
    "Say hello.\nPolitely.",
    "greet Ann --loud",
    [argument("name"), (argument("--loud", action="store_true"), argument("--softly", action="store_true"))],
    lambda given: len(given.name),
)


def parser() -> Parser:
    made = Parser(prog="say")
    add([GREET], made)
    return made


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], r"the following arguments are required: COMMAND \(say --help says more\)"),
        (["greet"], r"the following arguments are required: name \(say greet --help says more\)"),
        (["greet", "Ann", "--loud", "--softly"], "argument --softly: not allowed with argument --loud"),
        (["greet", "Ann", "--lou"], "unrecognized arguments: --lou"),
    ],
)
def test_what_it_does_not_take_is_one_line(argv: list[str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        parser().parse_args(argv)
