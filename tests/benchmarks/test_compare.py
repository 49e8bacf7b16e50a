"""What counts as worse: a loss of speed beyond the limit, or of the time altogether."""

from __future__ import annotations

from typing import Any

import pytest

from autostream.bench.ratios import Spread
from benchmarks.compare import Change, changes
from benchmarks.result import ResultError
from tests.benchmarks.results import cell, failed, result, row

STEADY = (10.0, 10.0, 10.0)


def of(before: dict[str, Any], after: dict[str, Any], modes: str = "autostream", measure: Any = "call") -> list[Change]:
    return list(changes(before, after, modes, "cuda_graph", measure))


def only(before: dict[str, Any], after: dict[str, Any]) -> Change:
    """What became of one row's autostream."""
    (change,) = of(result(row("a", **before)), result(row("a", **after)))
    return change


def cells(us: float) -> dict[str, Any]:
    return {"cuda_graph": cell(*STEADY), "autostream": cell(us, us, us)}


def test_ratios_to_the_baseline_are_compared_and_not_times() -> None:
    """All twice as slow, as on another day, is no change."""
    change = only(cells(5.0), {"cuda_graph": cell(20.0, 22.0, 24.0), "autostream": cell(10.0, 11.0, 12.0)})
    assert (change.row, change.mode, change.status) == ("a", "autostream", "ok")
    assert change.before == change.after == Spread(2.0, 0.0)
    assert change.share == 0.0
    assert not change.worse(0.0)


@pytest.mark.parametrize(("after", "share"), [(8.0, -0.375), (4.0, 0.25)])
def test_the_share_is_that_of_the_speed(after: float, share: float) -> None:
    assert only(cells(5.0), cells(after)).share == pytest.approx(share)


@pytest.mark.parametrize(("limit", "worse"), [(0.19, True), (0.2, False), (0.21, False)])
def test_worse_is_what_lost_more_than_the_limit(limit: float, worse: bool) -> None:
    change = only(cells(8.0), cells(10.0))
    assert change.share == -0.2 or pytest.approx(-0.2) == change.share
    assert change.worse(limit) is worse


@pytest.mark.parametrize("status", ["wrong", "failed", "crashed", "timed out"])
def test_a_lost_time_is_worse_whatever_the_limit(status: str) -> None:
    change = only(cells(5.0), cells(5.0) | {"autostream": failed(status)})
    assert (change.status, change.after, change.share) == (status, None, None)
    assert change.worse(0.99)


def test_a_mode_or_a_whole_row_that_is_gone_is_worse() -> None:
    missing = only(cells(5.0), {"cuda_graph": cell(*STEADY)})
    assert (missing.status, missing.worse(0.99)) == ("missing", True)
    (change,) = of(result(row("a", **cells(5.0))), result(row("a", failure="crashed: exit code 1")))
    assert (change.status, change.worse(0.99)) == ("crashed: exit code 1", True)


def test_a_lost_baseline_is_told() -> None:
    lost = only(cells(5.0), cells(5.0) | {"cuda_graph": failed("crashed")})
    assert (lost.status, lost.worse(0.99)) == ("without cuda_graph: crashed", True)
    both = only(cells(5.0), {"cuda_graph": failed("crashed"), "autostream": failed("wrong")})
    assert both.status == "wrong"


def test_what_had_no_time_cannot_get_worse() -> None:
    for after in (cells(5.0), cells(5.0) | {"autostream": failed()}):
        change = only(cells(5.0) | {"autostream": failed()}, after)
        assert change.before is None
        assert change.share is None
        assert not change.worse(0.0)


@pytest.mark.parametrize(
    ("before", "after", "noisy"),
    [(STEADY, STEADY, False), ((8.0, 10.0, 12.0), STEADY, True), (STEADY, (8, 10, 12), True)],
)
def test_a_scattered_ratio_is_noisy(before: Any, after: Any, noisy: bool) -> None:
    change = only(cells(5.0) | {"autostream": cell(*before)}, cells(5.0) | {"autostream": cell(*after)})
    assert change.noisy is noisy


def test_a_lost_time_may_have_been_noisy() -> None:
    assert only(cells(5.0) | {"autostream": cell(8.0, 10.0, 12.0)}, cells(5.0) | {"autostream": failed()}).noisy
    assert not only(cells(5.0), cells(5.0) | {"autostream": failed()}).noisy


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        (Spread(2.0, 0.4), Spread(1.55, 0.0), False),
        (Spread(2.0, 0.4), Spread(1.53, 0.0), True),
        (Spread(2.0, 0.0), Spread(1.55, 0.31), False),
        (Spread(2.0, 0.1), Spread(1.55, 0.31), False),
        (Spread(2.0, 0.0), Spread(1.53, 0.306), True),
        (Spread(2.0, 0.05), Spread(1.92, 0.0), True),
    ],
)
def test_what_is_noisy_is_worse_only_beyond_its_spread(before: Spread, after: Spread, worse: bool) -> None:
    """The larger of both spreads is a fifth, so with 3 % allowed, worse begins at 23 %; the last one is not noisy."""
    assert Change("a", "autostream", before, after, "ok").worse(0.03) is worse


def test_two_suites_are_not_compared() -> None:
    with pytest.raises(ResultError, match="results of quick and training do not compare: they are two suites"):
        of(result(row("a", **cells(5.0))), result(row("a", **cells(5.0)), suite="training"))


def test_what_only_the_newer_has_is_not_compared() -> None:
    """New rows and modes are no news of old ones; neither is the same model at another batch size."""
    before = result(row("a", **cells(5.0)), row("b", 8, **cells(5.0)), row("gone", **cells(5.0)))
    after = result(
        row("new", **cells(9.0)), row("b", 8, **cells(9.0), autostream_new=cell(1, 1)), row("a", 8, **cells(9.0))
    )
    found = [(change.row, change.mode, change.status, change.worse(0.99)) for change in of(before, after)]
    assert found == [
        ("a", "autostream", "missing", True),
        ("b ×8", "autostream", "ok", False),
        ("gone", "autostream", "missing", True),
    ]


def test_modes_are_chosen_by_how_they_start() -> None:
    both = result(row("a", **cells(5.0), autostream_eager=cell(*STEADY), compile_default=cell(*STEADY)))
    assert [change.mode for change in of(both, both)] == ["autostream", "autostream_eager"]
    assert [change.mode for change in of(both, both, "")] == ["autostream", "autostream_eager", "compile_default"]
    assert [change.mode for change in of(both, both, "eager")] == []


def test_either_time_is_compared() -> None:
    slower = cells(5.0)
    slower["autostream"]["device_us"] = [10.0, 10.0, 10.0]
    before, after = result(row("a", **cells(5.0))), result(row("a", **slower))
    assert [change.share for change in of(before, after)] == [0.0]
    assert [change.share for change in of(before, after, measure="device")] == [-0.75]
