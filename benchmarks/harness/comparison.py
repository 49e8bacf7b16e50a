"""Timing of one model in several modes: each is prepared and checked, then all are timed, in this process."""

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
from autostream.runtime.clock import clock_of, interleaved
from autostream.scheduling.peak import given_bytes

Status = Literal["ok", "wrong", "failed", "crashed", "timed out"]


@dataclass(frozen=True, slots=True)
class PreparedMode:
    """A prepared mode.

    Attributes:
        call: one run.
        error: runs it on several inputs, and returns its error.
        reports: autostream's reports, if the mode is autostream.
        late_error: ``error`` (the default) of the call that is timed, without compiling again.
    """

    call: Callable[[], object]
    error: Callable[[], float]
    reports: Callable[[], tuple[Report, ...]] = tuple
    late_error: Callable[[], float] | None = None


class Comparison(Protocol):
    """A workload in several modes.

    Attributes:
        device: of the workload.
        modes: all modes, in the order in which they are prepared.
        allowed_error: a mode with a larger error is wrong, and not timed.
    """

    device: torch.device
    allowed_error: float

    @property
    def modes(self) -> Collection[str]:
        """All names."""

    def prepare(self, mode: str) -> PreparedMode:
        """Prepare a mode; may raise any exception."""


@dataclass(slots=True)
class Cell:
    """One model in one mode.

    Attributes:
        status: ``"ok"``, or why there are no times.
        reason: the error message, or the error of the outputs.
        error: relative error of the outputs; ``None`` where they cannot be compared.
        first_s: seconds until the first result: tracing, compiling, measuring and the first run. Compilers may reuse
            caches of the mode before; run a mode alone for a cold start.
        allocated_bytes, reserved_bytes: peak memory of a run on top of that before the mode, in the caching allocator.
            It does not count allocations inside a graph's pool, so for graphs use the reserved bytes.
        call_us, device_us: of each round; see :mod:`autostream.runtime.clock`. A mode that cannot be queued in all
            rounds has no ``device_us``.
        host_us, latency_us: quartiles, and the 99th percentile of the latency.
        schedule: autostream's schedule, with planned bytes, bytes of weights and inputs, and seconds by stage.
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
        """As JSON, without unknown values."""
        return {name: value for name, value in asdict(self).items() if value not in ("", None, [], {})}


def compare_modes(
    comparison: Comparison, modes: Collection[str], note: Callable[[str], None] = lambda mode: None
) -> dict[str, Cell]:
    """Prepare the modes one after the other, and time the accurate ones in interleaved rounds.

    Each is checked when it is prepared, when all are prepared (a later capture may reuse memory of an earlier graph),
    and after timing.

    Args:
        comparison: the workload.
        modes: names of its modes.
        note: is called with the name of each mode before it is prepared or timed.

    Returns:
        A cell for each mode; a mode that raises has failed, and does not affect the others.
    """
    with torch.cuda.device(comparison.device) if comparison.device.type == "cuda" else nullcontext():
        return _compared(comparison, modes, note)


def _compared(comparison: Comparison, modes: Collection[str], note: Callable[[str], None]) -> dict[str, Cell]:
    clock = clock_of(comparison.device)
    ready: dict[str, PreparedMode] = {}
    cells: dict[str, Cell] = {}
    for mode in sorted(modes, key=list(comparison.modes).index):
        note(mode)
        cells[mode] = _prepared(comparison, mode, ready)
    _check(comparison, ready, cells, "once the others were prepared")
    timed = interleaved({mode: prepared.call for mode, prepared in ready.items()}, clock, note)
    _check(comparison, ready, cells, "after it was timed")
    for mode in ready:
        for name, us in timed[mode].dump().items():
            setattr(cells[mode], name, us)
    return cells


def _check(comparison: Comparison, ready: dict[str, PreparedMode], cells: dict[str, Cell], when: str) -> None:
    """Check the prepared modes again, and remove those that are wrong now."""
    for mode, prepared in list(ready.items()):
        try:
            error = (prepared.late_error or prepared.error)()
        except Exception as failure:
            cells[mode].status, cells[mode].reason = "failed", f"{when}: {first_line(failure)}"
        else:
            if error <= comparison.allowed_error:
                continue
            cells[mode].status, cells[mode].reason = "wrong", f"{when}: {_excess(error, comparison)}"
        del ready[mode]


def _excess(error: float, comparison: Comparison) -> str:
    return f"error {error:.1e}, {comparison.allowed_error:.1e} allowed"


def _prepared(comparison: Comparison, mode: str, ready: dict[str, PreparedMode]) -> Cell:
    """Prepare and check a mode; add it to ``ready`` if it is accurate."""
    memory = _Memory(comparison.device)
    start = time.perf_counter()
    try:
        prepared = comparison.prepare(mode)
        prepared.call()
        memory.synchronize()
        first_s = round(time.perf_counter() - start, 3)
        allocated, reserved = memory.used(prepared.call)  # before computing the error takes memory
        error = prepared.error()
    except Exception as failure:
        memory.synchronize()  # raises where the device is lost
        return Cell("failed", first_line(failure))
    finite = error if math.isfinite(error) else None  # JSON has no infinity
    cell = Cell("ok", "", finite, first_s, allocated, reserved, schedule=_schedule(prepared.reports()))
    if error > comparison.allowed_error:
        cell.status, cell.reason = "wrong", _excess(error, comparison)
    else:
        ready[mode] = prepared
    return cell


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
"""Runs until a mode is steady: ``torch.compile``'s graphs warm up, record, then replay."""


class _Memory:
    """Memory of a mode in the caching allocator; ``None`` on a CPU.

    Args:
        device: before the mode is prepared.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        if self._device:
            clear_cublas_workspaces()  # so that this mode allocates its own
        self._allocated, self._reserved = self._now()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._device:
            torch.cuda.synchronize(self._device)

    def used(self, call: Callable[[], object]) -> tuple[int | None, int | None]:
        """Peak bytes allocated and reserved in a steady run, on top of those before the mode."""
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
