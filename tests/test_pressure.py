"""The thread that allocates memory and fills it with NaN."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tests import pressure as module
from tests.pressure import BLOCKS, SIZES, churn, pressure

CPU = torch.device("cpu")


def test_no_more_is_allocated_than_allowed_and_all_of_it_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Tensor] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: (taken.append(empty(*args, **kwargs)), taken[-1])[1])
    most = 3 * max(SIZES)
    count = churn(CPU, nullcontext, most, random.Random(0))
    assert 0 < count == sum(block.nbytes for block in taken) <= most
    assert len(taken) <= BLOCKS
    assert all(bool(block.isnan().all()) for block in taken)


def test_errors_of_the_thread_are_raised_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "churn", failing)
    with pytest.raises(ZeroDivisionError), pressure(CPU, [nullcontext], most_bytes=0):
        pass
