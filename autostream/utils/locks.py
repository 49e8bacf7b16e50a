"""The lock that is held while a model is captured, traced and measured."""

from __future__ import annotations

import os
import threading

preparing = threading.RLock()
"""One model is prepared at a time: tracing patches ``nn.Module`` for all threads, measurements of two models disturb
each other, and a process can capture one CUDA graph at a time."""

# A fork waits for the lock; otherwise the child would have a half-traced model, and a lock that is never released.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=preparing.acquire, after_in_parent=preparing.release, after_in_child=preparing.release)
