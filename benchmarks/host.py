"""Host overhead, latency and device time of a call in several modes.

    python -m benchmarks.host linear towers8 mlp12_adamw --after-compile --seconds 540 --out benchmarks/results/latest

Each workload runs in a process of its own, where its modes are timed in interleaved rounds:

host_us     of a call while the device is busy, so that the host never waits
latency_us  from a call on an idle device until its results are complete
device_us   of a call that was queued behind others
call_us     of calls back to back

``bare_replay`` is the lower bound of ``host_us`` for a CUDA graph: eager captured on one stream, with inputs copied in
and outputs cloned. autostream's graph may be faster on the device.

``torch.compile`` in the same process may slow down autostream's calls. So these are also timed alone, before anything
is compiled that way, and with ``--after-compile`` again at the end, after one more compilation.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from autostream import backend
from autostream.cli import modes
from autostream.cli.arguments import positive
from autostream.cli.modes import Call, Mode
from autostream.errors import first_line
from autostream.runtime.clock import FEWEST_RUNS, LATENCIES, ROUND_US, Measured, Times, clock_of, order
from autostream.utils import collector
from benchmarks import zoo
from benchmarks.harness import training
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.inference import Inference
from benchmarks.harness.training import Training
from benchmarks.stamp import save, saving_parser, stamp
from benchmarks.suites import Row, comparison_of

ROWS: Mapping[str, Row] = {
    **{name: Row(name, 1, "float16") for name in (*zoo.SMALLEST, *zoo.INFERENCE)},
    **{
        f"{name.removeprefix('train_')}_adamw": Row(name, workload.batches[0], "bfloat16", "adamw")
        for name, workload in zoo.TRAINING.items()
    },
}
"""All workloads, by name on the command line."""

WORKLOADS = ("linear", "towers8", "googlenet", "bert_base", "nasnetalarge", "mlp12_adamw", "resnet50_adamw")

CALLS, STEPS = 10, 10
"""Calls, or training steps, queued in a round: more may fill the driver's queue, on which the host then waits."""

ROUNDS, FEWEST_ROUNDS = 200 // LATENCIES, 15
SECONDS = 40.0
"""No more rounds after this, but at least :data:`FEWEST_ROUNDS`."""

STEADY = 10
"""Calls after which a mode is steady."""


def compile_backend(model: nn.Module, args: Sequence[Any]) -> Call:
    """``torch.compile`` with autostream as its backend."""
    compiled: Call = torch.compile(model, backend=backend.autostream)
    return compiled


OURS = "autostream"

PLAIN: Mapping[str, Mode] = {
    "bare_replay": modes.cuda_graph,
    OURS: modes.optimized,
    "autostream_inputs": partial(modes.optimized, guards="inputs"),
}
"""Modes that are prepared before ``torch.compile`` is called."""

COMPILED: Mapping[str, Mode] = {
    "reduce_overhead": modes.compile_reduce_overhead,
    "compile_backend": compile_backend,
}

LATER: Mapping[str, Mode] = {"compile_default": modes.compile_default}
"""Modes that ``--after-compile`` prepares at the end."""

TRAINING: Mapping[str, Callable[[training.TrainingSubject], training.Step]] = {
    "bare_replay": training.cuda_graph,
    OURS: training.autostream,
}


def main(argv: list[str] | None = None) -> int:
    """Measure, save and print the results."""
    parser = saving_parser("host", __doc__)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"default: {' '.join(WORKLOADS)}")
    parser.add_argument(
        "--after-compile", action="store_true", help="time autostream again after one more torch.compile of the model"
    )
    parser.add_argument(
        "--seconds", type=positive, default=float("inf"), help="for all workloads; what is not measured then is named"
    )
    options = parser.parse_args(argv)
    unknown = set(options.workloads) - set(ROWS)
    if unknown:
        parser.error(f"{min(unknown)}: use {', '.join(ROWS)}")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here: on the CPU a call is all the host's")
    start = time.time()
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    result = {"schema": 1, "stamp": stamp(), "skipped": skipped, "rows": rows}
    for name in options.workloads or WORKLOADS:
        left = start + options.seconds - time.time()
        if left > 0:
            rows.append(_in_a_process(name, options.after_compile, start, left))
        else:
            skipped.append(name)
            _say(start, f"{name}: skipped, no time is left")
        save("host", result, table(result), options.out)  # after each row, in case the process is killed
    return 0


def _in_a_process(workload: str, after_compile: bool, start: float, seconds: float) -> dict[str, Any]:
    """A row; if the process fails or times out, with the reason."""
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.json"  # not a pipe, which processes of compilers would keep open after a kill
        program = f"from benchmarks.host import write; write({workload!r}, {after_compile}, {start}, {str(file)!r})"
        failed = ""
        try:
            code = subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=seconds).returncode
            failed = f"its process ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            failed = "it did not end in time"
        row = {"failed": failed} if failed else json.loads(file.read_text())
    _say(start, f"{workload}: {failed or 'done'}")
    return {"workload": workload, "seconds": round(time.time() - began, 1), **row}


