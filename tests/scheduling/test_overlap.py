"""Which ops run at the same time, on timelines that are easy to draw."""

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
ADJACENT = Timeline((Slice("a", 0, 0.0, 1.0), Slice("b", 0, 1.0, 2.0)))


def test_the_longest_overlaps_come_first_and_mention_no_op_twice() -> None:
    assert longest_overlaps(DRAWN, most=9) == (Overlap("b", 1, 5.0, {"a": 4.0, "d": 1.0, "c": 1.0}),)
    pairs = Timeline(tuple(Slice(name, at % 2, at // 2 * 9.0, at // 2 * 9.0 + 5.0) for at, name in enumerate("abcdef")))
    assert [overlap.op for overlap in longest_overlaps(pairs, most=2)] == ["a", "c"]


def test_adjacent_ops_and_empty_slices_do_not_overlap() -> None:
    """Fork and join are slices without a length."""
    assert longest_overlaps(ADJACENT, most=9) == ()
    assert longest_overlaps(Timeline((Slice("a", 0, 0.0, 2.0), Slice("mark", 0, 1.0, 1.0))), most=9) == ()


def test_demands_are_the_sums_of_shares() -> None:
    costs = {name: OpCost(1.0, 0.5, 0.25, "roofline") for name in "abcd"}
    marked = Timeline((*DRAWN.slices, Slice("mark", 0, 1.0, 1.0), Slice("c", 0, 1.0, 1.0)))
    for timeline in (DRAWN, marked):
        found = [(d.at_us, 2 * d.multiprocessors, 4 * d.bandwidth) for d in demands(timeline, costs)]
        assert found == [(0, 1, 1), (2, 2, 2), (5, 3, 3), (6, 1, 1), (7, 2, 2), (8, 1, 1), (10, 0, 0)]
    assert demands(ADJACENT, costs)[1] == Demand(1.0, 0.5, 0.25)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=8))
def test_concurrency_adds_up_to_the_makespan_and_to_the_durations(spans: list[tuple[int, int]]) -> None:
    slices = tuple(Slice(f"n{at}", at, float(start), float(start + us)) for at, (start, us) in enumerate(spans))
    spent = concurrency(Timeline(slices))
    assert sum(spent.values()) == Timeline(slices).makespan_us
    assert sum(count * us for count, us in spent.items()) == pytest.approx(sum(us for _, us in spans))
    for overlap in longest_overlaps(Timeline(slices), most=99):
        assert max(overlap.beside.values()) <= overlap.shared_us <= spans[int(overlap.op[1:])][1]
