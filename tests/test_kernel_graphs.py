"""Programs that TorchInductor wrote, recorded, from hazards to lowered graphs: no GPU is needed for any of that.

What is expected follows from the models (``kernel_graphs/record.py``), or from bytes: here a call touches the very
bytes that its arguments cover, each written down as one bit, and calls that touch a common one, of which one writes,
keep their order. Nothing of that knows what ``analysis`` does about views, slices and names.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from itertools import combinations, permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from autostream.analysis.dependencies import analyze
from autostream.errors import ScheduleError
from autostream.fusion.kernel_values import evaluate
from autostream.ir import FORK, JOIN, Hazard, Launch, OpGraph, Placeholder, Program, Role, Schedule
from autostream.runtime import streams
from autostream.runtime.lower import lower
from autostream.scheduling.arena import place_storages
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.releases import place_releases
from autostream.scheduling.structure import width
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from autostream.tuning.select import written
from tests.kernel_graphs.record import MODELS
from tests.kernel_graphs.recordings import DEVICE, FOLDER, NAMES, Recording, program_of, read, recorded, text_of
from tests.runtime.programs import random_schedule
from tests.scheduling.brute_force import closure, happens_before
from tests.scheduling.graphs import costs_of, profile_with
from tests.scheduling.mistakes import with_a_lifetime_shortened, with_a_release_too_early, without_a_wait

each = pytest.mark.parametrize("name", NAMES)

RANDOM = [f"random {seed}" for seed in range(4)]
PLANS = [(policy, count) for policy in (*POLICIES, *RANDOM) for count in (2, 3, 4)]
each_plan = pytest.mark.parametrize(("policy", "count"), PLANS)


@cache
def program(name: str) -> Program:
    return program_of(read(name))


@cache
def graph_of(name: str) -> OpGraph:
    return analyze(program(name))


@cache
def plan_of(name: str, policy: str, count: int) -> Schedule:
    """A schedule to capture, as if each op took 10 µs and edges nothing: whatever can go side by side does."""
    graph = graph_of(name)
    if policy in RANDOM:
        return random_schedule(graph, count, RANDOM.index(policy))
    assignment = POLICIES[policy](graph, costs_of(graph, 10.0), profile_with(), count, frozenset())
    return place_releases(graph, synchronize(graph, assignment))


# --- what touches what, byte by byte ---------------------------------------------------------------------------------

LAUNCH_NOTHING = {"aten.empty_strided.default", "inductor._reinterpret_tensor.default", "getitem"}

Bytes = Mapping[str, int]
"""Of storages: a bit for each byte that is touched."""


@dataclass
class Call:
    """What a call that launches something does."""

    reads: dict[str, int] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)
    draws: bool = False

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
        call = calls[node["name"]] = Call(draws=kernel is None and draws(node["target"]))
        for argument, is_read, is_written in uses_by_kernel(node, kernel) if kernel else uses_by_operator(node):
            value = values.get(argument) if isinstance(argument, str) else None
            assert value or "%" not in json.dumps(argument), "lists of tensors are not foreseen"
            if value and is_read:
                touch(call.reads, value)
            if value and is_written:
                touch(call.writes, value)
        results = node["value"] if isinstance(node["value"], list) else [node["value"]]
        for value in results if kernel is None else ():
            if isinstance(value, dict) and not call.touches(value["storage"]):
                touch(call.writes, value)  # of new memory
    return calls


Use = tuple[Any, bool, bool]
"""An argument, whether it is read, and whether it is written."""


def uses_by_kernel(node: Recording, kernel: Recording) -> Iterator[Use]:
    for at, argument in enumerate(node["args"]):
        yield argument, at not in kernel["overwritten"], at in kernel["written"]


def uses_by_operator(node: Recording) -> Iterator[Use]:
    schema = operator_named(node["target"])._schema.arguments
    given = dict(zip((argument.name for argument in schema), node["args"], strict=False)) | node["kwargs"]
    for argument in schema:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        yield given.get(argument.name), not argument.is_out, is_written


def draws(target: str) -> bool:
    return torch.Tag.nondeterministic_seeded in operator_named(target).tags


def operator_named(target: str) -> Any:
    return reduce(getattr, target.split("."), torch.ops)


def touch(touched: dict[str, int], value: Recording) -> None:
    """Set a bit for each byte of a tensor, one element after the other."""
    size = getattr(torch, value["dtype"].removeprefix("torch.")).itemsize
    for index in product(*map(range, value["shape"])):
        element = value["offset"] + sum(at * step for at, step in zip(index, value["stride"], strict=True))
        touched[value["storage"]] = touched.get(value["storage"], 0) | ((1 << size) - 1) << element * size


def meets(some: Bytes, others: Bytes) -> bool:
    return any(some[storage] & others[storage] for storage in some.keys() & others.keys())


@cache
def conflicts(name: str) -> frozenset[tuple[str, str, Hazard]]:
    """All pairs of calls that must keep their order, and why."""
    return frozenset(
        (before, after, hazard)
        for (before, earlier), (after, later) in combinations(calls_of(name).items(), 2)
        for hazard, met in (
            (Hazard.RAW, meets(earlier.writes, later.reads)),
            (Hazard.WAR, meets(earlier.reads, later.writes)),
            (Hazard.WAW, meets(earlier.writes, later.writes)),
            (Hazard.ORDER, earlier.draws and later.draws),
        )
        if met
    )


@cache
def required(name: str) -> frozenset[tuple[str, str]]:
    """Which call comes before which, directly or not."""
    return frozenset(closure((before, after) for before, after, _ in conflicts(name)))


def users(name: str, target: str) -> list[str]:
    """The calls that touch the model's parameter, buffer or input of this name."""
    (storage,) = (entry["storage"] for entry in read(name)["placeholders"] if entry["target"] == target)
    return [op for op, call in calls_of(name).items() if call.touches(storage)]


