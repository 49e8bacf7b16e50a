"""Selecting the fastest candidate, with fake builds and clocks; and timing of real runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from autostream.errors import CaptureError
from autostream.frontend.trace import trace
from autostream.ir import Candidate, Limit, OpGraph, Program, Schedule
from autostream.runtime.emulator import ThreadedProgram
from autostream.runtime.restore import Restore
from autostream.tuning import select as selection
from autostream.tuning.agreement import ALONE, Peers
from autostream.tuning.select import (
    MARGIN,
    VARIANTS,
    Selection,
    build,
    detached,
    interleaved,
    may_fail,
    select,
)
from tests.runtime.programs import Case, random_schedule, same, sample
from tests.semantics import Model

NOTHING = Restore([])


class Execution:
    """A fake execution of the candidate at an index, with the time of a run."""

    def __init__(self, place: int, time_us: float) -> None:
        self.place, self.time_us = place, time_us


class Workshop:
    """Builds fake executions with these times, and counts those alive; an exception instead of a time is raised."""

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

    def select(self, seconds: float = inf, variants: Sequence[int] = (), peers: Peers = ALONE) -> Selection:
        """Select among the candidates; those in ``variants`` are yielded as variants."""
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
        return select(program, graph, others, self.tensors, bound, NOTHING, seconds, varied, peers)


@pytest.mark.parametrize(
    ("times", "streams", "fastest"),
    [
        ([100.0, 90.0, 70.0, 80.0], [1, 2, 3, 4], 2),
        ([100.0, 110.0, 120.0], [1, 2, 3], 0),
        ([100.0], [1], 0),
        ([100.0, 100.0 * (1 - MARGIN) - 0.01], [1, 2], 1),
        ([100.0, 100.0 * (1 - MARGIN) + 0.01], [1, 2], 0),
        ([100.0, 50.0, 50.0, 50.0], [1, 8, 4, 2], 3),
        ([100.0, 50.0, 50.0, 50.0], [1, 2, 4, 8], 1),
        ([100.0, *(50.0 * 1.007**step for step in range(5))], [1, 8, 6, 4, 3, 2], 2),
        ([100.0, *(50.0 * 1.005**step for step in range(5))], [1, 2, 3, 4, 6, 8], 1),
    ],
    ids=[
        *("the fastest", "the sequential one", "the only one", "faster by the margin", "a tie with the sequential one"),
        *("fewest streams last", "fewest streams first", "ties on fewer streams add up", "ties on more streams"),
    ],
)
def test_the_fastest_is_selected_and_of_ties_the_one_with_fewest_streams(
    monkeypatch: pytest.MonkeyPatch, times: list[float], streams: list[int], fastest: int
) -> None:
    """Ties do not add up: a candidate has to be as fast as the fastest, not only as the best before it."""
    result = Workshop(monkeypatch, times, streams).select()
    assert result.execution.place == fastest  # type: ignore[union-attr]
    assert result.chosen is result.candidates[fastest]
    assert [candidate.measured_us for candidate in result.candidates] == pytest.approx(times)
    assert [candidate.schedule.streams for candidate in result.candidates] == streams


def test_of_ties_with_as_many_streams_the_one_with_least_memory_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = Workshop(monkeypatch, [100.0, 50.0, 50.3, 49.9], [1, 2, 2, 2])
    memory = zip(workshop.candidates, [10, 30, 20, 40], strict=True)
    workshop.candidates = [replace(candidate, memory_bytes=size) for candidate, size in memory]
    assert workshop.select().execution.place == 2  # type: ignore[union-attr]


def test_at_last_the_best_is_measured_against_the_sequential_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both take 80 µs then: a tie. Earlier times are scaled to the present speed of the device."""
    workshop = Workshop(monkeypatch, [100.0, 50.0, 75.0, 40.0], [1, 2, 3, 2])
    monkeypatch.setattr(selection, "_timer", lambda execution, *_: lambda: execution.time_us * workshop.clock)
    result = workshop.select(variants=[3])
    assert [candidate.measured_us for candidate in result.candidates] == [500.0, 250.0, 375.0, 200.0]
    tied = Workshop(monkeypatch, [100.0, 90.0], [1, 2])
    monkeypatch.setattr(selection, "interleaved", lambda timers, *_: [timer() for timer in timers])
    times = iter([100.0, 100.0, 90.0, 80.0, 80.0])
    monkeypatch.setattr(selection, "_timer", lambda execution, *_: lambda: next(times))
    result = tied.select()
    assert (tied.built, result.execution.place) == ([0, 1, 0], 0)  # type: ignore[union-attr]
    assert [candidate.measured_us for candidate in result.candidates] == [80.0, 80.0]


