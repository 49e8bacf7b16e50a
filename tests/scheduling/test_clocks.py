"""Vector clocks say what the transitive closure says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import FORK, Launch, Schedule
from autostream.scheduling.lifetimes import NEVER, clocks
from tests.scheduling.brute_force import conflict_graphs, happens_before, schedules

#   stream 0:  a(0) ───────────── d(3)
#   stream 1:       b(1) ── c(2) ─▶ d
SCHEDULE = Schedule("mine", 2, (Launch("a", 0), Launch("b", 1, (FORK,)), Launch("c", 1), Launch("d", 0, ("c",))))


def test_a_clock_is_what_the_stream_had_seen_and_what_is_waited_for() -> None:
    """Of stream 1, d has seen c, and so b; c has seen nothing of stream 0."""
    assert list(clocks(SCHEDULE)) == [(NEVER, NEVER), (NEVER, NEVER), (NEVER, 1), (0, 2)]


def test_no_launches_have_no_clocks() -> None:
    assert list(clocks(Schedule("mine", 3, ()))) == []


@given(data=st.data())
def test_a_launch_has_happened_if_the_clock_of_its_stream_has_come_as_far(data: st.DataObject) -> None:
    graph = data.draw(conflict_graphs())
    schedule = data.draw(schedules(graph))
    before = happens_before(schedule)
    for launch, seen in zip(schedule.launches, clocks(schedule), strict=True):
        for position, other in enumerate(schedule.launches):
            assert (seen[other.stream] >= position) == ((other.op, launch.op) in before)
