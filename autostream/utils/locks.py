"""One model is prepared at a time."""

from __future__ import annotations

import os
import threading

preparing = threading.RLock()
"""One model is traced, measured and captured at a time: tracing patches ``nn.Module`` for all threads, measurements
of two models disturb each other, and a process can capture one CUDA graph at a time."""

# A fork waits for that: what is half traced would stay so in the new process, and the lock would never be released.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=preparing.acquire, after_in_parent=preparing.release, after_in_child=preparing.release)
