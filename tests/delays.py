"""Inserts random delays into lowered graphs, which must not change any result.

On a GPU a missing wait often does no harm, because streams happen to run in the order of the program. So a kernel spins
before some of the ops, on some of the streams (on the CPU, where streams are threads, a thread sleeps)::

    lane 1:  wait forked │ pause 310 µs │ linear │ record linear_done

Ops on other streams that lack a wait then run ahead, and access memory that is not written, or not read, yet.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import torch
from torch import Tensor, fx

from autostream.ir import FORK, Schedule
from autostream.runtime import streams
from autostream.runtime.cuda_graph import CapturedGraph
from autostream.runtime.restore import Restore
from autostream.runtime.static_inputs import static_copies
from autostream.tuning.select import written
from tests.planned import Planned, copied, same
from tests.scheduling.mistakes import without_a_wait

MOST = 40
"""The most delays in one run."""

LONGEST_US = {"cpu": 2000, "cuda": 500}
"""The longest delay, µs: longer than any op, and than the host takes to launch a few ops."""

_CYCLES_PER_US = 2000
"""For a clock of 2 GHz; on a slower GPU, delays are longer."""


def pause(device: str, microseconds: int) -> None:
    """Keep the current stream, or the current thread on the CPU, busy for so long."""
    if device == "cpu":
        time.sleep(microseconds / 1e6)
    else:
        torch.cuda._sleep(microseconds * _CYCLES_PER_US)  # type: ignore[no-untyped-call]


def delayed(planned: Planned, lowered: fx.GraphModule, seed: int) -> fx.GraphModule:
    """A lowered graph with delays right before some ops of some lanes.

    Args:
        planned: the program.
        lowered: the result of :func:`~autostream.runtime.lower.lower`; it is not changed.
        seed: of the random choice.
    """
    choose, device = random.Random(seed), planned.program.device
    ops = list(_ops_by_lane(planned, lowered).values())
    late = [op for lane in choose.sample(ops, choose.randint(1, len(ops))) for op in lane]
    delayed_ops = set(choose.sample(late, choose.randint(1, min(MOST, len(late)))))
    longest_us = LONGEST_US[torch.device(device).type]
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in lowered.graph.nodes:
        if node.name in delayed_ops:
            graph.call_function(pause, (device, choose.randint(1, longest_us)))
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(lowered, graph, class_name="Delayed")


def _ops_by_lane(planned: Planned, lowered: fx.GraphModule) -> dict[int, list[str]]:
    ops, lane = defaultdict[int, list[str]](list), 0
    for node in lowered.graph.nodes:
        if node.target is streams.use:
            lane = node.args[1]
        elif node.name in planned.graph.ops:
            ops[lane].append(node.name)
    return ops


@torch.no_grad()
def symptoms(
    planned: Planned, schedule: Schedule, expected: Sequence[tuple[Tensor, ...]], seeds: Sequence[int], runs: int
) -> Iterator[str]:
    """A description of what is wrong with each of several delayed runs, ``""`` if nothing is.

    The runs are divided among the seeds, and take turns in the planned arguments, so that stale values of an earlier
    run are wrong.

    Args:
        planned: a program and several sets of arguments.
        schedule: for runs that are not captured.
        expected: the results for each set of arguments.
        seeds: of the delays.
        runs: the number of runs.
    """
    lowered = planned.lowered(schedule)
    for seed, calls in zip(seeds, _shares(len(expected), len(seeds), runs), strict=True):
        run = planned.run(delayed(planned, lowered, seed), schedule.streams)
        for at in calls:
            try:
                outputs = copied(run(*planned.arguments[at]))
            except KeyError as missing:  # lanes that are threads: a value that is not computed yet
                yield f"seed {seed}: {missing} is not there"
            else:
                yield "" if same(outputs, expected[at]) else f"seed {seed}: wrong numbers for arguments {at}"


@torch.no_grad()
def captured_symptoms(
    planned: Planned, schedule: Schedule, expected: Sequence[tuple[Tensor, ...]], seeds: Sequence[int], runs: int
) -> Iterator[str]:
    """Like :func:`symptoms` for captured runs: each seed has a graph with its delays, which is replayed."""
    device, lowered = torch.device(planned.program.device), planned.lowered(schedule)
    static = static_copies(planned.arguments[0], [at for at, bound in enumerate(planned.bound) if not bound])
    writes = written(planned.program, planned.graph)
    fixed = (static, planned.bound, writes, device)
    restore = Restore(tensor for tensor, is_written in zip(static, writes, strict=True) if is_written)
    # It keeps the memory pool alive, in which all other graphs are captured and dropped.
    first = CapturedGraph(planned.run(lowered, schedule.streams), *fixed, random=False, restore=restore)
    for seed, calls in zip(seeds, _shares(len(expected), len(seeds), runs), strict=True):
        run = planned.run(delayed(planned, lowered, seed), schedule.streams)
        graph = CapturedGraph(run, *fixed, random=False, restore=restore, pool=first.pool)
        for at in calls:
            right = same(copied(graph(*planned.arguments[at])), expected[at])
            yield "" if right else f"seed {seed}: wrong numbers for arguments {at}"


def _shares(inputs: int, seeds: int, runs: int) -> Iterator[Sequence[int]]:
    """The arguments of each seed's runs, by position; with 2 sets and 2 runs for each seed, ``0 1``, ``0 1``, …"""
    turns = cycle(range(inputs))
    for number in range(seeds):
        yield list(islice(turns, (number + 1) * runs // seeds - number * runs // seeds))


def without_inner_waits(schedule: Schedule) -> Iterator[Schedule]:
    """Each schedule that lacks one wait, but still forks and joins all streams, so that it can be captured.

    Such a wait is for an op that is not the last on its stream, by an op that is not the first on its stream.
    """
    ends = {launch.stream: launch.op for launch in schedule.launches}
    starts = {launch.stream: launch.op for launch in reversed(schedule.launches)}
    waits = [(launch.op, wait) for launch in schedule.launches for wait in launch.waits]
    for (op, wait), changed in zip(waits, without_a_wait(schedule), strict=False):
        if wait != FORK and op not in starts.values() and wait not in ends.values():
            yield changed
