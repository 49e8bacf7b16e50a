"""What holds the memory, and what the budget costs; one stream takes 3.1 MB in the report made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import FORK, Arena, Candidate, Launch, Limit, Schedule
from autostream.reporting.memory import Holder, KeptOut, Memory, kept_out, memory_of
from autostream.scheduling.peak import given_bytes
from autostream.tuning.budget import SLACK_BYTES, Budget
from tests.reporting.reports import CHOSEN, DIAMOND, GRAPHED, REFUSED, REPORT, with_source
from tests.scheduling.graphs import graph_of


def test_holders_of_all_pools_are_told_by_size_with_the_op_that_makes_them() -> None:
    """Op c shares the arena with b, which needs more of it; d is on the caller's stream, a on the other.

    stream 0   b ── c ── d
    stream 1   a
    """
    graph = with_source(graph_of("b-c c-d", names="abcd"), "b", "net.py:3: y = f(x)")
    sizes = {"a": 300, "b": 600, "c": 100, "d": 400}
    graph = replace(graph, storages={n: replace(graph.storages[n], bytes=size) for n, size in sizes.items()})
    launches = (Launch("b", 0), Launch("a", 1, waits=(FORK,)), Launch("c", 0), Launch("d", 0))
    arena = Arena(1024, {"b": 0, "c": 600})
    chosen = Candidate(
        Schedule("test", 2, launches, ("a",), arena=arena), captured=True, predicted_us=1.0, memory_bytes=9
    )
    report = replace(REPORT, graph=graph, chosen=chosen, candidates=(replace(GRAPHED, memory_bytes=7), chosen))
    assert memory_of(report, graph, chosen) == Memory(
        bytes=9,
        sequential_bytes=7,
        workspace_bytes=2 * 32 * 2**20,
        holders=(
            Holder("b", 600, "arena", "b", "net.py:3: y = f(x)"),
            Holder("d", 400, "stream 0", "d", ""),
            Holder("a", 300, "stream 1", "a", ""),
            Holder("c", 100, "arena", "c", ""),
        ),
    )


def test_cublas_takes_more_on_hopper_than_elsewhere() -> None:
    found = []
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "Tesla T4"):
        report = replace(REPORT, profile=replace(REPORT.profile, name=name))
        found.append(memory_of(report, DIAMOND, CHOSEN).workspace_bytes // CHOSEN.schedule.streams)
    assert found == [32 * 2**20, 8 * 2**20 + 128 * 2**10, 8 * 2**20 + 128 * 2**10]


WHY = "needs 4.5 MB, the budget is 3.4 MB: 1.1 × the 3.1 MB of one stream (memory_budget)"
TOO_LARGE = replace(REFUSED, predicted_us=10.5, refusal=WHY, limit=Limit.BUDGET)


def test_the_best_that_is_too_large_is_compared_with_the_best_that_is_not() -> None:
    """Whatever was measured: what was not built has only a prediction."""
    larger = replace(TOO_LARGE, predicted_us=12.0)
    assert kept_out(replace(REPORT, candidates=(GRAPHED, larger, TOO_LARGE, CHOSEN))) == KeptOut(
        "path_cover over 2 streams", 10.5, 13.0, WHY, 1.46, incomplete=False
    )


@pytest.mark.parametrize("predicted_us", [13.0, 14.0])
def test_a_budget_that_keeps_nothing_faster_out_costs_nothing(predicted_us: float) -> None:
    assert (
        kept_out(replace(REPORT, candidates=(GRAPHED, CHOSEN, replace(TOO_LARGE, predicted_us=predicted_us)))) is None
    )


@given(one=st.integers(0, 10**9), more=st.integers(1, 10**9))
def test_the_budget_that_is_named_lets_it_in(one: int, more: int) -> None:
    alone, large = replace(GRAPHED, memory_bytes=one), replace(TOO_LARGE, memory_bytes=one + more)
    found = kept_out(replace(REPORT, candidates=(alone, large)))
    assert found is not None
    assert REPORT.graph is not None
    given = given_bytes(REPORT.graph)
    assert Budget(found.budget, one, given).excess(one + more) == ""
    just_too_small = found.budget - 0.02
    forgiven = isinstance(found.budget, int) or more <= SLACK_BYTES
    assert forgiven or Budget(just_too_small, one, given).excess(one + more)