# --- recordings ------------------------------------------------------------------------------------------------------


def test_every_model_is_recorded_and_small() -> None:
    assert set(NAMES) == set(MODELS)
    assert all(len(program(name).module.graph.nodes) < 60 for name in NAMES)


@each
def test_files_are_as_recording_leaves_them(name: str) -> None:
    assert text_of(read(name)) == (FOLDER / f"{name}.json").read_text()


@each
def test_a_program_read_back_is_what_was_written_down(name: str) -> None:
    program(name).module.graph.lint()
    assert recorded(program(name)) == read(name)


@each
def test_values_are_those_that_the_calls_yield(name: str) -> None:
    """But for strides of what operators return: those of a convolution depend on the libraries that are there."""
    anew = program_of(read(name))
    arguments = [node.meta["val"] for node in anew.module.graph.find_nodes(op="placeholder")]
    with arguments[0].fake_mode:
        evaluate(anew.module, arguments)
    assert without_strides(recorded(anew)) == without_strides(read(name))


def without_strides(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_strides(item) for key, item in value.items() if key != "stride"}
    return [without_strides(item) for item in value] if isinstance(value, list) else value


def test_results_that_are_no_tensors_are_recorded_too() -> None:
    """As of fused attention, which yields tensors, the sizes that it was called with, and nothing."""
    graph = fx.Graph()
    query = graph.placeholder("query")
    attention = graph.call_function(torch.ops.aten._scaled_dot_product_flash_attention.default, (query, query, query))
    graph.output((graph.call_function(operator.getitem, (attention, 0)),))
    module = fx.GraphModule(nn.Module(), graph)
    with FakeTensorMode():
        evaluate(module, [torch.empty(1, 2, 8, 16, dtype=torch.float16, device=DEVICE)])
    placeholders = (Placeholder("query", Role.INPUT, "0", "query"),)
    recording = recorded(Program(module, placeholders, ("getitem",), "inductor", DEVICE))
    anew = program_of(json.loads(text_of(recording)))
    assert recorded(anew) == recording
    (value,) = (node.meta["val"] for node in anew.module.graph.nodes if node.name == attention.name)
    assert [item for item in value if not isinstance(item, Tensor)] == [None, None, 8, 8]
    analyzed = analyze(anew)
    assert list(analyzed.ops) == [attention.name]
    taken = {storage.name: storage.bytes for storage in analyzed.storages.values() if storage.bytes}
    assert taken == {name: size for name, size in recording["storages"].items() if size}


