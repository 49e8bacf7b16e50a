"""Which line of the user's code an op comes from, noted while it is traced.

``torch.export`` finds that out as well, but it symbolizes the whole stack for each op, which takes a quarter of its
time, and keeps only frames of methods that are called ``forward``.
"""

from __future__ import annotations

import linecache
import os
import traceback
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import set_stack_trace

_TORCH = os.path.dirname(torch.__file__) + os.sep
_NOT_THE_USERS = (_TORCH, os.path.dirname(__file__) + os.sep, "<eval_with_key>")


def note_line(frame: FrameType | None, outermost: CodeType) -> None:
    """Let nodes that are traced from now on keep the innermost line of the user's, from this frame outwards.

    Has no effect outside of :func:`torch.fx.traceback.preserve_node_meta`. Where no code of the user's is running
    inside of ``outermost``, as where the model is a graph already, nodes keep what they would keep without this.

    Args:
        frame: where to begin.
        outermost: the code that calls the model.

    Example:
        >>> from torch.fx.traceback import get_current_meta, preserve_node_meta
        >>> import sys
        >>> def forward():
        ...     note_line(sys._getframe(), note_line.__code__)
        >>> with preserve_node_meta():
        ...     forward()
        ...     print(get_current_meta()["stack_trace"].splitlines()[1])
            note_line(sys._getframe(), note_line.__code__)
    """
    if own := users_frame(frame, outermost):
        path, number = own.f_code.co_filename, own.f_lineno
        set_stack_trace([f'File "{path}", line {number}, in {own.f_code.co_name}\n    {_code(own)}\n'])


def users_frame(frame: FrameType | None, outermost: CodeType) -> FrameType | None:
    """The innermost frame of the user's code from this one outwards, inside of ``outermost``, if there is one."""
    while frame is not None and frame.f_code is not outermost and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return frame if frame is not None and frame.f_code is not outermost else None


def users_line(frame: FrameType | None) -> str:
    """Where a frame is, to end a message with."""
    if frame is None:
        return ""
    return at_line(frame.f_code.co_filename, frame.f_lineno, _code(frame))


def error_line(error: BaseException) -> str:
    """The innermost line that an error went through of code that is neither PyTorch's nor ours, to end a message with.

    Where there is none, it is that of one of PyTorch's layers; else ``""``.

    Example:
        >>> try:
        ...     torch.nn.Linear(2, 2)(torch.ones(3), torch.ones(3))
        ... except TypeError as error:
        ...     error_line(error)
        ' (at <doctest autostream.tracing.lines.error_line[0]>:2: torch.nn.Linear(2, 2)(torch.ones(3), torch.ones(3)))'
    """
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    layers = [frame for frame in frames if frame.filename.startswith(_LAYERS) and frame.name == "forward"]
    return next((at_line(own[-1].filename, own[-1].lineno, own[-1].line) for own in (users, layers) if own), "")


_LIBRARIES = (_TORCH, os.path.dirname(os.path.dirname(__file__)) + os.sep, "<string>")
_LAYERS = os.path.dirname(torch.nn.modules.__file__) + os.sep


def at_line(path: str, number: int | None, code: str | None) -> str:
    """A line of code, to end a message with.

    Example:
        >>> at_line("net.py", 3, "y = f(x)")
        ' (at net.py:3: y = f(x))'
    """
    return f" (at {path.removeprefix(os.getcwd() + os.sep)}:{number}: {code})"


def _code(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip()


def keep_lines(loss: Tensor) -> None:
    """Let what a backward computes have the user's lines of what was computed forward.

    Args:
        loss: computed in anomaly mode, in which autograd notes lines.
    """
    pending, seen = [loss.grad_fn], set()
    while pending:
        node: Any = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
            if lines := node.metadata.get("traceback_"):
                node.register_prehook(lambda gradients, lines=lines: set_stack_trace(lines))