def test_candidates_are_refused_once_time_is_up_but_not_the_first_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a second to build; time begins after the first, whose kernels may still have been compiling.

    The second is predicted to be the fastest of those that may run.
    """
    workshop = Workshop(monkeypatch, [100.0, 90.0, 50.0, 10.0], [1, 3, 2, 4])
    result = workshop.select(seconds=1.5)
    assert result.execution.place == 2  # type: ignore[union-attr]
    assert [candidate.measured_us for candidate in result.candidates] == [100.0, 90.0, 50.0, None]
    assert "tuning_seconds" in result.candidates[3].refusal
    assert result.candidates[3].limit is Limit.TIME
    result = workshop.select(seconds=0.0)
    assert result.execution.place == 1  # type: ignore[union-attr]
    assert [candidate.measured_us for candidate in result.candidates] == [100.0, 90.0, None, None]
    workshop.candidates[1] = replace(workshop.candidates[1], refusal="needs 13.1 MB")
    result = workshop.select(seconds=0.0)
    assert [candidate.measured_us for candidate in result.candidates] == [100.0, None, 50.0, None]


class Others(Peers):
    """Processes of which another one is the first, whose time is over or not."""

    over = True

    def first(self, what: str, do: Callable[[], Any], kind: Any) -> Any:
        return self.over


@pytest.mark.parametrize(("over", "measured"), [(True, [100.0, 90.0, None]), (False, [100.0, 90.0, 50.0])])
def test_of_several_processes_the_first_says_whether_time_is_up(
    monkeypatch: pytest.MonkeyPatch, over: bool, measured: list[float | None]
) -> None:
    """They have to measure equally many, and the others have waited for it while it timed ops."""
    monkeypatch.setattr(Others, "over", over)
    result = Workshop(monkeypatch, [100.0, 90.0, 50.0], [1, 3, 2]).select(inf if over else 0.0, peers=Others())
    assert [candidate.measured_us for candidate in result.candidates] == measured


def test_a_refused_candidate_is_not_built_and_keeps_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = Workshop(monkeypatch, [100.0, 10.0, 50.0], [1, 2, 2])
    workshop.candidates[1] = replace(workshop.candidates[1], refusal="needs 13.1 MB")
    result = workshop.select()
    assert 1 not in workshop.built
    assert [(candidate.measured_us, candidate.refusal) for candidate in result.candidates] == [
        (100.0, ""), (None, "needs 13.1 MB"), (50.0, ""),
    ]  # fmt: skip
    assert workshop.select(seconds=0.0).candidates[1].refusal == "needs 13.1 MB"


NO_MEMORY = torch.OutOfMemoryError("no\nway")
NO_MEMORY_TO_CAPTURE = CaptureError("no\nway")
NO_MEMORY_TO_CAPTURE.__cause__ = NO_MEMORY


@pytest.mark.parametrize(
    ("error", "limit"),
    [(CaptureError("no\nway"), None), (NO_MEMORY, Limit.DEVICE), (NO_MEMORY_TO_CAPTURE, Limit.DEVICE)],
)
def test_a_candidate_that_cannot_be_built_is_refused(
    monkeypatch: pytest.MonkeyPatch, error: Exception, limit: Limit | None
) -> None:
    result = Workshop(monkeypatch, [100.0, error, 50.0], [1, 2, 3]).select()
    assert result.execution.place == 2  # type: ignore[union-attr]
    refused = result.candidates[1]
    assert (refused.measured_us, refused.refusal, refused.limit) == (None, f"{type(error).__name__}: no", limit)
    assert [candidate.refusal for candidate in (result.candidates[0], result.candidates[2])] == ["", ""]


def test_an_error_of_the_first_candidate_and_unknown_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = Workshop(monkeypatch, [CaptureError("no"), 50.0], [1, 2])
    with pytest.raises(CaptureError, match="no"):
        workshop.select()
    assert workshop.built == [0]
    with pytest.raises(KeyError):
        Workshop(monkeypatch, [100.0, KeyError("defect")], [1, 2]).select()


@pytest.mark.parametrize("times", [[9.0, 8, 7, 6, 5, 4], [4.0, 5, 6, 7, 8, 9], [9.0, CaptureError(), 4, 5, 3, 6]])
def test_no_more_than_two_executions_are_alive(monkeypatch: pytest.MonkeyPatch, times: list[float | Exception]) -> None:
    workshop = Workshop(monkeypatch, times, range(1, 7))
    result = workshop.select()
    assert workshop.most == 2
    assert list(workshop.alive) == [result.execution]


# Variants


def places(result: Selection) -> list[int]:
    return [int(candidate.schedule.policy.rpartition(" ")[2]) for candidate in result.candidates]


def test_a_faster_variant_replaces_the_best_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next variants are variants of it. Slower ones are not reported."""
    workshop = Workshop(monkeypatch, [100.0, 50.0, 49.9, 49.0, 49.5, 48.0], [1, 2, 2, 2, 2, 3])
    result = workshop.select(variants=[2, 3, 4, 5])
    assert result.execution.place == 5  # type: ignore[union-attr]
    assert places(result) == [0, 1, 3, 5]
    assert [candidate.measured_us for candidate in result.candidates] == [100.0, 50.0, 49.0, 48.0]
    assert workshop.varied == ["policy 1", "policy 3", "policy 5"]
    assert workshop.most == 2


