"""Two ways to do the same calls, timed in calls that are made anyway: the user's, each done once, in one way.

    call   1     2     3     4    …   10   │ 11 …
    way    ours  as is ours  as is    as is │ the faster

For what must not be called only to be timed, since nobody knows what else a call of it does. Each of these calls is
timed from an idle device to its results, so that host and device both count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from statistics import median
from typing import Any

import torch

ROUNDS = 5
"""Calls in each way."""


class Turns:
    """Does calls in two ways by turns, until each has been timed often enough.

    Args:
        ours: the one way.
        plain: the other.
        devices: where they work, beside the host.

    Example:
        >>> turns = Turns(lambda x: x + x, lambda x: 2 * x, [])
        >>> [turns(n) for n in range(2 * ROUNDS - 1)], turns.verdict is None
        ([0, 2, 4, 6, 8, 10, 12, 14, 16], True)
        >>> turns(9), len(turns.verdict)
        (18, 2)
    """

    def __init__(self, ours: Callable[..., Any], plain: Callable[..., Any], devices: Collection[torch.device]) -> None:
        self._ways, self._devices = (ours, plain), devices
        self._us: tuple[list[float], list[float]] = [], []
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the way whose turn it is returns; of another thread's calls meanwhile, ours."""
        if not self._lock.acquire(blocking=False):
            return self._ways[0](*args, **kwargs)
        try:
            ours, plain = map(len, self._us)
            turn = int(plain < ours)
            self._wait()
            start = time.perf_counter()
            outputs = self._ways[turn](*args, **kwargs)
            self._wait()
            self._us[turn].append((time.perf_counter() - start) * 1e6)
        finally:
            self._lock.release()
        return outputs

    @property
    def verdict(self) -> tuple[float, float] | None:
        """The median µs of both ways, ours first; nothing while they have not been timed often enough."""
        if min(map(len, self._us)) < ROUNDS:
            return None
        ours_us, plain_us = map(median, self._us)
        return ours_us, plain_us

    def _wait(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)
