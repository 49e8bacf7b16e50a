"""Logging: messages begin with ``autostream:``, and ``AUTOSTREAM_LOG=debug`` shows them without PyTorch's logs."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from autostream.options import log_level

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class Log(_Adapter):
    """The log of a module: a program that has configured no logging prints messages alone, and so who speaks.

    Args:
        name: of the module.

    Example:
        >>> Log(__name__).process("it runs plainly", {})
        ('autostream: it runs plainly', {})
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name))

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the prefix before a message."""
        return f"autostream: {msg}", kwargs


def start() -> None:
    """Log to standard error from the level in ``AUTOSTREAM_LOG``. Without it, the program's logging applies.

    Raises:
        OptionError: there is no such level.
    """
    level, log = log_level(), logging.getLogger("autostream")
    if level:
        log.addHandler(logging.StreamHandler())
        log.setLevel(level)
        log.propagate = False  # messages would appear twice
