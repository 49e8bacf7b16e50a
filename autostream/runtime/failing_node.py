"""Finds the node of an fx graph that raised an error, for error messages."""

from __future__ import annotations

import linecache
import traceback


def where(error: BaseException) -> str:
    """``" at conv2d = torch.ops.aten.conv2d.default(…)"``, or ``""`` if the error is not from an fx graph.

    Example:
        >>> import torch.fx
        >>> def reshape(x):
        ...     return x.reshape(7) + 1
        >>> module = torch.fx.symbolic_trace(reshape)
        >>> try:
        ...     module.forward(torch.ones(2))
        ... except RuntimeError as error:
        ...     print(where(error))
         at reshape = x.reshape(7)
    """
    frames = [
        (frame.f_code.co_filename, line, frame.f_globals)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename.startswith("<eval_with_key>")
    ]
    if not frames:
        return ""
    statement = linecache.getline(*frames[-1]).partition(";")[0].strip()
    return f" at {statement}" if statement else ""