@pytest.mark.parametrize(
    ("times", "seconds", "candidates"),
    [
        ([100.0, 110.0, 50.0], inf, [0, 1]),
        ([100.0, 50.0] + [60.0] * VARIANTS + [10.0], inf, [0, 1]),
        ([100.0, 50.0, 60.0, 40.0, 30.0], 2.5, [0, 1, 3]),
        ([100.0, 50.0, CaptureError("no"), 40.0], inf, [0, 1, 3]),
        ([100.0, 50.0, torch.OutOfMemoryError("no"), 40.0], inf, [0, 1, 3]),
    ],
    ids=["one stream has none", "no more than a number", "no more than time allows", "not captured", "too large"],
)
def test_variants_of_several_streams_are_tried_within_limits(
    monkeypatch: pytest.MonkeyPatch, times: list[float | Exception], seconds: float, candidates: list[int]
) -> None:
    """Each takes a second to build."""
    workshop = Workshop(monkeypatch, times, [1] + [2] * (len(times) - 1))
    result = workshop.select(seconds=seconds, variants=range(2, len(times)))
    assert places(result) == candidates
    assert result.execution.place == (candidates[-1] if times[1] == 50.0 else 0)  # type: ignore[union-attr]
    assert workshop.most <= 2


# Clocks


@pytest.mark.parametrize(
    ("first", "last", "rounds"),
    [
        ([100.0] * 9, [130.0] * 9, 3),
        ([130.0, 1.0, 2.0] * 3, [100.0] * 9, 9),
        ([100.0] * 9, [130.0, 100.0, 130.0] * 3, 9),
    ],
    ids=["the last is slower", "the first is slower", "the last was fast once"],
)
def test_interleaved_returns_medians_and_stops_early_if_the_last_is_much_slower(
    first: list[float], last: list[float], rounds: int
) -> None:
    left, right = iter(first), iter(last)
    assert interleaved([lambda: next(left), lambda: next(right)]) == [median(first), median(last)]
    assert (len(list(left)), len(list(right))) == (9 - rounds, 9 - rounds)