def test_a_recorded_kernel_cannot_run() -> None:
    (call, *_) = (node for node in program("norms").module.graph.nodes if node.name.startswith("triton"))
    with pytest.raises(RuntimeError, match="recorded without its code"):
        call.target(*call.args)


# --- hazards ---------------------------------------------------------------------------------------------------------


@each
def test_hazards_are_those_of_the_bytes(name: str) -> None:
    graph = graph_of(name)
    assert list(graph.ops) == list(calls_of(name))
    assert closure(graph.digraph.edges) == required(name)
    found = {(hazard.before, hazard.after, hazard.hazard) for hazard in graph.dependencies}
    assert found <= conflicts(name)


@each
def test_storages_are_those_of_the_program(name: str) -> None:
    recording, graph = read(name), graph_of(name)
    values = {entry["name"]: entry["value"] for entry in recording["nodes"]}
    assert {storage.name: storage.bytes for storage in graph.storages.values()} == recording["storages"]
    returned = {values[output]["storage"] for output in recording["outputs"]}
    assert {storage.name for storage in graph.storages.values() if storage.escapes} == returned


INDEPENDENT = [
    ("inception", ["branch1.conv.weight", *(f"branch{at}.conv.weight" for at in ("2.0", "3.0", "4.1"))]),
    ("inception", ["branch1.conv.weight", "branch2.0.bn.weight", "branch3.0.bn.weight", "branch4.1.conv.weight"]),
    ("towers", [f"towers.{at}.0.weight" for at in range(3)]),
    ("towers", [f"towers.{at}.2.weight" for at in range(3)]),
    ("towers", ["towers.0.2.weight", "towers.1.0.weight", "towers.2.2.weight"]),
    ("towers_on_a_stem", [f"1.towers.{at}.{layer}.weight" for at, layer in enumerate((0, 2, 2))]),
    ("attention", [f"{of}.weight" for of in ("query", "key", "value")]),
    ("norms", [f"branches.{at}.0.weight" for at in range(2)]),
    ("norms", [f"branches.{at}.1.running_var" for at in range(2)]),
    ("norms", ["branches.0.0.weight", "branches.1.1.running_mean"]),
    ("norms", ["branches.0.1.running_mean", "branches.1.0.weight"]),
    ("ranked", [f"{of}.weight" for of in ("best", "sorted", "dropped")]),
    ("written", ["old.weight", "new.weight"]),
]


@pytest.mark.parametrize(("name", "weights"), INDEPENDENT)
def test_branches_of_the_model_are_independent(name: str, weights: Sequence[str]) -> None:
    """Those who use these weights come neither before nor after each other."""
    graph, ops = graph_of(name), {op for weight in weights for op in users(name, weight)}
    assert len(ops) == len(weights)
    assert not closure(graph.digraph.edges) & set(permutations(ops, 2))
    assert width(graph) >= len(weights)


@pytest.mark.parametrize("name", ["towers", "towers_on_a_stem"])
def test_slices_meet_where_all_are_read(name: str) -> None:
    """The matrix is taken with what comes before all towers, or before the fork where nothing does."""
    graph = graph_of(name)
    (matrix,) = (storage for storage in graph.storages.values() if storage.parts)
    assert len(matrix.parts) == 3
    if name == "towers":
        assert matrix.name in graph.prelude
    else:
        (stem,) = users(name, "0")
        assert matrix.name in graph.ops[stem].allocates
    *towers, softmax, square = (op for op, call in calls_of(name).items() if call.touches(matrix.name))
    assert len(towers) == 3
    assert all(set(towers) <= set(graph.digraph.predecessors(reader)) for reader in (softmax, square))


def test_random_numbers_are_drawn_in_turn() -> None:
    graph = graph_of("ranked")
    first, second = (op.name for op in graph.ops.values() if op.orders == {"rng"})
    assert graph.digraph.has_edge(first, second)


def test_what_is_written_in_place_is_read_before_and_its_result_after() -> None:
    graph = graph_of("written")
    (old,), (new,), (last,) = (users("written", f"{name}.weight") for name in ("old", "new", "last"))
    *readers, writer = users("written", "0")
    assert readers == [old]
    assert {old, new} == set(graph.digraph.predecessors(writer))
    assert graph.digraph.has_edge(writer, last)
    assert not graph.digraph.has_edge(old, last)


