"""Lowering: what is written where, by hand; and that what is written computes the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from autostream.analysis.dependencies import analyze
from autostream.errors import ScheduleError
from autostream.ir import FORK, Arena, Launch, Op, OpGraph, Placeholder, Program, Role, Schedule, Storage
from autostream.runtime import arena, streams
from autostream.runtime.emulator import run_interleaved
from autostream.runtime.lower import lower
from autostream.scheduling.releases import place_releases
from tests.runtime.programs import (
    MODELS,
    Case,
    Kernels,
    Towers,
    case_of,
    fused_case,
    random_schedule,
    same,
    sample,
    schedule_of,
    sliced_case,
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


def test_a_diamond_over_two_streams_reads_as_planned(diamond: Case) -> None:
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
        # sin was allocated on stream 1, which never hears that add has read it: it must wait for the join.
        "joined = record(lanes, 0)",
        "wait_2 = wait(lanes, 1, joined)",
        "release_1 = release(sin)",
    ]


def test_one_stream_is_plain_code(diamond: Case) -> None:
    order = ("relu", "cos", "sin", "add")
    module = lowered(diamond, schedule_of([Launch(op, 0, releases=("relu",) * (op == "sin")) for op in order]))
    assert [line.split(" = ")[0] for line in written(module)] == list(order)
    assert "relu = None" in module.code  # after its last use, by fx itself


def test_one_event_serves_all_who_wait_and_the_fork_is_recorded_before_anything_runs() -> None:
    case = case_of(lambda x: (x.sin(), x.cos(), x.exp()), torch.randn(4))
    schedule = schedule_of(
        [Launch("sin", 1, (FORK,)), Launch("cos", 2, (FORK, "sin")), Launch("exp", 0, ("sin",))], ("cos",)
    )
    assert written(lowered(case, schedule)) == [
        "lanes = fork(cpu, 3)",
        "forked = record(lanes, 0)",
        "use = use(lanes, 1)",
        "wait = wait(lanes, 1, forked)",
        "sin = sin(input_0)",
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


def test_views_of_inputs_are_made_before_the_fork() -> None:
    case = case_of(lambda x: x.t().sin(), torch.randn(4, 4))
    assert written(lowered(case, schedule_of([Launch("sin", 1, (FORK,))], ("sin",))))[:3] == [
        "t = t(input_0)",
        "lanes = fork(cpu, 2)",
        "forked = record(lanes, 0)",
    ]


def test_a_release_names_every_tensor_of_the_storage_used_or_not() -> None:
    def model(x: Tensor) -> Tensor:
        a = x + 1
        a.view(2, 2).add_(1)
        return a * 2

    case = case_of(model, torch.randn(4))
    launches = [Launch("add", 0), Launch("add_", 1, ("add",)), Launch("mul", 0, ("add_",), releases=("add",))]
    module = lowered(case, schedule_of(launches))
    assert written(module)[-1] == "release = release(add, view, add_)"
    assert last_lines_of(module, "add", "view", "add_") == {"release"}


def test_what_may_be_a_view_or_a_copy_is_dropped_when_both_storages_may_go() -> None:
    """``contiguous`` copies here, on a side stream that has not waited for ``sin`` when ``add`` may go::

    stream 0:  add ──────────────▶ sin (add goes) ──────▶ mul
                  ╲               ╱                      ╱
    stream 1:      contiguous ───╱───▶ cos (contiguous goes)
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


def test_a_list_of_results_does_not_hold_what_was_taken_out_of_it() -> None:
    """The values are released before the indices, and a tuple of both would keep them until then."""

    def model(x: Tensor) -> Tensor:
        values, indices = x.max(1)
        return values.sin() + indices

    case = case_of(model, torch.randn(4, 4))
    launches = [
        Launch("max_1", 0),
        Launch("sin", 0, releases=("max_1",)),
        Launch("add", 0, releases=("max_1.1", "sin")),
    ]
    releases = [
        line for line in written(lowered(case, Schedule("by hand", 2, tuple(launches)))) if line.startswith("release")
    ]
    assert releases == ["release = release(getitem)", "release_1 = release(getitem_1, sin)"]


def test_a_list_of_results_holds_what_nobody_took_out_of_it() -> None:
    """The variance is nobody's: it is released at once, and the tuple goes with it."""
    case = case_of(lambda x: torch.var_mean(x, 0)[1].sin(), torch.randn(4, 4))
    case.program.module.graph.eliminate_dead_code()
    launches = (Launch("var_mean", 0, releases=("var_mean",)), Launch("sin", 0, releases=("var_mean.1",)))
    module = lower(case.program, analyze(case.program), Schedule("by hand", 2, launches))
    releases = [line for line in written(module) if line.startswith("release")]
    assert releases == ["release = release(var_mean)", "release_1 = release(getitem_1)"]


def test_storages_of_the_callers_stream_need_no_fence(diamond: Case) -> None:
    launches = [Launch("relu", 0), Launch("sin", 0), Launch("cos", 0), Launch("add", 0)]
    assert written(lowered(diamond, Schedule("by hand", 2, tuple(launches))))[-1] == "release = release(relu, sin, cos)"


