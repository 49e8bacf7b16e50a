"""``AUTOSTREAM_LOG=debug``: each stage with its seconds, for those who want to hear nothing else of PyTorch's."""

from __future__ import annotations

import logging

from autostream.options import log_level


def start() -> None:
    """Print what autostream logs to the standard error, from the level on that the environment asks for.

    Without it, messages go where the program's own do, or where ``TORCH_LOGS`` has them go.

    Raises:
        OptionError: there is no such level.
    """
    level, log = log_level(), logging.getLogger("autostream")
    if level:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel(level)
        log.propagate = False  # once is enough
