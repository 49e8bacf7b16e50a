"""Fixtures of the tests on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autostream.runtime import arena


@pytest.fixture(autouse=True)
def _memory_is_freed() -> Iterator[None]:
    """Return cached memory to the driver after each test: several processes test on one GPU."""
    yield
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _few_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two dozen take seconds for each step that a test compiles."""
    monkeypatch.setattr("autostream.tuning.select.VARIANTS", 2)


@pytest.fixture
def several_streams_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule over several streams is chosen, if there is one, whatever is measured."""
    monkeypatch.setattr("autostream.tuning.select.interleaved", lambda timers, *_: [1.0, 0.5][: len(timers)])
    monkeypatch.setattr("autostream.tuning.select.VARIANTS", 0)


@pytest.fixture
def arena_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules use an arena, even where separate allocations would need no more memory."""
    monkeypatch.setattr("autostream.tuning.candidates.peak_bytes", lambda graph, schedule: -schedule.arena.bytes)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fill arenas with NaN, -1 and ``True`` at the start of each run or replay; returns their sizes in bytes."""
    sizes: list[int] = []
    reserve = arena.reserve

    def filled(device: str, size: int) -> Tensor:
        sizes.append(size)
        return reserve(device, size).fill_(0xFF)

    monkeypatch.setattr(arena, "reserve", filled)
    return sizes
