"""The hierarchy of exceptions, and exceptions in one line."""

from __future__ import annotations

import re

import pytest

from autostream import errors
from autostream.errors import AutostreamError, first_line

ERRORS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


def test_every_exception_is_in_the_drawn_hierarchy_and_mistakes_of_the_caller_are_value_errors() -> None:
    assert all(issubclass(error, AutostreamError) and error.__doc__ for error in ERRORS)
    drawn = set(re.findall(r"\w+Error\b", (errors.__doc__ or "").partition("\n\n``")[0]))
    assert drawn == {error.__name__ for error in ERRORS} | {"ValueError"}
    mistakes = {error.__name__ for error in ERRORS if issubclass(error, ValueError)}
    assert mistakes == {"OptionError", "TargetError", "CostError"}


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("\n\n  no kernel  \nat line 7\n", "RuntimeError: no kernel"),
        ("Lowering: UserWarning:\n\nno kernel\nat line 7", "RuntimeError: Lowering: UserWarning: no kernel"),
        ("why:\n", "RuntimeError: why:"),
        (" \n\t\n", "RuntimeError"),
    ],
)
def test_an_exception_in_one_line_ends_with_its_first_complete_line(message: str, line: str) -> None:
    assert first_line(RuntimeError(message)) == line
