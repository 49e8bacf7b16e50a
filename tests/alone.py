"""Programs and tests in a process of their own: what they leave behind must not reach other tests."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

Arguments = ParamSpec("Arguments")


def run_alone(program: str) -> None:
    """Run a program in a new process and fail with what it printed if it fails."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert ended.returncode == 0, ended.stdout + ended.stderr


def alone(test: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """A test that runs in a new process, with arguments that print as what they are."""

    @functools.wraps(test)
    def started(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        run_alone(f"from {test.__module__} import {test.__name__} as test\ntest.__wrapped__(*{args!r}, **{kwargs!r})")

    return started
