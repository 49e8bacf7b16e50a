"""Which gradients a training step reduces together over processes.

    program ──▶ simulated: when is each gradient ready? ──▶ merged by that ──▶ the buckets that cost a step least

Small buckets are reduced earlier, beside more of the backward, but each collective takes a while to start. What is best
depends on the program, its device and the interconnect (``scheduling/merging.py`` finds it). The usual buckets, filled
by size, may hold back large gradients for a small one that is ready at the end: in an encoder, 10 MiB for the bias of
its first projection. All is estimated for ATen's ops, before these are fused. Fused updates take less time than theirs,
so the time of the whole step says little of what ends it; the time from the last gradient on is compared.

In a group of one process no all-reduce runs. A bucket only makes what uses a gradient wait for the others, so buckets
are small there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import fx

from autostream.analysis.effects import group_of
from autostream.analysis.process_groups import processes_in
from autostream.costs.collectives import all_reduce_us
from autostream.costs.interconnects import Interconnect, interconnect_of
from autostream.costs.this_device import profile_here
from autostream.errors import GroupError, first_line
from autostream.frontend.all_reduces import Bucket, buckets
from autostream.frontend.reduction_buckets import Sums, gathered, in_buckets, joinable, summands, sums_of
from autostream.ir import Decision, DeviceProfile, Program
from autostream.options import Options
from autostream.scheduling.communication import with_collectives
from autostream.scheduling.merging import merged
from autostream.scheduling.policies.critical_path import critical_path
from autostream.scheduling.simulate import simulate
from autostream.scheduling.synchronize import synchronize
from autostream.store import Notes
from autostream.tuning.agreement import agree, peers_of
from autostream.tuning.interconnect import link_of
from autostream.tuning.pricing import Priced, measures, price_program
from autostream.utils.stopwatch import Stopwatch

Filled = tuple[tuple[Bucket, ...], ...]
"""The buckets of each op for all-reduces of a program; none for those of the usual sizes."""

_EACH_US = 10.0
"""What a bucket costs a step besides its collective, µs: copies into it, and waits. Steps of six encoder layers on two
H200s took 99 µs longer with four buckets more than the usual ones, 58 of which are what NCCL's kernels slow down."""

_MOST = 25 << 20
"""Bytes of a bucket, as in ``DistributedDataParallel``: early gradients are in memory until it is reduced, and updates
of them can run beside the backward."""

_MOST_OF_ONE = 1 << 20
"""Bytes of a bucket in a group of one process. Steps of six encoder layers on an H200 took 1,251 µs with these, 1,272
with 4 MiB, and 1,259 with the usual ones, while updates did not come last on their streams."""

_BESIDE = 1.6
"""How many times as long a collective takes beside other kernels. In steps of six encoder layers on two H200s those of
24 MiB took 1.3 times as long as alone, beside the backward; those of 1.5 to 12 MiB 1.5 to 1.9 times, beside updates."""

_SLOWED = 0.6
"""The share of a collective's time that it adds to a step by slowing down what runs beside it. Products of 462 µs on
two H200s took 125 µs more beside 200 µs of NCCL's kernels."""

_MARGIN = 0.01
"""Other buckets are used if they cost less by this share of a step: the estimates are not exact."""

_LISTED = 8
"""Of more buckets, a report has only the number and the sizes of the smallest and the largest."""

_STREAMS = 4
"""Of the schedule that is simulated: the times at which gradients are ready hardly depend on it."""

_WHAT = "the all-reduces of a step"


def in_best_buckets(program: Program, options: Options, stopwatch: Stopwatch) -> tuple[Program, Notes]:
    """The program with all-reduces in buckets, which the first of its processes chooses for all.

    Args:
        program: of a training step that reduces gradients over processes, or of one that does not, which is returned.
        options: how to schedule it.
        stopwatch: records the seconds of each stage.

    Returns:
        The program, and why these buckets.

    Raises:
        GroupError: another process averages other gradients, is somewhere else, or is gone.
    """
    joined = gathered(program)
    usual = in_buckets(joined)
    peers = peers_of(usual)
    if peers is None or usual.peers:
        return in_buckets(program), ()
    if usual is program and not peers.group:
        return program, ()
    with stopwatch("search"):
        agree(peers.group, summands(program) or [_WHAT])
        told = peers.each(_WHAT, lambda: [*map(str, joinable(program)), *summands(joined)])
        if len(set(map(tuple, told))) > 1:  # not all can join them
            return in_buckets(program), ()
        groups = set(map(group_of, usual.module.graph.nodes)) - {""}
        link, unmeasured = link_of(groups, program.device, peers, measure=measures(options, program.device))

        def chosen() -> tuple[Filled, Notes]:
            try:
                profile, _ = profile_here(program.device)
                return best_buckets(joined, usual, options, profile, link(profile))
            except GroupError:
                raise
            except Exception as error:
                reason = f"those of the usual sizes, as others could not be planned: {first_line(error)}"
                return (), (Decision("", "buckets", reason),)

        filled, notes = peers.first(_WHAT, chosen, tuple[Filled, Notes])
    return in_buckets(joined, filled) if filled else usual, (*unmeasured, *notes)


