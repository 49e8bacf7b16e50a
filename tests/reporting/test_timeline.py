"""Trace files; expectations follow from the drawing in reports.py, and the fields from the format's description."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import FORK, JOIN, Candidate, Launch, OpGraph, Schedule, Slice, Timeline
from autostream.reporting.report import Report
from autostream.reporting.timeline import events, render
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.simulate import simulate
from autostream.scheduling.synchronize import synchronize
from tests.reporting.reports import CHOSEN, COSTS, DIAMOND, ONE_STREAM, PLAIN, REPORT, with_source
from tests.scheduling.graphs import profile_with, random_costs, random_graphs

FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"cat": str, "dur": (int, float)},
    "i": {"cat": str, "s": str},
    "s": {"cat": str, "id": int},
    "f": {"cat": str, "id": int, "bp": str},
    "C": {"cat": str},
    "M": {},
}
"""What each phase has besides: complete, instant, flow start, flow finish, counter, metadata."""

COMMON: dict[str, type | tuple[type, ...]] = {
    "ph": str, "name": str, "pid": int, "tid": int, "ts": (int, float), "args": dict,
}  # fmt: skip

METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"} | {
    "thread_sort_index": "sort_index"
}


def checked(report: Report) -> list[dict[str, Any]]:
    """The events of a report's file, each with the fields that the format documents, and no others."""
    trace = json.loads(render(report))
    assert trace.keys() == {"displayTimeUnit", "otherData", "traceEvents"}
    assert trace["displayTimeUnit"] in {"ms", "ns"}
    found: list[dict[str, Any]] = trace["traceEvents"]
    for event in found:
        fields = COMMON | FIELDS[event["ph"]]
        assert event.keys() == fields.keys()
        for name, kind in fields.items():
            assert isinstance(event[name], kind), (name, event)
        assert event["ts"] >= 0
        assert min(event["pid"], event["tid"]) >= 1, "Perfetto takes 0 for the idle process of Linux"
        assert math.isfinite(event["ts"])
        assert event.get("dur", 0) >= 0
        assert event.get("bp", "e") == "e"
        assert event.get("s", "t") in {"g", "p", "t"}
        if event["ph"] == "M":
            assert event["args"].keys() == {METADATA[event["name"]]}
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    require_no_overlap(found)
    require_lanes_of_their_own(found)
    require_arrows_within_slices(found)
    return found


def require_no_overlap(found: list[dict[str, Any]]) -> None:
    """Slices of a lane that overlap are drawn as calls within calls, or not at all."""
    for start_ns, dur_ns in itertools.product([as_written, as_cut], repeat=2):
        until: dict[int, int] = {}
        for event in sorted(of(found, "X"), key=lambda e: (e["ts"], e["dur"])):
            start = start_ns(event["ts"])
            assert start >= until.get(event["tid"], 0), event
            until[event["tid"]] = start + dur_ns(event["dur"])


def as_written(time_us: float) -> int:
    return round(time_us * 1000.0)


def as_cut(time_us: float) -> int:
    """A time in ns, as some versions of Perfetto read it (CoerceToTs in its importer of JSON)."""
    return int(time_us * 1000.0)


def require_lanes_of_their_own(found: list[dict[str, Any]]) -> None:
    """Perfetto has had one name for all lanes of a number, whatever their process."""
    process_of: dict[int, int] = {}
    assert all(process_of.setdefault(event["tid"], event["pid"]) == event["pid"] for event in found)


def require_arrows_within_slices(found: list[dict[str, Any]]) -> None:
    """Each begins once and ends once, in slices of one process that are there at that time."""
    starts, ends = ({event["id"]: event for event in of(found, phase)} for phase in "sf")
    assert starts.keys() == ends.keys()
    assert len(of(found, "s")) == len(starts)
    for number, start in starts.items():
        end = ends[number]
        assert (start["cat"], start["name"], start["pid"]) == (end["cat"], end["name"], end["pid"])
        for event in (start, end):
            lane = [each for each in of(found, "X") if (each["pid"], each["tid"]) == (event["pid"], event["tid"])]
            for ns in (as_written, as_cut):
                at = ns(event["ts"])
                around = [s for s in lane if ns(s["ts"]) <= at < ns(s["ts"]) + ns(s["dur"]) or ns(s["ts"]) == at]
                assert around, event


def of(found: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in found if event["ph"] == phase]


def lanes(found: list[dict[str, Any]], process: int) -> dict[str, list[tuple[str, float, float]]]:
    """By the name of a lane, its slices as (op, start, duration)."""
    named = [event for event in of(found, "M") if event["name"] == "thread_name" and event["pid"] == process]
    return {
        lane["args"]["name"]: [
            (event["name"], event["ts"], event["dur"])
            for event in of(found, "X")
            if (event["pid"], event["tid"]) == (process, lane["tid"])
        ]
        for lane in named
    }


