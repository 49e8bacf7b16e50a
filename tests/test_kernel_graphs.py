"""Hazards and schedules of recorded programs of Inductor's kernels, without a GPU.

Expectations follow from the models (``kernel_graphs/record.py``), or from bytes: a call touches exactly the bytes that
its arguments cover, one bit for each, and calls that touch a common byte which one of them writes keep their order.
This shares no code with ``analysis``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from itertools import combinations, product
from typing import Any

import pytest
import torch

from autostream.analysis.dependencies import analyze
from autostream.errors import ScheduleError
from autostream.ir import FORK, JOIN, Hazard, OpGraph, Program, Schedule
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.releases import place_releases
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from autostream.tuning.select import written
from tests.kernel_graphs.record import MODELS
from tests.kernel_graphs.recordings import FOLDER, NAMES, Recording, program_of, read, recorded, text_of
from tests.runtime.programs import random_schedule
from tests.scheduling.brute_force import closure, happens_before
from tests.scheduling.graphs import costs_of, profile_with
from tests.scheduling.mistakes import without_a_wait

each = pytest.mark.parametrize("name", NAMES)

RANDOM = ["random 0", "random 1"]


@cache
def program(name: str) -> Program:
    return program_of(read(name))


@cache
def graph_of(name: str) -> OpGraph:
    return analyze(program(name))


def plan_of(name: str, policy: str, count: int) -> Schedule:
    """A schedule to capture, as if each op took 10 µs and edges nothing, so that all parallelism is used."""
    graph = graph_of(name)
    if policy in RANDOM:
        return random_schedule(graph, count, RANDOM.index(policy))
    assignment = POLICIES[policy](graph, costs_of(graph, 10.0), profile_with(), count, frozenset())
    return place_releases(graph, synchronize(graph, assignment))


# --- what touches what, byte by byte ---------------------------------------------------------------------------------

LAUNCH_NOTHING = {"aten.empty_strided.default", "inductor._reinterpret_tensor.default", "getitem"}

Bytes = Mapping[str, int]
"""Storage to touched bytes, one bit for each."""


@dataclass
class Call:
    """The bytes that a call reads and writes."""

    reads: dict[str, int] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)
    is_random: bool = False

    def touches(self, storage: str) -> bool:
        return storage in self.reads or storage in self.writes


@cache
def calls_of(name: str) -> Mapping[str, Call]:
    """The calls of a recording that launch something, in program order."""
    recording = read(name)
    values = {f"%{entry['name']}": entry["value"] for entry in (*recording["placeholders"], *recording["nodes"])}
    calls: dict[str, Call] = {}
    for node in recording["nodes"]:
        if node["target"] in LAUNCH_NOTHING:
            continue
        kernel = recording["kernels"].get(node["target"])
        call = calls[node["name"]] = Call(is_random=kernel is None and is_random(node["target"]))
        for argument, is_read, is_written in uses_by_kernel(node, kernel) if kernel else uses_by_operator(node):
            value = values.get(argument) if isinstance(argument, str) else None
            assert value or "%" not in json.dumps(argument), "lists of tensors are not supported"
            if value and is_read:
                touch(call.reads, value)
            if value and is_written:
                touch(call.writes, value)
        results = node["value"] if isinstance(node["value"], list) else [node["value"]]
        for value in results if kernel is None else ():
            if isinstance(value, dict) and not call.touches(value["storage"]):
                touch(call.writes, value)  # new memory
    return calls


Use = tuple[Any, bool, bool]
"""An argument, whether it is read, and whether it is written."""


def uses_by_kernel(node: Recording, kernel: Recording) -> Iterator[Use]:
    for at, argument in enumerate(node["args"]):
        yield argument, at not in kernel["overwritten"], at in kernel["written"]


def uses_by_operator(node: Recording) -> Iterator[Use]:
    schema = operator_named(node["target"])._schema.arguments
    arguments = dict(zip((argument.name for argument in schema), node["args"], strict=False)) | node["kwargs"]
    for argument in schema:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        yield arguments.get(argument.name), not argument.is_out, is_written


def is_random(target: str) -> bool:
    return torch.Tag.nondeterministic_seeded in operator_named(target).tags


def operator_named(target: str) -> Any:
    return reduce(getattr, target.split("."), torch.ops)


def touch(touched: dict[str, int], value: Recording) -> None:
    """Set the bits of all bytes of a tensor."""
    size = getattr(torch, value["dtype"].removeprefix("torch.")).itemsize
    for index in product(*map(range, value["shape"])):
        element = value["offset"] + sum(at * step for at, step in zip(index, value["stride"], strict=True))
        touched[value["storage"]] = touched.get(value["storage"], 0) | ((1 << size) - 1) << element * size


def overlap(some: Bytes, others: Bytes) -> bool:
    return any(some[storage] & others[storage] for storage in some.keys() & others.keys())


@cache
def conflicts(name: str) -> frozenset[tuple[str, str, Hazard]]:
    """All pairs of calls that must keep their order, and why."""
    return frozenset(
        (before, after, hazard)
        for (before, earlier), (after, later) in combinations(calls_of(name).items(), 2)
        for hazard, applies in (
            (Hazard.RAW, overlap(earlier.writes, later.reads)),
            (Hazard.WAR, overlap(earlier.reads, later.writes)),
            (Hazard.WAW, overlap(earlier.writes, later.writes)),
            (Hazard.ORDER, earlier.is_random and later.is_random),
        )
        if applies
    )


@cache
def required(name: str) -> frozenset[tuple[str, str]]:
    """The pairs of calls that must keep their order, directly or by transitivity."""
    return frozenset(closure((before, after) for before, after, _ in conflicts(name)))


# --- recordings ------------------------------------------------------------------------------------------------------


@each
def test_a_recording_is_read_back(name: str) -> None:
    assert name in MODELS
    assert text_of(read(name)) == (FOLDER / f"{name}.json").read_text()
    program(name).module.graph.lint()
    assert recorded(program(name)) == read(name)


# --- hazards ---------------------------------------------------------------------------------------------------------

STATISTICS = {
    f"branches.{at}.1.{of}" for at in range(2) for of in ("running_mean", "running_var", "num_batches_tracked")
}
WRITTEN = {"norms": STATISTICS, "written": {"0"}}


@each
def test_hazards_storages_and_mutated_arguments_are_those_of_the_bytes(name: str) -> None:
    graph, recording = graph_of(name), read(name)
    assert list(graph.ops) == list(calls_of(name))
    assert closure(graph.digraph.edges) == required(name)
    assert {(hazard.before, hazard.after, hazard.hazard) for hazard in graph.dependencies} <= conflicts(name)
    values = {entry["name"]: entry["value"] for entry in recording["nodes"]}
    assert {storage.name: storage.bytes for storage in graph.storages.values()} == recording["storages"]
    returned = {values[output]["storage"] for output in recording["outputs"]}
    assert {storage.name for storage in graph.storages.values() if storage.escapes} == returned
    pairs = zip(program(name).placeholders, written(program(name), graph), strict=True)
    assert {item.target for item, is_written in pairs if is_written} == WRITTEN.get(name, set())


# --- schedules -------------------------------------------------------------------------------------------------------


def keeps_order(name: str, plan: Schedule) -> bool:
    order = happens_before(plan)
    return required(name) <= order and {pair for op in calls_of(name) for pair in ((FORK, op), (op, JOIN))} <= order


@pytest.mark.parametrize("policy", [*POLICIES, *RANDOM])
@each
def test_schedules_keep_the_order_and_need_every_wait(name: str, policy: str) -> None:
    graph, plan = graph_of(name), plan_of(name, policy, 3)
    verify(graph, plan, pinned=graph.pinned if policy in RANDOM else frozenset())
    assert keeps_order(name, plan)
    broken = list(without_a_wait(plan))
    assert len(broken) == plan.wait_count
    assert policy in ("sequential", *RANDOM) or plan.wait_count >= 2
    for wrong in broken:
        assert not keeps_order(name, wrong)
        with pytest.raises(ScheduleError):
            verify(graph, wrong)
