"""Reproducible schedules of a model: made by the stages themselves, with estimated costs.

model ─▶ trace ─▶ fuse, if asked ─▶ analyze ─▶ price for an H200 ─▶ Planned ─▶ any schedule of it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from autostream.analysis.dependencies import analyze
from autostream.costs.device import profile_named
from autostream.costs.roofline import price
from autostream.frontend.trace import trace
from autostream.fusion.inductor import fuse
from autostream.ir import OpGraph, Program, Role, Schedule
from autostream.runtime.cuda_graph import FlatFunction
from autostream.runtime.lower import lower
from autostream.runtime.runs import uncaptured, uncast
from autostream.scheduling.arena import place_storages
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.releases import place_releases
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from tests.semantics import scattered

LEVELS = ("eager", "inductor")
"""Levels of kernels."""

STREAMED = {**POLICIES, "scattered": scattered}
"""Policies by name; ``scattered`` has as many waits as possible."""


@dataclass(frozen=True)
class Planned:
    """A program, its ops, and arguments for it.

    Attributes:
        program: of a model without random ops.
        graph: its ops and hazards.
        arguments: of several calls, in the order of its placeholders; the model's tensors are the same in all.
    """

    program: Program
    graph: OpGraph
    arguments: tuple[tuple[Tensor, ...], ...]

    @property
    def bound(self) -> tuple[bool, ...]:
        """Which arguments are the model's tensors."""
        return tuple(placeholder.role is not Role.INPUT for placeholder in self.program.placeholders)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold it."""
        return not any(op.uncapturable for op in self.graph.ops.values())

    def schedule(self, policy: str, streams: int, *, captured: bool) -> Schedule:
        """The verified schedule of a policy, with an arena."""
        graph, profile = self.graph, profile_named("h200")
        pinned = frozenset[str]() if captured else graph.pinned
        assignment = STREAMED[policy](graph, price(graph, profile), profile, streams, pinned)
        schedule = place_releases(graph, place_storages(graph, synchronize(graph, assignment)))
        verify(graph, schedule, pinned=pinned)
        return schedule

    def lowered(self, schedule: Schedule) -> fx.GraphModule:
        """The graph that runs a schedule."""
        return lower(self.program, self.graph, schedule)

    def run(self, lowered: fx.GraphModule, streams: int) -> FlatFunction:
        """A function that runs a lowered graph without a CUDA graph."""
        run = uncaptured(lowered, self.program.device, streams)
        return uncast(run) if self.program.level == "inductor" else run

    @torch.no_grad()
    def expected(self) -> tuple[tuple[Tensor, ...], ...]:
        """The results of one stream with the same kernels, for each call.

        Raises:
            AssertionError: results are not reproducible, or equal for different arguments.
        """
        schedule = self.schedule("sequential", 1, captured=False)
        run = self.run(self.lowered(schedule), 1)
        first, second = ([copied(run(*arguments)) for arguments in self.arguments] for _ in range(2))
        assert all(map(same, first, second)), "one stream does not compute the same twice, to the bit"
        different = [not same(first[0], other) for other in first[1:]]
        assert all(different), "a stale result of one call would pass for another's"
        return tuple(first)


@torch.no_grad()
def planned(model: nn.Module, inputs: Sequence[tuple[Tensor, ...]], level: str = "eager") -> Planned:
    """Trace a model at the first inputs, and fuse its ops if ``level`` is ``"inductor"``."""
    traced = trace(model, inputs[0])
    arguments = [tuple(t.detach() for t in traced.arguments(model, args)) for args in inputs]
    program = fuse(traced.program, {}, arguments[0]) if level == "inductor" else traced.program
    return Planned(program, analyze(program), tuple(arguments))


def copied(outputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Copies of the tensors among outputs: some ops leave one undefined."""
    return tuple(output.clone() for output in outputs if output is not None)


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether tensors are equal to the bit; NaN is equal to nothing."""
    return len(ours) == len(theirs) and all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


class Cells(nn.Module):
    """Two cells in a row, as in architecture search: a wait in the first is not at the end of the schedule.

    x ─▶ cell ─▶ cell ─▶        cell: x ─┬▶ linear ─▶ relu ─╮
                                         ├▶ linear ─▶ tanh ─┼▶ sum
                                         ╰▶ linear ─▶ sin ──╯
    """

    def __init__(self, width: int = 8, cells: int = 2) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.ModuleList(nn.Linear(width, width) for _ in range(3)) for _ in range(cells))

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            one, two, three = (layer(x) for layer in cell)  # type: ignore[attr-defined]
            x = one.relu() + two.tanh() + three.sin()
        return x
