"""The numbers behind every face; expectations follow from the drawing in reports.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autostream.reporting.summary import baselines, gain, limits, summarize, summary_of
from tests.reporting.reports import CHOSEN, COSTS, DIAMOND, GRAPHED, PLAIN, REFUSED, REPORT, UNCAPTURED
from tests.scheduling.graphs import costs_of, graph_of


def test_a_diamond_has_work_a_path_and_floors() -> None:
    summary = summarize(DIAMOND, COSTS)
    assert (summary.work_us, summary.critical_path_us, summary.bound, summary.width) == (18.0, 12.0, 1.5, 2)
    assert summary.critical_path == ("a", "b", "c", "e")
    assert (summary.sm_us, summary.bandwidth_us) == (4.5, 9.0)
    assert summary.slack_us == {"a": 0.0, "b": 0.0, "c": 0.0, "d": 2.0, "e": 0.0}
    assert [set(region.branches) for region in summary.regions] == [{("b", "c"), ("d",)}]


def test_slack_is_never_below_zero_where_sums_round_differently() -> None:
    chain = graph_of("a-b b-c c-d")
    slack = summarize(chain, costs_of(chain, 0.1)).slack_us
    assert min(slack.values()) >= 0.0
    assert all(f"{us:.1f}" == "0.0" for us in slack.values())


def test_nothing_is_summed_up_where_nothing_was_priced() -> None:
    assert summary_of(PLAIN) is None
    assert summary_of(replace(REPORT, costs={})) is None


def test_the_baseline_captured_alike_comes_first() -> None:
    assert baselines(REPORT) == (GRAPHED, UNCAPTURED)
    assert baselines(replace(REPORT, chosen=UNCAPTURED)) == (GRAPHED,)
    assert baselines(PLAIN) == ()


def test_gain_compares_like_with_like() -> None:
    assert gain(CHOSEN, UNCAPTURED) == 3.0, "42 over 14, both measured"
    assert gain(REFUSED, UNCAPTURED) == pytest.approx(26 / 13.5), "both predicted, as only one was measured"


@pytest.mark.parametrize(
    ("sm_share", "bandwidth_share", "tightest"),
    [
        (0.25, 0.5, "67% of the work is in line, on the critical path: at most 1.50×"),
        (0.9, 0.5, "one after the other, the ops already keep 90% of the device busy: at most 1.11×"),
        (0.25, 0.8, "one after the other, the ops already use 80% of the memory bandwidth: at most 1.25×"),
    ],
)
def test_the_tightest_limit_comes_first(sm_share: float, bandwidth_share: float, tightest: str) -> None:
    durations = {name: cost.duration_us for name, cost in COSTS.items()}
    found = limits(summarize(DIAMOND, costs_of(DIAMOND, durations, sm_share, bandwidth_share)))
    assert found[0] == tightest
    assert len(found) == 3


def test_a_chain_needs_no_other_reason() -> None:
    chain = graph_of("a-b b-c")
    assert limits(summarize(chain, costs_of(chain))) == (
        "the ops form a chain (width 1): nothing can run beside anything else",
    )


def test_free_work_is_no_division_by_zero() -> None:
    pair = graph_of((), names="ab")
    assert limits(summarize(pair, costs_of(pair, 0.0, sm_share=0.1))) == ()
