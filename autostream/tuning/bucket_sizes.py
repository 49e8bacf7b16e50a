"""How large the buckets are in which a training step reduces its gradients over processes.

    program ──▶ in buckets of each size ──▶ priced by estimates, scheduled ──▶ the size whose step is predicted fastest

Small buckets are reduced earlier, beside more of the backward, but each collective takes a while to start: about 25 µs
over NVLink, and longer over more processes and between machines. What is best depends on the program, its device and
the interconnect. (Bucket sizes as a choice between the two: Li et al. 2020, "PyTorch Distributed", section 3.2.3.)
"""

from __future__ import annotations

from dataclasses import replace

from autostream.costs.interconnects import Interconnect
from autostream.costs.this_device import profile_here
from autostream.frontend.all_reduces import BUCKET
from autostream.frontend.reduction_buckets import bucketing, gathered, in_buckets, summands
from autostream.ir import DeviceProfile, Program
from autostream.options import Options
from autostream.tuning.agreement import agree, peers_of
from autostream.tuning.candidates import best_of, candidates_for
from autostream.tuning.pricing import link_between, machines_of, price_program
from autostream.utils.logs import Log
from autostream.utils.stopwatch import Stopwatch

log = Log(__name__)

SIZES = (BUCKET, 6 << 20, 12 << 20, 50 << 20, 100 << 20)
"""Bytes of the buckets that are tried. The first is used unless another is predicted to be faster by ``_MARGIN``."""

_MARGIN = 0.05
"""The estimates flatter small buckets: of a step on two H200s, 1,463 µs with 25 MiB, they expect 0.3 % less with 12 MiB
and 0.5 % less with 6, which took 2 % and 7 % more."""


def in_best_buckets(program: Program, options: Options, stopwatch: Stopwatch) -> Program:
    """The program with all-reduces in buckets, whose size the first of its processes chooses for all.

    Args:
        program: of a training step that reduces gradients over processes, or of one that does not, which is returned.
        options: how to schedule it.
        stopwatch: records the seconds of each stage.

    Raises:
        GroupError: another process averages other gradients, is somewhere else, or is gone.
    """
    joined = gathered(program)
    usual = in_buckets(joined, BUCKET)
    peers = peers_of(usual)
    if peers is None or usual.peers:
        return in_buckets(program, BUCKET)
    if usual is program and not peers.group:
        return program
    with stopwatch("schedule"):
        agree(peers.group, summands(program))
        if len({*map(repr, peers.each("its sums", lambda: summands(joined)))}) > 1:  # not all can join them
            return in_buckets(program, BUCKET)
        machines = machines_of(peers)

        def chosen() -> int:
            profile, _ = profile_here(program.device)
            return best_size(joined, options, profile, link_between(machines, profile))

        size = peers.first("the size of its buckets", chosen, int)
    return usual if size == BUCKET else in_buckets(joined, size)


def best_size(
    program: Program, options: Options, profile: DeviceProfile | None = None, link: Interconnect | None = None
) -> int:
    """The size of buckets with which a training step is predicted to be the fastest, bytes.

    Args:
        program: of the step, of ATen ops.
        options: how to schedule it.
        profile: of the device to plan for; by default the program's device.
        link: what processes communicate over; by default, what the device has.
    """
    # Of sizes that make the same buckets, the first is kept.
    sizes = [*{repr(bucketing(program, size)): size for size in reversed(SIZES)}.values()]
    if len(sizes) == 1:
        return BUCKET
    times = {size: _step_us(in_buckets(program, size), options, profile, link) for size in sizes}
    log.debug(
        "predicted µs of the step by MiB of its buckets: %s", {size >> 20: round(us) for size, us in times.items()}
    )
    best = min(times, key=times.__getitem__)
    return best if times[best] < times[BUCKET] * (1 - _MARGIN) else BUCKET


def _step_us(program: Program, options: Options, profile: DeviceProfile | None, link: Interconnect | None) -> float:
    """The predicted time of a step, scheduled by the policy that takes the least time for that."""
    priced = price_program(program, options, Stopwatch(), profile, link=link)
    policy = "critical_path" if options.policy in ("auto", "search") else options.policy
    capture = options.cuda_graph is not False and program.device != "cpu" and not priced.refusals
    return best_of(candidates_for(priced, replace(options, policy=policy), capture, Stopwatch())).predicted_us
