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


MOST_WARNINGS = 100
"""How many different warnings are logged of one model."""


class Warned:
    """Logs the warnings of a model, each once.

    Args:
        log: of the module that warns.

    Example:
        >>> class Printed(Log):
        ...     def warning(self, *args):
        ...         print(*args)
        >>> warn = Warned(Printed(__name__))
        >>> for message in ("it runs plainly", "it has graph breaks", "it runs plainly"):
        ...     warn(message)
        %s it runs plainly
        %s it has graph breaks
    """

    def __init__(self, log: Log) -> None:
        self._log, self._said = log, set[str]()

    def __call__(self, message: str) -> None:
        """Log a warning, if there is one, and it is new."""
        if message and message not in self._said and len(self._said) < MOST_WARNINGS:
            self._said.add(message)
            self._log.warning("%s", message)


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
