"""The numbers behind every face; expectations follow from the drawing in reports.py."""

from __future__ import annotations

import pytest

from autostream.reporting.summary import gain, summarize
from autostream.scheduling.lost_time import Chain
from tests.reporting.reports import CHOSEN, COSTS, DIAMOND, REFUSED, UNCAPTURED
from tests.scheduling.graphs import costs_of, graph_of, profile_with

FREE = profile_with()


def test_gaps_are_part_of_the_critical_path_and_of_what_is_left_beside_it() -> None:
    """With gaps of 1 µs the path takes 15 µs, and d(6) with the two around it may start 3 µs later."""
    summary = summarize(DIAMOND, COSTS, profile_with(same_stream_edge_us=1.0, cross_stream_edge_us=2.0))
    assert summary.critical_path == Chain(("a", "b", "c", "e"), 12.0, 15.0)
    assert summary.slack_us == {"a": 0.0, "b": 0.0, "c": 0.0, "d": 3.0, "e": 0.0}


def test_slack_is_never_below_zero_where_sums_round_differently() -> None:
    chain = graph_of("a-b b-c c-d")
    slack = summarize(chain, costs_of(chain, 0.1), FREE).slack_us
    assert min(slack.values()) >= 0.0
    assert all(f"{us:.1f}" == "0.0" for us in slack.values())


def test_gain_compares_like_with_like() -> None:
    assert gain(CHOSEN, UNCAPTURED) == 3.0, "42 over 14, both measured"
    assert gain(REFUSED, UNCAPTURED) == pytest.approx(26 / 13.5), "both predicted, as only one was measured"