def test_slices_that_follow_each_other_do_not_overlap_however_their_times_are_read() -> None:
    """0.57 µs times 1000 is less than 570 in floating point."""
    times = {"a": (0.0, 0.29), "b": (0.29, 0.57), "d": (0.57, 1.001), "c": (1.001, 1.13), "e": (1.13, 2.26)}
    timeline = Timeline(tuple(Slice(name, 0, *time) for name, time in times.items()))
    chosen = replace(CHOSEN, schedule=ONE_STREAM)
    drawn = lanes(checked(replace(REPORT, timeline=timeline, chosen=chosen)), 1)["stream 0"]
    assert [name for name, *_ in drawn] == [*times]
    lost = [round(end - start - dur, 6) for (start, end), (_, _, dur) in zip(times.values(), drawn, strict=True)]
    assert {*lost} == {0.0, 0.001}, "where one was too long by a ns, it lost that"


def test_the_measured_timeline_is_a_process_of_its_own() -> None:
    assert REPORT.timeline is not None
    slower = tuple(replace(s, start_us=2 * s.start_us, end_us=2 * s.end_us) for s in REPORT.timeline.slices)
    found = checked(replace(REPORT, measured=Timeline(slower, "measured")))
    names = {e["pid"]: e["args"]["name"] for e in of(found, "M") if e["name"] == "process_name"}
    assert names == {1: "predicted", 2: "measured"}
    assert lanes(found, 2)["stream 1"] == [("d", 6.0, 12.0)]
    assert len({event["id"] for event in of(found, "s")}) == 4, "arrows of two processes have different numbers"


def test_fork_and_join_are_marks() -> None:
    launches = (Launch("a", 0), Launch("b", 1, waits=(FORK,)))
    ops = {name: DIAMOND.ops[name] for name in "ab"}
    graph = OpGraph(ops, (), DIAMOND.storages, (), "cuda:0")
    times = {FORK: (0, 0, 0), "a": (0, 0, 2), "b": (1, 1, 5), JOIN: (0, 6, 6)}
    timeline = Timeline(tuple(Slice(name, at, float(start), float(end)) for name, (at, start, end) in times.items()))
    chosen = Candidate(Schedule("drawn", 2, launches, join_waits=("b",)), captured=True, predicted_us=6.0)
    found = checked(replace(REPORT, graph=graph, chosen=chosen, timeline=timeline))
    assert [(e["name"], e["tid"], e["ts"]) for e in of(found, "i")] == [("fork", 1, 0.0), ("join", 1, 6.0)]
    assert of(found, "s") == [], "arrows need slices at both ends"


def test_hostile_names_are_data() -> None:
    hostile = '</script><script>alert("\\u2028\x00")</script>\n\ud800'
    odd = OpGraph({hostile: replace(DIAMOND.ops["a"], name=hostile)}, (), {}, (), "cuda:0")
    odd = with_source(odd, hostile, hostile)
    chosen = Candidate(Schedule("drawn", 1, (Launch(hostile, 0),)), captured=True, predicted_us=2.0)
    timeline = Timeline((Slice(hostile, 0, 0.0, 2.0),))
    report = replace(REPORT, graph=odd, costs={hostile: COSTS["a"]}, chosen=chosen, timeline=timeline)
    (slice_of_op, _) = of(checked(report), "X")
    assert (slice_of_op["name"], slice_of_op["args"]["source"]) == (hostile, hostile)
    assert render(report).isascii()


def test_nothing_scheduled_is_no_event() -> None:
    assert list(events(PLAIN)) == []


@given(data=st.data(), streams=st.integers(1, 4))
@pytest.mark.parametrize("policy", ["critical_path", "path_cover"])
def test_every_simulated_run_is_a_valid_file(policy: str, data: st.DataObject, streams: int) -> None:
    profile = profile_with(same_stream_edge_us=0.5, cross_stream_edge_us=1.7, fork_us=1.1, join_us=0.3)
    graph: OpGraph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph))
    schedule = synchronize(graph, POLICIES[policy](graph, costs, profile, streams, frozenset()))
    chosen = Candidate(schedule, captured=True, predicted_us=1.0)
    timeline = simulate(schedule, costs, profile)
    report = replace(REPORT, profile=profile, graph=graph, costs=costs, chosen=chosen, timeline=timeline)
    found = checked(report)
    assert sorted(e["name"] for e in of(found, "X") if e["cat"] == "op") == sorted(graph.ops)
    waits = [before for launch in schedule.launches for before in launch.waits if before != FORK]
    assert len(of(found, "s")) == len(waits)