STATISTICS = {
    f"branches.{at}.1.{of}" for at in range(2) for of in ("running_mean", "running_var", "num_batches_tracked")
}
WRITTEN = {"norms": STATISTICS, "written": {"0"}}


@each
def test_written_placeholders_are_known(name: str) -> None:
    placeholders = program(name).placeholders
    found = zip(placeholders, written(program(name), graph_of(name)), strict=True)
    assert {placeholder.target for placeholder, is_written in found if is_written} == WRITTEN.get(name, set())


# --- schedules -------------------------------------------------------------------------------------------------------


def refused(name: str, plan: Schedule) -> bool:
    try:
        verify(graph_of(name), plan)
    except ScheduleError:
        return True
    return False


def keeps_order(name: str, plan: Schedule) -> bool:
    order = happens_before(plan)
    return required(name) <= order and {pair for op in calls_of(name) for pair in ((FORK, op), (op, JOIN))} <= order


@each_plan
@each
def test_schedules_are_right(name: str, policy: str, count: int) -> None:
    graph, plan = graph_of(name), plan_of(name, policy, count)
    verify(graph, plan, pinned=graph.pinned if policy in RANDOM else frozenset())
    assert keeps_order(name, plan)


@each_plan
@each
def test_every_wait_is_needed(name: str, policy: str, count: int) -> None:
    plan = plan_of(name, policy, count)
    broken = list(without_a_wait(plan))
    assert len(broken) == plan.wait_count
    for wrong in broken:
        assert refused(name, wrong)
        assert not keeps_order(name, wrong)


@each_plan
@each
def test_memory_goes_after_its_last_use(name: str, policy: str, count: int) -> None:
    graph, plan = graph_of(name), plan_of(name, policy, count)
    order = happens_before(plan)
    launched = [launch.op for launch in plan.launches]
    released = [storage for launch in plan.launches for storage in launch.releases]
    assert len(released) == len(set(released))
    for position, launch in enumerate(plan.launches):
        for storage in launch.releases:
            assert graph.storages[storage].role is Role.INTERMEDIATE
            assert not graph.storages[storage].escapes
            (home,) = (plan.stream_of[op.name] for op in graph.ops.values() if storage in op.allocates)
            end = [other.op for other in plan.launches[: position + 1] if other.stream == home][-1]
            for op, call in calls_of(name).items():
                if call.touches(storage):
                    assert op in launched[: position + 1]
                    assert op == end or (op, end) in order
    for wrong in with_a_release_too_early(graph, plan):
        assert refused(name, wrong)


@each
def test_on_one_stream_memory_goes_right_after_its_last_use(name: str) -> None:
    graph = graph_of(name)
    plan = plan_of(name, "sequential", 2)
    last = {storage: op for op, call in calls_of(name).items() for storage in (*call.reads, *call.writes)}
    mine = {storage for op in graph.ops.values() for storage in op.allocates if not graph.storages[storage].escapes}
    released = {storage: launch.op for launch in plan.launches for storage in launch.releases}
    assert released == {storage: last[storage] for storage in mine}


def placed(name: str, policy: str, count: int) -> Schedule:
    return place_releases(graph_of(name), place_storages(graph_of(name), plan_of(name, policy, count)))


in_arenas = pytest.mark.parametrize("count", [1, 2, 4])


@in_arenas
@each
def test_bytes_of_an_arena_go_after_their_last_use(name: str, count: int) -> None:
    """All that kernels compute in between lies there, and who is given the same bytes comes after all who had them."""
    graph, plan = graph_of(name), placed(name, "critical_path", count)
    verify(graph, plan)
    inner = [each for each in graph.storages.values() if each.role is Role.INTERMEDIATE and not each.escapes]
    assert plan.arena.offsets.keys() == {storage.name for storage in inner if storage.bytes and storage.placeable}
    ends = {each: at + graph.storages[each].bytes for each, at in plan.arena.offsets.items()}
    touching = {each: {op for op, call in calls_of(name).items() if call.touches(each)} for each in ends}
    order = happens_before(plan)
    for one, other in combinations(ends, 2):
        if plan.arena.offsets[one] < ends[other] and plan.arena.offsets[other] < ends[one]:
            pairs = set(product(touching[one], touching[other]))
            assert pairs <= order or {(after, before) for before, after in pairs} <= order


