"""Delays in a lowered graph: ops start late, at random, and nothing may come of it.

On a GPU a missing wait does no harm as long as streams happen to run in the order of the program. So before some of
the ops, on some of the streams, a kernel spins (on the CPU, where streams are threads, a thread sleeps)::

    lane 1:  wait forked │ pause 310 µs │ linear │ record linear_done

All that waits for nothing then runs ahead, into memory that is not written yet, or not read yet.
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
"""Delays in one run."""

LONGEST_US = {"cpu": 2000, "cuda": 500}
"""Of one delay: longer than anything else that a run does, and than launching a few ops takes the host."""

_CYCLES_PER_US = 2000
"""Of a GPU that runs at 2 GHz; on a slower one, delays are longer."""


def pause(device: str, microseconds: int) -> None:
    """Keep the current stream busy for so long; where it is a thread, that."""
    if device == "cpu":
        time.sleep(microseconds / 1e6)
    else:
        torch.cuda._sleep(microseconds * _CYCLES_PER_US)  # type: ignore[no-untyped-call]


def delayed(planned: Planned, lowered: fx.GraphModule, seed: int) -> fx.GraphModule:
    """A lowered graph with delays right before some ops of some lanes; the same for the same seed.

    Args:
        planned: whose graph it is.
        lowered: what :func:`~autostream.runtime.lower.lower` returned; it stays as it is.
        seed: of the choice.
    """
    choose, device = random.Random(seed), planned.program.device
    ops = list(_ops_by_lane(planned, lowered).values())
    late = [op for lane in choose.sample(ops, choose.randint(1, len(ops))) for op in lane]
    victims = set(choose.sample(late, choose.randint(1, min(MOST, len(late)))))
    longest_us = LONGEST_US[torch.device(device).type]
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in lowered.graph.nodes:
        if node.name in victims:
            graph.call_function(pause, (device, choose.randint(1, longest_us)))
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(lowered, graph, class_name="Delayed")


def _ops_by_lane(planned: Planned, lowered: fx.GraphModule) -> dict[int, list[str]]:
    found, lane = defaultdict[int, list[str]](list), 0
    for node in lowered.graph.nodes:
        if node.target is streams.use:
            lane = node.args[1]
        elif node.name in planned.graph.ops:
            found[lane].append(node.name)
    return found


@torch.no_grad()
def symptoms(
    planned: Planned, schedule: Schedule, expected: Sequence[tuple[Tensor, ...]], seeds: Sequence[int], runs: int
) -> Iterator[str]:
    """What becomes of each of so many delayed runs, ``""`` if all is right.

    Each seed serves its share of the runs, at each of the planned arguments in turn: what an earlier run has left is
    then wrong.

    Args:
        planned: a program and arguments.
        schedule: of it, for runs that are not captured.
        expected: what it computes for each of the arguments.
        seeds: of the delays.
        runs: how many.
    """
    lowered = planned.lowered(schedule)
    for seed, calls in zip(seeds, _shares(len(expected), len(seeds), runs), strict=True):
        run = planned.run(delayed(planned, lowered, seed), schedule.streams)
        for at in calls:
            try:
                outputs = copied(run(*planned.arguments[at]))
            except KeyError as missing:  # where lanes are threads: a value that nobody has computed yet
                yield f"seed {seed}: {missing} is not there"
            else:
                yield "" if same(outputs, expected[at]) else f"seed {seed}: wrong numbers for arguments {at}"


@torch.no_grad()
def captured_symptoms(
    planned: Planned, schedule: Schedule, expected: Sequence[tuple[Tensor, ...]], seeds: Sequence[int], runs: int
) -> Iterator[str]:
    """The same of captured runs: for each seed a graph with its delays, replayed for its share of the runs."""
    device, lowered = torch.device(planned.program.device), planned.lowered(schedule)
    static = static_copies(planned.arguments[0], [at for at, bound in enumerate(planned.bound) if not bound])
    writes = written(planned.program, planned.graph)
    fixed = (static, planned.bound, writes, device)
    restore = Restore(tensor for tensor, is_written in zip(static, writes, strict=True) if is_written)
    # It keeps the pool alive, in which all others are captured and dropped.
    prompt = CapturedGraph(planned.run(lowered, schedule.streams), *fixed, draws=False, restore=restore)
    for seed, calls in zip(seeds, _shares(len(expected), len(seeds), runs), strict=True):
        run = planned.run(delayed(planned, lowered, seed), schedule.streams)
        graph = CapturedGraph(run, *fixed, draws=False, restore=restore, pool=prompt.pool)
        for at in calls:
            right = same(copied(graph(*planned.arguments[at])), expected[at])
            yield "" if right else f"seed {seed}: wrong numbers for arguments {at}"


def _shares(inputs: int, seeds: int, runs: int) -> Iterator[Sequence[int]]:
    """For each seed the arguments of its runs, all in turn: with 2 of them, ``0 1``, ``0 1``, … for 2 runs each."""
    turns = cycle(range(inputs))
    for number in range(seeds):
        yield list(islice(turns, (number + 1) * runs // seeds - number * runs // seeds))


def without_inner_waits(schedule: Schedule) -> Iterator[Schedule]:
    """Each schedule that lacks a wait without which all streams are still forked and joined: it can be captured.

    That is one for the end of an op that is not the last of its stream, by one that is not the first of its own.
    """
    ends = {launch.stream: launch.op for launch in schedule.launches}
    starts = {launch.stream: launch.op for launch in reversed(schedule.launches)}
    waits = [(launch.op, wait) for launch in schedule.launches for wait in launch.waits]
    for (op, wait), changed in zip(waits, without_a_wait(schedule), strict=False):
        if wait != FORK and op not in starts.values() and wait not in ends.values():
            yield changed
