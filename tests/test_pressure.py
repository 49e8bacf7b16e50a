"""Memory is taken, spoilt and given back beside other work."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tests import pressure as module
from tests.pressure import BLOCKS, SIZES, churn, limited, pressure

CPU = torch.device("cpu")


def test_no_more_is_taken_than_was_asked_for_and_all_of_it_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Tensor] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: (taken.append(empty(*args, **kwargs)), taken[-1])[1])
    most = 3 * max(SIZES)
    count = churn(CPU, nullcontext, most, random.Random(0))
    assert 0 < count == sum(block.nbytes for block in taken) <= most
    assert len(taken) <= BLOCKS
    assert all(bool(block.isnan().all()) for block in taken)


def test_where_there_is_no_more_it_makes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("there is none")

    monkeypatch.setattr(torch, "empty", refused)
    assert churn(CPU, nullcontext, max(SIZES), random.Random(0)) == 0


def test_it_goes_on_beside_other_work_and_then_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[object] = []
    monkeypatch.setattr(module, "churn", lambda device, lane, most, choose: (turns.append(lane), 7)[1])
    lanes = [nullcontext, lambda: nullcontext()]
    with limited(CPU, room_bytes=0), pressure(CPU, lanes, most_bytes=0) as taken:
        while len(turns) < 4:
            pass
    count = len(turns)
    assert turns[:4] == [*lanes, *lanes]
    assert taken == [7] * count
    assert len(turns) == count


def test_what_goes_wrong_there_is_told_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "churn", failing)
    with pytest.raises(ZeroDivisionError), pressure(CPU, [nullcontext], most_bytes=0):
        pass
