"""What runs beside what, on timelines that are easy to draw."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import OpCost, Slice, Timeline
from autostream.scheduling.overlap import Demand, Overlap, concurrency, demands, longest_overlaps

DRAWN = Timeline((Slice("a", 0, 0.0, 6.0), Slice("b", 1, 2.0, 8.0), Slice("c", 0, 7.0, 10.0), Slice("d", 2, 5.0, 6.0)))
"""
           0  1  2  3  4  5  6  7  8  9  10
stream 0   aaaaaaaaaaaaaaaaaa   ccccccccc
stream 1         bbbbbbbbbbbbbbbbbb
stream 2                  ddd
"""


def test_the_op_that_has_company_longest_comes_first_and_its_company_is_told_of_with_it() -> None:
    assert longest_overlaps(DRAWN, most=9) == (Overlap("b", 1, 5.0, {"a": 4.0, "d": 1.0, "c": 1.0}),)


def test_no_more_are_told_of_than_asked_for() -> None:
    apart = Timeline(tuple(Slice(name, at % 2, at // 2 * 9.0, at // 2 * 9.0 + 5.0) for at, name in enumerate("abcdef")))
    assert [overlap.op for overlap in longest_overlaps(apart, most=2)] == ["a", "c"]


def test_an_op_alone_has_no_company() -> None:
    assert longest_overlaps(Timeline((Slice("a", 0, 0.0, 1.0), Slice("b", 0, 1.0, 2.0))), most=9) == ()
    assert longest_overlaps(Timeline(()), most=9) == ()


def test_moments_are_no_company() -> None:
    """Fork and join are slices without a length."""
    assert longest_overlaps(Timeline((Slice("a", 0, 0.0, 2.0), Slice("mark", 0, 1.0, 1.0))), most=9) == ()


def test_how_many_run_at_once() -> None:
    assert concurrency(DRAWN) == {1: 5.0, 2: 4.0, 3: 1.0}
    assert concurrency(Timeline((Slice("a", 0, 0.0, 1.0), Slice("b", 0, 3.0, 4.0)))) == {0: 2.0, 1: 2.0}
    assert concurrency(Timeline(())) == {}


def test_what_runs_at_once_asks_for_the_sum_and_moments_ask_for_nothing() -> None:
    costs = {name: OpCost(1.0, 0.5, 0.25, "roofline") for name in "abcd"}
    marked = Timeline((*DRAWN.slices, Slice("mark", 0, 1.0, 1.0), Slice("c", 0, 1.0, 1.0)))
    for timeline in (DRAWN, marked):
        asked = demands(timeline, costs)
        assert [(d.at_us, 2 * d.multiprocessors) for d in asked] == [
            (0, 1),
            (2, 2),
            (5, 3),
            (6, 1),
            (7, 2),
            (8, 1),
            (10, 0),
        ]
        assert all(d.bandwidth == d.multiprocessors / 2 for d in asked)
    follow = Timeline((Slice("a", 0, 0.0, 1.0), Slice("b", 0, 1.0, 2.0)))
    assert demands(follow, costs)[1] == Demand(1.0, 0.5, 0.25), "what ends at a moment asks for nothing from then on"


slices = st.builds(lambda start, length: (start, start + length), st.integers(0, 20), st.integers(0, 6))


@given(st.lists(slices, max_size=8))
def test_time_is_spent_once(spans: list[tuple[int, int]]) -> None:
    timeline = Timeline(tuple(Slice(f"n{at}", at, float(start), float(end)) for at, (start, end) in enumerate(spans)))
    spent = concurrency(timeline)
    assert sum(spent.values()) == timeline.makespan_us
    assert sum(count * us for count, us in spent.items()) == pytest.approx(sum(end - start for start, end in spans))
    for overlap in longest_overlaps(timeline, most=99):
        start, end = spans[int(overlap.op[1:])]
        assert max(overlap.beside.values()) <= overlap.shared_us <= end - start