def best_buckets(
    program: Program,
    usual: Program,
    options: Options,
    profile: DeviceProfile | None = None,
    link: Interconnect | None = None,
) -> tuple[Filled, Notes]:
    """The buckets that are predicted to make a training step the fastest, and why; none for the usual ones.

    Args:
        program: of the step, of ATen ops.
        usual: the same with the usual buckets.
        options: how to schedule it.
        profile: of the device to plan for; by default the program's device.
        link: what processes communicate over; by default, what the device has.
    """
    sums = sums_of(program)
    if program.device == "cpu" or all(len(each.like) == 1 for each in sums):  # all else was measured on GPUs
        return (), ()
    priced = price_program(usual, options, Stopwatch(), profile, link=link)
    step_us, ends = _simulated(priced, options)
    link = link or interconnect_of(priced.profile)
    times_of = _ready_us(program, ends)
    ready = [[times_of[node] for node in each.sources] for each in sums]

    def cost_us(filled: Filled) -> float:
        return sum(map(partial(_cost_us, link=link), filled, sums, ready))

    best = tuple(_filled(each, times, link) for each, times in zip(sums, ready, strict=True))
    if all(processes_in(each.group) == 1 for each in sums):
        why = "no all-reduce runs in a group of one process, and updates wait for their bucket"
        reason = f"{_described(best, sums)}, as {why}"
        return best, (Decision("", "buckets", reason),)
    by_size = tuple(tuple(buckets(each.like)) for each in sums)
    if cost_us(best) >= cost_us(by_size) - _MARGIN * step_us:
        return (), ()
    reason = f"{_described(best, sums)}, as {cost_us(best):,.0f} µs more are predicted than without a group"
    return best, (Decision("", "buckets", f"{reason}, and {cost_us(by_size):,.0f} with {_described(by_size, sums)}"),)


def _described(filled: Filled, sums: Sequence[Sums]) -> str:
    """Their sizes, in words."""
    sizes = [
        sum(each.like[at].nbytes for at in bucket) / (1 << 20)
        for own, each in zip(filled, sums, strict=True)
        for bucket in own
    ]
    if len(sizes) > _LISTED:
        return f"{len(sizes)} buckets of {min(sizes):.3g} to {max(sizes):,.0f} MiB"
    return f"{', '.join(f'{size:.3g}' if size < 100 else f'{size:,.0f}' for size in sizes)} MiB"


def _filled(sums: Sums, ready_us: Sequence[float], link: Interconnect) -> tuple[Bucket, ...]:
    """The tensors of one op for all-reduces, in buckets of one dtype and device each, by when they are ready.

    Each op and each kind of tensors is planned as if it had the link alone.

    Args:
        sums: the op.
        ready_us: when each of its tensors is ready.
        link: what processes communicate over.
    """
    processes = processes_in(sums.group)
    each_us = _beside_us(all_reduce_us(0, processes, link))
    most = _MOST_OF_ONE if processes == 1 else _MOST

    def reduction_us(size: int) -> float:
        return _BESIDE * all_reduce_us(size, processes, link)

    kinds: dict[object, list[int]] = {}
    for at, tensor in enumerate(sums.like):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(at)
    found: list[Bucket] = []
    for places in kinds.values():
        sizes = [sums.like[at].nbytes for at in places]
        groups = merged([ready_us[at] for at in places], sizes, reduction_us, each_us, most)
        found += [tuple(places[at] for at in group) for group in groups]
    return tuple(sorted(found, key=lambda bucket: _begin_us(bucket, ready_us)))


def _cost_us(filled: Sequence[Bucket], sums: Sums, ready_us: Sequence[float], link: Interconnect) -> float:
    """What the buckets of an op add to a step: how long after the last tensor they are reduced, and what they slow."""
    processes, end_us, others_us = processes_in(sums.group), 0.0, 0.0
    for bucket in filled:
        duration_us = all_reduce_us(sum(sums.like[at].nbytes for at in bucket), processes, link)
        end_us = max(end_us, _begin_us(bucket, ready_us)) + _BESIDE * duration_us
        others_us += _beside_us(duration_us)
    return end_us - max(ready_us) + others_us


def _begin_us(bucket: Bucket, ready_us: Sequence[float]) -> float:
    return max(ready_us[at] for at in bucket)


def _beside_us(duration_us: float) -> float:
    """What a collective that takes so long alone costs a step besides its own time, µs: nothing if none runs."""
    return _EACH_US + _SLOWED * duration_us if duration_us else 0.0


def _ready_us(program: Program, ends: Mapping[str, float]) -> dict[fx.Node, float]:
    """When each value is there, by the ends of the ops of nodes: views take no time, and arguments are there."""
    found: dict[fx.Node, float] = {}
    for node in program.module.graph.nodes:
        inputs = (found[other] for other in node.all_input_nodes)
        found[node] = ends[node.name] if node.name in ends else max(inputs, default=0.0)
    return found


def _simulated(priced: Priced, options: Options) -> tuple[float, Mapping[str, float]]:
    """The time of a step if collectives took none, and when the op of each node would end, µs.

    On one stream nothing is hidden, as if all were ready last.
    """
    graph, profile, costs = priced.graph, priced.profile, with_collectives(priced.costs, priced.graph, 0.0)
    streams = 1 if options.policy == "sequential" else _STREAMS if options.streams == "auto" else options.streams
    timeline = simulate(synchronize(graph, critical_path(graph, costs, profile, streams, frozenset())), costs, profile)
    ends = timeline.ends if streams > 1 else dict.fromkeys(graph.ops, timeline.makespan_us)
    return timeline.makespan_us, {node: ends[name] for name, op in graph.ops.items() for node in op.nodes}
