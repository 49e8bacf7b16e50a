"""End to end on emulated streams: every wait of a schedule is needed, and every needed wait is there.

model ─▶ trace ─▶ analyze ─▶ policy ─▶ synchronize ─▶ release ─▶ lower ─▶ emulated streams
                                            │             │
                              without this wait,   released one launch earlier:
                              the verifier refuses, and results are wrong, every time
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autostream.costs.device import profile_named
from autostream.costs.roofline import price
from autostream.errors import ScheduleError
from autostream.ir import Assignment, OpGraph, Schedule
from autostream.runtime.emulator import run_interleaved
from autostream.runtime.lower import lower
from autostream.scheduling.arena import place_storages
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.releases import place_releases
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from tests.runtime.programs import Case, Towers, case_of, fused_case, random_schedule, same, sliced_case, step_case
from tests.scheduling.mistakes import with_a_lifetime_shortened, with_a_release_too_early, without_a_wait

SEEDS = 12


class Inception(nn.Module):
    """Four branches over one input, as in GoogLeNet, with batch norms in training mode."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.stem = self._block(channels, 1)
        self.one = self._block(channels, 1)
        self.three = nn.Sequential(self._block(channels, 1), self._block(channels, 3))
        self.five = nn.Sequential(self._block(channels, 1), self._block(channels, 3))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), self._block(channels, 1))

    @staticmethod
    def _block(channels: int, size: int) -> nn.Module:
        convolution = nn.Conv2d(channels, channels, size, padding=size // 2, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)


class Tied(nn.Module):
    """Two branches through one batch norm in training mode: the second reads the statistics of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x.sin()).relu(), self.norm(x.cos()).relu()


def in_place(x: Tensor) -> Tensor:
    """Branches that mutate views of one tensor, and others that read it before and after."""
    base = x * 2
    before = base.exp()
    left, right = base[:, :3], base[:, 3:]
    left.mul_(3)
    right.add_(1)
    base.clamp_(-2, 2)
    return before + base.sigmoid() + left.sum() + right.sum()


def views(x: Tensor) -> tuple[Tensor, ...]:
    """Branches over views of one intermediate, and outputs that share memory."""
    both = torch.stack([x.sin(), x.cos()])
    first, second = both.unbind(0)
    turned = first.t() @ second
    chunks = [chunk.exp() for chunk in both.chunk(3, dim=2)]
    return turned, torch.cat(chunks, dim=2).sum(0), both.flatten()


def mutated(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Mutates an input that earlier branches read, and returns it."""
    old = (x.exp() + x.sin()) * (x.cos() + y)
    x.copy_(y)
    return x, old, x.neg() + y.neg()


MODELS = {
    "towers": (Towers(4, 3), [(2, 8)]),
    "inception": (Inception().train(), [(2, 4, 5, 5)]),
    "tied": (Tied().train(), [(4, 6)]),
    "in place": (in_place, [(4, 6)]),
    "views": (views, [(6, 6)]),
    "mutated": (mutated, [(4, 6), (4, 6)]),
}
KERNELS = {"fused": fused_case, "sliced": sliced_case}
CASES = {**KERNELS, "training step": step_case}
NAMES = (*MODELS, *CASES)

PLANS = [("critical_path", 2), ("path_cover", 3), ("critical_path", 4)]


@cache
def case(name: str) -> Case:
    torch.manual_seed(0)
    if name in CASES:
        return CASES[name]()
    model, shapes = MODELS[name]
    return case_of(model, *(torch.randn(shape) for shape in shapes))  # type: ignore[arg-type]


@cache
def schedule(name: str, policy: str, streams: int) -> Schedule:
    graph = case(name).graph
    profile = profile_named("h200")
    assignment = POLICIES[policy](graph, price(graph, profile), profile, streams, graph.pinned)
    return place_releases(graph, synchronize(graph, assignment))


@cache
def expected(name: str) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The results of sequential execution, and the arguments afterwards."""
    return case(name).expected()


def all_right(name: str, plan: Schedule, seeds: int) -> bool:
    """Whether results and arguments are bit for bit those of sequential execution, in a number of random orders."""
    given, (results, after) = case(name), expected(name)
    lowered = lower(given.program, given.graph, plan)
    runs = (given.args() for _ in range(seeds))
    return all(
        same(run_interleaved(lowered, args, seed), results) and same(args, after) for seed, args in enumerate(runs)
    )


def refused(graph: OpGraph, plan: Schedule) -> bool:
    try:
        verify(graph, plan, pinned=graph.pinned)
    except ScheduleError:
        return True
    return False


@pytest.mark.parametrize(("policy", "streams"), PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_every_order_computes_the_same_and_every_wait_and_release_is_needed_as_it_is(
    name: str, policy: str, streams: int
) -> None:
    graph, plan = case(name).graph, schedule(name, policy, streams)
    assert not refused(graph, plan)
    assert all_right(name, plan, SEEDS)
    broken = list(without_a_wait(plan))
    assert len(broken) == plan.wait_count >= 2
    for wrong in (*broken, *with_a_release_too_early(graph, plan)):
        assert refused(graph, wrong)
        assert not all_right(name, wrong, streams)


def test_there_are_releases_that_can_be_too_early() -> None:
    plans = [(name, schedule(name, *plan)) for name in NAMES for plan in PLANS]
    assert sum(len(list(with_a_release_too_early(case(name).graph, plan))) for name, plan in plans) > 20


def test_slices_of_one_tensor_are_written_concurrently() -> None:
    """The kernels that fill the matrix wait only for the stem, which allocates it; see ``sliced_case``."""
    graph = case("sliced").graph
    (matrix,) = (storage for storage in graph.storages.values() if storage.parts)
    assert matrix.name in graph.ops["stem"].allocates
    assert [sorted(graph.digraph.predecessors(op)) for op in ("sin", "cos", "exp")] == [["stem"]] * 3
    assert sorted(graph.digraph.predecessors("scale")) == ["sin"]
    assert sorted(graph.digraph.predecessors("square")) == ["exp"]
    assert sorted(graph.digraph.predecessors("total")) == ["cos", "exp", "scale"]
    stream = {op: at % 3 for at, op in enumerate(("sin", "cos", "exp", "scale", "square"))}
    assignment = Assignment("by hand", 3, tuple(graph.ops), {op: stream.get(op, 0) for op in graph.ops})
    plan = place_releases(graph, synchronize(graph, assignment))
    assert not refused(graph, plan)
    assert all_right("sliced", plan, SEEDS)
    for wrong in without_a_wait(plan):
        assert refused(graph, wrong)
        assert not all_right("sliced", wrong, 3)


# Random numbers


class Drops(nn.Module):
    """Dropouts in branches use one generator, so their order matters."""

    def forward(self, x: Tensor) -> Tensor:
        branches: Sequence[Tensor] = [torch.dropout(x + shift, 0.5, True).exp() for shift in range(4)]
        return torch.stack(branches).sum(0)


@pytest.mark.parametrize(("policy", "streams"), PLANS)
def test_random_numbers_are_generated_in_program_order(policy: str, streams: int) -> None:
    torch.manual_seed(0)
    given = case_of(Drops(), torch.randn(4, 6))
    graph, profile = given.graph, profile_named("h200")
    assignment = POLICIES[policy](graph, price(graph, profile), profile, streams, graph.pinned)
    plan = place_releases(graph, synchronize(graph, assignment))
    lowered = lower(given.program, graph, plan)
    for seed in range(SEEDS):
        torch.manual_seed(1)
        expected, _ = given.expected()
        torch.manual_seed(1)
        assert same(run_interleaved(lowered, given.args(), seed), expected)
    unordered = replace(plan, launches=tuple(replace(launch, waits=(), releases=()) for launch in plan.launches))
    assert refused(graph, unordered)


# Arenas


@cache
def placed(name: str, policy: str, streams: int) -> Schedule:
    """A schedule with all placeable memory in an arena."""
    graph = case(name).graph
    return place_releases(graph, place_storages(graph, schedule(name, policy, streams)))


@pytest.mark.parametrize(("policy", "streams"), PLANS)
@pytest.mark.parametrize("name", KERNELS)
def test_in_an_arena_every_order_computes_the_same(name: str, policy: str, streams: int) -> None:
    graph, plan = case(name).graph, placed(name, policy, streams)
    verify(graph, plan, pinned=graph.pinned)
    free = {s.name for s in graph.storages.values() if s.placeable and not s.escapes}
    assert plan.arena.offsets.keys() == free
    assert all_right(name, plan, SEEDS)


@cache
def shortened(name: str) -> Sequence[tuple[str, str, Schedule]]:
    """Schedules with two storages at one offset, although an op may read the first while the second is written."""
    graph = case(name).graph
    drawn = (random_schedule(graph, streams, seed) for streams in (1, 2, 3) for seed in range(20))
    plans = (place_releases(graph, place_storages(graph, plan)) for plan in drawn)
    return [mistake for plan in plans for mistake in with_a_lifetime_shortened(graph, plan)]


@pytest.mark.parametrize("name", KERNELS)
def test_a_lifetime_that_is_too_short_is_detected_every_time(name: str) -> None:
    assert len(shortened(name)) > 20
    for first, second, wrong in shortened(name):
        assert refused(case(name).graph, wrong)
        if wrong.streams > 1:
            assert not all_right(name, wrong, wrong.streams), (first, second)


@settings(max_examples=25)
@given(name=st.sampled_from(sorted(KERNELS)), streams=st.integers(1, 4), seed=st.integers(0, 1000))
def test_random_schedules_in_arenas_are_correct(name: str, streams: int, seed: int) -> None:
    graph = case(name).graph
    drawn = random_schedule(graph, streams, seed)
    plan = place_releases(graph, place_storages(graph, drawn))
    verify(graph, plan, pinned=graph.pinned)
    if plan.streams > 1:
        assert all_right(name, plan, 4)
