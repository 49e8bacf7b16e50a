"""Who catches what: the tree of exceptions, and exceptions in one line."""

from __future__ import annotations

import re

import pytest

from autostream import errors
from autostream.errors import AutostreamError, first_line

OWN = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


def test_every_exception_is_one_of_ours_and_documented() -> None:
    assert AutostreamError in OWN
    assert all(issubclass(error, AutostreamError) and error.__doc__ for error in OWN)
    drawn = set(re.findall(r"\w+Error\b", (errors.__doc__ or "").partition("\n\n``")[0]))
    assert drawn == {error.__name__ for error in OWN} | {"ValueError"}


def test_mistakes_of_the_caller_are_value_errors_and_no_others_are() -> None:
    mistakes = {error.__name__ for error in OWN if issubclass(error, ValueError)}
    assert mistakes == {"OptionError", "TargetError", "CostError"}


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("no kernel", "RuntimeError: no kernel"),
        ("\n\n  no kernel  \nat line 7\n", "RuntimeError: no kernel"),
        (
            "LoweringException: UserWarning:\n\nno kernel\nat line 7",
            "RuntimeError: LoweringException: UserWarning: no kernel",
        ),
        ("why:\n", "RuntimeError: why:"),
        ("", "RuntimeError"),
        (" \n\t\n", "RuntimeError"),
    ],
)
def test_the_first_line_is_the_first_one_that_says_something(message: str, line: str) -> None:
    assert first_line(RuntimeError(message)) == line


def test_an_error_without_arguments_is_its_name() -> None:
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt"
