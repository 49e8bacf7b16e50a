"""Profiled kernels are mapped back to ops: in traces written by hand, and on a GPU in real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from autostream.dispatch.dispatcher import Dispatcher
from autostream.ir import FORK, Launch, OpGraph, Schedule
from autostream.options import Options
from autostream.reporting import timeline
from autostream.runtime import measured_timeline
from autostream.runtime.lower import lower
from autostream.runtime.measured_timeline import Unmatched, match
from autostream.runtime.profiled_kernels import Annotated, Kernel, Key, kernels_by_op, replays
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.policies.sequential import one_stream
from autostream.scheduling.simulate import simulate
from autostream.scheduling.synchronize import synchronize
from tests.runtime.programs import Case, case_of, fused_case, same, several
from tests.scheduling.graphs import profile_with, random_costs, random_graphs

#  stream 0   a ── b ──── d      b and c launch equal kernels; d waits for c
#  stream 1     ╰─ c ──╯
FORKED = Schedule("by hand", 2, (Launch("a", 0), Launch("b", 0), Launch("c", 1, ("a",)), Launch("d", 0, ("c",))))
LAUNCHED: Mapping[str, Sequence[Key]] = {"a": [("relu",)], "b": [("mm",)], "c": [("mm",)], "d": [("add",), ("copy",)]}


def ran(*kernels: tuple[str, int, float, float]) -> list[Kernel]:
    return [Kernel((name,), queue, start, end) for name, queue, start, end in kernels]


def times(schedule: Schedule, launched: Mapping[str, Sequence[Key]], kernels: list[Kernel]) -> dict[str, Any]:
    return {each.op: (each.start_us, each.end_us) for each in match(schedule, launched, kernels).slices}


def test_an_op_lasts_from_its_first_kernel_to_its_last() -> None:
    kernels = ran(("relu", 1, 7, 8), ("mm", 1, 9, 12), ("mm", 2, 10, 14), ("add", 1, 15, 16), ("copy", 1, 17, 18))
    assert times(FORKED, LAUNCHED, kernels) == {"a": (0, 1), "b": (2, 5), "c": (3, 7), "d": (8, 11)}
    assert match(FORKED, LAUNCHED, kernels).source == "measured"


def test_of_equal_kernels_a_stream_gets_the_one_in_its_queue() -> None:
    """Queue 2 ran z of stream 1 before, so the mm in it is c's, though it started first."""
    launches = (Launch("z", 1, (FORK,)), *FORKED.launches)
    kernels = ran(("relu", 1, 0, 1), ("mm", 1, 2, 9), ("mm", 2, 1.5, 4), ("add", 1, 10, 11), ("copy", 1, 11, 12))
    kernels = sorted([*kernels, *ran(("z", 2, 0.5, 0.9))], key=lambda kernel: kernel.start_us)
    measured = times(Schedule("by hand", 2, launches), {**LAUNCHED, "z": [("z",)]}, kernels)
    assert (measured["c"], measured["b"]) == ((1.5, 4), (2, 9))


def test_an_op_that_waits_gets_no_kernel_before_its_waits_have_ended() -> None:
    """The first mm ran in the queue of z, as c should, but c waits for a, which had not run."""
    schedule = Schedule("by hand", 2, (Launch("z", 1), Launch("b", 0), Launch("a", 0), Launch("c", 1, ("a",))))
    kernels = ran(("z", 5, 0, 1), ("mm", 5, 1, 2), ("relu", 5, 2, 3), ("mm", 5, 3, 4))
    measured = times(schedule, {**LAUNCHED, "z": [("z",)]}, kernels)
    assert measured == {"z": (0, 1), "b": (1, 2), "a": (2, 3), "c": (3, 4)}


def test_a_choice_is_taken_back_if_a_later_kernel_fits_nowhere() -> None:
    """The first mm may be b's or c's, but e follows c on its stream::

    stream 0   a ── b ────── d
    stream 1     ╰─ c ── e ──╯
    """
    launches = (*FORKED.launches[:3], Launch("e", 1), Launch("d", 0, ("e",)))
    kernels = ran(("relu", 1, 0, 1), ("mm", 2, 2, 3), ("tanh", 2, 3, 4), ("mm", 1, 5, 6))
    kernels += ran(("add", 1, 7, 8), ("copy", 1, 8, 9))
    measured = times(Schedule("by hand", 2, launches), {**LAUNCHED, "e": [("tanh",)]}, kernels)
    assert (measured["c"], measured["e"], measured["b"]) == ((2, 3), (3, 4), (5, 6))