def test_nothing_that_escapes_is_released() -> None:
    case = case_of(lambda x: x.sin(), torch.randn(4))
    assert (
        written(lowered(case, schedule_of([Launch("sin", 1, (FORK,))], ("sin",))))[-1]
        == "wait_1 = wait(lanes, 0, sin_done)"
    )


@pytest.mark.parametrize(
    ("launches", "message"),
    [
        ([Launch("sin", 1, (FORK,)), Launch("relu", 0)], r"'sin' .*uses 'relu', which is not launched yet"),
        ([Launch("relu", 0), Launch("sin", 1, ("cos",))], r"'sin' .*waits for 'cos', which is not launched before it"),
        (
            [Launch("relu", 0), Launch("cos", 0, releases=("relu",)), Launch("sin", 1, (FORK,))],
            r"'sin' .*uses 'relu', which is released after 'cos'",
        ),
        ([Launch("relu", 0), Launch("sin", 1, ("relu",))], r"the output uses 'add', which is not launched yet"),
    ],
)
def test_a_schedule_that_cannot_be_written_is_refused(diamond: Case, launches: list[Launch], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        lower(diamond.program, diamond.graph, schedule_of(launches))


def test_the_message_names_the_users_line(diamond: Case) -> None:
    sin = replace(diamond.graph.ops["sin"], source="model.py:12: return top.sin()")
    graph = replace(diamond.graph, ops={**diamond.graph.ops, "sin": sin})
    with pytest.raises(ScheduleError, match=r"'sin' \(model.py:12: return top.sin\(\)\) uses 'relu'"):
        lower(diamond.program, graph, schedule_of([Launch("sin", 0)]))


def test_names_and_metadata_are_the_programs() -> None:
    case = case_of(Towers(), torch.randn(2, 8))
    module = lowered(case, random_schedule(case.graph, 3, seed=0))
    ours = {node.name: node for node in module.graph.nodes}
    for node in case.program.module.graph.nodes:
        assert ours[node.name].meta["val"] is node.meta["val"] if "val" in node.meta else True
        assert ours[node.name].meta.get("stack_trace") == node.meta.get("stack_trace")
    assert [node.name for node in module.graph.find_nodes(op="placeholder")] == [
        placeholder.name for placeholder in case.program.placeholders
    ]


def test_the_program_is_left_alone(diamond: Case) -> None:
    before = diamond.program.module.code
    lower(diamond.program, diamond.graph, random_schedule(diamond.graph, 2, seed=1))
    assert diamond.program.module.code == before


def test_submodules_of_higher_order_ops_are_shared() -> None:
    root = nn.Module()
    root.body = nn.Linear(4, 4)
    graph = fx.Graph()
    x = graph.placeholder("x")
    applied = graph.call_function(torch.utils.checkpoint.checkpoint, (graph.get_attr("body"), x))
    graph.output((applied,))
    program = Program(
        fx.GraphModule(root, graph), (Placeholder("x", Role.INPUT, "0", "x"),), (applied.name,), "aten", "cpu"
    )
    own = frozenset({applied.name})
    op = Op(applied.name, "checkpoint", (applied.name,), frozenset({"x"}), own, own)
    storage = Storage(applied.name, Role.INTERMEDIATE, 16, (applied.name,), escapes=True)
    op_graph = OpGraph({op.name: op}, (), {storage.name: storage}, (), "cpu")
    module = lower(program, op_graph, schedule_of([Launch(op.name, 1, (FORK,))], (op.name,)))
    assert module.body is root.body


@pytest.mark.parametrize("name", MODELS)
def test_values_live_exactly_until_the_schedule_releases_them(name: str) -> None:
    """In the generated code every value of a released storage dies at the release, or before it as part of a list."""
    graph = sample(name).graph
    for seed in range(10):
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
    """The names of the nodes behind which these values die in the generated code."""
    dying = {}
    for line in module.code.splitlines():
        statement, _, deletion = line.partition(";")
        for name in deletion.replace(" ", "").split("=")[:-1]:
            dying[name] = statement.split(" = ")[0].strip()
    return {dying[name] for name in names}


def apart(graph: OpGraph) -> Arena:
    """Every storage whose place is free to choose at a place of its own."""
    free = [s.name for s in graph.storages.values() if s.placeable and not s.escapes]
    return Arena(512 * len(free), {name: 512 * at for at, name in enumerate(free)})


def test_placed_memory_is_a_place_in_the_arena_which_lives_until_all_streams_have_joined() -> None:
    case = fused_case()
    schedule = replace(random_schedule(case.graph, 3, seed=0), arena=apart(case.graph))
    schedule = place_releases(case.graph, schedule)
    assert not any(launch.releases for launch in schedule.launches), "what is left is the output"
    lines = written(lowered(case, schedule))
    targets = [line.split(" = ")[1].split("(")[0] for line in lines]
    assert targets[0] == "reserve"
    assert targets.count("place") == len(schedule.arena.offsets) == 6
    joined = max(at for at, line in enumerate(lines) if line.split(" = ")[1].startswith("wait(lanes, 0"))
    assert lines[-1].split(" = ")[1] == "release(arena)"
    assert joined < len(lines) - 1


def test_placed_memory_keeps_names_and_metadata() -> None:
    case = fused_case()
    module = lowered(case, replace(random_schedule(case.graph, 2, seed=0), arena=apart(case.graph)))
    placed = [node for node in module.graph.nodes if node.target is arena.place]
    originals = {node.name: node for node in case.program.module.graph.nodes}
    for node in placed:
        value = originals[node.name].meta["val"]
        assert node.meta["val"] is value
        assert node.args[1:] == (512 * placed_at(case, node.name), tuple(value.shape), value.stride(), value.dtype)


def placed_at(case: Case, name: str) -> int:
    return list(apart(case.graph).offsets).index(name)


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("build", [fused_case, sliced_case])
def test_with_an_arena_the_same_is_computed(build: Callable[[], Case], streams: int) -> None:
    case = build()
    expected, _ = case.expected()
    for seed in range(6):
        schedule = replace(random_schedule(case.graph, streams, seed), arena=apart(case.graph))
        module = lowered(case, place_releases(case.graph, schedule))
        if streams > 1:
            assert same(run_interleaved(module, case.args(), seed), expected)
        else:
            with torch.no_grad():
                assert same(module(*case.args()), expected)


def test_storages_that_live_at_the_same_time_in_the_same_place_are_found_out() -> None:
    """Whichever is computed later, the sum reads it as both.

    x ─┬▶ twice ──╮
       ╰▶ thrice ─┴▶ sum
    """
    kernels = Kernels({"x": torch.randn(4)})
    (x,) = kernels.arguments
    twice, thrice, total = (kernels.taken(4) for _ in range(3))
    kernels.launch("twice", lambda value, out: torch.mul(value, 2, out=out), x, twice)
    kernels.launch("thrice", lambda value, out: torch.mul(value, 3, out=out), x, thrice)
    kernels.launch("sum", lambda one, other, out: torch.add(one, other, out=out), twice, thrice, total)
    case = kernels.case(total, Role.INPUT)
    expected, _ = case.expected()
    plan = apart(case.graph)
    first, second = list(plan.offsets)[:2]
    clash = replace(plan, offsets={**plan.offsets, second: plan.offsets[first]})
    for seed in range(8):
        schedule = random_schedule(case.graph, 2, seed)
        for places, right in ((plan, True), (clash, False)):
            module = lowered(case, place_releases(case.graph, replace(schedule, arena=places)))
            assert same(run_interleaved(module, case.args(), seed), expected) == right


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_on_cuda_streams_the_bits_are_those_of_sequential_execution(seed: int) -> None:
    torch.manual_seed(0)
    model = Towers(towers=6, layers=4, width=256).cuda()
    case = case_of(model, torch.randn(64, 256, device="cuda"))
    expected, _ = case.expected()
    module = lowered(case, random_schedule(case.graph, 4, seed))
    caller = torch.cuda.Stream()
    caller.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(caller):
        for _ in range(20):
            with streams.restored("cuda:0"):
                results = module(*case.tensors)
            assert torch.cuda.current_stream() == caller
            assert same(results, expected)


@pytest.mark.gpu
def test_a_lowered_graph_can_be_captured_closing_fence_included() -> None:
    case = case_of(model_of_a_diamond, torch.randn(1024, device="cuda"))
    launches = [Launch("relu", 0), Launch("sin", 1, ("relu",)), Launch("cos", 0), Launch("add", 0, ("sin",))]
    module = lowered(case, schedule_of(launches))
    assert any(line.startswith("joined") for line in written(module))
    expected, _ = case.expected()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    capture = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
    with torch.no_grad(), capture, streams.restored("cuda:0"):
        results = module(*case.tensors)
    for _ in range(3):
        results[0].zero_()
        graph.replay()
        assert same(results, expected)


def a_list_of_what_is_returned_and_what_is_not(x: Tensor) -> Tensor:
    half = x.new_full((4,), 0.5)
    _, same_as_x = torch.broadcast_tensors(half, x)
    return same_as_x.add_(half)


def test_what_an_output_may_keep_alive_and_does_not_is_kept_until_the_end() -> None:
    """By the schemas, what is returned may lie in ``half``: so it is never released, but nobody else keeps it.

    It was dropped right behind add_ on stream 1, while its block was stream 0's to hand out again.
    """
    case = case_of(a_list_of_what_is_returned_and_what_is_not, torch.randn(4, 4))
    assert case.graph.storages["new_full"].escapes
    launches = (Launch("new_full", 0), Launch("add_", 1, ("new_full",)))
    lowered = lower(case.program, case.graph, Schedule("by hand", 2, launches, ("add_",)))
    lines = [line.partition(" = ")[2] for line in written(lowered)]
    assert lines.index("wait(lanes, 0, add__done)") < lines.index("release(new_full, broadcast_tensors)")
    for seed in range(4):
        (result,) = run_interleaved(lowered, [torch.ones(4, 4)], seed)
        assert result.tolist() == [[1.5] * 4] * 4
