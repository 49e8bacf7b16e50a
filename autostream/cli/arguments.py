"""Types of command-line arguments for argparse, shared with the benchmarks."""

from __future__ import annotations

import argparse
import re
import sys
from math import isinf

_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def names(text: str) -> tuple[str, ...]:
    """A comma-separated list.

    Example:
        >>> names("eager,autostream")
        ('eager', 'autostream')
    """
    return tuple(text.split(","))


def whole(text: str) -> int:
    """A whole number, 0 or more.

    Raises:
        ArgumentTypeError: it is not one.

    Example:
        >>> whole("20")
        20
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: use a whole number, 0 or more")
    return int(text)


def how_many(text: str) -> int:
    """A whole number, or ``all`` as ``sys.maxsize``.

    Raises:
        ArgumentTypeError: it is neither.

    Example:
        >>> how_many("20"), how_many("all") > 10**9
        (20, True)
    """
    if text == "all":
        return sys.maxsize
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: use a whole number, or all")
    return int(text)


def streams(text: str) -> int | str:
    """A number of streams; other text is left to :class:`~autostream.options.Options` to check.

    Example:
        >>> streams("4"), streams("auto")
        (4, 'auto')
    """
    return int(text) if text.isdecimal() else text


def share(text: str) -> float:
    """A share, as a number below 1 or in per cent.

    Raises:
        ArgumentTypeError: it is neither.

    Example:
        >>> share("3%"), share("0.03")
        (0.03, 0.03)
    """
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: write a share, such as 3% or 0.03")
    return number


def positive(text: str) -> float:
    """A number of seconds above 0 and below a million.

    Raises:
        ArgumentTypeError: it is not one.

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


def memory(text: str) -> int | float:
    """Bytes as a whole number, or a ratio as a float: a ratio has a dot, ends with an x, or is ``inf``.

    Raises:
        ArgumentTypeError: it is neither.

    Example:
        >>> memory("1.1"), memory("2x"), memory("64MiB"), memory("100000000")
        (1.1, 2.0, 67108864, 100000000)
    """
    if re.fullmatch(r"\d+\.\d*x?|\d+x|inf", text, re.ASCII):
        return float(text.removesuffix("x"))
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMG]?B|[KMG]iB|)", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed: use a ratio to one stream such as 1.1 or 2x, bytes such as 64MiB or 100000000, "
            "or inf for no limit"
        )
    size = float(match[1]) * _UNITS[match[2]]
    if isinf(size):
        raise argparse.ArgumentTypeError(f"{text[:9]}… is more bytes than there are: use inf for no limit")
    return round(size) if match[2] else int(text)