def pairs(number: int) -> tuple[Schedule, dict[str, Sequence[Key]], list[Kernel]]:
    """The first mm may be b's or c's, but e follows c; equal kernels of two other streams may be either's.

    stream 0   b
    stream 1   c ──────────── e
    stream 2   p0 ─ p1 ─ …
    stream 3   q0 ─ q1 ─ …
    """
    others = [(f"{name}{at}", stream) for at in range(number) for name, stream in (("p", 2), ("q", 3))]
    launches = [Launch("b", 0), Launch("c", 1), *(Launch(*each) for each in others), Launch("e", 1)]
    launched: dict[str, Sequence[Key]] = {"b": [("mm",)], "c": [("mm",)], "e": [("tanh",)]}
    launched |= {op: [("gelu",)] for op, _ in others}
    kernels = ran(("mm", 9, 0, 1), *(("gelu", 5, 1 + at, 2 + at) for at in range(2 * number)))
    kernels += ran(("tanh", 9, 2 * number + 1, 2 * number + 2), ("mm", 8, 2 * number + 1.5, 2 * number + 3))
    return Schedule("by hand", 4, tuple(launches)), launched, kernels


def test_a_choice_is_taken_back_behind_many_others_that_do_not_matter() -> None:
    measured = times(*pairs(30))
    assert (measured["c"], measured["e"], measured["b"]) == ((0, 1), (61, 62), (61.5, 63))


def test_what_is_taken_back_counts_for_nothing() -> None:
    """The first mm is c's, not b's: f, which waits for b by the view v, gets no earlier gelu, nor b a queue for it.

    stream 0   b ── v        stream 2   f, after v
    stream 1   c ── e        stream 3   g        stream 4   z        stream 5   m, after z
    """
    launches = [Launch("z", 4), Launch("m", 5, ("z",)), Launch("b", 0), Launch("v", 0), Launch("c", 1)]
    launches += [Launch("f", 2, ("v",)), Launch("g", 3), Launch("e", 1)]
    kinds = {"z": "zero", "m": "mm", "b": "mm", "c": "mm", "f": "gelu", "g": "gelu", "e": "tanh"}
    order = [("mm", 9), ("gelu", 3), ("zero", 4), ("tanh", 9), ("mm", 9), ("mm", 8), ("gelu", 5)]
    kernels = ran(*((name, queue, 2 * at, 2 * at + 1) for at, (name, queue) in enumerate(order)))
    measured = times(Schedule("by hand", 6, tuple(launches)), {op: [(kind,)] for op, kind in kinds.items()}, kernels)
    assert sorted(kinds, key=measured.__getitem__) == ["c", "g", "z", "e", "m", "b", "f"]


def test_the_search_for_a_mapping_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_timeline, "_PLACEMENTS", 1)
    with pytest.raises(Unmatched, match=r"launches tanh, which ran 61 ops in; no other way was found to map 63 kernel"):
        match(*pairs(30))


@pytest.mark.parametrize("stream", [0, 1])
def test_a_wait_goes_through_ops_that_launch_nothing(stream: int) -> None:
    """A view, v, joins a to b on the stream of either: b cannot have the mm that ran before a had ended."""
    waits = {0: ((), ("v",)), 1: (("a",), ())}[stream]
    launches = (Launch("a", 0), Launch("z", 1), Launch("w", 2), Launch("v", stream, waits[0]), Launch("b", 1, waits[1]))
    kernels = ran(("a", 1, 0, 10), ("z", 1, 0, 2), ("w", 1, 0, 2), ("mm", 1, 3, 4), ("mm", 2, 10, 18))
    launched: dict[str, Sequence[Key]] = {"b": [("mm",)], "y": [("mm",)], **{op: [(op,)] for op in "azw"}}
    measured = times(Schedule("by hand", 3, (*launches, Launch("y", 2))), launched, kernels)
    assert (measured["b"], measured["y"], measured["v"]) == ((10, 18), (3, 4), (10, 10))


@pytest.mark.parametrize("ended_us", [(4, 2, 2), (2, 4, 2)])
def test_of_equal_kernels_an_op_gets_one_that_starts_when_it_is_ready(ended_us: Sequence[float]) -> None:
    """The first mm began before a or z had ended, so it is y's::

    stream 0   a ─┬─ b
    stream 1   z ─╯
    stream 2   w ─── y
    """
    launches = (*(Launch(op, at, (FORK,) * (at > 0)) for at, op in enumerate("azw")), Launch("b", 0, ("z",)))
    schedule = Schedule("by hand", 3, (*launches, Launch("y", 2)))
    kernels = ran(*((op, 1, 0, end) for op, end in zip("azw", ended_us, strict=True)), ("mm", 1, 3, 5), ("mm", 2, 5, 6))
    measured = times(schedule, {"b": [("mm",)], "y": [("mm",)], **{op: [(op,)] for op in "azw"}}, kernels)
    assert (measured["b"], measured["y"]) == ((5, 6), (3, 5))


