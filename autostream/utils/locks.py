"""The lock that is held while a model is captured, traced and measured, and locks that no forked process waits for."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet

preparing = threading.RLock()
"""One model is prepared at a time: tracing patches ``nn.Module`` for all threads, measurements of two models disturb
each other, and a process can capture one CUDA graph at a time."""

_owners: WeakSet[Any] = WeakSet()


def lock_of(owner: object) -> threading.RLock:
    """A reentrant lock, to be kept as ``owner._lock``: a forked process, in which no thread holds it, has another."""
    _owners.add(owner)
    return threading.RLock()


def _renew_locks() -> None:
    for owner in _owners:
        owner._lock = threading.RLock()


# A fork waits for the lock; otherwise the child would have a half-traced model, and a lock that is never released.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=preparing.acquire, after_in_parent=preparing.release, after_in_child=preparing.release)
    os.register_at_fork(after_in_child=_renew_locks)
