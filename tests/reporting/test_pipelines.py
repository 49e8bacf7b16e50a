"""Pipelines as text and JSON, of two equal stages: a forward takes 10 µs, a backward 20."""

from __future__ import annotations

import json
from dataclasses import replace

from autostream.reporting.pipelines import render, to_json
from autostream.scheduling.microbatches import (
    Comparison,
    Pipeline,
    Run,
    bubble_share,
    gpipe,
    one_forward_one_backward,
    simulated,
)
from autostream.scheduling.partition import Stage

STAGES = (Stage("", (0, 1), 10.0, 0, 4000, 100), Stage("b", (1, 2), 10.0, 64, 4000, 100))
PIPELINE = Pipeline("Net", "GPU", 3, STAGES, (("a",), ("b",)), (), 120.0, (4200, 4100))


def run(name: str, microbatches: int) -> Run:
    orders = {"GPipe": gpipe, "1F1B": one_forward_one_backward}[name](2, microbatches)
    timeline = simulated(orders, STAGES, [0.0, 0.0])
    return Run(name, microbatches, timeline, timeline.makespan_us, bubble_share(timeline), (4300, 4100))


COMPARISON = Comparison(
    PIPELINE, "nvlink", 8, (run("GPipe", 3), run("1F1B", 3), Run("ZBVZeroBubble", 3, refusal="no cut"), run("1F1B", 4))
)


def test_all_that_was_compared_is_shown() -> None:
    text = render(COMPARISON)
    summary, stages, schedules, microbatches, first, second = text.split("\n\n")
    assert summary.splitlines()[1:] == [
        "devices  2 times GPU, joined by nvlink",
        "step     3 microbatches of 8 rows, forward and backward",
        "best     GPipe with 3 microbatches: 120.0 µs, 25% waits",
        "refused  ZBVZeroBubble: no cut",
    ]
    assert stages.splitlines()[-1] == "A step by 1F1B takes 120.0 µs. Times and bytes in are of one microbatch."
    assert [line.split()[:4] for line in schedules.splitlines()[3:]] == [
        ["GPipe", "3", "120.0", "µs"],
        ["1F1B", "3", "120.0", "µs"],
    ]
    assert [line.split()[1] for line in microbatches.splitlines()[3:]] == ["3", "4"]
    assert first.startswith("GPipe, 3 microbatches")
    assert second.startswith("1F1B, 3 microbatches")


def test_the_best_that_was_not_asked_for_is_drawn_and_a_faster_one_is_named() -> None:
    """Two microbatches of half as many rows take less than three; 1F1B holds less than GPipe, which is 0.5 % faster."""
    small, fast = (replace(run(name, 2), step_us=us) for name, us in (("1F1B", 100.5), ("GPipe", 100.0)))
    comparison = replace(COMPARISON, runs=(*COMPARISON.runs, replace(small, memory_bytes=(4100, 4100)), fast))
    summary, *_, first, second, third = render(comparison).split("\n\n")
    best = "1F1B with 2 microbatches: 100.5 µs, 33% waits; GPipe with 2 microbatches takes 100.0 µs, and more memory"
    assert f"best     {best}" in summary.splitlines()
    assert [each.split(":")[0] for each in (first, second, third)] == [
        "1F1B, 2 microbatches",
        "GPipe, 3 microbatches",
        "1F1B, 3 microbatches",
    ]


def test_a_drawing_has_a_character_for_each_hundredth_of_a_step() -> None:
    """Two of three forwards, a wait, and a backward: 10 µs of 120 are 8 or 9 characters."""
    *_, drawing = render(COMPARISON).split("\n\n")
    title, one, two = drawing.splitlines()
    assert title.endswith("a character is 1.2 µs")
    assert one.startswith("device 0  " + "F" * 17 + "·" * 16 + "B" * 17 + "F" * 8)
    assert len(one) == len(two) == 10 + 100
    assert one.endswith("B" * 17)
    assert two.startswith("device 1  " + "·" * 8 + "F" * 9 + "B" * 16)


def test_json_has_the_timelines_and_the_best() -> None:
    data = json.loads(to_json(COMPARISON))
    assert data["best"] == {"schedule": "GPipe", "microbatches": 3}
    assert data["pipeline"]["stages"][1]["begins"] == "b"
    assert data["runs"][1]["timeline"]["slices"][0] == {"op": "0F0", "stream": 0, "start_us": 0.0, "end_us": 10.0}
    assert data["runs"][2]["refusal"] == "no cut"