def test_an_op_that_launches_nothing_takes_no_time() -> None:
    kernels = ran(("relu", 1, 3, 5), ("add", 1, 6, 7), ("copy", 1, 7, 8))
    launched = {"a": LAUNCHED["a"], "d": LAUNCHED["d"]}
    assert times(FORKED, launched, kernels) == {"a": (0, 2), "b": (2, 2), "c": (2, 2), "d": (3, 5)}


def test_a_fill_of_memory_may_be_a_kernel_of_the_graph() -> None:
    """Convolutions and attention fill a few bytes before they start. A fill by another name is none of theirs."""
    schedule = Schedule("by hand", 1, (Launch("conv", 0),))
    launched: Mapping[str, Sequence[Key]] = {"conv": [("Memset (Device)", (), (), 4), ("conv",)]}
    fill = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<unsigned int> >"
    assert times(schedule, launched, ran((fill, 1, 2, 3), ("conv", 1, 4, 9))) == {"conv": (0, 7)}
    with pytest.raises(Unmatched, match="launches relu"):
        match(schedule, launched, ran(("relu", 1, 2, 3), ("conv", 1, 4, 9)))


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        (ran(("relu", 1, 0, 1), ("conv", 1, 2, 3)), "no op whose turn it is launches conv, which ran 1 ops in"),
        (ran(("add", 1, 0, 1)), "no op whose turn it is launches add, which ran 0 ops in"),
        (ran(("relu", 1, 0, 1), ("mm", 1, 2, 3)), "c did not run all the kernels that it launches op by op"),
        ([], "a did not run all"),
    ],
)
def test_other_kernels_than_expected_are_an_error(kernels: list[Kernel], message: str) -> None:
    with pytest.raises(Unmatched, match=message):
        match(FORKED, LAUNCHED, kernels)


@given(data=st.data(), streams=st.integers(1, 4))
def test_simulated_runs_of_kernels_with_different_names_are_recovered(data: st.DataObject, streams: int) -> None:
    profile = profile_with(same_stream_edge_us=0.5, cross_stream_edge_us=1.7, fork_us=1.1, join_us=0.3)
    graph: OpGraph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph))
    schedule = synchronize(graph, POLICIES["critical_path"](graph, costs, profile, streams, frozenset()))
    slices = [each for each in simulate(schedule, costs, profile).slices if each.op in graph.ops]
    first = min((each.start_us for each in slices), default=0.0)
    kernels = [Kernel((each.op,), 0, each.start_us, each.end_us) for each in slices]
    index = {launch.op: at for at, launch in enumerate(schedule.launches)}
    kernels.sort(key=lambda kernel: (kernel.start_us, index[str(kernel.key[0])]))
    measured = match(schedule, {op: [(op,)] for op in graph.ops}, kernels)
    assert measured.slices == tuple(
        replace(each, start_us=each.start_us - first, end_us=each.end_us - first) for each in slices
    )


@given(data=st.data(), streams=st.integers(2, 4), names=st.integers(1, 3), random=st.randoms(use_true_random=False))
def test_simulated_runs_of_equal_kernels_are_matched(
    data: st.DataObject, streams: int, names: int, random: Random
) -> None:
    """In whatever queues, each kernel belongs to one op that launches such a kernel."""
    profile = profile_with(same_stream_edge_us=0.5, cross_stream_edge_us=1.7, fork_us=1.1, join_us=0.3)
    graph: OpGraph = data.draw(random_graphs(max_ops=24))
    costs = data.draw(random_costs(graph))
    schedule = synchronize(graph, POLICIES["critical_path"](graph, costs, profile, streams, frozenset()))
    launched = {op: [(random.randrange(names),)] for op in graph.ops}
    slices = [each for each in simulate(schedule, costs, profile).slices if each.op in graph.ops]
    kernels = [Kernel(launched[each.op][0], random.randrange(streams), each.start_us, each.end_us) for each in slices]
    kernels.sort(key=lambda kernel: kernel.start_us)
    measured = match(schedule, launched, kernels).slices
    found = sorted((*launched[each.op][0], each.start_us, each.end_us) for each in measured)
    first_us = kernels[0].start_us
    assert found == sorted((*each.key, each.start_us - first_us, each.end_us - first_us) for each in kernels)