def test_mutated_arguments_are_restored_before_each_run_outside_of_the_measured_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Restoring takes 100 µs, a run 50 µs."""
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

    monkeypatch.setitem(selection._ROUND_US, "cpu", 750.0)
    monkeypatch.setattr(selection.time, "perf_counter", lambda: now[0])
    timer = selection._timer(run, [place], "cpu", Slow())  # type: ignore[arg-type]
    assert (timer(), timer()) == (pytest.approx(50.0), pytest.approx(50.0))
    assert seen == [3] * (2 + 2 * 5)


# Building


def candidate(case: Case, streams: int) -> Candidate:
    return Candidate(random_schedule(case.graph, streams, seed=2), captured=False, predicted_us=0.0)


@pytest.mark.parametrize("streams", [1, 2])
def test_a_built_candidate_computes_the_same_as_the_program(streams: int) -> None:
    case = sample("towers")
    run = build(case.program, case.graph, candidate(case, streams), case.args(), [False] * len(case.tensors), NOTHING)
    assert isinstance(run, ThreadedProgram) == (streams > 1)
    with torch.no_grad():
        assert same(run(*case.args()), case.expected()[0])


@pytest.mark.gpu
def test_on_a_gpu_restoring_is_not_part_of_the_measured_time() -> None:
    """It takes ten times as long as a run."""
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


def _checked(x: Tensor) -> Tensor:
    torch._assert_async((x > 0).all())
    return x + 1


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (lambda x: x.relu() > 0, (torch.ones(3),), False),
        (lambda x, i: x[i], (torch.ones(3), torch.tensor([1])), True),
        (lambda x, i: x[i.view(-1)[:1] * 2 - 1], (torch.ones(3), torch.tensor([1])), True),
        (lambda x: x[x.argmax(0, keepdim=True)], (torch.ones(3),), True),
        (lambda x: x[x.topk(1)[1]], (torch.ones(3),), True),
        (lambda x: x.argmax().float(), (torch.ones(3),), False),
        (lambda x, t: x * torch.cos(t[:, None].float() / 8), (torch.ones(3), torch.tensor([7, 900])), False),
        (lambda x: x * 1j, (torch.ones(3),), False),
        (_checked, (torch.ones(3),), True),
    ],
    ids=["mask", "index", "computed", "made", "made with others", "converted", "time steps", "complex", "check"],
)
def test_programs_that_may_fail_with_other_weights_use_integers_as_indices_or_check(
    function: Any, args: tuple[Tensor, ...], expected: bool
) -> None:
    model = Model(lambda module, *args: function(*args), counter=torch.tensor(3))
    assert may_fail(trace(model, args).program) == expected


def test_an_index_that_is_a_buffer_stays_within_bounds() -> None:
    model = Model(lambda module, x: x[module.places], places=torch.tensor([2, 0]))
    assert not may_fail(trace(model, (torch.ones(3),)).program)


@pytest.mark.parametrize("error", [CaptureError("no"), torch.OutOfMemoryError("no")])
def test_the_best_stays_if_the_sequential_one_cannot_be_built_again(
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
def test_inputs_of_which_an_output_is_a_detached_view_are_found(function: Any, expected: tuple[int, ...]) -> None:
    """The first argument is the model's buffer, which does not count."""
    args = torch.ones(3, 3), torch.ones(3)
    model = Model(lambda module, x, y: (*function(x, y), module.own.detach()), own=torch.ones(3))
    assert detached(trace(model, args).program) == expected
