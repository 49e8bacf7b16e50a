"""What PyTorch logs at length while Dynamo traces, heard instead of written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autostream.errors import first_line

_CONVERT_FRAME = "torch._dynamo.convert_frame"
_FAKE_TENSORS = "torch._subclasses.fake_tensor"


@contextmanager
def overheard(refused: Callable[[str], None]) -> Iterator[None]:
    """Keep errors with their tracebacks out of PyTorch's logs, in this thread only: who traces has them as exceptions.

    Args:
        refused: is told why Dynamo leaves a part of a model alone.
    """
    thread = threading.get_ident()

    def elsewhere(record: logging.LogRecord) -> bool:
        if record.thread != thread or not record.exc_info:
            return True
        if record.name == _CONVERT_FRAME and isinstance(record.exc_info[1], Exception):
            refused(first_line(record.exc_info[1]))
        return False

    loggers = [logging.getLogger(name) for name in (_CONVERT_FRAME, _FAKE_TENSORS)]
    for logger in loggers:
        logger.addFilter(elsewhere)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(elsewhere)