@in_arenas
@each
def test_a_lifetime_in_an_arena_that_is_cut_short_is_refused(name: str, count: int) -> None:
    plan = placed(name, "critical_path", count)
    for one, _, wrong in with_a_lifetime_shortened(graph_of(name), plan):
        with pytest.raises(ScheduleError, match=f"{one!r} .*share|arena after {one!r}"):
            verify(graph_of(name), wrong)


def test_bytes_are_used_again_and_lifetimes_can_be_cut_short() -> None:
    plans = [(name, placed(name, "critical_path", count)) for name in NAMES for count in (1, 2, 4)]
    for name in ("attention", "inception"):
        graph, plan = graph_of(name), placed(name, "critical_path", 4)
        assert 0 < plan.arena.bytes < sum(graph.storages[each].bytes for each in plan.arena.offsets)
    assert sum(len(list(with_a_lifetime_shortened(graph_of(name), plan))) for name, plan in plans) > 50


def test_there_is_something_to_break() -> None:
    plans = [(name, plan_of(name, *plan)) for name in NAMES for plan in PLANS if plan[0] != "sequential"]
    assert all(plan.wait_count >= 2 for _, plan in plans if plan.policy != "random")
    assert sum(len(list(with_a_release_too_early(graph_of(name), plan))) for name, plan in plans) > 50


# --- lowered graphs --------------------------------------------------------------------------------------------------


@each_plan
@each
def test_lowered_graphs_say_what_was_planned(name: str, policy: str, count: int) -> None:
    graph, plan = graph_of(name), plan_of(name, policy, count)
    lowered = lower(program(name), graph, plan)
    lowered.graph.lint()
    assert [node.name for node in lowered.graph.output_node().all_input_nodes] == list(program(name).outputs)
    if plan.streams > 1:
        assert f"fork('cuda:0', {plan.streams})" in lowered.code
        assert lowered.code.count("_wait(lanes, ") >= plan.wait_count
        found = read_back(lowered, graph, plan.policy)
        assert without_releases(found) == without_releases(plan)
        for launch, lowered_launch in zip(plan.launches, found.launches, strict=True):
            for storage in launch.releases:
                assert set(graph.storages[storage].holders) & set(lowered_launch.releases)


def without_releases(plan: Schedule) -> Schedule:
    launches = tuple(replace(launch, releases=()) for launch in plan.launches)
    return replace(plan, launches=launches, decisions=())


def read_back(lowered: fx.GraphModule, graph: OpGraph, policy: str) -> Schedule:
    """The schedule that a lowered graph follows, with names of values that it drops in the place of storages.

    Checks on the way that nothing is used after it is dropped, and that what an op takes is taken on its stream.
    """
    op_of = {node: op.name for op in graph.ops.values() for node in op.nodes}
    points = {"forked": FORK, "joined": JOIN} | {f"{op}_done": op for op in graph.ops}
    count, lane = 0, 0
    waits: list[str] = []
    launches: list[Launch] = []
    for node in lowered.graph.nodes:
        if node.target is streams.fork:
            count = node.args[1]
        elif node.target is streams.use:
            lane = node.args[1]
        elif node.target is streams.wait:
            assert node.args[1] == lane or node.args[2].name == "joined"
            waits.append(points[node.args[2].name])
        elif node.target is streams.release:
            assert all(max(holder.users, key=list(lowered.graph.nodes).index) is node for holder in node.args)
            names = tuple(holder.name for holder in node.args)
            launches[-1] = replace(launches[-1], releases=launches[-1].releases + names)
        elif node.name in op_of:
            op = op_of[node.name]
            if not launches or launches[-1].op != op:
                launches.append(Launch(op, lane, tuple(waits)))
                waits.clear()
            assert launches[-1].stream == lane
    return Schedule(policy, count, tuple(launches), tuple(wait for wait in waits if wait != JOIN))
