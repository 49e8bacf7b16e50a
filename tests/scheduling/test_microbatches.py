"""Schedules of microbatches, simulated. Times are derived by hand: a forward takes 1 µs, a backward 2."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autostream.errors import ScheduleError
from autostream.scheduling.microbatches import (
    Action,
    Comparison,
    Pipeline,
    Run,
    bubble_share,
    gpipe,
    memory_bytes,
    one_forward_one_backward,
    simulated,
)
from autostream.scheduling.partition import Stage


def stages(*times_us: float) -> list[Stage]:
    return [Stage(f"s{at}", (at, at + 1), us, 0, 100, 10) for at, us in enumerate(times_us)]


@pytest.mark.parametrize(
    ("orders", "devices", "microbatches"),
    [
        *((gpipe, *shape) for shape in ((2, 1), (2, 4), (4, 8), (4, 2))),
        *((one_forward_one_backward, *shape) for shape in ((2, 2), (2, 4), (4, 8))),
    ],
)
def test_the_bubble_is_that_of_the_papers(orders: object, devices: int, microbatches: int) -> None:
    """With equal stages a step takes as long as microbatches and the devices before, one after another."""
    timeline = simulated(orders(devices, microbatches), stages(*[1.0] * devices), [0.0] * devices)  # type: ignore[operator]
    assert timeline.makespan_us == pytest.approx(3.0 * (microbatches + devices - 1))
    assert bubble_share(timeline) == pytest.approx((devices - 1) / (microbatches + devices - 1))


def test_transfers_delay_what_needs_them() -> None:
    """Device 0   F0 ·  ·  ·  ·  ·  ·  B0        F0 arrives 2 µs later, and so does the gradient

    device 1      ·  ·  ·  F0 B0 B0 ·  ·
    """
    starts = simulated(gpipe(2, 1), stages(1.0, 1.0), [0.0, 2.0]).starts
    assert starts == {"0F0": 0.0, "1F0": 3.0, "1B0": 4.0, "0B0": 8.0}


def test_stages_on_one_device_need_no_transfer() -> None:
    order = [[Action(0, "F", 0), Action(1, "F", 0), Action(1, "B", 0), Action(0, "B", 0)]]
    assert simulated(order, stages(1.0, 1.0), [0.0, 50.0]).makespan_us == 6.0


def test_the_device_before_goes_on_after_half_a_backward() -> None:
    halves = [
        [Action(0, "F", 0), Action(0, "I", 0), Action(0, "W", 0)],
        [Action(1, "F", 0), Action(1, "I", 0), Action(1, "W", 0)],
    ]
    starts = simulated(halves, stages(1.0, 1.0), [0.0, 0.0]).starts
    assert (starts["1I0"], starts["0I0"], starts["1W0"], starts["0W0"]) == (2.0, 3.0, 3.0, 4.0)


def test_one_forward_one_backward_holds_fewer_activations() -> None:
    assert [memory_bytes(order, stages(1, 1, 1)) for order in gpipe(3, 8)] == [180, 180, 180]
    assert [memory_bytes(order, stages(1, 1, 1)) for order in one_forward_one_backward(3, 8)] == [130, 120, 110]


def test_outputs_are_held_until_they_are_joined_and_buffers_always() -> None:
    first = Stage("", (0, 1), 1.0, 0, 100, 10, leaving_bytes=2)
    last = Stage("b", (1, 2), 1.0, 2, 100, 10, output_bytes=5)
    one, other = one_forward_one_backward(2, 4)
    assert memory_bytes(one, (first, last)) == 100 + 4 * 2 + 2 * 10
    assert memory_bytes(other, (first, last)) == 100 + 4 * 2 + 2 * 4 * 5
    assert memory_bytes(other, (first, last), outputs=False) == 100 + 4 * 2 + 10
    small = replace(last, output_bytes=1)  # the activations of the last microbatch are more than the copy
    assert memory_bytes(other, (first, small)) == 100 + 4 * 2 + 4 * 1 + 10


def test_activations_are_held_to_the_end_of_the_second_half() -> None:
    order = [Action(0, "F", 0), Action(0, "I", 0), Action(0, "F", 1), Action(0, "W", 0)]
    assert memory_bytes(order, stages(1.0)) == 120


def test_devices_that_wait_for_each_other_are_an_error() -> None:
    orders = [[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]
    with pytest.raises(ScheduleError, match="wait for each other: at 0B0, 1F0"):
        simulated(orders, stages(1.0, 1.0), [0.0, 0.0])


def test_of_runs_that_differ_by_less_than_estimates_are_exact_the_best_takes_the_least_memory() -> None:
    pipeline = Pipeline("net", "GPU", 4, (), (), (), 0.0, ())

    def best(*runs: Run) -> str:
        return Comparison(pipeline, "nvlink", 1, runs).best.schedule

    gpipe_run, other = Run("GPipe", 4, step_us=128094.41102635526, memory_bytes=(43, 20)), Run("1F1B", 4)
    for step_us in (128094.41102635529, 128094.41102635520, 129000.0):
        assert best(gpipe_run, replace(other, step_us=step_us, memory_bytes=(19, 20))) == "1F1B"
        assert best(gpipe_run, replace(other, step_us=step_us, memory_bytes=(19, 43))) == "1F1B"  # on all devices
    assert best(gpipe_run, replace(other, step_us=129500.0, memory_bytes=(19, 20))) == "GPipe"
    assert best(replace(gpipe_run, refusal="too large"), replace(other, step_us=9e9, memory_bytes=(19, 20))) == "1F1B"
