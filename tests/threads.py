"""Run a function in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """The results of ``work`` for each number below ``count``, each computed in a thread of its own at the same time.

    Raises the exception of a thread when all have ended.
    """
    ready = threading.Barrier(count)

    def start(number: int) -> T:
        ready.wait()
        return work(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(start, range(count)))
