"""Ratios of times, taken round by round, and which changes of them count as worse."""

from __future__ import annotations

from typing import Any

import pytest

from autostream.cli.changes import NOISY, Change, Spread, ratio, row_changes
from tests.benchmarks.results import cell, failed, row

STEADY = (10.0, 10.0, 10.0)


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """The device slows down from round to round, for both: the ratios are 4, 2 and 1, that of the medians is 1."""
    times = {
        "old": {"call_us": [4.0, 4.0, 16.0], "device_us": [3.0, 3.0]},
        "new": {"call_us": [1.0, 4.0, 8.0], "device_us": [12.0, 12.0]},
    }
    assert ratio(times, "new", "old") == Spread(median=2.0, iqr=3.0, count=3)
    assert ratio(times, "new", "old", "device") == Spread(0.25, 0.0, 2)


def test_there_is_no_ratio_where_one_was_not_timed_and_an_error_where_rounds_do_not_match() -> None:
    timed = {"call_us": [1.0, 1.0]}
    assert ratio({"old": timed}, "new", "old") is None
    assert ratio({"old": {"status": "wrong"}, "new": timed}, "new", "old") is None
    with pytest.raises(ValueError, match="zip"):
        ratio({"old": timed, "new": {"call_us": [1.0, 1.0, 1.0]}}, "new", "old")


@pytest.mark.parametrize(("iqr", "noisy"), [(0.0, False), (NOISY * 200, False), (NOISY * 200 + 0.1, True)])
def test_a_spread_is_noisy_above_a_share_of_its_median(iqr: float, noisy: bool) -> None:
    assert Spread(200.0, iqr, 9).noisy is noisy


def of(before: dict[str, Any], after: dict[str, Any], modes: str = "autostream", measure: Any = "call") -> list[Change]:
    return list(row_changes(before, after, modes, "cuda_graph", measure))


def only(before: dict[str, Any], after: dict[str, Any]) -> Change:
    """What became of one row's autostream."""
    (change,) = of(row("a", **before), row("a", **after))
    return change


def cells(us: float) -> dict[str, Any]:
    return {"cuda_graph": cell(*STEADY), "autostream": cell(us, us, us)}


def test_ratios_to_the_baseline_are_compared_and_not_times() -> None:
    """All twice as slow, as on another day, is no change."""
    change = only(cells(5.0), {"cuda_graph": cell(20.0, 22.0, 24.0), "autostream": cell(10.0, 11.0, 12.0)})
    assert (change.row, change.mode, change.status) == ("a", "autostream", "ok")
    assert change.before == change.after == Spread(2.0, 0.0, 3)
    assert change.share == 0.0
    assert not change.worse(0.0)


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_a_lost_time_is_worse_whatever_the_limit(status: str) -> None:
    change = only(cells(5.0), cells(5.0) | {"autostream": failed(status)})
    assert (change.status, change.after, change.share) == (status, None, None)
    assert change.worse(0.99)


def test_a_mode_or_a_whole_row_that_is_gone_is_worse() -> None:
    missing = only(cells(5.0), {"cuda_graph": cell(*STEADY)})
    assert (missing.status, missing.worse(0.99)) == ("missing", True)
    (change,) = of(row("a", **cells(5.0)), row("a", failure="crashed: exit code 1"))
    assert (change.status, change.worse(0.99)) == ("crashed: exit code 1", True)


def test_a_lost_baseline_is_told() -> None:
    lost = only(cells(5.0), cells(5.0) | {"cuda_graph": failed("crashed")})
    assert (lost.status, lost.worse(0.99)) == ("without cuda_graph: crashed", True)
    both = only(cells(5.0), {"cuda_graph": failed("crashed"), "autostream": failed("wrong")})
    assert both.status == "wrong"


def test_what_neither_has_timed_is_no_change() -> None:
    """On the device, for one, where only calls are timed."""
    broken = row("a", **cells(5.0) | {"autostream": failed()})
    assert of(broken, broken) == []
    calls = row("a", **cells(5.0))
    for measured in calls["cells"].values():
        del measured["device_us"]
    assert len(of(calls, calls)) == 1
    assert of(calls, calls, measure="device") == []


@pytest.mark.parametrize(
    ("before", "after", "noisy"),
    [(STEADY, STEADY, False), ((8.0, 10.0, 12.0), STEADY, True), (STEADY, (8, 10, 12), True)],
)
def test_a_scattered_ratio_is_noisy(before: Any, after: Any, noisy: bool) -> None:
    change = only(cells(5.0) | {"autostream": cell(*before)}, cells(5.0) | {"autostream": cell(*after)})
    assert change.noisy is noisy


def measured(median: float, error: float) -> Spread:
    """Of 25 rounds, with a standard error: of normal numbers, 0.929 interquartile ranges by the root of their count."""
    return Spread(median, error * 5 / 0.929, 25)


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        pytest.param(measured(2.0, 0.0), measured(1.95, 0.0), False, id="within the limit"),
        pytest.param(measured(2.0, 0.0), measured(1.93, 0.0), True, id="beyond it"),
        pytest.param(measured(2.0, 0.02), measured(1.89, 0.0), False, id="within three errors of the first"),
        pytest.param(measured(2.0, 0.02), measured(1.87, 0.0), True, id="beyond them"),
        pytest.param(measured(2.0, 0.0), measured(1.89, 0.02), False, id="within three errors of the second"),
        pytest.param(measured(2.0, 0.0), measured(1.87, 0.02), True, id="beyond those"),
        pytest.param(measured(2.0, 0.03), measured(1.80, 0.04), False, id="within three of both, 0.05"),
        pytest.param(measured(2.0, 0.03), measured(1.78, 0.04), True, id="beyond both"),
        pytest.param(measured(2.0, 0.0), measured(1.71, 9.0), False, id="chance explains it"),
        pytest.param(measured(2.0, 0.0), measured(1.69, 9.0), True, id="five times the limit, whatever explains it"),
        pytest.param(measured(2.0, 9.0), measured(1.69, 0.0), True, id="the same in the first"),
    ],
)
def test_what_medians_differ_by_chance_is_no_loss(before: Spread, after: Spread, worse: bool) -> None:
    """3 % are allowed, so worse begins at 1.94 less three standard errors, and at 1.7 at the latest."""
    assert Change("a", "autostream", before, after, "ok").worse(0.03) is worse


@pytest.mark.parametrize(("times", "rounds", "worse"), [(5.0, 18, True), (2.0, 13, True), (2.0, 12, False)])
def test_a_loss_in_most_rounds_does_not_excuse_itself(times: float, rounds: int, worse: bool) -> None:
    """It widens the spread of the rounds; in fewer than half of them it leaves the median where it was."""
    slow = cell(*[5.0 * times] * rounds, *[5.0] * (25 - rounds))
    before = {"cuda_graph": cell(*[10.0] * 25), "autostream": cell(*[5.0] * 25)}
    change = only(before, before | {"autostream": slow})
    assert change.noisy
    assert change.worse(0.03) is worse


def test_modes_are_chosen_by_how_they_start() -> None:
    both = row("a", **cells(5.0), autostream_eager=cell(*STEADY), compile_default=cell(*STEADY))
    assert [change.mode for change in of(both, both)] == ["autostream", "autostream_eager"]
    assert [change.mode for change in of(both, both, "")] == ["autostream", "autostream_eager", "compile_default"]
    assert [change.mode for change in of(both, both, "eager")] == []
