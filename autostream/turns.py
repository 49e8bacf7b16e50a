"""Two ways to do the same calls, timed in calls that are made anyway: the user's, each done once, in one way.

    call   1     2     3     4    …   10   │ 11 …
    way    ours  as is ours  as is    as is │ the faster

For what must not be called only to be timed, since nobody knows what else a call of it does. Each of these calls is
timed from an idle device to its results, so that host and device both count. What a loop hides of that, and what a
backward adds to it, several calls in a row tell, with all that is done until the next ones::

    call   1 … 8    9 … 16   17 …
    way    ours     as is    ours
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
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
        in_a_row: how many calls are timed as one, with what is done until the next; 0 to time calls alone.

    Example:
        >>> turns = Turns(lambda x: x + x, lambda x: 2 * x, [])
        >>> [turns(n) for n in range(2 * ROUNDS - 1)], turns.verdict is None
        ([0, 2, 4, 6, 8, 10, 12, 14, 16], True)
        >>> turns(9), len(turns.verdict)
        (18, 2)
    """

    def __init__(
        self,
        ours: Callable[..., Any],
        plain: Callable[..., Any],
        devices: Collection[torch.device],
        in_a_row: int = 0,
    ) -> None:
        self._ways, self._devices = (ours, plain), devices
        self._us: tuple[list[float], list[float]] = [], []
        self._lock = threading.Lock()
        self._in_a_row, self._calls, self._start = in_a_row, 0, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the way whose turn it is returns; of another thread's calls meanwhile, ours."""
        if not self._lock.acquire(blocking=False):
            return self._ways[0](*args, **kwargs)
        try:
            return self._in_row(args, kwargs) if self._in_a_row else self._alone(args, kwargs)
        finally:
            self._lock.release()

    def _alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        turn, start = self._turn, self._now()
        outputs = self._ways[turn](*args, **kwargs)
        self._us[turn].append((self._now() - start) * 1e6)
        return outputs

    def _in_row(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._calls == self._in_a_row:  # the next one has been come to
            self._us[self._turn].append((self._now() - self._start) * 1e6 / self._in_a_row)
            self._calls = 0
        if self._calls == 0:
            self._start = self._now()
        outputs = self._ways[self._turn](*args, **kwargs)
        self._calls += 1
        return outputs

    @property
    def _turn(self) -> int:
        ours, plain = map(len, self._us)
        return int(plain < ours)

    def _now(self) -> float:
        """Seconds, once the devices are idle."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    @property
    def verdict(self) -> tuple[float, float] | None:
        """What the second best of each way took, µs, ours first; nothing while they have not been timed often enough.

        All that comes between, such as a validation every hundred steps, makes a time longer; and one may be luck.
        """
        if min(map(len, self._us)) < ROUNDS:
            return None
        (_, ours_us, *_), (_, plain_us, *_) = map(sorted, self._us)
        return ours_us, plain_us
