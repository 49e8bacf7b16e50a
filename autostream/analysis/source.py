"""Finds the line of the user's source code that a node was traced from."""

from __future__ import annotations

import os
import re

import torch

_FRAME = re.compile(
    r'^\s*File "(?P<path>.+?)", line (?P<line>\d+), in .*(?:\n[ \t]+(?![ \t]|File ")(?P<code>.*))?$', re.M
)
_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_PYTHONS = os.path.dirname(os.__file__) + os.sep


def user_line(stack_trace: str | None) -> str:
    r"""The innermost frame of a stack trace that is in neither Python's library, PyTorch nor autostream, or ``""``.

    Paths in the working directory become relative to it.

    Example:
        >>> user_line('File "/models/net.py", line 12, in forward\n    y = self.conv(x)\n')
        '/models/net.py:12: y = self.conv(x)'
    """
    for frame in reversed(list(_FRAME.finditer(stack_trace or ""))):
        path = frame["path"]
        if not path.startswith((*_LIBRARIES, "<")) and (not path.startswith(_PYTHONS) or "-packages" in path):
            return f"{_shortened(path)}:{frame['line']}: {(frame['code'] or '').strip()}".removesuffix(": ")
    return ""


def _shortened(path: str) -> str:
    return path.removeprefix(os.getcwd() + os.sep)
