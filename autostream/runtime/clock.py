"""Times of several calls by device events and the host's clock, in interleaved rounds.

Each round times each call once, in random order, so that drift of clocks and temperature affects all alike. Each
measurement follows directly on an untimed call, so that cold caches are not part of it. There are four times:

call_us     calls back to back, by events around them: throughput, including the host where it is slower
device_us   the same calls queued behind a filler kernel: the time of the device alone; missing in rounds in which they
            could not all be queued in time
host_us     until a call returns, with the device idle before
latency_us  until its results are complete

On a CPU, all four are the time of a call.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, Protocol

import torch

from autostream.utils import collector

Measured = Callable[[], object]

ROUNDS = 25
FEWEST_ROUNDS = 9
ROUND_US = 4000.0
FEWEST_RUNS = 3
LATENCIES = 5
SECONDS = 20.0
"""No more rounds after this, but at least :data:`FEWEST_ROUNDS`."""

_QUEUE_US = 20_000.0
_MOST_QUEUED = 100
_FILLER_BYTES = 256 * 2**20


@dataclass(slots=True)
class Times:
    """The times of one call, µs: one number a round, several for ``host_us`` and ``latency_us``."""

    call_us: list[float] = field(default_factory=list)
    device_us: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)
    latency_us: list[float] = field(default_factory=list)

    def dump(self) -> dict[str, Any]:
        """As JSON: rounds as they are, the others as quartiles and the 99th percentile of the latency.

        ``device_us`` is left out if it is not known of all rounds.
        """
        rounds = {"call_us": self.call_us}
        if len(self.device_us) == len(self.call_us):  # numbers at one position are of one round
            rounds["device_us"] = self.device_us
        p99 = quantiles(self.latency_us, n=100, method="inclusive")[98]
        return {
            **{name: [round(us, 2) for us in values] for name, values in rounds.items()},
            "host_us": _quartiles(self.host_us),
            "latency_us": _quartiles(self.latency_us) | {"p99": round(p99, 2)},
        }


def _quartiles(values: list[float]) -> dict[str, float]:
    low, _, high = quantiles(values, n=4)
    return {"q1": round(low, 2), "median": round(median(values), 2), "q3": round(high, 2)}


class Clock(Protocol):
    """Times calls on one device."""

    def measure(self, call: Measured, times: Times, runs: int) -> None:
        """Add one round."""

    def once_us(self, call: Measured) -> float:
        """An estimate of the time of a call."""


def clock_of(device: torch.device) -> Clock:
    """The clock for a device."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)


def interleaved(calls: Mapping[str, Measured], clock: Clock, note: Callable[[str], None]) -> dict[str, Times]:
    """Time calls side by side. No garbage is collected meanwhile: that would count as the time of one of them.

    Args:
        calls: by name.
        clock: of the device that they run on.
        note: is called with the name of each call before it is timed.

    Returns:
        By name; the numbers at one position were measured in the same round.
    """
    times = {name: Times() for name in calls}
    runs = {}
    gc.collect()
    with collector.paused():
        for name, call in calls.items():
            note(name)
            call()
            runs[name] = max(FEWEST_RUNS, round(ROUND_US / max(clock.once_us(call), 1.0)))
        end = time.perf_counter() + SECONDS
        for turn in range(ROUNDS):
            if turn >= FEWEST_ROUNDS and time.perf_counter() > end:
                break
            for name in order(list(calls), turn):
                note(name)
                clock.measure(calls[name], times[name], runs[name])
    return times


def order(names: Sequence[str], turn: int) -> Sequence[str]:
    """Another order in each round, the same in each run, so that no call always follows the same one."""
    return random.Random(turn).sample(names, len(names))


class HostClock:
    """For a CPU, where a call is complete when it returns."""

    def measure(self, call: Measured, times: Times, runs: int) -> None:
        """Add one round."""
        call()
        latencies = [_host_us(call) for _ in range(runs)]
        mean = sum(latencies) / runs
        for series in (times.call_us, times.device_us, times.host_us):
            series.append(mean)
        times.latency_us += latencies[:LATENCIES]

    def once_us(self, call: Measured) -> float:
        """How long a call takes."""
        return _host_us(call)


class DeviceClock:
    """For a CUDA device, which may still be computing when a call returns.

    Args:
        device: the device; its current stream is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._filler = torch.empty(_FILLER_BYTES, dtype=torch.uint8, device=device)
        self._filler.zero_()
        self._fill_us = min(self._between(self._filler.zero_, 4) for _ in range(3))

    def measure(self, call: Measured, times: Times, runs: int) -> None:
        """Add one round."""
        times.call_us.append(self._between(call, runs))
        device_us = self._queued(call, min(runs, _MOST_QUEUED))
        if device_us is not None:
            times.device_us.append(device_us)
        for _ in range(LATENCIES):
            host_us, latency_us = self._alone(call)
            times.host_us.append(host_us)
            times.latency_us.append(latency_us)

    def once_us(self, call: Measured) -> float:
        """How long a call takes back to back with others."""
        return self._between(call, 3)

    def _between(self, call: Measured, runs: int) -> float:
        """µs of a call by events around ``runs`` calls, starting on an idle device."""
        self._synchronize()
        start, end = self._event(), self._event()
        call()
        start.record()
        for _ in range(runs):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / runs * 1e3

    def _queued(self, call: Measured, runs: int) -> float | None:
        """Device µs of a call behind a filler that runs until the last call is queued.

        Returns:
            ``None`` where the filler ended first, for instance since the calls have more launches than the driver's
            queue holds.
        """
        issue_us, _ = self._alone(call)
        runs = max(FEWEST_RUNS, min(runs, int(_QUEUE_US / 2 / issue_us)))
        start, end = self._event(), self._event()
        for _ in range(1 + round(2 * (1 + runs) * issue_us / self._fill_us)):
            self._filler.zero_()
        call()
        start.record()
        for _ in range(runs):
            call()
        queued = not start.query()  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / runs * 1e3 if queued else None

    def _alone(self, call: Measured) -> tuple[float, float]:
        """µs until a call returns, and until its kernels have ended, starting on an idle device."""
        start = time.perf_counter()
        call()
        returned = time.perf_counter()
        self._synchronize()
        return (returned - start) * 1e6, (time.perf_counter() - start) * 1e6

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def _host_us(call: Measured) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6
