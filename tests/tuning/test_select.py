"""Candidates are measured against the best so far; the clocks here say what they are told to say."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from operator import is_
from typing import Any

import pytest
import torch
from torch import Tensor

from autostream.errors import CaptureError
from autostream.frontend.trace import trace
from autostream.ir import Candidate, Limit, Op, OpGraph, Placeholder, Program, Role, Schedule
from autostream.runtime.emulator import ThreadedProgram
from autostream.runtime.restore import Restore
from autostream.tuning import select as selection
from autostream.tuning.select import (
    MARGIN,
    VARIANTS,
    Selection,
    build,
    detached,
    has_integers,
    interleaved,
    select,
    written,
)
from tests.runtime.programs import Case, random_schedule, same, sample
from tests.semantics import Model

NOTHING = Restore([])


class Execution:
    """What stands for a candidate that was built: it knows its place, and how long it takes."""

    def __init__(self, place: int, time_us: float) -> None:
        self.place, self.time_us = place, time_us


class Workshop:
    """Builds executions that take the times given, and counts those alive; raises what is given for a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: Sequence[float | Exception], streams: Sequence[int]):
        self.alive: weakref.WeakSet[Execution] = weakref.WeakSet()
        self.most = 0
        self.built: list[int] = []
        self.tensors = [torch.ones(2), torch.zeros(3)]
        self.given: list[Sequence[Tensor]] = []
        self.times = times
        self.candidates = [
            Candidate(Schedule(f"policy {place}", count, ()), captured=True, predicted_us=1.0)
            for place, count in enumerate(streams)
        ]
        self.clock = 0.0
        monkeypatch.setattr(selection.time, "perf_counter", lambda: self.clock)
        monkeypatch.setattr(selection, "build", self.build)
        monkeypatch.setattr(selection, "_timer", lambda execution, *_: lambda: execution.time_us)

    def build(
        self, program: object, graph: object, candidate: Candidate, tensors: Sequence[Tensor], *_: object
    ) -> Execution:
        self.given.append(tensors)
        place = int(candidate.schedule.policy.rpartition(" ")[2])
        self.built.append(place)
        self.clock += 1.0
        time_us = self.times[place]
        if isinstance(time_us, Exception):
            # A new one, since an exception holds on to what it passed through.
            raise type(time_us)(*time_us.args) from time_us.__cause__
        execution = Execution(place, time_us)
        self.alive.add(execution)
        self.most = max(self.most, len(self.alive))
        return execution

    def select(self, seconds: float = inf, variants: Sequence[int] = ()) -> Selection:
        """The choice among all candidates but variants, which come after it; each of these once."""
        program: Any = Program(None, (), (), "aten", "cuda:0")  # type: ignore[arg-type]
        left = [self.candidates[place] for place in variants]
        self.varied: list[str] = []

        def varied(candidate: Candidate) -> Iterator[Candidate]:
            self.varied.append(candidate.schedule.policy)
            while left:
                yield left.pop(0)

        others = [candidate for candidate in self.candidates if candidate not in left]
        bound = [False] * len(self.tensors)
        graph = OpGraph({}, (), {}, (), "cuda:0")
        return select(program, graph, others, self.tensors, bound, NOTHING, seconds, varied)


def chosen(
    monkeypatch: pytest.MonkeyPatch, times: Sequence[float | Exception], streams: Sequence[int] | None = None
) -> int:
    """The place of the candidate that is chosen."""
    result = Workshop(monkeypatch, times, streams or range(1, len(times) + 1)).select()
    place = result.execution.place  # type: ignore[union-attr]
    assert result.chosen is result.candidates[place]
    return int(place)


def test_the_fastest_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, [100.0, 90.0, 70.0, 80.0]) == 2
    assert chosen(monkeypatch, [100.0, 110.0, 120.0]) == 0
    assert chosen(monkeypatch, [100.0]) == 0


def test_more_streams_must_be_faster_by_the_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    just, almost = 100.0 * (1 - MARGIN) - 0.01, 100.0 * (1 - MARGIN) + 0.01
    assert chosen(monkeypatch, [100.0, just]) == 1
    assert chosen(monkeypatch, [100.0, almost]) == 0


