"""Arguments of distributions, which PyTorch checks on the host, and a graph cannot.

``torch.compile`` turns these checks off at its first use, and leaves them off for the rest of the process. A capture
turns them off for its own time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution


@contextmanager
def arguments_not_checked() -> Iterator[None]:
    """Let no distribution check its arguments, unless it was made with ``validate_args=True``.

    Example:
        >>> from torch.distributions import Normal
        >>> with arguments_not_checked():
        ...     Normal(0.0, -1.0)
        Normal(loc: 0.0, scale: -1.0)
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def is_default_of_checks(owner: object, name: str) -> bool:
    """Whether what Dynamo reaches by this step says whether they do.

    It reads that from a distribution, its class, or a copy of the dictionary of the class.
    """
    if name != "_validate_args":
        return False
    if isinstance(owner, Distribution):
        return name not in vars(owner)  # else it was made with ``validate_args``
    return owner == dict(vars(Distribution)) or (isinstance(owner, type) and issubclass(owner, Distribution))
