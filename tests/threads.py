"""Work in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """What ``work`` returns for each number below ``count``, each in a thread of its own, all at once.

    When all have ended, what one of them raised is raised here.
    """
    ready = threading.Barrier(count)

    def start(number: int) -> T:
        ready.wait()
        return work(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(start, range(count)))
