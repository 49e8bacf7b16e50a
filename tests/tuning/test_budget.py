"""The memory budget, where one stream takes 10 MB."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autostream.costs.device import profile_named
from autostream.ir import Candidate, Op, OpGraph, Schedule
from autostream.tuning.budget import SLACK_BYTES, Budget, budget_of

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
    assert bool(Budget(budget, 10 * MB, given_bytes).excess(memory_bytes)) is over


def test_a_refusal_names_the_needed_memory_and_the_budget() -> None:
    assert Budget(1.25, 10 * MB, 0).excess(15_100_000) == (
        "needs 15.1 MB, the budget is 12.5 MB: 1.25 × the 10.0 MB of one stream (memory_budget)"
    )
    assert Budget(1.25, 10 * MB, 5 * MB).excess(15_100_000) == (
        "needs 20.1 MB, the budget is 18.8 MB: 1.25 × the 15.0 MB of one stream, weights and inputs included "
        "(memory_budget)"
    )
    assert Budget(1.1, 10 * MB, 0).excess(15_100_000) == (
        "needs 15.1 MB, the budget is 12.1 MB: 2.1 MB more than the 10.0 MB of one stream (memory_budget)"
    )
    assert Budget(12 * MB, 10 * MB, 5 * MB).excess(15_100_000) == "needs 15.1 MB, the budget is 12.0 MB (memory_budget)"
    hopeless = Budget(12 * MB, 10 * MB, 5 * MB).excess(15_100_000, at_least=True)
    assert hopeless == "needs at least 15.1 MB, the budget is 12.0 MB (memory_budget)"
    assert Budget(10 * MB, 10 * MB, 0).exemption == Budget(1.0, 10 * MB, 0).exemption == ()


def test_a_program_with_collectives_may_take_a_share_of_the_device_too() -> None:
    """One stream takes 10 MB of the 80 GB of an H100: 10 % more are 1 MB, and 1 % of the device is 800 MB."""
    profile = profile_named("h100")
    alone = Candidate(Schedule("sequential", 1, ()), captured=True, predicted_us=1.0, memory_bytes=10 * MB)
    op = Op("sum", "all_reduce", ("sum",), frozenset(), frozenset())
    graphs = [OpGraph({"sum": each}, (), {}, (), "cuda:0") for each in (op, replace(op, group="0"))]
    without, with_one = (budget_of(graph, profile, alone, 1.1) for graph in graphs)
    assert without.room_bytes == 10 * MB + SLACK
    assert with_one.room_bytes == 10 * MB + profile.memory_bytes / 100
    assert budget_of(graphs[1], profile, alone, 12 * MB).room_bytes == 12 * MB
