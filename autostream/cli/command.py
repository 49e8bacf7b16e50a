"""Commands and their arguments as values, and an argparse parser made from them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from autostream.errors import OptionError


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: its names, and keyword arguments of :meth:`argparse.ArgumentParser.add_argument`."""

    names: tuple[str, ...]
    settings: Mapping[str, Any]


def argument(*names: str, **settings: Any) -> Argument:
    """An :class:`Argument`, with the parameters of argparse.

    Example:
        >>> argument("--json", action="store_true").names
        ('--json',)
    """
    return Argument(names, settings)


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        name: on the command line.
        summary: description in the list of commands.
        about: description in its own help.
        example: a command line, without ``autostream``.
        arguments: in the order of its help; a tuple is a mutually exclusive group.
        run: runs it, and returns the exit code.
    """

    name: str
    summary: str
    about: str
    example: str
    arguments: Sequence[Argument | tuple[Argument, ...]]
    run: Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are exceptions. Abbreviations are off: a new option would change their meaning."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise an :class:`OptionError`."""
        raise OptionError(f"{message} ({self.prog} --help says more)")


def add(commands: Sequence[Command], parser: Parser) -> None:
    """Add commands to a parser, which sets ``run`` to the function of the one on the command line.

    Example:
        >>> parser = Parser(prog="greet")
        >>> hello = Command("hello", "greet", "Greet a person.", "hello Ann", [argument("name")], lambda _: 0)
        >>> add([hello], parser)
        >>> parser.parse_args(["hello", "Ann"]).name
        'Ann'
    """
    parsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in commands:
        example = f"example: {parser.prog} {command.example}"
        subparser = parsers.add_parser(command.name, help=command.summary, description=command.about, epilog=example)
        for each in command.arguments:
            if isinstance(each, Argument):
                subparser.add_argument(*each.names, **each.settings)
            else:
                group = subparser.add_mutually_exclusive_group()
                for one in each:
                    group.add_argument(*one.names, **one.settings)
        subparser.set_defaults(run=command.run)
