"""A random search: what it draws can run, what it keeps is the fastest, and luck is not taken for a gain."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autostream.errors import ScheduleError
from autostream.ir import Assignment, OpGraph, Schedule
from autostream.options import Options
from autostream.runtime.clock import clock_of
from autostream.scheduling.releases import place_releases
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from autostream.tuning.tune import tune
from autostream.utils.stopwatch import Stopwatch
from benchmarks import random_search
from benchmarks.random_search import (
    CAREFUL,
    FINAL,
    KEPT,
    MOST_STREAMS,
    Comparison,
    Look,
    Pair,
    SearchResult,
    best_of,
    changed,
    explore,
    fresh,
    main,
)
from tests.runtime.programs import sample
from tests.scheduling.graphs import check_assignment, graph_of, random_graphs

NONE: frozenset[str] = frozenset()


def sequential(graph: OpGraph) -> Assignment:
    return Assignment("sequential", 1, tuple(graph.ops), dict.fromkeys(graph.ops, 0))


# What is drawn


@given(random_graphs(), st.booleans(), st.integers(0, 1000))
def test_whatever_is_drawn_can_run(graph: OpGraph, captured: bool, seed: int) -> None:
    random, pinned = Random(seed), NONE if captured else graph.pinned
    drawn = fresh(graph, pinned, random)
    for assignment in (drawn, changed(graph, pinned, drawn, random), changed(graph, pinned, sequential(graph), random)):
        check_assignment(graph, assignment, MOST_STREAMS, pinned)
        assert set(assignment.stream.values()) == set(range(assignment.streams))
        verify(graph, place_releases(graph, synchronize(graph, assignment)), pinned=pinned)


def test_fresh_ones_have_long_chains_as_well_as_many_edges() -> None:
    """Of the nine edges of a ─▶ b ─▶ … ─▶ j, from none to nearly all leave their stream."""
    graph = graph_of([*zip("abcdefghi", "bcdefghij", strict=True)])
    drawn = [fresh(graph, NONE, Random(seed)) for seed in range(200)]
    leaving = [sum(each.stream[a] != each.stream[b] for a, b in graph.digraph.edges) for each in drawn]
    assert min(leaving) == 0
    assert max(leaving) >= 8
    assert {each.streams for each in drawn} >= {1, 2, MOST_STREAMS - 1}


# What is kept


class Ticks:
    """A clock that goes on by a second whenever it is looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seconds = count()
        monkeypatch.setattr(random_search.time, "perf_counter", lambda: float(next(seconds)))


def explored(graph: OpGraph, look: Look, seconds: float = 500.0, seed: int = 0) -> SearchResult:
    return explore(graph, NONE, [sequential(graph)], look, seconds, seed)


def load(assignment: Assignment, _: float = inf) -> float:
    """A time that is the shorter, the more evenly ops are spread: the squares of their numbers by stream, added up."""
    return float(sum(many**2 for many in Counter(assignment.stream.values()).values()))


LETTERS = graph_of((), names="abcdefghijklmnopqrstuvwx")
"""Twenty-four ops side by side: at best there are three on each of eight streams."""


