"""The memory budget, where one stream takes 10 MB."""

from __future__ import annotations

import math

import pytest

from autostream.ir import Candidate, Schedule
from autostream.tuning.budget import SLACK_BYTES, excess, exemption


def taking(memory_bytes: int) -> Candidate:
    return Candidate(Schedule("test", 2, ()), captured=True, predicted_us=1.0, memory_bytes=memory_bytes)


ALONE = taking(10_000_000)


MB = 1_000_000
SLACK = SLACK_BYTES  # 2.1 MB


@pytest.mark.parametrize(
    ("budget", "memory_bytes", "given_bytes", "over"),
    [
        (1.3, 13 * MB, 0, False), (1.3, 13 * MB + 1, 0, True),
        (1.1, 10 * MB + SLACK, 0, False), (1.1, 10 * MB + SLACK + 1, 0, True), (1.0, 10 * MB + SLACK, 0, False),
        (1.1, 20 * MB, 90 * MB, False), (1.1, 20 * MB + 1, 90 * MB, True),
        (12 * MB, 12 * MB, 90 * MB, False), (12 * MB, 12 * MB + 1, 90 * MB, True), (1, 2, 0, True),
        (math.inf, 2**60, 0, False), (math.inf, 0, 0, False), (1.1, 0, 0, False),
    ],
)  # fmt: skip
def test_a_ratio_is_to_all_that_one_stream_takes_and_an_int_is_bytes(
    budget: float, memory_bytes: int, given_bytes: int, over: bool
) -> None:
    assert bool(excess(taking(memory_bytes), ALONE, budget, given_bytes)) is over


def test_a_refusal_names_the_needed_memory_and_the_budget() -> None:
    large = taking(15_100_000)
    assert excess(large, ALONE, 1.25, 0) == (
        "needs 15.1 MB, the budget is 12.5 MB: 1.25 × the 10.0 MB of one stream (memory_budget)"
    )
    assert excess(large, ALONE, 1.25, 5 * MB) == (
        "needs 20.1 MB, the budget is 18.8 MB: 1.25 × the 15.0 MB of one stream, weights and inputs included "
        "(memory_budget)"
    )
    assert excess(large, ALONE, 1.1, 0) == (
        "needs 15.1 MB, the budget is 12.1 MB: 2.1 MB more than the 10.0 MB of one stream (memory_budget)"
    )
    assert excess(large, ALONE, 12 * MB, 5 * MB) == "needs 15.1 MB, the budget is 12.0 MB (memory_budget)"
    hopeless = excess(large, ALONE, 12 * MB, 5 * MB, at_least=True)
    assert hopeless == "needs at least 15.1 MB, the budget is 12.0 MB (memory_budget)"
    assert exemption(ALONE, 10 * MB, 0) == exemption(ALONE, 1.0, 0) == ()
