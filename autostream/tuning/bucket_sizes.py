"""How large the buckets are in which a training step reduces its gradients over processes.

    program ──▶ in buckets of each kind ──▶ priced by estimates, scheduled ──▶ those whose step is predicted fastest

Small buckets are reduced earlier, beside more of the backward, but each collective takes a while to start: about 25 µs
over NVLink, and longer over more processes and between machines. What is best depends on the program, its device and
the interconnect. (Bucket sizes as a choice between the two: Li et al. 2020, "PyTorch Distributed", section 3.2.3.)
It is made for ATen's ops, before these are fused.
"""

from __future__ import annotations

import platform
import time
from dataclasses import replace
from math import inf

from autostream.costs.interconnects import Interconnect
from autostream.costs.this_device import profile_here
from autostream.errors import GroupError, first_line
from autostream.frontend.all_reduces import USUAL, Sizes
from autostream.frontend.reduction_buckets import bucketing, gathered, in_buckets, joinable, summands
from autostream.ir import Decision, DeviceProfile, Program
from autostream.options import Options
from autostream.scheduling.communication import with_collectives
from autostream.scheduling.simulate import run_us
from autostream.store import Notes
from autostream.tuning.agreement import agree, peers_of
from autostream.tuning.candidates import SEARCH_SHARE, best_of, candidates_for
from autostream.tuning.pricing import link_between, price_program
from autostream.utils.stopwatch import Stopwatch

_MIB = 1 << 20

TRIED = (
    USUAL,
    Sizes(inf, inf, 0),
    USUAL._replace(middle=6 * _MIB),
    Sizes(25 * _MIB, 25 * _MIB, 0),
    USUAL._replace(middle=12 * _MIB),
    USUAL._replace(middle=50 * _MIB),
)
"""The sizes that are tried. The first are used unless others are predicted to be faster by ``_MARGIN``."""

_MARGIN = 0.05
"""The estimates flatter small buckets: of a step on two H200s, 1,463 µs with 25 MiB, they expect 0.3 % less with 12 MiB
and 0.5 % less with 6, which took 2 % and 7 % more."""

_WHAT = "the all-reduces of a step"


def in_best_buckets(program: Program, options: Options, stopwatch: Stopwatch) -> tuple[Program, Notes]:
    """The program with all-reduces in buckets, whose sizes the first of its processes chooses for all; and why these.

    Args:
        program: of a training step that reduces gradients over processes, or of one that does not, which is returned.
        options: how to schedule it.
        stopwatch: records the seconds of each stage.

    Raises:
        GroupError: another process averages other gradients, is somewhere else, or is gone.
    """
    joined = gathered(program)
    usual = in_buckets(joined, USUAL)
    peers = peers_of(usual)
    if peers is None or usual.peers:
        return in_buckets(program, USUAL), ()
    if usual is program and not peers.group:
        return program, ()
    with stopwatch("search"):
        agree(peers.group, summands(program) or [_WHAT])
        told = peers.each(_WHAT, lambda: [platform.node(), *map(str, joinable(program)), *summands(joined)])
        if len({tuple(sums) for _, *sums in told}) > 1:  # not all can join them
            return in_buckets(program, USUAL), ()

        def chosen() -> tuple[int, Notes]:
            try:
                profile, _ = profile_here(program.device)
                link = link_between([machine for machine, *_ in told], program.device, profile)
                return best_of_tried(joined, options, profile, link, SEARCH_SHARE * options.tuning_seconds)
            except GroupError:
                raise
            except Exception as error:
                return 0, (Decision("", "buckets", f"{USUAL}, as others could not be planned: {first_line(error)}"),)

        at, notes = peers.first(_WHAT, chosen, tuple[int, Notes])
    return in_buckets(joined, TRIED[at]) if at else usual, notes


def best_of_tried(
    program: Program,
    options: Options,
    profile: DeviceProfile | None = None,
    link: Interconnect | None = None,
    seconds: float = inf,
) -> tuple[int, Notes]:
    """Which sizes of buckets are predicted to make a training step the fastest: their place in ``TRIED``, and why.

    Args:
        program: of the step, of ATen ops.
        options: how to schedule it.
        profile: of the device to plan for; by default the program's device.
        link: what processes communicate over; by default, what the device has.
        seconds: after which no more are tried.
    """
    if program.device == "cpu":  # what joins CPUs is an assumption
        return 0, ()
    end = time.monotonic() + seconds
    # Of sizes that make the same buckets, the first is kept.
    different = sorted({repr(bucketing(program, TRIED[at])): at for at in reversed(range(len(TRIED)))}.values())
    if len(different) == 1:
        return 0, ()

    def predicted(at: int) -> tuple[float, float]:
        return _predicted_us(in_buckets(program, TRIED[at]), options, profile, link)

    usual_us, without_us = predicted(0)
    times = {0: usual_us}
    for at in different[1:] if without_us < usual_us * (1 - _MARGIN) else ():
        if time.monotonic() < end:
            times[at], _ = predicted(at)
    best = min(times, key=times.__getitem__)
    if times[best] >= usual_us * (1 - _MARGIN):
        return 0, ()
    reason = f"{TRIED[best]}: {times[best]:,.0f} µs are predicted, and {usual_us:,.0f} with {USUAL}"
    return best, (Decision("", "buckets", reason),)


def _predicted_us(
    program: Program, options: Options, profile: DeviceProfile | None, link: Interconnect | None
) -> tuple[float, float]:
    """The predicted time of a step, by the policy that takes the least time to schedule it, and that without sums."""
    priced = price_program(program, options, Stopwatch(), profile, link=link)
    policy = "critical_path" if options.policy in ("auto", "search") else options.policy
    capture = options.cuda_graph is not False and program.device != "cpu" and not priced.refusals
    best = best_of(candidates_for(priced, replace(options, policy=policy), capture, Stopwatch()))
    costs = with_collectives(priced.costs, priced.graph, 0.0)
    return best.predicted_us, run_us(best.schedule, costs, priced.profile, captured=capture)