def test_the_fastest_are_kept_and_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fresh one comes near the best, which changes find."""
    Ticks(monkeypatch)
    times = [load(assignment) for assignment in explored(LETTERS, load, seconds=1000.0).kept]
    assert len(times) == KEPT
    assert times == sorted(times)
    assert times[0] == 8 * 3**2
    assert min(load(fresh(LETTERS, NONE, Random(seed))) for seed in range(500)) > times[-1]


# Luck


def test_the_best_is_measured_once_more_by_rounds_that_chose_nothing() -> None:
    """In its final look a is lucky by chance; what is reported comes from another one."""
    a, b = sequential(LETTERS), fresh(LETTERS, NONE, Random(0))
    times = {"sequential": iter([80.0, 110.0]), "fresh": iter([90.0])}
    looks: list[tuple[float, int]] = []

    def pairs(assignment: Assignment) -> Iterator[Pair]:
        time_us = next(times[assignment.policy])
        for number in count(1):
            looks.append((time_us, number))
            yield 100.0, time_us

    best, measured = best_of([b, a], pairs)
    assert best is a
    assert measured == [(100.0, 110.0)] * FINAL
    assert dict(looks) == {90.0: FINAL, 80.0: FINAL, 110.0: FINAL}


def looked(monkeypatch: pytest.MonkeyPatch, times: Sequence[float], bound: float) -> tuple[float, int]:
    """The result of a look, and the pairs that it took."""
    left = [(100.0, time_us) for time_us in reversed(times)]

    def pairs(comparison: Comparison, assignment: Assignment) -> Iterator[Pair]:
        while True:
            yield left.pop()

    monkeypatch.setattr(Comparison, "pairs", pairs)
    any_arena: Any = None
    return Comparison(any_arena, [], [], any_arena).look(sequential(graph_of("a-b")), bound), len(times) - len(left)


def test_what_looks_better_is_judged_without_its_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [20.0, *[105.0] * (CAREFUL // 2 + 1), *[60.0] * (CAREFUL // 2)]
    assert looked(monkeypatch, times, bound=1.02) == (1.05, 1 + CAREFUL)


# On a device


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """Towers on the CPU, as autostream runs them."""
    case = sample("towers")
    arguments, bound = case.args(), [False] * len(case.tensors)
    with torch.no_grad():
        tuned = tune(case.program, arguments, bound, Options(memory_budget=inf), Stopwatch())
    return Comparison(tuned, arguments, bound, clock_of(torch.device("cpu")))


def test_what_fails_verification_is_never_run(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_waits(graph: OpGraph, assignment: Assignment) -> Schedule:
        schedule = synchronize(graph, assignment)
        return replace(schedule, launches=tuple(replace(launch, waits=()) for launch in schedule.launches))

    monkeypatch.setattr(random_search, "synchronize", without_waits)
    monkeypatch.setattr(random_search, "build", lambda *_: pytest.fail("it was built"))
    with pytest.raises(ScheduleError):
        comparison.look(fresh(comparison.tuned.priced.graph, comparison.pinned, Random(0)), bound=inf)


# Results


def test_results_are_saved_with_their_stamp(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(random_search, "_comparison", lambda workload: comparison)
    monkeypatch.setattr(random_search, "interleaved", lambda timers: [90.0, 60.0])
    assert main(["googlenet", "--seconds", "0.2", "--seed", "7", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "random_search.json").read_text())
    assert (result["seconds"], result["seed"]) == (0.2, 7)
    assert result["stamp"]["commit"]
    (row,) = result["rows"]
    assert (row["workload"], row["level"], row["ops"]) == ("googlenet", "aten", len(comparison.tuned.priced.graph.ops))
    assert (row["ratio"], row["standard_error"]) == (1.5, 0.0)
    assert (row["autostream"]["measured_us"], row["best"]["measured_us"]) == (90.0, 60.0)
    assert row["autostream"]["policy"] == comparison.tuned.selection.chosen.schedule.policy
    assert "1.500×" in (tmp_path / "random_search.md").read_text()
    for seed, workloads in ((7, ["googlenet", "inception_v3"]), (8, ["inception_v3"])):
        assert main(["inception_v3", "--seconds", "0.2", "--seed", str(seed), "--out", str(tmp_path)]) == 0
        result = json.loads((tmp_path / "random_search.json").read_text())
        assert [row["workload"] for row in result["rows"]] == workloads, "with another seed it is another search"


@pytest.mark.gpu
def test_memory_does_not_grow_with_what_is_tried() -> None:
    """A hundred graphs that stayed would hold far more than one does, even the largest."""

    def reserved(seeds: range) -> int:
        for seed in seeds:
            assert comparison.look(fresh(graph, comparison.pinned, Random(seed)), bound=0.0) < inf
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    with torch.no_grad():
        comparison = random_search._comparison("towers8")
        graph = comparison.tuned.priced.graph
        assert comparison.tuned.selection.chosen.captured
        assert reserved(range(1, 100)) <= reserved(range(1)) + 8 * 2**20
