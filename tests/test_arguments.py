"""Types of command-line arguments."""

from __future__ import annotations

import argparse

import pytest

from autostream.arguments import names, positive


def test_names_are_separated_by_commas() -> None:
    assert names("a,b,c") == ("a", "b", "c")
    assert names("a") == ("a",)


@pytest.mark.parametrize("text", ["1", "0.5", "1e3", "999999"])
def test_a_positive_number(text: str) -> None:
    assert positive(text) == float(text)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1000000", "soon", ""])
def test_what_is_none_is_told(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not allowed: use a positive number below a million"):
        positive(text)
