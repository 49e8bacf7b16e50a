"""Memory that calls write in turn: whoever still needs what was there has a copy, and nobody else has one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from autostream.runtime.saved_activations import SavedActivations

CPU = torch.device("cpu")


class Memory:
    """A graph that leaves the number of its call twice, in the same memory each time."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.places = [torch.zeros(2, device=device), torch.zeros(2, 2, device=device).t()]
        self.lending = SavedActivations(device)

    def call(self, number: float) -> list[Tensor]:
        self.lending.preserve()
        for place in self.places:
            place.fill_(number)
        return self.lending.alias(self.places)

    def later(self, tensors: list[Tensor]) -> list[float]:
        self.lending.restore(tensors, self.places)
        return [value for place in self.places for value in place.flatten().tolist()]


def lies(tensor: Tensor, place: Tensor) -> bool:
    return tensor.data_ptr() == place.data_ptr()


def test_nothing_is_copied_where_each_call_is_followed_by_what_is_done_later() -> None:
    memory = Memory()
    for number in range(3):
        lent = memory.call(number)
        assert all(map(lies, lent, memory.places))
        assert memory.later(lent) == [number] * 6
        assert all(map(lies, lent, memory.places))
        del lent


def test_what_is_still_needed_moves_away_and_comes_back() -> None:
    """Calls 1 ─ 2 ─ 3, what is done later of 2, of 1, of 3, of 3 once more."""
    memory = Memory()
    calls = [memory.call(number) for number in (1, 2, 3)]
    assert [lies(lent[0], memory.places[0]) for lent in calls] == [False, False, True]
    assert [float(lent[1][0, 1]) for lent in calls] == [1, 2, 3]
    assert all(lent[1].stride() == (1, 2) for lent in calls)
    assert [memory.later(calls[at]) for at in (1, 0, 2, 2)] == [[2] * 6, [1] * 6, [3] * 6, [3] * 6]


def test_what_somebody_keeps_elsewhere_comes_back_too() -> None:
    """As hooks on saved tensors may, which move them to the host meanwhile."""
    memory = Memory()
    kept = [tensor.clone() for tensor in memory.call(1)]
    other = memory.call(2)
    assert memory.later(kept) == [1] * 6
    assert [float(tensor.sum()) for tensor in other] == [4, 8]


def test_writes_to_the_memory_are_no_writes_to_what_was_lent() -> None:
    """Autograd would refuse a tensor whose version is not that of when it was saved."""
    memory = Memory()
    first = memory.call(1)
    versions = [tensor._version for tensor in first]
    memory.call(2)
    memory.later(first)
    assert [tensor._version for tensor in first] == versions


def test_any_order_of_calls_and_what_is_done_later() -> None:
    choose, memory, pending = random.Random(0), Memory(), dict[int, list[Tensor]]()
    for number in range(200):
        pending[number] = memory.call(number)
        while pending and choose.random() < 0.5:
            at = choose.choice(list(pending))
            assert memory.later(pending[at]) == [at] * 6
            if choose.random() < 0.7:
                del pending[at]


@pytest.mark.gpu
def test_streams_wait_for_each_other() -> None:
    """A late reader on one stream, a writer on another: the reader has a copy, whose memory is not handed on early."""
    device = torch.device("cuda:0")
    memory, (first, second) = Memory(device), (torch.cuda.Stream(device), torch.cuda.Stream(device))
    torch.cuda.synchronize()
    found = list[Any]()
    for number in range(20):
        with torch.cuda.stream(first):
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            lent = memory.call(number)
        with torch.cuda.stream(second):
            torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
            other = memory.call(-1)
        with torch.cuda.stream(first):
            memory.lending.restore(lent, memory.places)
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            found.append((number, [place.clone() for place in memory.places]))
            del lent
        with torch.cuda.stream(second):
            memory.lending.restore(other, memory.places)
            found.append((-1, [place.clone() for place in memory.places]))
            torch.full((64,), 7.0, device=device)
            del other
    torch.cuda.synchronize()
    for number, places in found:
        assert all(bool((place == number).all()) for place in places)
