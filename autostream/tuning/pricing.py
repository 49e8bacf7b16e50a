"""The ops of a program with the cost of each, and why no CUDA graph could hold some of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from autostream.analysis.dependencies import analyze
from autostream.costs.interconnects import Interconnect
from autostream.costs.measured import run_alone
from autostream.costs.roofline import price
from autostream.costs.this_device import costs_here, profile_here
from autostream.ir import Costs, Decision, DeviceProfile, OpGraph, Program
from autostream.options import Options
from autostream.runtime.cuda_graph import release_unused_memory
from autostream.store import Notes
from autostream.tuning.agreement import ALONE, Peers, agree_on
from autostream.tuning.interconnect import link_of
from autostream.utils import collector
from autostream.utils.stopwatch import Stopwatch

MEASURE_SHARE = 0.5
"""The share of ``tuning_seconds`` for measuring ops; ops that there is no time for keep their estimates."""


@dataclass(frozen=True)
class Priced:
    """A program's op graph with the cost of each op.

    Attributes:
        graph: ops and hazards.
        profile: of the device to schedule for.
        costs: of each op.
        refusals: why a CUDA graph cannot hold the program; empty if it can, and on the CPU.
        notes: why measurements could not be read or kept.
    """

    graph: OpGraph
    profile: DeviceProfile
    costs: Costs
    refusals: tuple[Decision, ...]
    notes: tuple[Decision, ...] = ()


def price_program(
    program: Program,
    options: Options,
    stopwatch: Stopwatch,
    profile: DeviceProfile | None = None,
    tensors: Sequence[Tensor] | None = None,
    peers: Peers = ALONE,
    link: Interconnect | None = None,
) -> Priced:
    """Analyze a program and price its ops.

    The first of several processes prices them for all, once these have agreed on their collectives.

    Args:
        program: the traced model.
        options: which costs to use.
        stopwatch: measures the time of the stages.
        profile: of the device to plan for; by default the program's device.
        tensors: the program's arguments, for measured costs; without them, costs are estimated.
        peers: the processes that take part in its collectives.
        link: what processes communicate over, to plan for; by default, what they have.

    Raises:
        GroupError: one of them has other collectives, or is gone.
    """
    with stopwatch("analyze"), collector.paused():
        graph = analyze(program)
    measuring = tensors is not None and measures(options, graph.device)

    def priced() -> tuple[DeviceProfile, Costs, Notes]:
        known, notes = (profile, ()) if profile else profile_here(program.device)
        costs: Costs = {}
        estimated: Iterable[str] = graph.ops
        if tensors is not None and measuring:
            budget_s = min(MEASURE_SHARE * options.tuning_seconds, stopwatch.left(options))
            costs, faults = costs_here(program, graph, known, tensors, budget_s)
            notes, estimated = (*notes, *faults), graph.collectives  # by what joins processes
        if estimated:
            with collector.paused():
                estimates = price(graph, known, link or joined(known))
            costs = {**costs, **{name: estimates[name] for name in estimated}}
        return known, costs, notes

    if tensors is not None and program.level == "inductor":
        with stopwatch("compile"):
            _compile(program, graph, tensors)
    if peers.group:
        agree_on(graph, graph.ops)
    with stopwatch("price"):
        joined, unmeasured = link_of(graph.process_groups, graph.device, peers, measure=measuring and link is None)
        known, costs, notes = peers.first("what its ops cost", priced, tuple[DeviceProfile, Costs, Notes])
    refusals = () if graph.device == "cpu" else capture_refusals(graph)
    return Priced(graph, known, costs, refusals, tuple(dict.fromkeys((*notes, *unmeasured))))


def _compile(program: Program, graph: OpGraph, tensors: Sequence[Tensor]) -> None:
    """Wait for kernels that still compile, load them, and let Triton tune them: the first launch of each does that.

    It may take longer than all that ``tuning_seconds`` is for. What fails in this run does so again where that is said.
    """
    with suppress(Exception):
        run_alone(program, graph, tensors)
    release_unused_memory(program.device)  # a capture, such as those that time ops, cannot take it


def measures(options: Options, device: str) -> bool:
    """Whether ops of a device are timed.

    Example:
        >>> measures(Options(), "cuda:0"), measures(Options(), "cpu")
        (True, False)
    """
    return options.costs == "measured" or (options.costs == "auto" and device != "cpu")


def capture_refusals(graph: OpGraph) -> tuple[Decision, ...]:
    """Why some of these ops cannot be captured.

    Args:
        graph: the ops.
    """
    return tuple(
        Decision(op.name, "not captured", f"{op.target}: {op.uncapturable}" + (f" ({op.source})" if op.source else ""))
        for op in graph.ops.values()
        if op.uncapturable
    )
