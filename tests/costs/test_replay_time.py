"""How long a replay takes, by events that tell what a test wants them to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autostream.costs.replay_time import replay_us


class Graph:
    """Its replays take so many ms, one after the other."""

    def __init__(self, *times_ms: float) -> None:
        self.times_ms = iter(times_ms)
        self.now_ms = self.waited_ms = 0.0

    def replay(self) -> None:
        self.now_ms += next(self.times_ms)


@pytest.fixture
def on_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Graph]]:
    """Events read the time of the graph in this list."""
    graphs: list[Graph] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_ms = graphs[0].now_ms

        def synchronize(self) -> None:
            graphs[0].waited_ms = self.at_ms

        def elapsed_time(self, after: Any) -> float:
            assert after.at_ms <= graphs[0].waited_ms, "until they are waited for, events have not happened"
            return float(after.at_ms - self.at_ms)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    yield graphs
    assert next(graphs[0].times_ms, None) is None, "it is replayed once to upload it and five times by the clock"


def test_the_median_of_five_replays_counts_and_the_first_one_does_not(on_clock: list[Graph]) -> None:
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
