"""The time of a replay, with simulated events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autostream.costs.replay_time import replay_us


class Graph:
    """A graph whose replays take these times, ms."""

    def __init__(self, *times_ms: float) -> None:
        self.times_ms = iter(times_ms)
        self.now_ms = self.waited_ms = 0.0

    def replay(self) -> None:
        self.now_ms += next(self.times_ms)


@pytest.fixture
def on_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Graph]]:
    """A list for the graph whose time events read."""
    graphs: list[Graph] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_ms = graphs[0].now_ms

        def synchronize(self) -> None:
            graphs[0].waited_ms = self.at_ms

        def elapsed_time(self, after: Any) -> float:
            assert after.at_ms <= graphs[0].waited_ms, "the event has not been waited for"
            return float(after.at_ms - self.at_ms)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    yield graphs
    assert next(graphs[0].times_ms, None) is None, "one replay uploads it, five are timed"


def test_the_median_of_five_replays_counts_without_the_first_one(on_clock: list[Graph]) -> None:
    on_clock.append(Graph(900.0, 3.0, 1.0, 2.0, 80.0, 2.5))
    assert replay_us(on_clock[0]) == pytest.approx(2500.0)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_longer_graph_takes_longer() -> None:
    x = torch.zeros(1 << 20, device="cuda:0")

    def captured(launches: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(launches):
                x.add_(1)
        return graph

    assert 0.5 < replay_us(captured(1)) < replay_us(captured(100)) < 10_000