@pytest.mark.parametrize("streams", [[1, 8, 4, 2], [1, 2, 4, 8], [1, 4, 2, 8]])
def test_of_equal_ones_that_with_fewest_streams_wins(monkeypatch: pytest.MonkeyPatch, streams: list[int]) -> None:
    """Whatever the order in which they are promising."""
    place = chosen(monkeypatch, [100.0, 50.0, 50.0, 50.0], streams)
    assert streams[place] == 2


def test_of_equal_ones_over_as_many_streams_that_with_least_memory_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = Workshop(monkeypatch, [100.0, 50.0, 50.3, 49.9], [1, 2, 2, 2])
    memory = [10, 30, 20, 40]
    workshop.candidates = [
        replace(candidate, memory_bytes=size) for candidate, size in zip(workshop.candidates, memory, strict=True)
    ]
    assert workshop.select().execution.place == 2  # type: ignore[union-attr]


def test_ties_do_not_add_up_to_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 0.7 % longer than the one before, on fewer streams: only the first step is a tie with the fastest."""
    times = [100.0, *(50.0 * 1.007**step for step in range(5))]
    assert chosen(monkeypatch, times, [1, 8, 6, 4, 3, 2]) == 2


def test_what_there_is_no_time_for_is_refused_but_not_the_sequential_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a second to build; the most promising ones come first."""
    workshop = Workshop(monkeypatch, [100.0, 90.0, 50.0, 10.0], [1, 3, 2, 4])
    result = workshop.select(seconds=2.5)
    assert result.execution.place == 2  # type: ignore[union-attr]
    assert [candidate.measured_us for candidate in result.candidates] == [100.0, 90.0, 50.0, None]
    assert "tuning_seconds" in result.candidates[3].refusal
    assert result.candidates[3].limit is Limit.TIME
    result = workshop.select(seconds=0.0)
    assert result.execution.place == 0  # type: ignore[union-attr]
    assert [candidate.measured_us for candidate in result.candidates] == [100.0, None, None, None]


def test_what_is_refused_already_is_not_built_and_keeps_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = Workshop(monkeypatch, [100.0, 10.0, 50.0], [1, 2, 2])
    workshop.candidates[1] = replace(workshop.candidates[1], refusal="needs 13.1 MB")
    result = workshop.select()
    assert 1 not in workshop.built
    assert [(candidate.measured_us, candidate.refusal) for candidate in result.candidates] == [
        (100.0, ""), (None, "needs 13.1 MB"), (50.0, ""),
    ]  # fmt: skip
    assert workshop.select(seconds=0.0).candidates[1].refusal == "needs 13.1 MB"


def test_a_winner_that_the_sequential_one_beats_in_the_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks are up when they meet once more: both take 80 µs then."""
    workshop = Workshop(monkeypatch, [100.0, 90.0], [1, 2])

    def timer(execution: Execution, *_: object) -> Callable[[], float]:
        return lambda: execution.time_us if workshop.built == [0, 1] else 80.0

    monkeypatch.setattr(selection, "_timer", timer)
    result = workshop.select()
    assert workshop.built == [0, 1, 0]
    assert result.execution.place == 0  # type: ignore[union-attr]
    assert [candidate.measured_us for candidate in result.candidates] == [80.0, 80.0]


def test_little_gains_do_not_add_up_to_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is within the margin of the one before, and slower; the fastest stays."""
    times = [100.0, *(50.0 * 1.005**step for step in range(5))]
    assert chosen(monkeypatch, times, [1, 2, 3, 4, 6, 8]) == 1


