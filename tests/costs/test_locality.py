"""What a program goes through in memory, and how much of that a cache loses. Ops, storages and sizes by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.costs.locality import footprint_bytes, missed_share
from autostream.ir import OpGraph, Role, Storage
from tests.scheduling.graphs import graph_of, profile_with, random_graphs

# a ── b ── c     each writes 1024 bytes; x_in, which a reads, has 1024 too
CHAIN = graph_of("a-b b-c", outputs="c")


def holding(graph: OpGraph, role: Role, size: int) -> OpGraph:
    """The graph with one more storage, which is given to it."""
    return replace(graph, storages={**graph.storages, "w": Storage("w", role, size, ("w",))})


def test_a_program_goes_through_what_it_is_given_and_what_it_holds_at_a_time() -> None:
    """x_in; then a and b, b and c: a's memory is c's."""
    assert footprint_bytes(CHAIN) == 1024 + 2 * 1024


def test_what_is_held_side_by_side_adds_up() -> None:
    """Until d, a is needed too: a, b and c are there at once, and d has the memory of b.

    a ─┬─ b ── c ─┬─ d
       └──────────┘
    """
    assert footprint_bytes(graph_of("a-b b-c a-d c-d", names="abcd", outputs="d")) == 1024 + 3 * 1024


@pytest.mark.parametrize("role", [Role.PARAMETER, Role.INPUT, Role.CONSTANT])
def test_what_is_given_to_a_program_counts_whatever_it_is(role: Role) -> None:
    assert footprint_bytes(holding(CHAIN, role, 5000)) == footprint_bytes(CHAIN) + 5000


# Of a cache of 10,000 bytes, half is kept, and of a program of 8,000 bytes nothing.
CACHE = profile_with(cache_bytes=10_000)


@pytest.mark.parametrize(("size", "share"), [(0, 0.0), (5000, 0.0), (6500, 0.5), (8000, 1.0), (10**9, 1.0)])
def test_what_is_missed_rises_from_half_of_the_cache_on(size: int, share: float) -> None:
    weights = holding(OpGraph({}, (), {}, (), "cuda:0"), Role.PARAMETER, size)
    assert missed_share(weights, CACHE) == pytest.approx(share)


def test_a_cache_of_unknown_size_is_taken_to_hold_everything() -> None:
    assert missed_share(holding(CHAIN, Role.PARAMETER, 10**12), profile_with()) == 0.0


@given(random_graphs(), st.integers(0, 50_000), st.integers(1, 50_000), st.integers(1, 50_000))
def test_a_larger_program_misses_no_less_and_a_larger_cache_no_more(
    graph: OpGraph, size: int, cache: int, more: int
) -> None:
    profile, larger = profile_with(cache_bytes=cache), profile_with(cache_bytes=cache + more)
    small, large = holding(graph, Role.PARAMETER, size), holding(graph, Role.PARAMETER, size + more)
    assert 0 <= missed_share(small, profile) <= missed_share(large, profile) <= 1
    assert missed_share(small, larger) <= missed_share(small, profile)
