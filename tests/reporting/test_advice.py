"""Rules, each with the numbers that bring it about and those that do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autostream.ir import FORK, Decision, Launch, Limit, OpGraph, Schedule
from autostream.reporting.explanation import explanation_of
from autostream.reporting.report import Report
from autostream.reporting.summary import summary_of
from tests.reporting.reports import CHOSEN, COSTS, DIAMOND, GRAPHED, REPORT
from tests.scheduling.graphs import costs_of, graph_of, profile_with


def advice(**fields: Any) -> tuple[str, ...]:
    report: Report = replace(REPORT, **fields)
    found = explanation_of(report, summary_of(report))
    assert found is not None
    return found.advice


def with_shares(sm_share: float, bandwidth_share: float = 0.0) -> Any:
    return costs_of(DIAMOND, {name: cost.duration_us for name, cost in COSTS.items()}, sm_share, bandwidth_share)


def starting(found: tuple[str, ...], words: str) -> list[str]:
    return [each for each in found if each.startswith(words)]


def test_what_is_well_scheduled_is_left_alone() -> None:
    nothing = ("nothing: no schedule of these ops would be more than 1.00× as fast",)
    assert advice() == advice(profile=profile_with(replay_us=9.0)) == nothing


def test_what_is_left_to_gain_is_what_the_ceilings_say() -> None:
    """A chain of 12 µs, but 18 µs on one stream, which runs: 1.5 times, however slow the rejected schedule is."""
    slow = replace(CHOSEN, schedule=replace(CHOSEN.schedule, join_waits=("d",)))
    profile = profile_with(cross_stream_edge_us=30.0, join_us=30.0)
    assert advice(chosen=GRAPHED, candidates=(GRAPHED, slow), profile=profile) == (
        "nothing: no schedule of these ops would be more than 1.50× as fast",
    )


def test_an_op_that_no_graph_can_hold_is_named_with_its_reason() -> None:
    first = Decision("d", "not captured", "aten.item: it synchronizes (net.py:3: y.item())")
    (said,) = advice(refusals=(first,))
    assert (
        said == "take d out of the model, so that it can be captured: aten.item: it synchronizes (net.py:3: y.item())"
    )
    (said,) = advice(refusals=(first, replace(first, op="e"), Decision("", "not captured", "out of memory")))
    assert said.startswith("take d (and 1 more like it) out of the model")


GAPS = profile_with(same_stream_edge_us=1.0, cross_stream_edge_us=1.0)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"level": "inductor"}, id="they are fused"),
        pytest.param({"graph": replace(DIAMOND, device="cpu")}, id="on the CPU there is no fusing"),
        pytest.param({"refusals": (Decision("", "not fused", "it takes longer"),)}, id="it was tried"),
    ],
)
def test_fusing_is_not_advised_where_it_is_of_no_use(fields: dict[str, Any]) -> None:
    assert not starting(advice(**{"profile": GAPS, "refusals": (), **fields}), "kernels=")


@pytest.mark.parametrize(
    ("sm_share", "bandwidth_share", "use"),
    [(0.8, 0.1, "80% of the multiprocessors"), (0.1, 0.9, "90% of the memory bandwidth")],
)
def test_a_full_device_calls_for_less_work(sm_share: float, bandwidth_share: float, use: str) -> None:
    (said,) = starting(advice(costs=with_shares(sm_share, bandwidth_share)), "less work rather than more streams")
    assert said.endswith(f": one after the other, the ops use {use}")
    assert not starting(advice(costs=with_shares(0.65, 0.65)), "less work"), "then there is room"


def test_a_chain_leaves_room_for_others() -> None:
    """18 µs of work on a tenth of the device: 15 % of the 12 µs in line."""
    (said,) = starting(advice(costs=with_shares(0.1)), "a larger batch")
    assert "the chain keeps the device 15% busy" in said
    alone = advice(costs=with_shares(0.1), chosen=GRAPHED, candidates=(GRAPHED,))
    assert starting(alone, "a larger batch"), "without several streams the chain is all there is"
    assert not starting(advice(costs=with_shares(0.25, 0.6)), "a larger batch"), "90 % busy is no room"


def wide(streams: int) -> tuple[OpGraph, Schedule]:
    """Four independent ops over as many streams as there are to be."""
    graph = graph_of((), names="abcd")
    launches = [Launch(name, at % streams, waits=(FORK,) * (0 < at < streams)) for at, name in enumerate("abcd")]
    side = tuple(launch.op for launch in launches if launch.stream)[-streams + 1 :]
    return graph, Schedule("test", streams, tuple(launches), join_waits=side)


def test_ops_that_wait_for_their_turn_call_for_more_streams() -> None:
    """Streams are always busy in this schedule, so no turns are lost; an uneven one loses them."""
    graph, _ = wide(2)
    uneven = Schedule(
        "test", 2, (Launch("a", 0), Launch("b", 1, waits=(FORK,)), Launch("c", 0), Launch("d", 0)), join_waits=("b",)
    )
    chosen = replace(CHOSEN, schedule=uneven)
    fields = {"graph": graph, "costs": costs_of(graph, 9.0), "chosen": chosen, "candidates": (chosen,)}
    assert starting(advice(**fields), "streams=") == [
        "streams=4: ops wait for their turn on 2, and up to 4 are independent"
    ]
    more = replace(CHOSEN, schedule=wide(3)[1])
    assert not starting(advice(**fields | {"candidates": (chosen, more)}), "streams="), "more were tried"


def test_what_did_not_fit_into_memory_calls_for_more() -> None:
    refusal = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    refused = replace(CHOSEN, predicted_us=10.5, refusal=refusal, limit=Limit.DEVICE)
    assert starting(advice(candidates=(GRAPHED, CHOSEN, refused)), "more free memory") == [
        "more free memory: critical_path over 2 streams did not fit, and is predicted to take 2.5 µs less"
    ]
    assert not starting(advice(candidates=(CHOSEN, replace(refused, predicted_us=13.5))), "more free memory")
    assert not starting(advice(candidates=(CHOSEN, replace(refused, limit=None))), "more free memory")


def test_what_there_was_no_time_to_measure_calls_for_more() -> None:
    refused = replace(CHOSEN, predicted_us=10.5, refusal="not measured", limit=Limit.TIME)
    assert starting(advice(candidates=(GRAPHED, CHOSEN, refused)), "a larger tuning_seconds") == [
        "a larger tuning_seconds: there was no time to measure critical_path over 2 streams, "
        "which is predicted to take 2.5 µs less"
    ]
    assert not starting(advice(candidates=(CHOSEN, replace(refused, predicted_us=13.5))), "a larger tuning_seconds")


def test_what_the_memory_budget_keeps_out_calls_for_a_larger_one() -> None:
    """One stream takes 3.1 MB, and 4.5 MB are 1.4516 times that."""
    refused = replace(CHOSEN, predicted_us=10.5, refusal="needs 4.5 MB", limit=Limit.BUDGET)
    for incomplete, needed in ((False, "that"), (True, "at least that")):
        refused = replace(refused, incomplete=incomplete)
        assert starting(advice(candidates=(GRAPHED, CHOSEN, refused)), "memory_budget=") == [
            f"memory_budget=1.46: critical_path over 2 streams needs {needed}, and is predicted to take 2.5 µs less"
        ]
    for predicted_us in (12.8, 13.0):
        slower = replace(refused, predicted_us=predicted_us)
        assert not starting(advice(candidates=(GRAPHED, CHOSEN, slower)), "memory_budget=")


@pytest.mark.parametrize(("measured_us", "times"), [(26.0, "2.00"), (6.5, "0.50"), (14.0, ""), (None, "")])
def test_a_time_far_from_its_estimate_is_no_basis(measured_us: float | None, times: str) -> None:
    """13 µs were predicted."""
    chosen = replace(CHOSEN, measured_us=measured_us)
    found = starting(advice(chosen=chosen), 'costs="measured"')
    assert bool(found) == bool(times)
    assert all(f"it takes {times} times what was estimated" in said for said in found)
    exact = {name: replace(cost, source="measured") for name, cost in COSTS.items()}
    assert not starting(advice(chosen=chosen, costs=exact), 'costs="measured"'), "they are measured already"
