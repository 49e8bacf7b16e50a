"""What command lines take, from text: types for argparse, for this package's commands and for the benchmarks'."""

from __future__ import annotations

import argparse


def names(text: str) -> tuple[str, ...]:
    """A list with commas.

    Example:
        >>> names("eager,autostream")
        ('eager', 'autostream')
    """
    return tuple(text.split(","))


def positive(text: str) -> float:
    """A number above zero, and short enough to wait for.

    Raises:
        ArgumentTypeError: it is another, or none.

    Example:
        >>> positive("1.5")
        1.5
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: use a positive number below a million")
    return number