def test_every_candidate_says_what_it_took_in_the_order_given(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Workshop(monkeypatch, [100.0, 50.0, 70.0], [1, 8, 2]).select()
    assert [candidate.measured_us for candidate in result.candidates] == [100.0, 50.0, 70.0]
    assert [candidate.schedule.streams for candidate in result.candidates] == [1, 8, 2]


def test_times_of_candidates_are_told_at_one_pace_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It slows down with each one that is built: the second meets the first at half the pace, the third at a third."""
    workshop = Workshop(monkeypatch, [100.0, 120.0, 130.0], [1, 2, 3])
    monkeypatch.setattr(selection, "_timer", lambda execution, *_: lambda: execution.time_us * workshop.clock)
    assert [candidate.measured_us for candidate in workshop.select().candidates] == [300.0, 360.0, 390.0]


def test_so_they_are_where_the_best_one_meets_the_sequential_one_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third, which lost to the second, was faster than the sequential one is now."""
    workshop = Workshop(monkeypatch, [100.0, 50.0, 75.0, 40.0], [1, 2, 3, 2])
    monkeypatch.setattr(selection, "_timer", lambda execution, *_: lambda: execution.time_us * workshop.clock)
    result = workshop.select(variants=[3])
    assert [candidate.measured_us for candidate in result.candidates] == [500.0, 250.0, 375.0, 200.0]


NO_MEMORY = torch.OutOfMemoryError("no\nway")
NO_MEMORY_TO_CAPTURE = CaptureError("no\nway")
NO_MEMORY_TO_CAPTURE.__cause__ = NO_MEMORY


@pytest.mark.parametrize(
    ("error", "limit"),
    [(CaptureError("no\nway"), None), (NO_MEMORY, Limit.DEVICE), (NO_MEMORY_TO_CAPTURE, Limit.DEVICE)],
)
def test_what_cannot_be_captured_is_noted_and_passed_over(
    monkeypatch: pytest.MonkeyPatch, error: Exception, limit: Limit | None
) -> None:
    result = Workshop(monkeypatch, [100.0, error, 50.0], [1, 2, 3]).select()
    assert result.execution.place == 2  # type: ignore[union-attr]
    refused = result.candidates[1]
    assert (refused.measured_us, refused.refusal, refused.limit) == (None, f"{type(error).__name__}: no", limit)
    assert [candidate.refusal for candidate in (result.candidates[0], result.candidates[2])] == ["", ""]


def test_what_runs_out_of_memory_while_it_is_measured_is_passed_over_too(monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = Workshop(monkeypatch, [100.0, 50.0], [1, 2])

    def timer(execution: Execution, *_: object) -> Any:
        def out_of_memory() -> float:
            raise torch.OutOfMemoryError("CUDA out of memory")

        return out_of_memory if execution.place == 1 else lambda: execution.time_us

    monkeypatch.setattr(selection, "_timer", timer)
    result = workshop.select()
    assert result.execution.place == 0  # type: ignore[union-attr]
    assert result.candidates[1].refusal == "OutOfMemoryError: CUDA out of memory"
    assert result.candidates[1].limit is Limit.DEVICE


def test_if_the_first_cannot_be_captured_none_can(monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = Workshop(monkeypatch, [CaptureError("no"), 50.0], [1, 2])
    with pytest.raises(CaptureError, match="no"):
        workshop.select()
    assert workshop.built == [0]


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        Workshop(monkeypatch, [100.0, KeyError("defect")], [1, 2]).select()


@pytest.mark.parametrize("times", [[9.0, 8, 7, 6, 5, 4], [4.0, 5, 6, 7, 8, 9], [9.0, CaptureError(), 4, 5, 3, 6]])
def test_no_more_than_two_are_alive(monkeypatch: pytest.MonkeyPatch, times: list[float | Exception]) -> None:
    workshop = Workshop(monkeypatch, times, range(1, 7))
    result = workshop.select()
    assert workshop.most == 2
    assert list(workshop.alive) == [result.execution]


# Variants


def places(result: Selection) -> list[int]:
    return [int(candidate.schedule.policy.rpartition(" ")[2]) for candidate in result.candidates]


def test_a_variant_of_the_best_one_that_is_faster_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next ones are variants of that. What is no faster is no candidate."""
    workshop = Workshop(monkeypatch, [100.0, 50.0, 49.9, 49.0, 49.5, 48.0], [1, 2, 2, 2, 2, 3])
    result = workshop.select(variants=[2, 3, 4, 5])
    assert result.execution.place == 5  # type: ignore[union-attr]
    assert places(result) == [0, 1, 3, 5]
    assert [candidate.measured_us for candidate in result.candidates] == [100.0, 50.0, 49.0, 48.0]
    assert workshop.varied == ["policy 1", "policy 3", "policy 5"]
    assert workshop.most == 2


def test_all_candidates_and_variants_share_the_static_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of them for each would take memory for as long as it is alive, and time."""
    workshop = Workshop(monkeypatch, [100.0, 50.0, 60.0, 40.0], [1, 2, 2, 2])
    workshop.select(variants=[2, 3])
    assert workshop.built == [0, 1, 2, 3, 0]
    assert all(all(map(is_, given, workshop.tensors)) for given in workshop.given)


def test_one_stream_has_no_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = Workshop(monkeypatch, [100.0, 110.0, 50.0], [1, 2, 2])
    assert places(workshop.select(variants=[2])) == [0, 1]
    assert workshop.built == [0, 1]


def test_no_more_variants_are_tried_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = Workshop(monkeypatch, [100.0, 50.0] + [60.0] * (VARIANTS + 5), [1] + [2] * (VARIANTS + 6))
    result = workshop.select(variants=range(2, VARIANTS + 7))
    assert workshop.built == [*range(VARIANTS + 2), 0]
    assert (places(result), result.execution.place) == ([0, 1], 1)  # type: ignore[union-attr]


def test_variants_are_tried_as_long_as_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a second to build."""
    workshop = Workshop(monkeypatch, [100.0, 50.0, 60.0, 40.0, 30.0], [1, 2, 2, 2, 2])
    assert places(workshop.select(seconds=3.5, variants=[2, 3, 4])) == [0, 1, 3]


@pytest.mark.parametrize("error", [CaptureError("no"), torch.OutOfMemoryError("no")])
def test_a_variant_that_cannot_be_captured_is_passed_over(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    workshop = Workshop(monkeypatch, [100.0, 50.0, error, 40.0], [1, 2, 2, 2])
    assert places(workshop.select(variants=[2, 3])) == [0, 1, 3]
    assert workshop.most == 2


def test_the_sequential_one_may_beat_a_variant_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = Workshop(monkeypatch, [100.0, 90.0, 80.0], [1, 2, 2])

    def timer(execution: Execution, *_: object) -> Callable[[], float]:
        return lambda: execution.time_us if workshop.built == [0, 1, 2][: len(workshop.built)] else 80.0

    monkeypatch.setattr(selection, "_timer", timer)
    result = workshop.select(variants=[2])
    assert (workshop.built, result.execution.place) == ([0, 1, 2, 0], 0)  # type: ignore[union-attr]


# Clocks


def script(times: Sequence[float]) -> Iterator[float]:
    yield from times


def test_interleaved_takes_turns_and_medians() -> None:
    log: list[str] = []
    left, right = script([1, 9, 2, 9, 3, 9, 4, 9, 5]), script([10] * 9)

    def call(name: str, times: Iterator[float]) -> float:
        log.append(name)
        return next(times)

    assert interleaved([lambda: call("left", left), lambda: call("right", right)]) == [5, 10]
    assert log == ["left", "right"] * 9


def test_interleaved_gives_up_on_what_is_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [0, 0]

    def timer(index: int, time_us: float) -> float:
        counts[index] += 1
        return time_us

    assert interleaved([lambda: timer(0, 100.0), lambda: timer(1, 130.0)]) == [100.0, 130.0]
    assert counts == [3, 3]


def test_interleaved_does_not_give_up_on_the_first_nor_on_what_was_fast_once() -> None:
    for first, last in ([130.0] * 9, [100.0] * 9), ([100.0] * 9, [130.0, 100.0, 130.0] * 3):
        left, right = script(first), script(last)
        interleaved([lambda left=left: next(left), lambda right=right: next(right)])  # type: ignore[misc]
        assert (list(left), list(right)) == ([], [])


def test_interleaved_measures_three_times_even_if_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 10000, 100))
    monkeypatch.setattr(selection.time, "perf_counter", lambda: next(now))
    assert interleaved([script([3, 1, 2, 9]).__next__]) == [2]


def test_a_round_on_the_cpu_is_about_10_ms_and_at_most_50_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for each_us, expected in (1.0, 50), (500.0, 20), (25000.0, 1):
        runs: list[int] = []
        monkeypatch.setattr(
            selection, "_host_us", lambda run, count, each_us=each_us, runs=runs: runs.append(count) or each_us
        )
        selection._timer(lambda: (), [], "cpu", NOTHING)()
        assert runs == [1, 1, expected]


def test_what_a_program_writes_is_put_back_before_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not while the clock runs: it would be 100 µs more."""
    place, seen, now = torch.tensor(3), list[float](), [0.0]
    restore = Restore([place])

    def run(place: Tensor) -> None:
        seen.append(place.item())
        place += 1
        now[0] += 50e-6

    class Slow:
        spans = restore.spans

        def __call__(self) -> None:
            now[0] += 100e-6
            restore()

    monkeypatch.setattr(selection.time, "perf_counter", lambda: now[0])
    timer = selection._timer(run, [place], "cpu", Slow())  # type: ignore[arg-type]
    assert (timer(), timer()) == (pytest.approx(50.0), pytest.approx(50.0))
    assert seen == [3] * (2 + 2 * 50)


def test_putting_back_makes_a_round_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes 500 µs with it, of which it is a part."""
    monkeypatch.setattr(selection, "_host_us", lambda run, count: 500.0)
    counts: list[int] = []
    monkeypatch.setattr(selection, "_host_us_alone", lambda run, count, restore: counts.append(count) or 9.0)
    assert selection._timer(lambda x: (), [torch.ones(1)], "cpu", Restore([torch.ones(1)]))() == 9.0
    assert counts == [20]


# Building


def candidate(case: Case, streams: int) -> Candidate:
    return Candidate(random_schedule(case.graph, streams, seed=2), captured=False, predicted_us=0.0)


@pytest.mark.parametrize("streams", [1, 2])
def test_build_makes_what_computes_the_same(streams: int) -> None:
    case = sample("towers")
    run = build(case.program, case.graph, candidate(case, streams), case.args(), [False] * len(case.tensors), NOTHING)
    assert isinstance(run, ThreadedProgram) == (streams > 1)
    with torch.no_grad():
        assert same(run(*case.args()), case.expected()[0])


def test_select_runs_real_candidates_on_the_cpu() -> None:
    case = sample("towers")
    candidates = [candidate(case, 1), candidate(case, 2)]
    with torch.no_grad():
        result = select(case.program, case.graph, candidates, case.args(), [False] * len(case.tensors), NOTHING)
        assert same(result.execution(*case.args()), case.expected()[0])
    assert all(candidate.measured_us for candidate in result.candidates)
    assert replace(result.chosen, measured_us=None) in candidates


class Captured:
    """Remembers what a captured graph is told."""

    def __init__(self, run: object, tensors: object, bound: object, written: object, device: object, **rest: object):
        self.told = {"bound": bound, "written": written, "device": device, **rest}


@pytest.mark.parametrize(
    ("writes", "orders", "expected"),
    [
        ((), (), {"written": (False, False), "random": False}),
        (("y",), (), {"written": (False, True), "random": False}),
        ((), ("rng",), {"written": (False, False), "random": True}),
        ((), ("world",), {"written": (False, False), "random": True}),
    ],
)
def test_a_captured_graph_is_told_what_it_writes_and_whether_it_draws(
    monkeypatch: pytest.MonkeyPatch, writes: Sequence[str], orders: Sequence[str], expected: dict[str, object]
) -> None:
    monkeypatch.setattr(selection, "CapturedGraph", Captured)
    monkeypatch.setattr(selection, "lower", lambda *args: torch.fx.symbolic_trace(torch.nn.ReLU()))
    op = Op("a", "f", ("a",), frozenset({"x"}), frozenset({"a", *writes}), frozenset({"a"}), frozenset(orders))
    placeholders = tuple(Placeholder(name, Role.INPUT, "0", name) for name in "xy")
    program = Program(None, placeholders, ("a",), "aten", "cuda:1")  # type: ignore[arg-type]
    graph = OpGraph({"a": op}, (), {}, (), "cuda:1")
    captured: Any = build(program, graph, Candidate(Schedule("mine", 1, ()), True, 0.0), [], [True, False], NOTHING)
    told = {"bound": [True, False], "device": torch.device("cuda:1"), "restore": NOTHING}
    assert captured.told == {**told, **expected}


def test_written_are_placeholders_whose_storage_an_op_writes() -> None:
    """Of aliased, x is written, and so is y where it lies in the same storage."""
    case = sample("aliased")
    assert written(case.program, case.graph) == (True, False)
    x, y = case.program.placeholders
    tied = replace(case.program, placeholders=(x, replace(y, storage=x.storage)))
    assert written(tied, case.graph) == (True, True)


@pytest.mark.gpu
def test_times_are_those_of_the_device_that_runs_it() -> None:
    """Sleeping on the device takes the host no time, on whichever stream is current."""
    stream = torch.cuda.Stream("cuda:0")
    sleeps: list[int] = []

    def run(x: Tensor) -> None:
        sleeps.append(1)
        torch.cuda._sleep(20_000_000)

    with torch.cuda.stream(stream):
        time_us = selection._timer(run, [torch.ones(1, device="cuda:0")], "cuda:0", NOTHING)()
    assert time_us > 1000
    assert len(sleeps) == 3


@pytest.mark.gpu
def test_on_a_device_putting_back_is_no_part_of_a_time_either() -> None:
    """The device sleeps ten times as long for it."""
    place = torch.zeros(1, dtype=torch.int64, device="cuda:0")
    seen = torch.zeros(1, dtype=torch.int64, device="cuda:0")
    restore = Restore([place])

    class Slow:
        spans = restore.spans

        def __call__(self) -> None:
            torch.cuda._sleep(20_000_000)
            restore()

    def run(place: Tensor) -> None:
        torch.cuda._sleep(2_000_000)
        seen.add_(place)
        place.add_(1)

    time_us = selection._timer(run, [place], "cuda:0", Slow())()  # type: ignore[arg-type]
    assert 500 < time_us < 5000
    assert seen.item() == 0


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (lambda x: x.relu() > 0, (torch.ones(3),), False),
        (lambda x, i: x[i], (torch.ones(3), torch.tensor([1])), True),
        (lambda x: x.argmax().float(), (torch.ones(3),), True),
        (lambda x: x.topk(1), (torch.ones(3),), True),
        (lambda x: x * 1j, (torch.ones(3),), False),
    ],
    ids=["mask", "index", "made", "made with others", "complex"],
)
def test_integers_may_be_indices(function: Any, args: tuple[Tensor, ...], expected: bool) -> None:
    model = Model(lambda module, *args: function(*args), counter=torch.tensor(3))
    assert has_integers(trace(model, args).program) == expected


@pytest.mark.parametrize("error", [CaptureError("no"), torch.OutOfMemoryError("no")])
def test_a_winner_stays_where_the_sequential_one_cannot_be_built_beside_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    workshop = Workshop(monkeypatch, [100.0, 50.0], [1, 2])
    build = workshop.build

    def once(program: object, graph: object, candidate: Candidate, *rest: object) -> Execution:
        if workshop.built == [0, 1]:
            raise type(error)(*error.args)
        return build(program, graph, candidate, *rest)

    monkeypatch.setattr(selection, "build", once)
    assert workshop.select().execution.place == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, y: (x.t(), y), ()),
        (lambda x, y: (x + 1, y.detach()), (2,)),
        (lambda x, y: (x.relu_().detach()[0], y[1:].detach()), (1, 2)),
        (lambda x, y: (x, y.detach() * 2), ()),
        (lambda x, y: ((x + 1).detach(), y), ()),
    ],
    ids=["views", "detached", "seen in other ways too", "not returned", "a result"],
)
def test_outputs_may_be_detached_inputs(function: Any, expected: tuple[int, ...]) -> None:
    """The argument before the inputs is the model's own, which is none."""
    args = torch.ones(3, 3), torch.ones(3)
    model = Model(lambda module, x, y: (*function(x, y), module.own.detach()), own=torch.ones(3))
    assert detached(trace(model, args).program) == expected
