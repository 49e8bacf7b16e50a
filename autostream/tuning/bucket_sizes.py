"""How large the buckets are in which a training step reduces its gradients over processes.

    program ──▶ in buckets of each kind ──▶ priced by estimates, scheduled ──▶ those whose step is predicted fastest

Small buckets are reduced earlier, beside more of the backward, but each collective takes a while to start: about 25 µs
over NVLink, and longer over more processes and between machines. What is best depends on the program, its device and
the interconnect. (Bucket sizes as a choice between the two: Li et al. 2020, "PyTorch Distributed", section 3.2.3.)
It is made for ATen's ops, before these are fused. GPUs of one machine may copy large buckets from each other
(``peer_memory.py``), which delays less of what runs beside them.
"""

from __future__ import annotations

import platform
import time
from dataclasses import replace
from math import inf
from typing import Any

from torch import Tensor

from autostream.costs.collectives import copies_by_engine
from autostream.costs.interconnects import Interconnect
from autostream.costs.roofline import WAIT
from autostream.costs.this_device import profile_here
from autostream.errors import CaptureError, GroupError, first_line
from autostream.frontend.all_reduces import USUAL, Sizes
from autostream.frontend.peer_memory import allocate, can_copy, rendezvous
from autostream.frontend.reduction_buckets import bucketing, gathered, in_buckets, joinable, memory_for, summands
from autostream.ir import Costs, Decision, DeviceProfile, OpGraph, Program
from autostream.options import Options
from autostream.scheduling.communication import with_collectives
from autostream.scheduling.simulate import run_us
from autostream.store import Notes
from autostream.tuning.agreement import Peers, agree, peers_of
from autostream.tuning.budget import COLLECTIVES_SHARE
from autostream.tuning.candidates import SEARCH_SHARE, best_of, candidates_for
from autostream.tuning.pricing import link_between, price_program
from autostream.utils.stopwatch import Stopwatch

_MIB = 1 << 20

TRIED = (
    USUAL,
    Sizes(12 * _MIB, 12 * _MIB, USUAL.last, copied=4 * _MIB),
    Sizes(inf, inf, 0),
    USUAL._replace(middle=6 * _MIB),
    Sizes(25 * _MIB, 25 * _MIB, 0),
    USUAL._replace(middle=12 * _MIB),
    USUAL._replace(middle=50 * _MIB),
)
"""The sizes that are tried. The first are used unless others are predicted to be faster by a margin. A copy of 4 MiB
takes as long as NCCL does, 35 µs on two H200s; a smaller one takes longer, a larger one less."""

_MARGIN = 0.05
"""The estimates flatter small buckets: of a step on two H200s, 1,463 µs with 25 MiB, they expect 0.3 % less with 12 MiB
and 0.5 % less with 6, which took 2 % and 7 % more."""

_COPIES_MARGIN = 0.02
"""Of that step they expect 2.8 % less with copies of 12 MiB. It took 1,423 µs then, and by NCCL 1,436 to 1,490 in three
other runs. Copies of 4 MiB, of which they expect 4.8 % less, took 1,453, so these are not tried."""

_WHAT = "the all-reduces of a step"


def in_best_buckets(program: Program, options: Options, stopwatch: Stopwatch) -> tuple[Program, list[Tensor], Notes]:
    """The program with all-reduces in buckets, whose sizes the first of its processes chooses for all.

    Args:
        program: of a training step that reduces gradients over processes, or of one that does not, which is returned.
        options: how to schedule it.
        stopwatch: records the seconds of each stage.

    Returns:
        The program; its first arguments, which the given program does not take; and why these sizes.

    Raises:
        GroupError: another process averages other gradients, is somewhere else, or is gone.
    """
    joined = gathered(program)
    usual = in_buckets(joined, USUAL)
    peers = peers_of(usual)
    if peers is None or usual.peers:
        return in_buckets(program, USUAL), [], ()
    if usual is program and not peers.group:
        return program, [], ()
    with stopwatch("search"):
        agree(peers.group, summands(program) or [_WHAT])
        known: list[Any] = [platform.node(), can_copy(program.device)]
        told = peers.each(_WHAT, lambda: [known, [*map(str, joinable(program)), *summands(joined)]])
        if len({tuple(sums) for _, sums in told}) > 1:  # not all can join them
            return in_buckets(program, USUAL), [], ()

        def chosen() -> tuple[int, Notes]:
            try:
                profile, _ = profile_here(program.device)
                link = link_between([machine for (machine, _), _ in told], program.device, profile)
                copies, seconds = all(can for (_, can), _ in told), SEARCH_SHARE * options.tuning_seconds
                return best_of_tried(joined, options, profile, link, seconds, copies=copies)
            except GroupError:
                raise
            except Exception as error:
                return 0, _usual_as("others could not be planned", error)

        at, notes = peers.first(_WHAT, chosen, tuple[int, Notes])
        best = in_buckets(joined, TRIED[at]) if at else usual
        try:
            return best, _memory(best, peers), notes
        except CaptureError as error:
            return usual, [], _usual_as("processes cannot copy from each other", error)


