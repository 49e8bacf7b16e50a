"""Measures when each op of a captured graph runs: profiled kernels are mapped back to ops.

    lowered graph, profiled op by op     ──▶ which kernels each op launches      kernels_by_op
    captured graph, profiled             ──▶ which kernels ran, and when         replays
    both, and the order of the schedule  ──▶ Timeline                            match

The profile of a replay has neither the op of a kernel nor the stream that was captured: it names hardware queues. Known
are the kernels that each op launches, the order of ops on each stream, and their waits. So a kernel belongs to an op
that is next on its stream, has no wait left, and launches a kernel of this name and grid next. Where several ops match
(equal branches), one is preferred whose waits had ended when the kernel started, then a stream whose last kernel ran in
the same queue, then the op launched first. If no op matches a later kernel, the last choice is taken back (depth-first
search). Matching kernels are equal, so a wrong choice that remains swaps similar times. Small fills of memory are
kernels in a graph (``runtime/small_fills.py``), and none op by op.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, fx

from autostream.ir import FORK, Launch, OpGraph, Schedule, Slice, Timeline
from autostream.runtime.cuda_graph import CapturedGraph
from autostream.runtime.profiled_kernels import Annotated, Kernel, Key, kernels_by_op, profiled, replays
from autostream.runtime.runs import without_autocast
from autostream.runtime.streams import restored

_REPLAYS = 5
"""The replay of median duration is used. There is one more, the first, which uploads the graph."""

_PLACEMENTS = 50
"""So many times as many kernels as there are may be placed. Simulated runs of 300 ops needed up to 2.7 times."""

_FILL, _FILLING = "Memset", "FillFunctor"
"""In the names of fills of memory that are no kernels, and of those that are."""


class Unmatched(Exception):  # noqa: N818 - a notice between modules, not an error
    """A replay ran other kernels than the ops launched one by one; the message has the first difference."""


def measure_timeline(
    lowered: fx.GraphModule,
    graph: OpGraph,
    schedule: Schedule,
    captured: CapturedGraph,
    arguments: Sequence[Tensor],
    level: str,
) -> Timeline:
    """Run a schedule under a profiler and return when each op ran. Its ops must not mutate the model's state.

    Args:
        lowered: the lowered graph.
        graph: its ops.
        schedule: that it was lowered from.
        captured: the CUDA graph; it is replayed with the current contents of its static inputs.
        arguments: of a call; bound ones must be where the graph reads them.
        level: of the program, as in :class:`~autostream.ir.Program`.

    Raises:
        Unmatched: kernels could not be mapped to ops, or the profiler recorded nothing.
    """
    device = str(captured.device)
    annotated = Annotated(lowered, graph)
    inputs = [captured.static.get(at, argument) for at, argument in enumerate(arguments)]

    def op_by_op() -> None:
        with torch.no_grad(), restored(device), without_autocast(level):
            annotated.run(*inputs)

    op_by_op()  # in the first run, libraries choose kernels
    launched = kernels_by_op(profiled(op_by_op, device))

    def replayed() -> None:
        for _ in range(_REPLAYS + 1):
            captured.replay()

    runs = replays(profiled(replayed, device))[1:]
    if not runs:
        raise Unmatched("the profiler saw no replay of a CUDA graph")
    runs.sort(key=lambda run: max(kernel.end_us for kernel in run) - min(kernel.start_us for kernel in run))
    return match(schedule, launched, runs[len(runs) // 2])


def match(schedule: Schedule, launched: Mapping[str, Sequence[Key]], kernels: Sequence[Kernel]) -> Timeline:
    """Map the kernels of a run to ops.

    Args:
        schedule: of the run.
        launched: the keys of the kernels that each op launches, in order.
        kernels: of one run, in order of their start.

    Returns:
        One slice per launch, in launch order, from the start of its first kernel to the end of its last one; the run
        starts at 0. An op that launches nothing takes no time, when those that it comes after have ended.

    Raises:
        Unmatched: other kernels ran than the ops launch, or in an order in which no way was found to map them.

    Example:
        >>> beside = Schedule("by hand", 2, (Launch("a", 0), Launch("b", 1, waits=("a",)), Launch("c", 0)))
        >>> launched = {"a": [("relu",)], "b": [("add",)], "c": [("mul",)]}
        >>> ran = [Kernel(("relu",), 7, 5.0, 6.0), Kernel(("mul",), 7, 7.0, 9.0), Kernel(("add",), 9, 8.0, 9.5)]
        >>> [(slice.op, slice.start_us, slice.end_us) for slice in match(beside, launched, ran).slices]
        [('a', 0.0, 1.0), ('b', 3.0, 4.5), ('c', 2.0, 4.0)]
    """
    progress, hopeless, reason = _Progress(schedule, launched), set[object](), ""
    untried: list[Iterator[Launch]] = []  # of each kernel so far, other launches to which it may belong
    left = _PLACEMENTS * len(kernels)
    while True:
        try:
            if len(untried) == len(kernels):
                progress.finish()
                return Timeline(tuple(_slices(schedule, progress)), source="measured")
            untried.append(iter(progress.matching(kernels[len(untried)])))
        except Unmatched as error:
            reason = reason or str(error)
            progress.give_up(hopeless)
        while True:
            if not untried:
                raise Unmatched(reason)
            if not left:
                raise Unmatched(f"{reason}; no other way was found to map {len(kernels)} kernels")
            launch = next(untried[-1], None)
            if launch is None:
                untried.pop()
                progress.give_up(hopeless)
                continue
            left -= 1
            progress.place(kernels[len(untried) - 1], launch)
            if progress.state not in hopeless:
                break
            progress.undo()


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where a kernel was placed, the queue of the one before on that stream, and the launches that it ended."""

    launch: Launch
    queue: int | None
    passed: Sequence[Launch]


