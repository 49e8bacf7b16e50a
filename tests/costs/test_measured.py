"""Measuring: every distinct op once, on its real inputs, with nothing of the caller's changed.

Programs are built by hand, so that each test shows the graph that it is about. No test reads a clock: a timer that
counts stands in for the real one, except where only the fact that something was measured matters.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from autostream.costs import measured
from autostream.costs.device import profile_of
from autostream.costs.measured import _is_timeable, measure
from autostream.costs.occupancy import Multiprocessor
from autostream.costs.roofline import price
from autostream.ir import Op, OpGraph, Placeholder, Program, Role
from autostream.kernels import Footprint, Kernel

aten = torch.ops.aten


def _program(build: Callable[..., Any], inputs: int, device: str = "cpu") -> tuple[Program, OpGraph]:
    """Trace ``build(graph, *placeholders)`` by hand; every ATen call in it is an op that allocates what it returns."""
    graph = Graph()
    nodes = [graph.placeholder(f"x{index}") for index in range(inputs)]
    outputs = build(graph, *nodes)
    graph.output(outputs)
    placeholders = tuple(Placeholder(node.name, Role.INPUT, str(at), node.name) for at, node in enumerate(nodes))
    module = GraphModule(torch.nn.Module(), graph)
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    ops = {node.name: _op(node, device) for node in calls}
    names = tuple(output.name for output in outputs)
    return Program(module, placeholders, names, "aten", device), OpGraph(ops, (), {}, (), device)


def _op(node: Node, device: str) -> Op:
    """In-place calls write their first argument; dropout draws random numbers."""
    in_place = str(node.target).split(".")[1].endswith("_")
    return Op(
        name=node.name,
        target=str(node.target),
        nodes=(node.name,),
        reads=frozenset(argument.name for argument in node.all_input_nodes),
        writes=frozenset({node.all_input_nodes[0].name if in_place else node.name}),
        allocates=frozenset() if in_place else frozenset({node.name}),
        orders=frozenset({"rng"}) if "dropout" in str(node.target) else frozenset(),
        device=device,
        dtype="float32",
    )


def _with_op(graph: OpGraph, name: str, **changes: Any) -> OpGraph:
    return replace(graph, ops={**graph.ops, name: replace(graph.ops[name], **changes)})


def _dropout(graph: Graph, x: Node) -> tuple[Node, ...]:
    return (graph.call_function(aten.native_dropout.default, (x, 0.5, True)),)


class _Counting:
    """A timer that calls once and answers 1 µs, 2 µs, …"""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def __call__(self, call: Callable[[], Any], expected_us: float) -> float:
        self.results.append(call())
        return float(len(self.results))


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> _Counting:
    counting = _Counting()
    monkeypatch.setattr(measured, "_time_calls", counting)
    return counting


def _measure(program: Program, graph: OpGraph, args: Sequence[Tensor]) -> dict[str, tuple[float, str]]:
    costs = measure(program, graph, profile_of("cpu"), args)
    assert list(costs) == list(graph.ops)
    return {name: (cost.duration_us, cost.source) for name, cost in costs.items()}


def test_ops_of_the_same_shapes_are_timed_once(timer: _Counting) -> None:
    """x0 ─▶ relu ─▶ relu_1 ─▶ sum   (both relus get 4 × 4 floats)"""

    def build(graph: Graph, x: Node) -> tuple[Node, ...]:
        relu = graph.call_function(aten.relu.default, (x,))
        relu_1 = graph.call_function(aten.relu.default, (relu,))
        return (graph.call_function(aten.sum.default, (relu_1,)),)

    program, graph = _program(build, 1)
    costs = _measure(program, graph, [torch.ones(4, 4)])
    assert costs["relu_default"] == costs["relu_default_1"] == (1.0, "measured")
    assert costs["sum_default"] == (2.0, "measured")
    assert len(timer.results) == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.ones(4, 4), torch.ones(4, 5)),
        (torch.ones(4, 4), torch.ones(4, 4).double()),
        (torch.ones(4, 4), torch.ones(8, 4).t()[:, ::2]),
    ],
    ids=["shape", "dtype", "strides"],
)
def test_ops_of_other_layouts_are_timed_each(timer: _Counting, first: Tensor, second: Tensor) -> None:
    """x0 ─▶ relu    x1 ─▶ relu_1"""
    program, graph = _program(
        lambda graph, *inputs: tuple(graph.call_function(aten.relu.default, (x,)) for x in inputs), 2
    )
    _measure(program, graph, [first, second])
    assert len(timer.results) == 2


def test_ops_of_other_constants_are_timed_each(timer: _Counting) -> None:
    """1, 1.0 and True are equal in Python, but not the same constant."""

    def build(graph: Graph, x: Node) -> tuple[Node, ...]:
        return tuple(graph.call_function(aten.add.Tensor, (x, other)) for other in (1, 1.0, True, 2, 1))

    program, graph = _program(build, 1)
    _measure(program, graph, [torch.ones(4)])
    assert len(timer.results) == 4


def test_every_op_is_timed_on_the_inputs_that_it_really_gets(timer: _Counting) -> None:
    """x0 = 2 ─▶ mul (x0 · x1) ─▶ add (+ x1)    with x1 = 3"""

    def build(graph: Graph, x0: Node, x1: Node) -> tuple[Node, ...]:
        mul = graph.call_function(aten.mul.Tensor, (x0, x1))
        return (graph.call_function(aten.add.Tensor, (mul,), {"other": x1}),)

    program, graph = _program(build, 2)
    _measure(program, graph, [torch.tensor(2.0), torch.tensor(3.0)])
    assert [result.item() for result in timer.results] == [6.0, 9.0]


def test_views_and_getitems_run_but_are_not_timed(timer: _Counting) -> None:
    """x0 ─▶ split ─▶ getitem ─▶ relu    (split is folded away, as a view is)"""

    def build(graph: Graph, x: Node) -> tuple[Node, ...]:
        split = graph.call_function(aten.split.Tensor, (x, 2))
        item = graph.call_function(operator.getitem, (split, 1))
        return (graph.call_function(aten.relu.default, (item,)),)

    program, graph = _program(build, 1)
    graph = replace(graph, ops={"relu_default": graph.ops["relu_default"]})
    _measure(program, graph, [torch.arange(4.0)])
    assert [result.tolist() for result in timer.results] == [[2.0, 3.0]]


def test_an_op_that_writes_in_place_is_timed_on_a_copy(timer: _Counting) -> None:
    """x0 ─▶ relu ─▶ add_ (+ x1) ─▶ neg    (timing add_ must not add twice)"""

    def build(graph: Graph, x0: Node, x1: Node) -> tuple[Node, ...]:
        relu = graph.call_function(aten.relu.default, (x0,))
        add = graph.call_function(aten.add_.Tensor, (relu, x1))
        return (graph.call_function(aten.neg.default, (add,)),)

    program, graph = _program(build, 2)
    _measure(program, graph, [torch.ones(3), torch.ones(3)])
    assert timer.results[1].tolist() == [2.0, 2.0, 2.0]
    assert timer.results[2].tolist() == [-2.0, -2.0, -2.0]


def test_lists_of_written_tensors_are_copied_too(timer: _Counting) -> None:
    """relu, relu_1 ─▶ _foreach_add_([relu, relu_1], 1) ─▶ neg(relu)"""

    def build(graph: Graph, x: Node) -> tuple[Node, ...]:
        relu = graph.call_function(aten.relu.default, (x,))
        graph.call_function(aten._foreach_add_.Scalar, ([relu], 1))
        return (graph.call_function(aten.neg.default, (relu,)),)

    program, graph = _program(build, 1)
    _measure(program, graph, [torch.ones(3)])
    assert timer.results[2].tolist() == [-2.0, -2.0, -2.0]


def test_arguments_that_the_program_writes_are_left_alone(timer: _Counting) -> None:
    """x0 ─▶ add_ (+ 1)    while x1 is another view of the same memory, read afterwards"""

    def build(graph: Graph, x0: Node, x1: Node) -> tuple[Node, ...]:
        add = graph.call_function(aten.add_.Tensor, (x0, 1))
        return add, graph.call_function(aten.neg.default, (x1,))

    program, graph = _program(build, 2)
    first, second = program.placeholders
    program = replace(program, placeholders=(first, replace(second, storage="x0")))
    memory = torch.zeros(6)
    _measure(program, graph, [memory[:4], memory[2:]])
    assert memory.tolist() == [0.0] * 6
    assert timer.results[1].tolist() == [-1.0, -1.0, -0.0, -0.0], "the copies must share memory as the arguments do"


def test_statistics_that_a_schema_does_not_declare_are_left_alone() -> None:
    """batch_norm in training writes running_mean, which its schema calls an input."""

    def build(graph: Graph, x: Node, mean: Node, var: Node) -> tuple[Node, ...]:
        return (graph.call_function(aten.batch_norm.default, (x, None, None, mean, var, True, 0.1, 1e-5, False)),)

    program, graph = _program(build, 3)
    graph = _with_op(graph, "batch_norm_default", writes=frozenset({"batch_norm_default", "x1", "x2"}))
    mean, var = torch.zeros(3), torch.ones(3)
    assert _measure(program, graph, [torch.randn(8, 3), mean, var])["batch_norm_default"][1] == "measured"
    assert mean.tolist() == [0.0] * 3
    assert var.tolist() == [1.0] * 3


def test_an_undeclared_write_to_an_intermediate_is_timed_on_a_copy(timer: _Counting) -> None:
    """x1 = 0 ─▶ relu ─▶ batch_norm(x0, mean=relu) ─▶ neg(relu)    (momentum 1/2, mean of x0 is 1: mean becomes 1/2)"""

    def build(graph: Graph, x: Node, zero: Node, var: Node) -> tuple[Node, ...]:
        mean = graph.call_function(aten.relu.default, (zero,))
        norm = graph.call_function(aten.batch_norm.default, (x, None, None, mean, var, True, 0.5, 1e-5, False))
        return norm, graph.call_function(aten.neg.default, (mean,))

    program, graph = _program(build, 3)
    graph = _with_op(graph, "batch_norm_default", writes=frozenset({"batch_norm_default", "relu_default", "x2"}))
    _measure(program, graph, [torch.ones(8, 3), torch.zeros(3), torch.ones(3)])
    assert timer.results[2].tolist() == [-0.5, -0.5, -0.5]


@pytest.mark.parametrize(("tells", "share"), [(True, 66 / (2 * 132)), (False, 1 / 132)])
def test_a_kernel_fills_what_its_launch_takes_as_far_as_it_tells(
    timer: _Counting, monkeypatch: pytest.MonkeyPatch, tells: bool, share: float
) -> None:
    """It tells once it has been launched: x0 ─▶ triton"""
    launched: list[Tensor] = []

    def footprint(x: Tensor) -> Footprint | None:
        return Footprint(blocks=66, warps=32, registers=32, shared_bytes=0) if tells and launched else None

    kernel = Kernel("triton.sum", launched.append, frozenset(), frozenset(), footprint)
    program, graph = _program(lambda graph, x: (graph.call_function(kernel, (x,)),), 1)
    monkeypatch.setattr(measured, "multiprocessor_of", lambda device: Multiprocessor())
    (cost,) = measure(program, graph, replace(profile_of("cpu"), multiprocessors=132), [torch.ones(4)]).values()
    assert (cost.source, cost.sm_share) == ("measured", share)


def test_random_numbers_are_drawn_as_if_nothing_had_been_measured() -> None:
    """x0 ─▶ native_dropout"""
    program, graph = _program(_dropout, 1)
    before = torch.get_rng_state()
    assert _measure(program, graph, [torch.ones(64)])["native_dropout_default"][1] == "measured"
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "changes",
    [
        {"orders": frozenset({"collective"})},
        {"orders": frozenset({"rng", "world"})},
        {"device": "cuda:0"},
    ],
    ids=["collective", "side effect", "other device"],
)
def test_what_cannot_be_repeated_keeps_its_estimate(timer: _Counting, changes: dict[str, Any]) -> None:
    program, graph = _program(lambda graph, x: (graph.call_function(aten.relu.default, (x,)),), 1)
    graph = _with_op(graph, "relu_default", **changes)
    costs = measure(program, graph, profile_of("cpu"), [torch.ones(3)])
    assert costs == price(graph, profile_of("cpu"))
    assert timer.results == []


@pytest.mark.parametrize(("device", "timeable"), [("cpu", True), ("cuda:0", False)])
def test_what_cannot_be_captured_is_timed_where_nothing_is_captured(device: str, timeable: bool) -> None:
    _, graph = _program(lambda graph, x: (graph.call_function(aten.relu.default, (x,)),), 1)
    op = _with_op(graph, "relu_default", device=device, uncapturable="runs on the CPU").ops["relu_default"]
    assert _is_timeable(op, device) is timeable


def test_an_op_that_cannot_be_timed_keeps_its_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(call: Callable[[], Any], expected_us: float) -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(measured, "_time_calls", failing)
    program, graph = _program(lambda graph, x: (graph.call_function(aten.relu.default, (x,)),), 1)
    costs = measure(program, graph, profile_of("cpu"), [torch.ones(3)])
    assert costs == price(graph, profile_of("cpu"))


def test_the_program_s_own_failure_reaches_the_caller() -> None:
    program, graph = _program(lambda graph, x0, x1: (graph.call_function(aten.mm.default, (x0, x1)),), 2)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        measure(program, graph, profile_of("cpu"), [torch.ones(2, 3), torch.ones(2, 3)])


def test_when_the_time_is_spent_the_rest_keeps_its_estimates(timer: _Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """x0 ─▶ relu ─▶ neg ─▶ relu_1   (relu's time is known when the time is up, neg's is not)"""
    seconds = iter([0.0, 5.0])
    monkeypatch.setattr(measured.time, "perf_counter", lambda: next(seconds))

    def build(graph: Graph, x: Node) -> tuple[Node, ...]:
        relu = graph.call_function(aten.relu.default, (x,))
        neg = graph.call_function(aten.neg.default, (relu,))
        return (graph.call_function(aten.relu.default, (neg,)),)

    program, graph = _program(build, 1)
    monkeypatch.setattr(measured, "_BUDGET_S", 1.0)
    costs = _measure(program, graph, [torch.ones(3)])
    assert [source for _, source in costs.values()] == ["measured", "roofline", "measured"]


def test_no_gradients_are_recorded(timer: _Counting) -> None:
    program, graph = _program(lambda graph, x: (graph.call_function(aten.relu.default, (x,)),), 1)
    _measure(program, graph, [torch.ones(3, requires_grad=True)])
    assert not timer.results[0].requires_grad


def test_the_median_of_five_short_calls_counts_and_one_long_call_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(durations: Sequence[float]) -> tuple[float, int]:
        clock = iter([tick for duration in durations for tick in (0.0, duration)])
        calls: list[None] = []
        monkeypatch.setattr(measured.time, "perf_counter", lambda: next(clock))
        return measured._time_calls(lambda: calls.append(None), 1.0), len(calls)

    assert timed([1e-6, 9e-6, 2e-6, 3e-6, 5e-6]) == (pytest.approx(3.0), 1 + 5)
    assert timed([0.5]) == (pytest.approx(5e5), 1 + 1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[2::3],
        torch.arange(3.0).expand(4, 3),
        torch.arange(12.0).as_strided((2, 3), (1, 4), 2),
        torch.empty(0, 4),
        torch.tensor(5),
    ],
    ids=["transposed", "gaps", "expanded", "offset", "empty", "scalar"],
)
def test_a_copy_has_the_same_values_and_strides_elsewhere(tensor: Tensor) -> None:
    copy = measured._copied_tensor(tensor)
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()
    assert tensor.numel() == 0 or copy.data_ptr() != tensor.data_ptr()


def _on_gpu(build: Callable[..., Any], args: Sequence[Tensor]) -> dict[str, Any]:
    program, graph = _program(build, len(args), "cuda:0")
    return dict(measure(program, graph, profile_of("cuda:0"), args))


def _mlp(graph: Graph, x: Node, w0: Node, b0: Node, w1: Node, b1: Node) -> tuple[Node, ...]:
    hidden = graph.call_function(aten.linear.default, (x, w0, b0))
    relu = graph.call_function(aten.relu.default, (hidden,))
    return (graph.call_function(aten.linear.default, (relu, w1, b1)),)


@pytest.mark.gpu
def test_every_op_of_an_mlp_is_measured_on_the_gpu() -> None:
    shapes = [(64, 512), (1024, 512), (1024,), (256, 1024), (256,)]
    costs = _on_gpu(_mlp, [torch.randn(shape, device="cuda:0", requires_grad=True) for shape in shapes])
    assert {cost.source for cost in costs.values()} == {"measured"}
    assert all(0.1 < cost.duration_us < 1000 for cost in costs.values())


@pytest.mark.gpu
def test_a_large_product_takes_far_longer_than_a_relu_and_no_less_than_the_peak_allows() -> None:
    def build(graph: Graph, x: Node, w: Node) -> tuple[Node, ...]:
        product = graph.call_function(aten.mm.default, (x, w))
        return (graph.call_function(aten.relu.default, (product,)),)

    args = [torch.randn(4096, 4096, device="cuda:0", dtype=torch.float16) for _ in range(2)]
    costs = _on_gpu(build, args)
    product_us, relu_us = costs["mm_default"].duration_us, costs["relu_default"].duration_us
    assert product_us > 3 * relu_us
    assert product_us > 2 * 4096**3 / profile_of("cuda:0").flops["float16"]


@pytest.mark.gpu
def test_the_gpu_s_generator_is_left_as_found() -> None:
    before = torch.cuda.get_rng_state(0)
    costs = _on_gpu(_dropout, [torch.ones(4096, device="cuda:0")])
    assert costs["native_dropout_default"].source == "measured"
    assert torch.equal(torch.cuda.get_rng_state(0), before)
    torch.rand(3, device="cuda:0")


@pytest.mark.gpu
def test_an_op_in_place_does_not_change_the_arguments_on_the_gpu() -> None:
    x = torch.zeros(1024, device="cuda:0")
    costs = _on_gpu(lambda graph, x: (graph.call_function(aten.add_.Tensor, (x, 1)),), [x])
    assert costs["add__tensor"].source == "measured"
    assert x.count_nonzero().item() == 0


@pytest.mark.gpu
def test_an_op_that_waits_for_the_device_is_not_captured_and_harms_nothing() -> None:
    """x0 ─▶ nonzero, x0 ─▶ relu ─▶ native_dropout   (after nonzero, captures and random numbers must still work)"""

    def build(graph: Graph, x: Node) -> tuple[Node, ...]:
        indices = graph.call_function(aten.nonzero.default, (x,))
        relu = graph.call_function(aten.relu.default, (x,))
        return indices, relu, *_dropout(graph, relu)

    costs = _on_gpu(build, [torch.ones(1024, device="cuda:0")])
    assert [cost.source for cost in costs.values()] == ["roofline", "measured", "measured"]
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.gpu
def test_measuring_leaves_no_memory_in_use() -> None:
    args = [torch.randn(256, 256, device="cuda:0") for _ in range(2)]

    def build(graph: Graph, x: Node, w: Node) -> tuple[Node, ...]:
        relus = [graph.call_function(aten.relu.default, (x,)) for _ in range(3)]
        return (*relus, graph.call_function(aten.mm.default, (relus[0], w)))

    _on_gpu(build, args)
    before = torch.cuda.memory_allocated()
    _on_gpu(build, args)
    assert torch.cuda.memory_allocated() <= before
