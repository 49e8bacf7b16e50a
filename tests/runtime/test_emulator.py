"""Emulated streams compute what sequential execution does. Wrong schedules are in tests/test_races.py."""

from __future__ import annotations

import gc
import operator
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from autostream.runtime import emulator, streams
from autostream.runtime.emulator import ThreadedProgram, run_interleaved
from autostream.runtime.lower import lower
from tests.runtime.programs import MODELS, Case, random_schedule, same, sample

LANES = 3

names = st.sampled_from(sorted(MODELS))
seeds = st.integers(0, 1000)


@settings(deadline=None, max_examples=25)
@given(names, seeds, st.integers(0, 3 * LANES))
def test_a_correct_schedule_computes_the_same_in_any_order_and_in_threads(name: str, seed: int, order: int) -> None:
    case = sample(name)
    lowered = lower(case.program, case.graph, random_schedule(case.graph, LANES, seed))
    assert correct(case, lambda args: run_interleaved(lowered, args, order))
    with torch.no_grad():
        assert correct(case, lambda args: ThreadedProgram(lowered)(*args))


def correct(case: Case, run: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> bool:
    """Whether results, and arguments afterwards, are those of sequential execution. An error counts as wrong."""
    results, after = case.expected()
    args = case.args()
    try:
        return same(run(args), results) and same(args, after)
    except (IndexError, RuntimeError):  # an index of -1
        return False


# Graphs written by hand


class Hand:
    """A lowered graph, written by hand. Every value is a vector of two numbers, in a storage of its own."""

    def __init__(self, lanes: int) -> None:
        self.graph = fx.Graph()
        self.x = self._fake(self.graph.placeholder("x"))
        self.lanes = self.graph.call_function(streams.fork, ("cpu", lanes))

    def use(self, lane: int) -> None:
        self.graph.call_function(streams.use, (self.lanes, lane))

    def record(self, lane: int) -> fx.Node:
        return self.graph.call_function(streams.record, (self.lanes, lane))

    def wait(self, lane: int, event: fx.Node) -> None:
        self.graph.call_function(streams.wait, (self.lanes, lane, event))

    def release(self, *nodes: fx.Node) -> None:
        self.graph.call_function(streams.release, nodes)

    def call(self, function: Callable[..., Any], *args: Any, dtype: torch.dtype = torch.float32) -> fx.Node:
        return self._fake(self.graph.call_function(function, args), dtype)

    def module(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        return fx.GraphModule({}, self.graph)

    def _fake(self, node: fx.Node, dtype: torch.dtype = torch.float32) -> fx.Node:
        node.meta["val"] = torch.empty(2, dtype=dtype)
        return node


def test_a_view_without_users_is_not_computed() -> None:
    """It launches nothing, so lane 0 does not wait for it before it drops ``one``: lane 1 raised a KeyError.

    ``two`` is written, so it is computed, though the result of the write has no users.
    """
    aten = torch.ops.aten
    hand = Hand(2)
    one = hand.call(torch.neg, hand.x)
    two = hand.call(torch.abs, hand.x)
    written = hand.call(aten.add_.Scalar, two, 1)
    hand.use(1)
    halves = hand.call(aten.chunk.default, one, 2)
    half = hand.call(operator.getitem, halves, 0)
    hand.release(one, halves, half)
    for node in (halves, half):
        node.meta["val"] = one.meta["val"]
    written.meta["val"] = two.meta["val"]
    lowered = hand.module(two)
    for _ in range(20):
        assert ThreadedProgram(lowered)(torch.ones(2))[0].tolist() == [2.0, 2.0]
    assert run_interleaved(lowered, [torch.ones(2)], seed=1)[0].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(("dtype", "garbage"), [(torch.float16, float("nan")), (torch.int64, -1), (torch.bool, True)])
def test_a_read_before_the_write_reads_garbage(dtype: torch.dtype, garbage: float) -> None:
    hand = Hand(2)
    hand.use(1)
    late = hand.call(lambda x: torch.zeros(2, dtype=dtype), hand.x, dtype=dtype)
    hand.use(0)
    read = hand.call(torch.clone, late, dtype=dtype)
    (result,) = run_interleaved(hand.module(read), [torch.zeros(2)], seed=0)
    torch.testing.assert_close(result, torch.full((2,), garbage, dtype=dtype), equal_nan=True)
    assert dtype is not torch.bool or result.view(torch.uint8).tolist() == [1, 1]


def test_an_op_that_returns_fewer_results_than_its_fake() -> None:
    """``_native_multi_head_attention`` returns no weights if they are not needed, and its fake does."""
    hand = Hand(2)
    several = hand.call(lambda x: (x + 1, None), hand.x)
    result = hand.call(operator.getitem, several, 0)
    result.meta["val"], weights = torch.empty(2), torch.empty(0)
    several.meta["val"] = (result.meta["val"], weights)
    read = hand.call(torch.neg, result)
    lowered = hand.module(read)
    assert run_interleaved(lowered, [torch.ones(2)], seed=0)[0].tolist() == [-2.0, -2.0]


def test_two_lanes_run_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=30)
    hand = Hand(2)
    forked = hand.record(0)
    hand.use(1)
    hand.wait(1, forked)
    there = hand.call(lambda x: (meeting.wait(), x + 1)[1], hand.x)
    done = hand.record(1)
    hand.use(0)
    here = hand.call(lambda x: (meeting.wait(), x + 2)[1], hand.x)
    hand.wait(0, done)
    results = ThreadedProgram(hand.module(here, there))(torch.zeros(2))
    assert same(results, [torch.full((2,), 2.0), torch.full((2,), 1.0)])


def test_several_threads_may_call_at_once() -> None:
    case = sample("towers")
    program = ThreadedProgram(lower(case.program, case.graph, random_schedule(case.graph, 4, seed=3)))

    def call(_: int) -> bool:
        with torch.no_grad():
            return correct(case, lambda args: program(*args))

    with ThreadPoolExecutor(8) as callers:
        assert all(callers.map(call, range(32)))


class OopsError(Exception):
    pass


def fail(x: Tensor) -> Tensor:
    raise OopsError


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_in_any_lane_ends_all_lanes_and_is_raised(failing: int) -> None:
    """Lane 1 waits for lane 2, lane 0 for lane 1. Nothing runs after a wait for the failed lane."""
    ran: list[int] = []

    def op(lane: int) -> Callable[[Tensor], Tensor]:
        return lambda x: fail(x) if lane == failing and x.sum() > 0 else (ran.append(lane), x + 1)[1]

    hand = Hand(3)
    values, event = [hand.x], hand.record(0)
    for lane in (2, 1, 0):
        hand.use(lane)
        hand.wait(lane, event)
        values.append(hand.call(op(lane), hand.x))
        event = hand.record(lane)
    program = ThreadedProgram(hand.module(*values))
    with pytest.raises(OopsError):
        program(torch.ones(2))
    assert ran == list(range(2, failing, -1))
    assert [result[0] for result in program(torch.full((2,), -9.0))] == [-9, -8, -8, -8]


@pytest.mark.parametrize("during", ["submit", "wait"])
def test_an_interrupt_between_ops_ends_all_lanes(during: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lane 1 waited for lane 0 forever, so that Python could not exit."""
    hand = Hand(2)
    left = hand.call(torch.neg, hand.x)
    event = hand.record(0)
    hand.use(1)
    hand.wait(1, event)
    right = hand.call(torch.exp, left)
    hand.wait(0, hand.record(1))
    program = ThreadedProgram(hand.module(left, right))
    lanes: list[Future[None]] = []
    real, submit = emulator.wait, program._threads.submit

    def submitted(*args: Any) -> Future[None]:
        lanes.append(submit(*args))
        if during == "submit" and len(lanes) == 1:
            raise KeyboardInterrupt
        return lanes[-1]

    def waited(futures: Any) -> Any:
        if during == "wait" and len(lanes) == 1:
            lanes.append(lanes[0])
            raise KeyboardInterrupt
        return real(futures)

    monkeypatch.setattr(program._threads, "submit", submitted)
    monkeypatch.setattr(emulator, "wait", waited)
    with pytest.raises(KeyboardInterrupt):
        program(torch.ones(2))
    lanes[0].result(timeout=60)
    assert [result[0] for result in program(torch.zeros(2))] == [0, 1]


def test_an_error_is_freed_without_a_garbage_collection() -> None:
    hand = Hand(2)
    hand.use(1)
    failed = hand.call(fail, hand.x)
    hand.wait(0, hand.record(1))
    program = ThreadedProgram(hand.module(failed))
    gc.disable()
    try:
        with pytest.raises(OopsError) as error:
            program(torch.ones(2))
        raised = weakref.ref(error.value)
        del error
        assert raised() is None
    finally:
        gc.enable()


@pytest.fixture
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_all_lanes_run_in_the_callers_modes_with_as_many_threads(mode: Callable[[], Any]) -> None:
    """OpenMP's number of threads is a setting of each thread, and products round differently for another number."""
    torch.manual_seed(0)
    linear, x, seen = torch.nn.Linear(16, 32), torch.randn(6, 16), list[object]()

    def modes() -> tuple[object, ...]:
        return (
            *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()),
            *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        )

    hand = Hand(2)
    hand.use(1)
    value = hand.call(lambda x: (seen.append(modes()), linear(x))[1], hand.x)
    hand.wait(0, hand.record(1))
    program = ThreadedProgram(hand.module(value))
    for threads, autocast in ((1, False), (2, True), (1, True)):
        torch.set_num_threads(threads)
        with mode(), torch.autocast("cpu", torch.float16, autocast):
            (result,) = program(x)
            torch.testing.assert_close(result, linear(x), rtol=0, atol=0)
            assert seen.pop() == modes()


def test_memory_is_freed_where_the_schedule_releases_it() -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def make(x: Tensor) -> Tensor:
        result = x + 1
        made.append(weakref.ref(result))
        return result

    def check(x: Tensor) -> Tensor:
        alive.append(made[0]() is not None)
        return x + 1

    hand = Hand(2)
    forked = hand.record(0)
    hand.use(1)
    hand.wait(1, forked)
    value = hand.call(make, hand.x)
    first = hand.call(check, value)
    second = hand.call(check, hand.x)
    hand.release(value)
    third = hand.call(check, hand.x)
    done = hand.record(1)
    hand.wait(0, done)
    ThreadedProgram(hand.module(first, second, third))(torch.ones(2))
    assert alive == [True, True, False]


def test_threads_end_with_the_program() -> None:
    hand = Hand(2)
    hand.use(1)
    where: list[threading.Thread] = []
    value = hand.call(lambda x: (where.append(threading.current_thread()), x + 1)[1], hand.x)
    done = hand.record(1)
    hand.wait(0, done)
    program = ThreadedProgram(hand.module(value))
    program(torch.ones(2))
    program(torch.ones(2))
    assert where[0] is where[1] is not threading.current_thread()
    del program
    gc.collect()
    where[0].join(timeout=30)
    assert not where[0].is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    case = sample("towers")
    run = ThreadedProgram(lower(case.program, case.graph, random_schedule(case.graph, 3, seed=1)))
    args = case.args()
    with torch.no_grad():
        run(*args)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends it if it hangs
            run(*args)
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
