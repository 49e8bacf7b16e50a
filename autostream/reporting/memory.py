"""Peak memory of a schedule, the storages that make it up, and what the memory budget costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autostream.ir import Candidate, DeviceProfile, Limit, OpGraph, Schedule
from autostream.reporting.summary import baselines, named
from autostream.scheduling.peak import ARENA, given_bytes, pools

if TYPE_CHECKING:
    from autostream.reporting.report import Report

_HOPPER = ("H100", "H200", "H800", "H20")
"""Substrings of the names of Hopper GPUs."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A storage that is live at the peak of its memory pool.

    Attributes:
        storage: its name.
        bytes: its size.
        pool: ``"stream 1"``, or ``"arena"``, which all streams share.
        op: the op that allocates it; the storage's name again if it exists before the first op.
        source: the user's source line of that op, or ``""``.
    """

    storage: str
    bytes: int
    pool: str
    op: str
    source: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the chosen schedule.

    Attributes:
        bytes: its planned peak.
        sequential_bytes: the same of the sequential schedule; ``None`` where that was chosen.
        workspace_bytes: of cuBLAS, if it is used on every stream. The memory budget does not include it.
        holders: the storages live at the peak, the largest first. Their sum may differ from ``bytes``: an arena has
            gaps, and streams may peak at different times.
    """

    bytes: int
    sequential_bytes: int | None
    workspace_bytes: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class KeptOut:
    """The best schedule that exceeds the memory budget, if it is predicted to be faster than all within it.

    Attributes:
        schedule: its name.
        predicted_us: its time, µs.
        within_us: the time of the best within the budget, µs.
        why: what it needs, and what the budget is.
        budget: the smallest budget that allows it: a ratio to one stream, weights and inputs included, to two digits;
            bytes where one stream takes none.
        incomplete: whether it may need more than that.
    """

    schedule: str
    predicted_us: float
    within_us: float
    why: str
    budget: int | float
    incomplete: bool

    @property
    def cost_us(self) -> float:
        """What the budget costs, µs."""
        return self.within_us - self.predicted_us


def memory_of(report: Report, graph: OpGraph, chosen: Candidate) -> Memory:
    """The memory of the chosen candidate of a report."""
    schedule = chosen.schedule
    sequential = next(iter(baselines(report)), None)
    return Memory(
        bytes=chosen.memory_bytes,
        sequential_bytes=sequential.memory_bytes if sequential else None,
        workspace_bytes=0 if graph.device == "cpu" else schedule.streams * _workspace_bytes(report.profile),
        holders=holders(graph, schedule),
    )


def is_hopper(profile: DeviceProfile | None) -> bool:
    """Whether a GPU is a Hopper one, on which PyTorch gives cuBLAS four times as much workspace."""
    return profile is not None and any(name in profile.name for name in _HOPPER)


def _workspace_bytes(profile: DeviceProfile | None) -> int:
    return 32 * 2**20 if is_hopper(profile) else 2 * 4096 * 2**10 + 8 * 16 * 2**10


def holders(graph: OpGraph, schedule: Schedule) -> tuple[Holder, ...]:
    """The storages live at the peak of each memory pool, the largest first.

    Example:
        >>> from autostream.ir import Launch, Op, Role, Storage
        >>> a = Op("a", "f", ("a",), frozenset(), frozenset("a"), frozenset("a"), source="net.py:3: y = f(x)")
        >>> graph = OpGraph({"a": a}, (), {"a": Storage("a", Role.INTERMEDIATE, 512, ("a",))}, (), "cuda:0")
        >>> holders(graph, Schedule("mine", 1, (Launch("a", 0),)))
        (Holder(storage='a', bytes=512, pool='stream 0', op='a', source='net.py:3: y = f(x)'),)
    """
    makers = {name: (op.name, op.source) for op in graph.ops.values() for name in op.allocates}
    live = [
        Holder(name, graph.storages[name].bytes, where, *makers.get(name, (name, "")))
        for pool in pools(graph, schedule)
        for where in ["arena" if pool.stream == ARENA else f"stream {pool.stream}"]
        for name in pool.live
    ]
    return tuple(sorted(live, key=lambda holder: -holder.bytes))


def kept_out(report: Report) -> KeptOut | None:
    """The schedule that the memory budget excludes, with its cost; ``None`` where it costs nothing, by simulation."""
    best = best_kept_out(report)
    if best is None:
        return None
    given = given_bytes(report.graph) if report.graph else 0
    one = given + next(c.memory_bytes for c in report.candidates if c.schedule.policy == "sequential")
    budget = math.floor(100 * (given + best.memory_bytes) / one + 1) / 100 if one else best.memory_bytes
    return KeptOut(named(best.schedule), best.predicted_us, _within_us(report), best.refusal, budget, best.incomplete)


def best_kept_out(report: Report) -> Candidate | None:
    """The best candidate that exceeds the memory budget, if it is predicted to be faster than all within it."""
    best = min(filter(_exceeds, report.candidates), key=lambda candidate: candidate.predicted_us, default=None)
    return best if best and best.predicted_us < _within_us(report) else None


def _within_us(report: Report) -> float:
    """The time of the best candidate within the memory budget, µs."""
    return min((c.predicted_us for c in report.candidates if not _exceeds(c)), default=0.0)


def _exceeds(candidate: Candidate) -> bool:
    return candidate.limit is Limit.BUDGET