def write(workload: str, after_compile: bool, start: float, file: str) -> None:
    """Measure a workload in this process, and write the row as JSON."""
    comparison = comparison_of(ROWS[workload], "cuda")()
    row = measured(comparison, after_compile, lambda what: _say(start, f"{workload}: {what}"))
    Path(file).write_text(json.dumps(row))


def _say(start: float, what: str) -> None:
    print(f"[{time.time() - start:6.1f} s] {what}", flush=True)


def measured(comparison: Comparison, after_compile: bool, note: Callable[[str], None]) -> dict[str, Any]:
    """Times of a workload by mode; the reason for modes that failed or are wrong.

    Args:
        comparison: of the workload; its modes become those of this benchmark.
        after_compile: whether to time autostream again at the end.
        note: is called with each step.
    """
    trains = isinstance(comparison, Training)
    calls = STEPS if trains else CALLS
    with torch.set_grad_enabled(trains):  # around all calls, since it would be part of each one's time
        lineup = Lineup(comparison)
        for mode in TRAINING if trains else PLAIN:
            lineup.prepare(mode, note)
        clock = BusyClock(comparison.device)
        row: dict[str, Any] = {}
        if not trains:
            row["autostream_before_compile_us"] = _alone(lineup, clock, calls, note)
            for mode in COMPILED:
                lineup.prepare(mode, note)
        lineup.check(note)
        gc.collect()
        with collector.paused():  # a collection would count as the time of one mode
            timed = rounds(lineup.calls, clock, comparison.device, calls, note)
        row["modes"] = {mode: {"failed": why} for mode, why in lineup.failed.items()} | timed
        if after_compile and not trains:
            for mode in LATER:
                lineup.prepare(mode, note)
            row["modes"] |= {mode: {"failed": lineup.failed[mode]} for mode in LATER if mode in lineup.failed}
            row["autostream_after_compile_us"] = _alone(lineup, clock, calls, note)
    return row


def _alone(lineup: Lineup, clock: BusyClock, calls: int, note: Callable[[str], None]) -> dict[str, float] | None:
    """Host overhead of autostream with no other mode between; ``None`` where it failed."""
    note(f"{OURS} by itself")
    call = lineup.calls.get(OURS)
    pace = clock.pace(call, calls) if call else None
    if call is None or pace is None:
        return None
    with collector.paused():
        times = [clock.host_us(call, pace) for _ in range(FEWEST_ROUNDS)]
    return _quartiles([us for us in times if us is not None])