def _memory(program: Program, peers: Peers) -> list[Tensor]:
    """The first arguments of a program, in which buckets are gathered.

    Raises:
        CaptureError: a process has no memory for it, or none that the others see.
    """
    likes = memory_for(program)
    if not likes:
        return []

    def seen() -> None:
        for tensor, (_, group) in zip(memory, likes, strict=True):
            rendezvous(tensor, group)

    # In two steps: others would wait in vain for a process that has no memory. One that the others cannot see leaves
    # them waiting, too, as long as the store of their group does.
    memory: list[Tensor] = peers.together(
        "memory for copies", lambda: [allocate(like, program.device) for like, _ in likes], failing=CaptureError
    )
    peers.together("memory that all see", seen, failing=CaptureError)
    return memory


def _usual_as(reason: str, error: Exception) -> Notes:
    return (Decision("", "buckets", f"{USUAL}, as {reason}: {first_line(error)}"),)


def best_of_tried(
    program: Program,
    options: Options,
    profile: DeviceProfile | None = None,
    link: Interconnect | None = None,
    seconds: float = inf,
    *,
    copies: bool = True,
) -> tuple[int, Notes]:
    """Which sizes of buckets are predicted to make a training step the fastest: their place in ``TRIED``, and why.

    Args:
        program: of the step, of ATen ops.
        options: how to schedule it.
        profile: of the device to plan for; by default the program's device.
        link: what processes communicate over; by default, what the device has.
        seconds: after which no more are tried.
        copies: whether the devices can copy from each other, as far as the processes know.
    """
    if program.device == "cpu":  # what joins CPUs is an assumption
        return 0, ()
    end = time.monotonic() + seconds
    copies &= link is None or link.copying is not None
    made = {at: bucketing(program, sizes) for at, sizes in enumerate(TRIED) if copies or sizes.copied == inf}
    # Of sizes that make the same buckets, the first is kept.
    different = sorted({repr(made[at]): at for at in reversed(made)}.values())
    margins = {at: _COPIES_MARGIN if any(copied for _, copied in made[at]) else _MARGIN for at in different}
    if len(different) == 1:
        return 0, ()
    usual_us, without_us = _predicted_us(in_buckets(program, USUAL), options, profile, link)
    times = {0: usual_us}
    for at in different[1:] if without_us < usual_us * (1 - min(margins.values())) else ():
        if time.monotonic() >= end:
            break
        bucketed = in_buckets(program, TRIED[at])
        if _has_room(bucketed, profile):
            found_us, _ = _predicted_us(bucketed, options, profile, link)
            if found_us < usual_us * (1 - margins[at]):
                times[at] = found_us
    best = min(times, key=times.__getitem__)
    if best == 0:
        return 0, ()
    reason = f"{TRIED[best]}: {times[best]:,.0f} µs are predicted, and {usual_us:,.0f} with {USUAL}"
    return best, (Decision("", "buckets", reason),)


def _has_room(program: Program, profile: DeviceProfile | None) -> bool:
    """Whether what a program gathers is a small part of the device's memory."""
    rows = sum(like.nbytes for like, _ in memory_for(program))
    return profile is None or rows <= COLLECTIVES_SHARE * (profile.memory_bytes or inf)


def _predicted_us(
    program: Program, options: Options, profile: DeviceProfile | None, link: Interconnect | None
) -> tuple[float, float]:
    """The predicted time of a step, by the policy that takes the least time to schedule it, and that without sums."""
    priced = price_program(program, options, Stopwatch(), profile, link=link)
    if options.kernels != "eager":
        priced = replace(priced, costs=_without_fused_sums(priced.costs, priced.graph))
    policy = "critical_path" if options.policy in ("auto", "search") else options.policy
    capture = options.cuda_graph is not False and program.device != "cpu" and not priced.refusals
    best = best_of(candidates_for(priced, replace(options, policy=policy), capture, Stopwatch()))
    costs = with_collectives(priced.costs, priced.graph, 0.0)
    return best.predicted_us, run_us(best.schedule, costs, priced.profile, captured=capture)


def _without_fused_sums(costs: Costs, graph: OpGraph) -> Costs:
    """The costs, but for the sums of what was copied, which TorchInductor fuses with the ops that read them."""
    rows = {name for op in graph.ops.values() if copies_by_engine(op) for name in op.writes}
    sums = {op.name for op in graph.ops.values() if not rows.isdisjoint(op.reads) and op.target != WAIT}
    return {name: replace(cost, duration_us=0.0) if name in sums else cost for name, cost in costs.items()}
