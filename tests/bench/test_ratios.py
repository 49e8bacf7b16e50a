"""Ratios are taken round by round."""

from __future__ import annotations

import pytest

from autostream.bench.ratios import NOISY, Spread, ratio, spread


def test_a_spread_is_the_median_and_the_distance_of_the_quartiles() -> None:
    """Of 1 … 7, the quartiles are 2 and 6; the order does not matter."""
    assert spread([7.0, 1.0, 3.0, 2.0, 6.0, 5.0, 4.0]) == Spread(median=4.0, iqr=4.0, count=7)


@pytest.mark.parametrize(("iqr", "noisy"), [(0.0, False), (NOISY * 200, False), (NOISY * 200 + 0.1, True)])
def test_a_spread_is_noisy_above_a_share_of_its_median(iqr: float, noisy: bool) -> None:
    assert Spread(200.0, iqr, 9).noisy is noisy


def test_the_standard_error_of_a_median_falls_with_the_root_of_the_count() -> None:
    """Of normal numbers, the quartiles are 1.349 σ apart, and the median scatters by 1.2533 σ/√n."""
    assert Spread(5.0, 1.349, 1).standard_error == pytest.approx(1.2533, rel=1e-4)
    assert Spread(5.0, 1.349, 25).standard_error == pytest.approx(1.2533 / 5, rel=1e-4)


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """The device slows down from round to round, for both: the ratios are 4, 2 and 1, that of the medians is 1."""
    cells = {"old": {"call_us": [4.0, 4.0, 16.0]}, "new": {"call_us": [1.0, 4.0, 8.0]}}
    assert ratio(cells, "new", "old") == Spread(median=2.0, iqr=3.0, count=3)


def test_drift_that_hits_both_is_no_noise() -> None:
    cells = {"old": {"call_us": [10.0, 20.0, 90.0, 40.0]}, "new": {"call_us": [5.0, 10.0, 45.0, 20.0]}}
    found = ratio(cells, "new", "old")
    assert found == Spread(2.0, 0.0, 4)
    assert spread(cells["new"]["call_us"]).noisy


def test_a_ratio_is_of_the_time_that_is_asked_for() -> None:
    cells = {
        "old": {"call_us": [4.0, 4.0], "device_us": [3.0, 3.0]},
        "new": {"call_us": [2.0, 2.0], "device_us": [1.0, 1.0]},
    }
    assert ratio(cells, "new", "old") == ratio(cells, "new", "old", "call") == Spread(2.0, 0.0, 2)
    assert ratio(cells, "new", "old", "device") == Spread(3.0, 0.0, 2)


def test_a_slower_mode_has_a_ratio_below_one() -> None:
    assert ratio({"old": {"call_us": [1.0, 1.0]}, "new": {"call_us": [4.0, 4.0]}}, "new", "old") == Spread(0.25, 0.0, 2)


@pytest.mark.parametrize("cells", [{}, {"old": {"call_us": [1.0, 1.0]}}, {"new": {"call_us": [1.0, 1.0]}},
                                   {"old": {"call_us": [1.0, 1.0]}, "new": {"status": "failed"}},
                                   {"old": {"status": "wrong"}, "new": {"call_us": [1.0, 1.0]}}])  # fmt: skip
def test_there_is_none_where_one_was_not_timed(cells: dict[str, dict[str, list[float]]]) -> None:
    assert ratio(cells, "new", "old") is None


def test_rounds_that_do_not_match_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratio({"old": {"call_us": [1.0, 1.0]}, "new": {"call_us": [1.0, 1.0, 1.0]}}, "new", "old")
