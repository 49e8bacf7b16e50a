"""The memory that a program accesses, and the share of its reads that misses a cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autostream.costs.locality import footprint_bytes, missed_share
from autostream.ir import OpGraph, Role, Storage
from tests.scheduling.graphs import graph_of, profile_with

# a ── b ── c     each writes 1024 bytes; the argument x_in, which a reads, has 1024 too
CHAIN = graph_of("a-b b-c", outputs="c")


def holding(graph: OpGraph, role: Role, size: int) -> OpGraph:
    """The graph with one more argument."""
    return replace(graph, storages={**graph.storages, "w": Storage("w", role, size, ("w",))})


def test_the_footprint_is_arguments_and_the_peak_of_intermediates() -> None:
    """In the second graph a, b and c are live at once:

    a ─┬─ b ── c ─┬─ d
       └──────────┘
    """
    assert footprint_bytes(CHAIN) == 1024 + 2 * 1024
    assert footprint_bytes(graph_of("a-b b-c a-d c-d", names="abcd", outputs="d")) == 1024 + 3 * 1024
    for role in (Role.PARAMETER, Role.INPUT, Role.CONSTANT):
        assert footprint_bytes(holding(CHAIN, role, 5000)) == footprint_bytes(CHAIN) + 5000


@pytest.mark.parametrize(("size", "share"), [(0, 0.0), (5000, 0.0), (6500, 0.5), (8000, 1.0), (10**9, 1.0)])
def test_the_missed_share_rises_from_half_of_the_cache_to_four_fifths(size: int, share: float) -> None:
    weights = holding(OpGraph({}, (), {}, (), "cuda:0"), Role.PARAMETER, size)
    assert missed_share(weights, profile_with(cache_bytes=10_000)) == pytest.approx(share)
    assert missed_share(weights, profile_with()) == 0.0, "a cache of unknown size"
