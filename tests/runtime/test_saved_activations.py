"""Saved activations in memory that each call overwrites: those still in use are copied, and no others."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from autostream.runtime.saved_activations import SavedActivations

CPU = torch.device("cpu")


class Graph:
    """Saves the number of a call twice, in the same memory each time."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.memory = [torch.zeros(2, device=device), torch.zeros(2, 2, device=device).t()]
        self.saved = SavedActivations(device)

    def forward(self, number: float) -> list[Tensor]:
        self.saved.preserve()
        for tensor in self.memory:
            tensor.fill_(number)
        return self.saved.alias(self.memory)

    def backward(self, activations: list[Tensor]) -> list[float]:
        self.saved.restore(activations, self.memory)
        return [value for tensor in self.memory for value in tensor.flatten().tolist()]

    def in_place(self, activations: list[Tensor]) -> bool:
        pairs = zip(activations, self.memory, strict=True)
        return all(tensor.data_ptr() == memory.data_ptr() for tensor, memory in pairs)


def test_activations_in_use_are_moved_and_copied_back() -> None:
    """Forwards 1 ─ 2 ─ 3, backwards of 2, of 1, of 3, of 3 once more. Autograd refuses a changed version counter."""
    graph = Graph()
    calls = [graph.forward(number) for number in (1, 2, 3)]
    assert list(map(graph.in_place, calls)) == [False, False, True]
    assert [float(activations[1][0, 1]) for activations in calls] == [1, 2, 3]
    assert all(activations[1].stride() == (1, 2) for activations in calls)
    versions = [[tensor._version for tensor in activations] for activations in calls]
    assert [graph.backward(calls[at]) for at in (1, 0, 2, 2)] == [[2] * 6, [1] * 6, [3] * 6, [3] * 6]
    assert versions == [[tensor._version for tensor in activations] for activations in calls] == [[0, 0]] * 3


def test_activations_copied_by_hooks_are_copied_back() -> None:
    """As hooks on saved tensors may do, to keep them on the host meanwhile."""
    graph = Graph()
    copies = [tensor.clone() for tensor in graph.forward(1)]
    activations = graph.forward(2)
    assert graph.backward(copies) == [1] * 6
    assert [float(tensor.sum()) for tensor in activations] == [4, 8]


def test_any_order_of_forwards_and_backwards() -> None:
    choose, graph, pending = random.Random(0), Graph(), dict[int, list[Tensor]]()
    for number in range(200):
        pending[number] = graph.forward(number)
        while pending and choose.random() < 0.5:
            at = choose.choice(list(pending))
            assert graph.backward(pending[at]) == [at] * 6
            if choose.random() < 0.7:
                del pending[at]


@pytest.mark.gpu
def test_streams_wait_for_each_other() -> None:
    """A late reader on one stream, a writer on another: the reader has a copy, whose memory is not reused early."""
    device = torch.device("cuda:0")
    graph, (first, second) = Graph(device), (torch.cuda.Stream(device), torch.cuda.Stream(device))
    torch.cuda.synchronize()
    results = list[Any]()
    for number in range(20):
        with torch.cuda.stream(first):
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            activations = graph.forward(number)
        with torch.cuda.stream(second):
            torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
            other = graph.forward(-1)
        with torch.cuda.stream(first):
            graph.saved.restore(activations, graph.memory)
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            results.append((number, [tensor.clone() for tensor in graph.memory]))
            del activations
        with torch.cuda.stream(second):
            graph.saved.restore(other, graph.memory)
            results.append((-1, [tensor.clone() for tensor in graph.memory]))
            torch.full((64,), 7.0, device=device)
            del other
    torch.cuda.synchronize()
    for number, tensors in results:
        assert all(bool((tensor == number).all()) for tensor in tensors)