@dataclass(slots=True)
class Lineup:
    """The prepared modes of one workload.

    Attributes:
        comparison: prepares and checks them.
        calls: of modes that work.
        failed: the reasons of the others.
    """

    comparison: Comparison
    calls: dict[str, Measured] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    _errors: dict[str, Callable[[], float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.comparison, Training):
            self.comparison.modes = TRAINING
        elif isinstance(self.comparison, Inference):
            every = {**PLAIN, **COMPILED, **LATER}
            self.comparison.modes = {name: partial(self._recorded, name, mode) for name, mode in every.items()}

    def _recorded(self, name: str, mode: Mode, model: nn.Module, args: Sequence[Any]) -> Call:
        """A mode whose call is timed directly: the prepared's call enters ``no_grad`` each time."""
        call = mode(model, args)
        self.calls[name] = partial(call, *args)
        return call

    def prepare(self, mode: str, note: Callable[[str], None]) -> None:
        """Prepare a mode, and call it until it is steady."""
        note(f"{mode} is prepared")
        try:
            prepared = self.comparison.prepare(mode)
            call = self.calls.setdefault(mode, prepared.call)
            for _ in range(STEADY):
                call()
        except Exception as failure:
            self._fail(mode, first_line(failure))
        else:
            self._errors[mode] = prepared.late_error or prepared.error

    def check(self, note: Callable[[str], None]) -> None:
        """Check the outputs of all modes; wrong ones are not timed."""
        note("results are checked")
        for mode, error_of in self._errors.items():
            try:
                error = error_of()
            except Exception as failure:
                self._fail(mode, first_line(failure))
            else:
                if not error <= self.comparison.allowed_error:
                    self._fail(mode, f"wrong: error {error:.1e}, {self.comparison.allowed_error:.1e} allowed")

    def _fail(self, mode: str, why: str) -> None:
        self.calls.pop(mode, None)
        self.failed[mode] = why


def rounds(
    calls: Mapping[str, Measured], busy: BusyClock, device: torch.device, most: int, note: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Time calls in interleaved rounds.

    Args:
        calls: by mode.
        busy: clock for ``host_us``.
        device: for the other times.
        most: calls to queue for one measurement of ``host_us``.
        note: is called once, before the rounds.

    Returns:
        By mode, the quartiles of each time, the number of queued calls, and the rounds in which they were queued in
        time.
    """
    clock = clock_of(device)
    paces = {mode: busy.pace(call, most) for mode, call in calls.items()}
    runs = {mode: max(FEWEST_RUNS, round(ROUND_US / max(clock.once_us(call), 1.0))) for mode, call in calls.items()}
    times = {mode: Times() for mode in calls}
    queued: dict[str, list[float]] = {mode: [] for mode in calls}
    note(f"{', '.join(calls)} take turns")
    end = time.perf_counter() + SECONDS
    for turn in range(ROUNDS):
        if turn >= FEWEST_ROUNDS and time.perf_counter() > end:
            break
        for mode in order(list(calls), turn):
            pace = paces[mode]
            if pace is not None and (us := busy.host_us(calls[mode], pace)) is not None:
                queued[mode].append(us)
            clock.measure(calls[mode], times[mode], runs[mode])
    return {
        mode: {
            "host_us": _quartiles(queued[mode]),
            "latency_us": _quartiles(of.latency_us),
            "device_us": _quartiles(of.device_us),
            "call_us": _quartiles(of.call_us),
            "queued_calls": paces[mode].calls if paces[mode] else None,  # type: ignore[union-attr]
            "rounds": len(queued[mode]),
        }
        for mode, of in times.items()
    }


@dataclass(frozen=True, slots=True)
class Pace:
    """Number of calls, and µs that the device sleeps while they are queued."""

    calls: int
    sleep_us: float


class BusyClock:
    """Measures host overhead while the device sleeps for longer than queueing the calls takes.

    Args:
        device: a CUDA device; calls are on its current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sleep(_CYCLES)  # loads the kernel
        start, end = self._event(), self._event()
        start.record()
        self._sleep(_CYCLES)
        end.record()
        end.synchronize()
        self._cycles_of_us = _CYCLES / (start.elapsed_time(end) * 1e3)

    def pace(self, call: Measured, calls: int) -> Pace | None:
        """The number of calls, fewer if they do not fit into the driver's queue, and the time to sleep.

        Returns:
            ``None`` for calls that synchronize, or of which not even one fits into the queue.
        """
        alone_us = min(self._alone_us(call) for _ in range(3))
        while calls:
            for longer in (2, 4, 8):
                pace = Pace(calls, _LEAST_US + longer * (1 + calls) * alone_us)
                if self.host_us(call, pace) is not None:
                    return pace
            calls //= 2  # the host waits for the full queue, so a longer sleep does not help
        return None

    def host_us(self, call: Measured, pace: Pace) -> float | None:
        """Host µs of a call.

        Returns:
            ``None`` where the device woke up first: a call may have waited for it.
        """
        torch.cuda.synchronize(self._device)
        self._sleep(round(pace.sleep_us * self._cycles_of_us))
        awake = self._event()
        awake.record()
        call()  # warms up the host's caches
        start = time.perf_counter()
        for _ in repeat(None, pace.calls):
            call()
        took = time.perf_counter() - start
        asleep = not awake.query()  # type: ignore[no-untyped-call]
        return took / pace.calls * 1e6 if asleep else None

    def _alone_us(self, call: Measured) -> float:
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    def _sleep(self, cycles: int) -> None:
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


_CYCLES = 10_000_000
"""Cycles of a few milliseconds."""

_LEAST_US = 1_000.0


def _quartiles(values: Sequence[float]) -> dict[str, float] | None:
    if len(values) < 2:
        return None
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return {"q1": round(low, 2), "median": round(middle, 2), "q3": round(high, 2)}


def table(result: dict[str, Any]) -> str:
    """A line for each workload and mode with its medians; below, what was not measured and why."""
    lines, missing = [], list[str]()
    for row in result["rows"]:
        if "failed" in row:
            missing.append(f"{row['workload']}: {row['failed']}")
        for mode, cell in row.get("modes", {}).items():
            if "failed" in cell:
                missing.append(f"{row['workload']}, {mode}: {cell['failed']}")
                continue
            host = cell["host_us"]
            lines.append(
                [
                    row["workload"],
                    mode,
                    _median(host),
                    f"{host['q1']:.1f} to {host['q3']:.1f}" if host else None,
                    *(_median(cell[what]) for what in ("latency_us", "device_us", "call_us")),
                    *(_median(row.get(f"{OURS}_{when}_compile_us") if mode == OURS else None) for when in _WHEN),
                ]
            )
    headers = ["workload", "mode", "host_us", "quartiles", "latency_us", "device_us", "call_us"]
    headers += [f"{OURS}_{when}_compile_us" for when in _WHEN]
    text = tabulate(lines, headers, tablefmt="github", floatfmt=".1f")
    missing += [f"{name}: no time was left" for name in result["skipped"]]
    return "\n".join([text, *(["", "Not measured:", "", *(f"- {why}" for why in missing)] if missing else [])])


_WHEN = ("before", "after")


def _median(quartiles_us: dict[str, float] | None) -> float | None:
    return quartiles_us["median"] if quartiles_us else None


if __name__ == "__main__":
    sys.exit(main())
