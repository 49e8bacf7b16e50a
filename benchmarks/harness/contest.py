"""One model in several modes: each prepared, checked and then timed, all in this process."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import torch

from autostream.errors import first_line
from autostream.reporting.report import Report
from autostream.runtime.capture import clear_cublas_workspaces
from autostream.runtime.clock import Clock, Times, clock_of, interleaved
from autostream.scheduling.peak import given_bytes

Status = Literal["ok", "wrong", "failed", "crashed", "timed out"]


@dataclass(frozen=True, slots=True)
class Contender:
    """A mode that is ready to run.

    Attributes:
        call: one run.
        error: runs it a few times on inputs old and new, and returns its error.
        reports: looks up what autostream has done, where the mode is autostream.
        late_error: as ``error``, which it is by default, but of the very call that is timed, without compiling anew.
    """

    call: Callable[[], object]
    error: Callable[[], float]
    reports: Callable[[], tuple[Report, ...]] = tuple
    late_error: Callable[[], float] | None = None


class Contest(Protocol):
    """What is run in several modes.

    Attributes:
        device: where.
        modes: all that there are, in the order in which they can be prepared one after the other.
        allowed_error: a mode whose error is larger is wrong, and not timed.
    """

    device: torch.device
    allowed_error: float

    @property
    def modes(self) -> Collection[str]:
        """All names."""

    def contender(self, mode: str) -> Contender:
        """Prepare a mode; it may raise anything."""


@dataclass(slots=True)
class Cell:
    """One model in one mode.

    Attributes:
        status: why there are no times, or ``"ok"``.
        reason: the error message, or by how much the result is wrong.
        error: distance of the outputs from a reference in higher precision, relative; ``None`` where they cannot be
            compared.
        first_s: seconds from the model to its first result: tracing, compiling, measuring and the first run. A mode
            that compiles what one before it has compiled finds it in the compiler's caches: run it alone for a time
            from nothing.
        allocated_bytes, reserved_bytes: the most that a run needs above what there was before the mode, as the
            caching allocator counts it. It does not see what a replay does inside of its graph's pool, so for graphs,
            what is reserved is the number to look at.
        call_us, device_us: of each round; see :mod:`autostream.runtime.clock`. A mode that cannot be queued in all
            rounds has no ``device_us``.
        host_us, latency_us: quartiles, and the 99th percentile of the latency.
        schedule: what autostream chose, with the bytes that its plan allocates, and those of weights and inputs, and
            the seconds that preparing it took, by stage.
    """

    status: Status
    reason: str = ""
    error: float | None = None
    first_s: float | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    call_us: list[float] = field(default_factory=list)
    device_us: list[float] = field(default_factory=list)
    host_us: dict[str, float] = field(default_factory=dict)
    latency_us: dict[str, float] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)

    def dump(self) -> dict[str, Any]:
        """As JSON, without what is not known."""
        return {name: value for name, value in asdict(self).items() if value not in ("", None, [], {})}


def hold(contest: Contest, modes: Collection[str], note: Callable[[str], None] = lambda mode: None) -> dict[str, Cell]:
    """Prepare the modes one after the other, and time those that are right side by side.

    Each is checked when it is prepared; again when all are, since whatever captures or compiles may hand on memory that
    an earlier graph uses; and again when it has been timed.

    Args:
        contest: what to run.
        modes: names that it knows.
        note: is told the name of each mode before anything is done with it.

    Returns:
        A cell for each mode; one that raises has failed, and the others go on.
    """
    with torch.cuda.device(contest.device) if contest.device.type == "cuda" else nullcontext():
        return _held(contest, modes, note)


def _held(contest: Contest, modes: Collection[str], note: Callable[[str], None]) -> dict[str, Cell]:
    clock = clock_of(contest.device)
    ready: dict[str, Contender] = {}
    cells: dict[str, Cell] = {}
    for mode in sorted(modes, key=list(contest.modes).index):
        note(mode)
        cells[mode] = _prepared(contest, mode, ready)
    _check(contest, ready, cells, "once the others were prepared")
    timed = _timed(ready, clock, note)
    _check(contest, ready, cells, "after it was timed")
    for mode in ready:
        for name, us in timed[mode].dump().items():
            setattr(cells[mode], name, us)
    return cells


def _check(contest: Contest, ready: dict[str, Contender], cells: dict[str, Cell], when: str) -> None:
    """Look at the results of those that are ready once more; who is wrong by now is ready no longer."""
    for mode, contender in list(ready.items()):
        try:
            error = (contender.late_error or contender.error)()
        except Exception as failure:
            cells[mode].status, cells[mode].reason = "failed", f"{when}: {first_line(failure)}"
        else:
            if error <= contest.allowed_error:
                continue
            cells[mode].status, cells[mode].reason = "wrong", f"{when}: {_excess(error, contest)}"
        del ready[mode]


def _excess(error: float, contest: Contest) -> str:
    return f"error {error:.1e}, {contest.allowed_error:.1e} allowed"


def _prepared(contest: Contest, mode: str, ready: dict[str, Contender]) -> Cell:
    """Prepare and check a mode; add it to those that are ready if it is right."""
    memory = _Memory(contest.device)
    start = time.perf_counter()
    try:
        contender = contest.contender(mode)
        contender.call()
        memory.synchronize()
        first_s = round(time.perf_counter() - start, 3)
        allocated, reserved = memory.used(contender.call)  # before others multiply to find the error
        error = contender.error()
    except Exception as failure:
        memory.synchronize()  # raises where the device is lost, and nothing more can be done in this process
        return Cell("failed", first_line(failure))
    finite = error if math.isfinite(error) else None  # JSON has no infinity
    cell = Cell("ok", "", finite, first_s, allocated, reserved, schedule=_schedule(contender.reports()))
    if error > contest.allowed_error:
        cell.status, cell.reason = "wrong", _excess(error, contest)
    else:
        ready[mode] = contender
    return cell


def _timed(ready: dict[str, Contender], clock: Clock, note: Callable[[str], None]) -> dict[str, Times]:
    gc.collect()
    gc.disable()  # a collection in one mode's turn would be that mode's time
    try:
        return interleaved({mode: contender.call for mode, contender in ready.items()}, clock, note)
    finally:
        gc.enable()


def _schedule(reports: tuple[Report, ...]) -> dict[str, Any]:
    if not reports:
        return {}
    report = reports[0]
    facts: dict[str, Any] = {"mode": report.mode}
    if report.graph:
        facts |= {"ops": len(report.graph.ops), "given_bytes": given_bytes(report.graph)}
    if report.chosen:
        schedule = report.chosen.schedule
        facts |= {"policy": schedule.policy, "streams": schedule.streams, "waits": schedule.wait_count}
        facts["predicted_us"] = round(report.chosen.predicted_us, 2)
        facts["planned_bytes"] = report.chosen.memory_bytes
    if report.seconds:
        facts["seconds"] = {stage: round(seconds, 2) for stage, seconds in report.seconds.items()}
    if report.refusals:
        facts["refusals"] = sorted({refusal.reason for refusal in report.refusals})[:3]
    return facts


_SETTLED = 3
"""Runs after which a mode does what it always does: ``torch.compile``'s graphs warm up, then record, then replay."""


class _Memory:
    """What the caching allocator holds for a mode; nothing is known of the CPU's.

    Args:
        device: as it is before the mode.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        if self._device:
            clear_cublas_workspaces()  # whoever multiplied before would otherwise have paid for this mode's
        self._allocated, self._reserved = self._now()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._device:
            torch.cuda.synchronize(self._device)

    def used(self, call: Callable[[], object]) -> tuple[int | None, int | None]:
        """Peak bytes allocated and reserved in a run that is like all later ones, above those of before."""
        if self._device is None:
            return None, None
        for _ in range(_SETTLED):
            call()
        self._now()
        torch.cuda.reset_peak_memory_stats(self._device)
        call()
        self.synchronize()
        allocated = torch.cuda.max_memory_allocated(self._device) - self._allocated
        return allocated, torch.cuda.max_memory_reserved(self._device) - self._reserved

    def _now(self) -> tuple[int, int]:
        if self._device is None:
            return 0, 0
        gc.collect()
        self.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
