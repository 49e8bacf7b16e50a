"""Lowering: the nodes of small graphs, and results of lowered graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx

from autostream.analysis.dependencies import analyze
from autostream.errors import ScheduleError
from autostream.ir import FORK, Arena, Launch, OpGraph, Schedule
from autostream.runtime import streams
from autostream.runtime.emulator import run_interleaved
from autostream.runtime.lower import lower
from autostream.scheduling.releases import place_releases
from tests.runtime.programs import (
    MODELS,
    Case,
    case_of,
    fused_case,
    random_schedule,
    sample,
    schedule_of,
)


def model_of_a_diamond(x: Tensor) -> Tensor:
    r"""Two ops between two others::

            relu
           /    \
         sin    cos
           \    /
            add

    ``sin`` and ``cos`` may run side by side.
    """
    top = x.relu()
    return top.sin() + top.cos()


@pytest.fixture(scope="module")
def diamond() -> Case:
    return case_of(model_of_a_diamond, torch.randn(4))


def written(module: fx.GraphModule) -> list[str]:
    """Each node as ``"name = target(arguments)"``, without the namespaces."""
    lines = []
    for node in module.graph.nodes:
        if node.op == "call_function":
            target = getattr(node.target, "__name__", str(node.target)).split(".")[0]
            lines.append(f"{node.name} = {target}({', '.join(map(str, node.args))})")
    return lines


def lowered(case: Case, schedule: Schedule) -> fx.GraphModule:
    module = lower(case.program, case.graph, schedule)
    module.graph.lint()
    return module


def test_a_diamond_on_two_streams(diamond: Case) -> None:
    schedule = schedule_of(
        [
            Launch("relu", 0),
            Launch("sin", 1, ("relu",)),
            Launch("cos", 0),
            Launch("add", 0, ("sin",), releases=("relu", "cos")),
        ]
    )
    assert written(lowered(diamond, schedule)) == [
        "lanes = fork(cpu, 2)",
        "relu = relu(input_0)",
        "relu_done = record(lanes, 0)",
        "use = use(lanes, 1)",
        "wait = wait(lanes, 1, relu_done)",
        "sin = sin(relu)",
        "sin_done = record(lanes, 1)",
        "use_1 = use(lanes, 0)",
        "cos = cos(relu)",
        "wait_1 = wait(lanes, 0, sin_done)",
        "add = add(sin, cos)",
        "release = release(relu, cos)",
        # sin was allocated on stream 1, which has not waited for add to read it: it waits for the join.
        "joined = record(lanes, 0)",
        "wait_2 = wait(lanes, 1, joined)",
        "release_1 = release(sin)",
    ]


def test_one_event_is_recorded_for_all_waits_and_one_for_the_fork() -> None:
    """Views of inputs come before the fork. Outputs are not released."""
    case = case_of(lambda x: (x.t().sin(), x.cos(), x.exp()), torch.randn(4, 4))
    schedule = schedule_of(
        [Launch("sin", 1, (FORK,)), Launch("cos", 2, (FORK, "sin")), Launch("exp", 0, ("sin",))], ("cos",)
    )
    assert written(lowered(case, schedule)) == [
        "t = t(input_0)",
        "lanes = fork(cpu, 3)",
        "forked = record(lanes, 0)",
        "use = use(lanes, 1)",
        "wait = wait(lanes, 1, forked)",
        "sin = sin(t)",
        "sin_done = record(lanes, 1)",
        "use_1 = use(lanes, 2)",
        "wait_1 = wait(lanes, 2, forked)",
        "wait_2 = wait(lanes, 2, sin_done)",
        "cos = cos(input_0)",
        "cos_done = record(lanes, 2)",
        "use_2 = use(lanes, 0)",
        "wait_3 = wait(lanes, 0, sin_done)",
        "exp = exp(input_0)",
        "wait_4 = wait(lanes, 0, cos_done)",
    ]


def test_a_possible_view_is_dropped_when_both_storages_may_be_released() -> None:
    """``contiguous`` copies here, on a side stream that has not waited for ``sin`` when ``add`` may be released::

    stream 0:  add ──────────────▶ sin (release add) ──▶ mul
                  ╲               ╱                      ╱
    stream 1:      contiguous ───╱───▶ cos (release contiguous)
    """

    def model(x: Tensor) -> Tensor:
        turned = (x + 1).t().contiguous()
        top = turned.sin()
        return top.cos() * top

    case = case_of(model, torch.randn(4, 4))
    launches = [
        Launch("add", 0),
        Launch("contiguous", 1, ("add",)),
        Launch("sin", 0, ("contiguous",), releases=("add",)),
        Launch("cos", 1, ("sin",), releases=("contiguous",)),
        Launch("mul", 0, ("cos",)),
    ]
    module = lowered(case, schedule_of(launches))
    assert last_lines_of(module, "add", "t") == {"release"}
    assert last_lines_of(module, "contiguous") == {"release_1"}


def releases_of(case: Case, *launches: Launch) -> list[str]:
    module = lower(case.program, analyze(case.program), Schedule("by hand", 2, launches))
    return [line for line in written(module) if line.startswith("release")]


def test_results_of_one_op_are_released_one_by_one() -> None:
    """A tuple would keep both alive. A result without users is released with the tuple."""

    def model(x: Tensor) -> Tensor:
        values, indices = x.max(1)
        return values.sin() + indices

    launches = Launch("max_1", 0), Launch("sin", 0, releases=("max_1",)), Launch("add", 0, releases=("max_1.1", "sin"))
    releases = releases_of(case_of(model, torch.randn(4, 4)), *launches)
    assert releases == ["release = release(getitem)", "release_1 = release(getitem_1, sin)"]
    case = case_of(lambda x: torch.var_mean(x, 0)[1].sin(), torch.randn(4, 4))
    case.program.module.graph.eliminate_dead_code()
    launches = Launch("var_mean", 0, releases=("var_mean",)), Launch("sin", 0, releases=("var_mean.1",))
    assert releases_of(case, *launches) == ["release = release(var_mean)", "release_1 = release(getitem_1)"]


@pytest.mark.parametrize(
    ("launches", "message"),
    [
        (
            [Launch("sin", 1, (FORK,)), Launch("relu", 0)],
            r"'sin' \(.*test_lower.py:\d+: return .*\) uses 'relu', which is not launched yet",
        ),
        ([Launch("relu", 0), Launch("sin", 1, ("cos",))], r"'sin' .*waits for 'cos', which is not launched before it"),
        (
            [Launch("relu", 0), Launch("cos", 0, releases=("relu",)), Launch("sin", 1, (FORK,))],
            r"'sin' .*uses 'relu', which is released after 'cos'",
        ),
        ([Launch("relu", 0), Launch("sin", 1, ("relu",))], r"the output uses 'add', which is not launched yet"),
    ],
)
def test_a_schedule_that_uses_missing_values_is_refused(diamond: Case, launches: list[Launch], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        lower(diamond.program, diamond.graph, schedule_of(launches))


@pytest.mark.parametrize("name", ["towers", "fused"])
def test_nodes_keep_names_and_metadata_and_the_program_is_unchanged(name: str) -> None:
    """Also tensors in the arena."""
    case = fused_case() if name == "fused" else sample(name)
    before = case.program.module.code
    schedule = random_schedule(case.graph, 3, seed=0)
    plan = apart(case.graph) if name == "fused" else schedule.arena
    module = lowered(case, replace(schedule, arena=plan))
    nodes = {node.name: node for node in module.graph.nodes}
    for node in case.program.module.graph.nodes:
        assert nodes[node.name].meta.get("val") is node.meta.get("val")
        assert nodes[node.name].meta.get("stack_trace") == node.meta.get("stack_trace")
    for placed, offset in plan.offsets.items():
        value = nodes[placed].meta["val"]
        assert nodes[placed].args[1:] == (offset, tuple(value.shape), value.stride(), value.dtype)
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    assert names == [placeholder.name for placeholder in case.program.placeholders]
    assert case.program.module.code == before


@pytest.mark.parametrize("name", MODELS)
def test_values_live_exactly_until_the_schedule_releases_them(name: str) -> None:
    """The generated code drops each value of a released storage at the release, or before it as part of a list."""
    graph = sample(name).graph
    for seed in range(5):
        schedule = random_schedule(graph, 3, seed)
        module = lowered(sample(name), schedule)
        nodes = {node.name: node for node in module.graph.nodes}
        order = {name: index for index, name in enumerate(nodes)}
        for launch in schedule.launches:
            end = max(order[node] for node in graph.ops[launch.op].nodes)
            for storage in launch.releases:
                lives = [
                    max(nodes[holder].users, key=lambda node: order[node.name])
                    for holder in graph.storages[storage].holders
                    if not isinstance(nodes[holder].meta["val"], (list, tuple))
                ]
                assert {last.target for last in lives} <= {streams.release}
                assert all(end < order[last.name] <= end + 2 for last in lives)


def last_lines_of(module: fx.GraphModule, *names: str) -> set[str]:
    """The names of the nodes after which the generated code drops these values."""
    dying = {}
    for line in module.code.splitlines():
        statement, _, deletion = line.partition(";")
        for name in deletion.replace(" ", "").split("=")[:-1]:
            dying[name] = statement.split(" = ")[0].strip()
    return {dying[name] for name in names}


def apart(graph: OpGraph) -> Arena:
    """An arena with an offset for each storage that may be placed; none overlap."""
    free = [s.name for s in graph.storages.values() if s.placeable and not s.escapes]
    return Arena(512 * len(free), {name: 512 * at for at, name in enumerate(free)})


def test_the_arena_lives_until_all_streams_have_joined() -> None:
    case = fused_case()
    schedule = place_releases(case.graph, replace(random_schedule(case.graph, 3, seed=0), arena=apart(case.graph)))
    assert not any(launch.releases for launch in schedule.launches), "what is left is the output"
    targets = [line.split(" = ")[1] for line in written(lowered(case, schedule))]
    assert targets[0].startswith("reserve(")
    assert len([target for target in targets if target.startswith("place(")]) == len(schedule.arena.offsets) == 6
    assert targets[-1] == "release(arena)"
    assert any(target.startswith("wait(lanes, 0") for target in targets[:-1])


def list_of_an_output_and_another(x: Tensor) -> Tensor:
    half = x.new_full((4,), 0.5)
    _, same_as_x = torch.broadcast_tensors(half, x)
    return same_as_x.add_(half)


def test_a_storage_that_no_output_keeps_alive_though_it_may_is_kept_until_the_end() -> None:
    """By the schemas, the output may alias ``half``, so the schedule does not release it.

    It was dropped right after add_ on stream 1, while its block belongs to stream 0.
    """
    case = case_of(list_of_an_output_and_another, torch.randn(4, 4))
    assert case.graph.storages["new_full"].escapes
    launches = (Launch("new_full", 0), Launch("add_", 1, ("new_full",)))
    lowered = lower(case.program, case.graph, Schedule("by hand", 2, launches, ("add_",)))
    lines = [line.partition(" = ")[2] for line in written(lowered)]
    assert lines.index("wait(lanes, 0, add__done)") < lines.index("release(new_full, broadcast_tensors)")
    for seed in range(4):
        (result,) = run_interleaved(lowered, [torch.ones(4, 4)], seed)
        assert result.tolist() == [[1.5] * 4] * 4
