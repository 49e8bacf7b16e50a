"""Types of command-line arguments."""

from __future__ import annotations

import argparse
import math

import pytest

from autostream.cli.arguments import how_many, memory, positive, share, streams, whole


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1000000", "soon", ""])
def test_what_is_none_is_told(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not allowed: use a positive number below a million"):
        positive(text)


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


@pytest.mark.parametrize("text", ["", "x", "-1", "-1.1", "nan", "1,1", "1e9", "64mb", "64 MiB", "1.1xB", "²", "lots"])
def test_what_is_neither_is_told(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not allowed: use a ratio to one stream such as 1"):
        memory(text)


@pytest.mark.parametrize("text", ["-1", "1.5", "many", "", "²"])
def test_what_is_no_whole_number_is_told(text: str) -> None:
    for parse, said in ((whole, "use a whole number$"), (how_many, "use a whole number, or all$")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"is not allowed: {said}"):
            parse(text)
    assert streams(text) == text, "options know what else may be"


@pytest.mark.parametrize("text", ["1", "100%", "-1%", "nan", "some", "", "%"])
def test_what_is_no_share_is_told(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not allowed: write a share, such as 3% or 0\.03"):
        share(text)
