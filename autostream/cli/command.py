"""What a command is, as a value, and the parser that argparse makes of some."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from autostream.errors import OptionError


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: its names, and what :meth:`argparse.ArgumentParser.add_argument` takes besides."""

    names: tuple[str, ...]
    settings: Mapping[str, Any]


def argument(*names: str, **settings: Any) -> Argument:
    """An argument as argparse has it.

    Example:
        >>> argument("--json", action="store_true").names
        ('--json',)
    """
    return Argument(names, settings)


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        name: what users write.
        summary: what it does, in the list of commands.
        about: what it does, in its own help.
        example: what to write after ``autostream``.
        arguments: what it takes, in the order of its help; of a tuple of them, one at a time.
        run: does it, and returns the exit code.
    """

    name: str
    summary: str
    about: str
    example: str
    arguments: Sequence[Argument | tuple[Argument, ...]]
    run: Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ours: one line. What is abbreviated would change its meaning with the next option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise it."""
        raise OptionError(f"{message} ({self.prog} --help says more)")


def add(commands: Sequence[Command], parser: Parser) -> None:
    """Let a parser take these commands; it puts the function of the one that is given into ``run``.

    Example:
        >>> parser = Parser(prog="greet")
        >>> hello = Command("hello", "greet", "Greet somebody.", "hello Ann", [argument("name")], lambda given: 0)
        >>> add([hello], parser)
        >>> parser.parse_args(["hello", "Ann"]).name
        'Ann'
    """
    parsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in commands:
        example = f"example: {parser.prog} {command.example}"
        own = parsers.add_parser(command.name, help=command.summary, description=command.about, epilog=example)
        for each in command.arguments:
            if isinstance(each, Argument):
                own.add_argument(*each.names, **each.settings)
            else:
                group = own.add_mutually_exclusive_group()
                for one in each:
                    group.add_argument(*one.names, **one.settings)
        own.set_defaults(run=command.run)
