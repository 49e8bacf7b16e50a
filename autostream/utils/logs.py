"""Logging for ``AUTOSTREAM_LOG=debug``, which shows the stages of autostream without PyTorch's logs."""

from __future__ import annotations

import logging

from autostream.options import log_level


def start() -> None:
    """Log to standard error from the level in ``AUTOSTREAM_LOG``. Without it, the program's logging applies.

    Raises:
        OptionError: there is no such level.
    """
    level, log = log_level(), logging.getLogger("autostream")
    if level:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel(level)
        log.propagate = False  # messages would appear twice
