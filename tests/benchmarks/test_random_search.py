"""A random search: what it draws can run, what it keeps is the fastest, and luck is not taken for a gain."""

from __future__ import annotations

import gc
import json
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, repeat
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autostream
from autostream.errors import CaptureError, ScheduleError
from autostream.ir import Assignment, OpGraph, Schedule
from autostream.options import Options
from autostream.runtime.clock import clock_of
from autostream.scheduling.releases import place_releases
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from autostream.tuning.tune import tune
from autostream.utils.stopwatch import Stopwatch
from benchmarks import random_search, zoo
from benchmarks.random_search import (
    CAREFUL,
    FINAL,
    KEPT,
    LONGEST_MOVE,
    MOST_MOVES,
    MOST_STREAMS,
    Arena,
    Duel,
    Found,
    Look,
    champion,
    changed,
    explore,
    fresh,
    main,
    table,
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


def test_fresh_ones_have_any_order_that_dependencies_allow() -> None:
    """Beside a ─▶ b, c is launched first, second or last."""
    graph = graph_of("a-b", names="abc")
    assert {fresh(graph, NONE, Random(seed)).order for seed in range(50)} == {
        ("a", "b", "c"),
        ("a", "c", "b"),
        (*"cab",),
    }


def test_a_change_moves_few_ops_and_brings_in_one_stream_at_most() -> None:
    """Of eighty ops on one stream, some in a row go to a second one, or some are launched elsewhere, or both."""
    graph = graph_of((), names=[f"n{at}" for at in range(80)])
    parent = sequential(graph)
    moved: set[int] = set()
    relaunched: set[bool] = set()
    for seed in range(200):
        child = changed(graph, NONE, parent, Random(seed))
        assert child.streams <= 2
        moved.add(len(graph.ops) - max(Counter(child.stream.values()).values()))
        relaunched.add(child.order != parent.order)
    assert parent == sequential(graph)
    assert moved <= set(range(MOST_MOVES * LONGEST_MOVE + 1))
    assert {0, 1, LONGEST_MOVE} <= moved
    assert relaunched == {True, False}


# What is kept


class Ticks:
    """A clock that goes on by a second whenever it is looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seconds = count()
        monkeypatch.setattr(random_search.time, "perf_counter", lambda: float(next(seconds)))


def explored(graph: OpGraph, look: Look, seconds: float = 500.0, seed: int = 0) -> Found:
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


def test_a_quarter_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    Ticks(monkeypatch)
    tried = explored(LETTERS, load, seconds=1000.0).tried
    assert set(tried) == {"fresh", "changed"}
    assert 0.2 < tried["fresh"] / sum(tried.values()) < 0.3


def test_nothing_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ops have two orders, each with one stream, with a alone on the first, and with b alone on the first."""
    Ticks(monkeypatch)
    looks: list[Assignment] = []
    explored(graph_of((), names="ab"), lambda assignment, bar: looks.append(assignment) or 1.0)  # type: ignore[func-returns-value]
    assert len(looks) == len({(each.order, each.stream["a"], each.stream["b"]) for each in looks}) == 6


def test_only_what_is_faster_than_the_worst_kept_is_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    Ticks(monkeypatch)
    bars, times = [], iter([5.0, 9.0, 7.0, 8.0, 6.0, 6.5, 7.5, 1.0, *repeat(10.0, 500)])
    explored(graph_of((), names="abcdefgh"), lambda assignment, bar: bars.append(bar) or next(times), seconds=12.0)
    assert bars[:10] == [inf, inf, inf, inf, inf, 9.0, 8.0, 7.5, 7.0, 7.0]


def test_what_cannot_run_is_counted_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    Ticks(monkeypatch)
    found = explored(LETTERS, lambda each, bar: 1.0 if each.policy == "sequential" else inf)
    assert found.kept == (sequential(LETTERS),)
    assert found.refused == sum(found.tried.values()) > 0


def test_the_same_seed_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(seed: int) -> Sequence[Assignment]:
        Ticks(monkeypatch)
        return explored(LETTERS, load, 30.0, seed).kept

    assert drawn(0) == drawn(0) != drawn(1)


# Luck


def test_the_best_is_measured_once_more_by_rounds_that_chose_nothing() -> None:
    """In its final look a is lucky by chance; what is reported comes from another one."""
    a, b = sequential(LETTERS), fresh(LETTERS, NONE, Random(0))
    times = {"sequential": iter([80.0, 110.0]), "fresh": iter([90.0])}
    looks: list[tuple[float, int]] = []

    def duels(assignment: Assignment) -> Iterator[Duel]:
        time_us = next(times[assignment.policy])
        for number in count(1):
            looks.append((time_us, number))
            yield 100.0, time_us

    best, measured = champion([b, a], duels)
    assert best is a
    assert measured == [(100.0, 110.0)] * FINAL
    assert dict(looks) == {90.0: FINAL, 80.0: FINAL, 110.0: FINAL}


def looked(monkeypatch: pytest.MonkeyPatch, times: Sequence[float], bar: float) -> tuple[float, int]:
    """The result of a look, and the duels that it took."""
    left = [(100.0, time_us) for time_us in reversed(times)]

    def duels(arena: Arena, assignment: Assignment) -> Iterator[Duel]:
        while True:
            yield left.pop()

    monkeypatch.setattr(Arena, "duels", duels)
    any_arena: Any = None
    return Arena(any_arena, [], [], any_arena).look(sequential(graph_of("a-b")), bar), len(times) - len(left)


def test_a_first_look_is_one_duel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked(monkeypatch, [103.0, 50.0], bar=1.02) == (1.03, 1)


def test_what_looks_better_is_judged_without_its_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [20.0, *[105.0] * (CAREFUL // 2 + 1), *[60.0] * (CAREFUL // 2)]
    assert looked(monkeypatch, times, bar=1.02) == (1.05, 1 + CAREFUL)


# On a device


@pytest.fixture(scope="module")
def arena() -> Arena:
    """Towers on the CPU, as autostream runs them."""
    case = sample("towers")
    arguments, bound = case.args(), [False] * len(case.tensors)
    with torch.no_grad():
        tuned = tune(case.program, arguments, bound, Options(memory_budget=inf), Stopwatch())
    return Arena(tuned, arguments, bound, clock_of(torch.device("cpu")))


def test_schedules_meet_the_one_that_was_chosen(arena: Arena) -> None:
    chosen = arena.tuned.selection.execution

    class Names:
        def once_us(self, call: Any) -> float:
            call()
            return 1.0 if call.func is chosen else 2.0

    with torch.no_grad():
        assert next(replace(arena, clock=Names()).duels(arena.known()[0])) == (1.0, 2.0)
        assert 0.0 < arena.look(arena.known()[-1], bar=0.0) < inf


def test_known_schedules_are_those_that_were_measured(arena: Arena) -> None:
    for assignment, candidate in zip(arena.known(), arena.tuned.selection.candidates, strict=True):
        again = arena.candidate(assignment)
        assert again.schedule.launches == candidate.schedule.launches
        assert again.predicted_us == candidate.predicted_us
        assert again.captured == candidate.captured


def test_what_was_not_measured_is_not_known(arena: Arena) -> None:
    first, *others = arena.tuned.selection.candidates
    candidates = (first, *(replace(each, measured_us=None) for each in others))
    tuned = replace(arena.tuned, selection=replace(arena.tuned.selection, candidates=candidates))
    assert others
    assert [each.policy for each in replace(arena, tuned=tuned).known()] == [first.schedule.policy]


def test_schedules_are_captured_if_the_chosen_one_is(arena: Arena) -> None:
    """What is captured may have outputs on any stream, and its prediction includes the replay."""
    priced, selection = arena.tuned.priced, arena.tuned.selection
    drawn = fresh(priced.graph, priced.graph.pinned, Random(0))

    def as_if(captured: bool) -> Arena:
        chosen = replace(selection.chosen, captured=captured)
        profile = replace(priced.profile, replay_us=1e6)
        tuned = replace(
            arena.tuned, priced=replace(priced, profile=profile), selection=replace(selection, chosen=chosen)
        )
        return replace(arena, tuned=tuned)

    assert as_if(captured=True).pinned == NONE
    assert as_if(captured=False).pinned == priced.graph.pinned != NONE
    for captured in (True, False):
        candidate = as_if(captured).candidate(drawn)
        assert candidate.captured == captured
        assert (candidate.predicted_us > 1e6) == captured


def test_what_fails_verification_is_never_run(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_waits(graph: OpGraph, assignment: Assignment) -> Schedule:
        schedule = synchronize(graph, assignment)
        return replace(schedule, launches=tuple(replace(launch, waits=()) for launch in schedule.launches))

    monkeypatch.setattr(random_search, "synchronize", without_waits)
    monkeypatch.setattr(random_search, "build", lambda *_: pytest.fail("it was built"))
    with pytest.raises(ScheduleError):
        arena.look(fresh(arena.tuned.priced.graph, arena.pinned, Random(0)), bar=inf)


def test_one_schedule_is_alive_beside_the_chosen_one(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        def __call__(self, *tensors: object) -> Sequence[object]:
            return ()

    alive: weakref.WeakSet[Run] = weakref.WeakSet()
    most: list[int] = []

    def build(*_: object) -> Run:
        run = Run()
        alive.add(run)
        most.append(len(alive))
        if len(most) % 3:
            return run
        raise CaptureError("no") if len(most) % 2 else torch.OutOfMemoryError("no")

    monkeypatch.setattr(random_search, "build", build)
    monkeypatch.setattr(random_search, "interleaved", lambda timers: [1.0] * len(timers))
    Ticks(monkeypatch)
    graph = arena.tuned.priced.graph
    gc.disable()
    try:
        with torch.no_grad():
            found = explore(graph, arena.pinned, arena.known(), arena.look, seconds=100.0, seed=0)
    finally:
        gc.enable()
    assert found.refused > 10
    assert len(most) > 40
    assert max(most) == 1
    assert len(alive) == 0


def test_a_workload_is_made_ready_as_by_default() -> None:
    subject = zoo.prepare(zoo.INFERENCE["mm_small"], 1, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        (report,) = autostream.optimize(subject.model, subject.args).reports
        arena = random_search._arena("mm_small")
    candidates = arena.tuned.selection.candidates
    assert [each.schedule for each in candidates] == [each.schedule for each in report.candidates]
    assert arena.bound.count(False) == 1
    assert len(arena.bound) == len(arena.arguments) == len(arena.tuned.program.placeholders)


# Results


def test_results_are_saved_with_their_stamp(arena: Arena, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(random_search, "_arena", lambda workload: arena)
    monkeypatch.setattr(random_search, "interleaved", lambda timers: [90.0, 60.0])
    assert main(["googlenet", "--seconds", "0.2", "--seed", "7", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "random_search.json").read_text())
    assert (result["seconds"], result["seed"]) == (0.2, 7)
    assert result["stamp"]["commit"]
    (row,) = result["rows"]
    assert (row["workload"], row["level"], row["ops"]) == ("googlenet", "aten", len(arena.tuned.priced.graph.ops))
    assert (row["ratio"], row["standard_error"]) == (1.5, 0.0)
    assert (row["autostream"]["measured_us"], row["best"]["measured_us"]) == (90.0, 60.0)
    assert row["autostream"]["policy"] == arena.tuned.selection.chosen.schedule.policy
    assert "1.500×" in (tmp_path / "random_search.md").read_text()
    for seed, workloads in ((7, ["googlenet", "inception_v3"]), (8, ["inception_v3"])):
        assert main(["inception_v3", "--seconds", "0.2", "--seed", str(seed), "--out", str(tmp_path)]) == 0
        result = json.loads((tmp_path / "random_search.json").read_text())
        assert [row["workload"] for row in result["rows"]] == workloads, "with another seed it is another search"


def test_what_ran_beside_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two searches, each on a GPU of its own, begin before either has written anything."""
    line = {"policy": "search", "streams": 4, "measured_us": 100.0}

    def row(workload: str, *_: object) -> dict[str, Any]:
        if workload == "googlenet":
            main(["inception_v3", "--out", str(tmp_path)])
        found = {"workload": workload, "level": "inductor", "ops": 9, "tried": {"fresh": 3}, "refused": 1}
        return {**found, "autostream": line, "best": line, "ratio": 1.0, "standard_error": 0.001}

    monkeypatch.setattr(random_search, "row", row)
    main(["googlenet", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "random_search.json").read_text())["rows"]
    assert [row["workload"] for row in rows] == ["inception_v3", "googlenet"]


def test_the_table_adds_up_what_was_tried() -> None:
    line = {"policy": "search", "streams": 4, "measured_us": 100.0}
    row = {"workload": "w", "level": "inductor", "ops": 9, "tried": {"fresh": 3, "changed": 9}, "refused": 1}
    text = table([{**row, "autostream": line, "best": line, "ratio": 1.0, "standard_error": 0.001}])
    assert [cell.strip() for cell in text.splitlines()[-1].strip("|").split("|")] == [
        *("w", "inductor", "9", "12", "1", "search 4", "100.0", "search 4", "100.0", "1.000× ±0.001"),
    ]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["gogglenet"], "gogglenet: use googlenet"),
        (["--seconds", "0"], "--seconds 0.0: use a finite number above 0"),
        (["--seconds", "nan"], "--seconds nan: use a finite number above 0"),
    ],
)
def test_what_cannot_be_searched_is_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert said in capsys.readouterr().err


@pytest.mark.gpu
def test_memory_does_not_grow_with_what_is_tried() -> None:
    """A hundred graphs that stayed would compare_modes far more than one does, even the largest."""

    def reserved(seeds: range) -> int:
        for seed in seeds:
            assert arena.look(fresh(graph, arena.pinned, Random(seed)), bar=0.0) < inf
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    with torch.no_grad():
        arena = random_search._arena("towers8")
        graph = arena.tuned.priced.graph
        assert arena.tuned.selection.chosen.captured
        assert reserved(range(1, 100)) <= reserved(range(1)) + 8 * 2**20
