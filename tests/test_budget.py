"""What exceeds the memory budget, and in which words; one stream takes 10 MB."""

from __future__ import annotations

import math

import pytest

from autostream.budget import excess, exemption
from autostream.ir import Candidate, Decision, Schedule


def taking(memory_bytes: int) -> Candidate:
    return Candidate(Schedule("test", 2, ()), captured=True, predicted_us=1.0, memory_bytes=memory_bytes)


ALONE = taking(10_000_000)


@pytest.mark.parametrize(
    ("budget", "memory_bytes", "over"),
    [
        (1.1, 11_000_000, False), (1.1, 11_000_001, True), (1.0, 10_000_001, True), (0.5, 5_000_000, False),
        (12_000_000, 12_000_000, False), (12_000_000, 12_000_001, True), (1, 2, True), (math.inf, 2**60, False),
    ],
)  # fmt: skip
def test_a_ratio_is_to_one_stream_and_an_int_is_bytes(budget: float, memory_bytes: int, over: bool) -> None:
    assert bool(excess(taking(memory_bytes), ALONE, budget)) is over


def test_it_says_what_is_needed_and_what_there_is() -> None:
    assert excess(taking(13_100_000), ALONE, 1.15) == (
        "needs 13.1 MB, the budget is 11.5 MB: 1.15 × the 10.0 MB of one stream (memory_budget)"
    )
    assert excess(taking(13_100_000), ALONE, 12_000_000) == "needs 13.1 MB, the budget is 12.0 MB (memory_budget)"


@pytest.mark.parametrize("budget", [1.1, math.inf])
def test_nothing_is_within_any_budget(budget: float) -> None:
    assert excess(taking(0), taking(0), budget) == ""


def test_one_stream_may_exceed_it_which_is_told() -> None:
    assert exemption(ALONE, 10_000_000) == exemption(ALONE, 1.0) == ()
    said = "one stream needs 10.0 MB, the budget is 9.0 MB (memory_budget): it is tried all the same"
    assert exemption(ALONE, 9_000_000) == (Decision("", "over budget", said),)