def event(cat: str, name: str, ts: float, dur: float, **args: object) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def test_kernels_belong_to_the_op_whose_annotation_they_were_launched_in() -> None:
    """In the order of the launches. Kernels launched in no annotation belong to no op."""
    grid = {"grid": [2, 1, 1], "block": [32, 1, 1], "stream": 7}
    events = [
        event("user_annotation", "autostream op a", 0, 10),
        event("user_annotation", "autostream op b", 12, 8),
        event("user_annotation", "of the user", 2, 3),
        event("cuda_runtime", "cudaLaunchKernel", 5, 1, correlation=2),
        event("cuda_driver", "cuLaunchKernel", 3, 1, correlation=1),
        event("cuda_runtime", "cudaMemsetAsync", 13, 1, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 11, 0.5, correlation=4),
        event("kernel", "second", 100, 5, correlation=2, **grid),
        event("kernel", "first", 110, 5, correlation=1, **grid),
        event("gpu_memset", "Memset", 120, 5, correlation=3, bytes=64, stream=7),
        event("kernel", "other", 130, 5, correlation=4, **grid),
        {"ph": "M", "name": "process_name", "ts": 0, "args": {"name": "python"}},
    ]
    shape = ((2, 1, 1), (32, 1, 1), None)
    assert kernels_by_op(events) == {"a": [("first", *shape), ("second", *shape)], "b": [("Memset", (), (), 64)]}


@pytest.mark.parametrize("make", [lambda: case_of(several, torch.ones(4, 6)), fused_case])
def test_a_lowered_graph_runs_with_an_annotation_for_each_op(make: Callable[[], Case]) -> None:
    """In launch order, and with the same results. Views and allocations belong to ops as well."""
    case = make()
    schedule = one_stream(case.graph)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        results = Annotated(lower(case.program, case.graph, schedule), case.graph).run(*case.args())
    spans = [event.name for event in profiler.events() if event.name.startswith("autostream op ")]
    assert [name for name, _ in groupby(spans)] == [f"autostream op {launch.op}" for launch in schedule.launches]
    assert same(results, case.expected()[0])


def test_kernels_of_replays_are_found_by_launch() -> None:
    events = [
        event("cuda_runtime", "cudaGraphLaunch", 50, 5, correlation=9),
        event("cuda_runtime", "cudaGraphLaunch", 10, 5, correlation=8),
        event("cuda_runtime", "cudaLaunchKernel", 5, 1, correlation=7),
        event("kernel", "y", 80, 2, correlation=9, stream=3),
        event("kernel", "x", 70, 4, correlation=9, stream=4),
        event("kernel", "x", 20, 4, correlation=8, stream=4),
        event("kernel", "copy of an input", 8, 1, correlation=7, stream=7),
    ]
    assert [[(k.key[0], k.queue, k.start_us, k.end_us) for k in run] for run in replays(events)] == [
        [("x", 4, 20, 24)],
        [("x", 4, 70, 74), ("y", 3, 80, 82)],
    ]


def test_without_a_captured_graph_the_report_says_why_nothing_was_measured() -> None:
    report = Dispatcher(nn.ReLU(), Options()).watched(torch.ones(2))
    assert report is not None
    assert report.measured is None
    assert report.refusals[-1].reason == "only replays of a CUDA graph are watched, and nothing is captured"


class Towers(nn.Module):
    """Two branches of different lengths, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(512, 256), nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))

    def forward(self, x: Tensor) -> Tensor:
        x = x.relu()
        return torch.cat([self.short(x), self.long(x)], dim=-1)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["eager", "inductor"])
@pytest.mark.parametrize(("policy", "streams"), [("sequential", 1), ("path_cover", 2)])
def test_a_replay_is_mapped_back_to_its_ops(policy: str, streams: int, kernels: str) -> None:
    """Every op is measured, in an order that its schedule allows."""
    options = Options.parse({"policy": policy, "kernels": kernels, "streams": streams, "memory_budget": float("inf")})
    report = Dispatcher(Towers().cuda().eval(), options).watched(torch.randn(64, 512, device="cuda"))
    assert report is not None
    assert report.measured is not None, report.refusals
    assert report.chosen is not None
    assert report.graph is not None
    assert report.measured.starts.keys() == report.graph.ops.keys()
    assert all(each.end_us >= each.start_us for each in report.measured.slices)
    start, end = report.measured.starts, report.measured.ends
    for before, after in report.graph.digraph.edges:
        assert end[before] <= start[after] + 1.0, (before, after)
    assert report.measured.makespan_us < 1000
    assert timeline.render(report).count('"measured"') == 1