class _Progress:
    """How far each stream has come.

    Attributes:
        ran: by op, its kernels.
        ended_us: when each op that is over has ended; one that launches nothing, when those before it have.
    """

    def __init__(self, schedule: Schedule, launched: Mapping[str, Sequence[Key]]) -> None:
        self.ran: dict[str, list[Kernel]] = {launch.op: [] for launch in schedule.launches}
        self.ended_us: dict[str, float] = {FORK: -inf}
        self._placed: list[_Placed] = []
        self._launched = launched
        self._index = {launch.op: at for at, launch in enumerate(schedule.launches)}
        self._queue: dict[int, int | None] = {}
        self._before: dict[str, str] = {}  # the op before it on its stream
        self._remaining: dict[int, deque[Launch]] = defaultdict(deque)
        for launch in schedule.launches:
            lane = self._remaining[launch.stream]
            self._before[launch.op] = lane[-1].op if lane else FORK
            lane.append(launch)
        self._pass()

    @property
    def state(self) -> object:
        """How many kernels of each stream have run: what can be placed next depends on nothing else."""
        return tuple((len(lane), len(self.ran[lane[0].op]) if lane else 0) for lane in self._remaining.values())

    def matching(self, kernel: Kernel) -> Sequence[Launch]:
        """The launches to which the next kernel that ran may belong, the likeliest first.

        Raises:
            Unmatched: there is none.
        """
        lanes = (lane[0] for lane in self._remaining.values() if lane)
        turns = [launch for launch in lanes if self._has_no_wait(launch) and _is(kernel.key, self._next(launch.op))]
        if not turns:
            over = len(self.ended_us) - 1
            raise Unmatched(f"no op whose turn it is launches {kernel.key[0]}, which ran {over} ops in")

        def unlikeliness(launch: Launch) -> tuple[bool, bool, int]:
            too_early = kernel.start_us < self._ready_us(launch)
            return too_early, self._queue.get(launch.stream) != kernel.queue, self._index[launch.op]

        return sorted(turns, key=unlikeliness)

    def place(self, kernel: Kernel, launch: Launch) -> None:
        """Count a kernel as one of the op that is launched there."""
        queue = self._queue.get(launch.stream)
        self._queue[launch.stream] = kernel.queue
        self.ran[launch.op].append(kernel)
        self._placed.append(_Placed(launch, queue, self._pass()))

    def undo(self) -> None:
        """Take back the latest kernel."""
        placed = self._placed.pop()
        for launch in reversed(placed.passed):
            self._remaining[launch.stream].appendleft(launch)
            del self.ended_us[launch.op]
        self.ran[placed.launch.op].pop()
        self._queue[placed.launch.stream] = placed.queue

    def give_up(self, hopeless: set[object]) -> None:
        """Remember that nothing can follow, and take back the latest kernel, if there is one."""
        hopeless.add(self.state)
        if self._placed:
            self.undo()

    def finish(self) -> None:
        """Check that no kernel is missing.

        Raises:
            Unmatched: one is.
        """
        if rest := [op for op in self._index if op not in self.ended_us]:
            raise Unmatched(f"{rest[0]} did not run all the kernels that it launches op by op")

    def _pass(self) -> Sequence[Launch]:
        """Pass the launches that have run all of their kernels."""
        passed: list[Launch] = []
        before = -1
        while before != len(passed):
            before = len(passed)
            for lane in self._remaining.values():
                while lane and self._has_no_wait(lane[0]) and self._next(lane[0].op) is None:
                    passed.append(lane.popleft())
                    self.ended_us[passed[-1].op] = self._ready_us(passed[-1])
        return passed

    def _ready_us(self, launch: Launch) -> float:
        """When its own kernels so far, the op before it on its stream, and those that it waits for, have ended."""
        own = (kernel.end_us for kernel in self.ran[launch.op][-1:])
        return max(*own, *(self.ended_us[op] for op in (self._before[launch.op], *launch.waits)), -inf)

    def _next(self, op: str) -> Key | None:
        """The kernel that an op launches next; ``None`` after its last one."""
        launched, ran = self._launched.get(op, ()), self.ran[op]
        return launched[len(ran)] if len(ran) < len(launched) else None

    def _has_no_wait(self, launch: Launch) -> bool:
        return all(op in self.ended_us for op in launch.waits)


def _is(ran: Key, launched: Key | None) -> bool:
    """Whether a kernel of a replay is the one that an op launches, or fills memory in its place."""
    return ran == launched or bool(launched and _FILL in str(launched[0]) and _FILLING in str(ran[0]))


def _slices(schedule: Schedule, progress: _Progress) -> Iterator[Slice]:
    first_us = min((kernel.start_us for kernels in progress.ran.values() for kernel in kernels), default=0.0)
    for launch in schedule.launches:
        kernels = progress.ran[launch.op]
        over_us = max(progress.ended_us[launch.op], first_us)
        start_us = min((kernel.start_us for kernel in kernels), default=over_us)
        end_us = max((kernel.end_us for kernel in kernels), default=over_us)
        yield Slice(launch.op, launch.stream, start_us - first_us, end_us - first_us)
