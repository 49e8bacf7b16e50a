"""Rounds that all calls share. A scripted clock stands in for the real one; only the GPU's is put to the test."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from autostream.runtime import clock
from autostream.runtime.clock import (
    FEWEST_ROUNDS,
    LATENCIES,
    ROUND_US,
    ROUNDS,
    SECONDS,
    DeviceClock,
    HostClock,
    Times,
    clock_of,
    interleaved,
)


@dataclass
class Time:
    """Seconds that pass only in calls."""

    now: float = 0.0

    def call(self, *seconds: float) -> Callable[[], None]:
        """A call that takes each of these in turn, and the last one from then on."""
        left = list(seconds)

        def take() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return take


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Time:
    scripted = Time()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: scripted.now)
    return scripted


@dataclass
class Scripted:
    """A clock that enters the number of the measurement, and a log of what happened."""

    log: list[str] = field(default_factory=list)
    once: float = ROUND_US
    entered: int = 0
    runs: set[int] = field(default_factory=set)

    def call(self, name: str) -> Callable[[], None]:
        return lambda: self.log.append(f"call {name}")

    def note(self, name: str) -> None:
        self.log.append(f"note {name}")

    def measure(self, call: Callable[[], object], times: Times, runs: int) -> None:
        self.log.append("measure")
        self.runs.add(runs)
        times.call_us.append(float(self.entered))
        self.entered += 1

    def once_us(self, call: Callable[[], object]) -> float:
        self.log.append("once")
        return self.once


def run(scripted: Scripted, *names: str) -> dict[str, Times]:
    return interleaved({name: scripted.call(name) for name in names}, scripted, scripted.note)


# Rounds


@pytest.mark.parametrize(
    ("once", "runs"), [(ROUND_US / 10, 10), (ROUND_US, 3), (100 * ROUND_US, 3), (0.0, round(ROUND_US))]
)
def test_a_round_lasts_about_as_long_for_each_call_but_has_three_runs(host: Time, once: float, runs: int) -> None:
    scripted = Scripted(once=once)
    run(scripted, "a")
    assert scripted.runs == {runs}


def test_rounds_end_with_the_time_but_not_before_a_median_has_enough(host: Time) -> None:
    """The call before the rounds does not count."""

    class Calling(Scripted):
        def measure(self, call: Callable[[], object], times: Times, runs: int) -> None:
            call()
            super().measure(call, times, runs)

    def rounds(seconds_a_round: float) -> int:
        host.now = 0.0
        times = interleaved({"a": host.call(1000.0, seconds_a_round)}, Calling(), lambda name: None)
        return len(times["a"].call_us)

    assert rounds(seconds_a_round=SECONDS) == FEWEST_ROUNDS
    # After the twelfth round, SECONDS have not passed; after the thirteenth, they have.
    assert rounds(seconds_a_round=SECONDS / 12.5) == 13
    assert rounds(seconds_a_round=SECONDS / 1000) == ROUNDS


# The host


def test_on_the_host_a_round_is_the_mean_of_its_runs_after_one_untimed(host: Time) -> None:
    times = Times()
    HostClock().measure(host.call(9e-6, 1e-6, 2e-6, 6e-6), times, 3)
    assert times.call_us == times.device_us == times.host_us == [pytest.approx(3.0)]
    assert times.latency_us == pytest.approx([1.0, 2.0, 6.0])


# The device


@pytest.mark.gpu
def test_a_slow_host_is_no_time_of_the_device() -> None:
    """A tiny kernel, launched by a host that sleeps for a millisecond first."""
    device_clock = clock_of(torch.device("cuda:0"))
    assert isinstance(device_clock, DeviceClock)
    x, times = torch.ones(1024, device="cuda:0"), Times()

    def call() -> None:
        time.sleep(1e-3)
        x.add_(1)

    rounds = 0
    while rounds < 9 or (not times.device_us and rounds < 50):  # one that the host was too late for is left out
        call()
        device_clock.measure(call, times, 5)
        rounds += 1
    assert len(times.call_us) == rounds
    assert 1 <= len(times.device_us) <= rounds
    assert len(times.latency_us) == len(times.host_us) == rounds * LATENCIES
    # A device that other tests keep busy begins late, and has then less to wait for: the longest round is the one that
    # they delayed least.
    assert max(times.device_us) < 100 < 1000 < max(times.call_us)
    assert min(times.host_us) > 1000
    assert min(times.latency_us) > 1000


@pytest.mark.gpu
def test_a_slow_device_is_no_time_of_the_host() -> None:
    """A product that takes a millisecond or so, launched in a few microseconds."""
    x, times = torch.ones(8192, 8192, device="cuda:0", dtype=torch.float16), Times()
    device_clock = DeviceClock(torch.device("cuda:0"))
    out = x @ x

    def call() -> None:
        torch.mm(x, x, out=out)

    for _ in range(3):
        call()
        device_clock.measure(call, times, 3)
    # Other tests may use the same host and GPU meanwhile: the quickest of each is the one least delayed by them.
    assert min(times.host_us) < 200 < min(times.device_us)
    assert min(times.latency_us) > 200
    assert min(times.call_us) > 0.5 * min(times.device_us)
    # It is one number of three calls, which the turns of others on the GPU can only lengthen.
    assert min(device_clock.once_us(call) for _ in range(3)) > 0.5 * min(times.call_us)


@pytest.mark.gpu
def test_what_the_drivers_queue_cannot_take_has_no_time_of_the_device() -> None:
    x, times = torch.ones(16, device="cuda:0"), Times()

    def call() -> None:
        for _ in range(3000):
            x.add_(1)

    DeviceClock(torch.device("cuda:0")).measure(call, times, 3)
    assert (len(times.call_us), times.device_us) == (1, [])
