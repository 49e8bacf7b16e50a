"""Processes that are not there: a process group of any size in one process, to plan for many without them.

Private to PyTorch (seen in 2.11 and 2.13): ``torch.testing._internal.distributed.fake_pg``, whose collectives return at
once and move nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from autostream.errors import OptionError, TargetError, first_line


@contextmanager
def fake_processes(number: int) -> Iterator[dist.ProcessGroup]:
    """The default process group, of so many processes, of which this one is the first and the only one.

    What compares processes finds that all others do the same.

    Args:
        number: how many processes.

    Raises:
        OptionError: there are fewer than one.
        TargetError: this version of PyTorch has no such group, or there is a default process group already.

    Example:
        >>> with fake_processes(64) as group:
        ...     group.size(), group.rank()
        (64, 0)
    """
    if number < 1:
        raise OptionError(f"world={number} is not allowed: use a whole number of processes from 1")
    try:
        # Importing it registers the backend.
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except (ImportError, AttributeError) as error:
        raise TargetError(f"this version of PyTorch plans for no processes: {first_line(error)}") from error
    if dist.is_initialized():
        raise TargetError("a default process group is initialized already: plan in a process without one")

    class Agreeing(FakeStore):
        """Answers for each process what this one has written last."""

        def __init__(self) -> None:
            super().__init__()
            self.latest, self.count = b"", 0

        def set(self, key: str, value: Any) -> None:
            self.latest = value if isinstance(value, bytes) else str(value).encode()

        def get(self, key: str) -> bytes:
            return self.latest

        def add(self, key: str, amount: int) -> int:
            self.count += amount
            return self.count

        def check(self, keys: Sequence[str]) -> bool:
            return True

    store = Agreeing()  # the group does not keep it alive
    dist.init_process_group("fake", store=store, rank=0, world_size=number)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
