"""Measuring: every distinct op once, on its real inputs, with nothing of the caller's changed; what is known, never.

Programs are built by hand, so that each test shows the graph that it is about. No test reads a clock: a timer that
counts stands in for the real one, except where only the fact that something was measured matters. A GPU of ours, which
adds up what is launched, stands in for one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from autostream.costs import measured, occupancy
from autostream.costs.device import profile_named, profile_of
from autostream.costs.measured import _is_timeable, measure
from autostream.costs.records import Record
from autostream.costs.roofline import price
from autostream.ir import Costs, DeviceProfile, Op, OpGraph, Placeholder, Program, Role, Storage
from autostream.runtime.restore import Restore
from autostream.utils.kernels import Kernel
from tests.runtime.programs import MODELS, Case, fused_case, sample

aten = torch.ops.aten
NOTHING = Restore([])


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

    def __call__(self, call: Callable[[], Any], restore: Restore, expected_us: float) -> Record:
        self.results.append(call())
        return {"warm_us": float(len(self.results))}


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> _Counting:
    counting = _Counting()
    monkeypatch.setattr(measured, "_time_calls", counting)
    return counting


def _measured(
    program: Program,
    graph: OpGraph,
    args: Sequence[Tensor],
    known: Mapping[str, Record] | None = None,
    budget_s: float = 1000.0,
) -> tuple[Costs, Mapping[str, Record]]:
    return measure(program, graph, profile_of("cpu"), args, known or {}, budget_s)


def _measure(program: Program, graph: OpGraph, args: Sequence[Tensor]) -> dict[str, tuple[float, str]]:
    costs, _ = _measured(program, graph, args)
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


def test_a_record_without_a_time_is_measured_again(timer: _Counting) -> None:
    """x0 ─▶ relu   (the file of the cache says only how busy it keeps the device)"""
    program, graph = _program(lambda graph, x: (graph.call_function(aten.relu.default, (x,)),), 1)
    _, found = _measured(program, graph, [torch.ones(4)])
    known = {key: {"busy_share": 0.5} for key in found}
    costs, again = _measured(program, graph, [torch.ones(4)], known)
    assert again.keys() == found.keys()
    assert costs["relu_default"].source == "measured"
    costs, _ = _measured(program, graph, [torch.ones(4)], known, budget_s=0.0)
    assert costs["relu_default"].source == "roofline"


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


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_an_op_that_counts_up_what_it_looks_up_finds_it_as_it_was(dtype: torch.dtype) -> None:
    """x1 = 3 ─▶ count_: takes x0[x1], the last one, then adds 1 to x1"""

    def count(place: Tensor, table: Tensor) -> None:
        table[place.long()]
        place.add_(1)

    kernel = Kernel("fused.count_", count, frozenset({0}), frozenset())
    program, graph = _program(lambda graph, x0, x1: (graph.call_function(kernel, (x0, x1)),), 2)
    costs = _measure(program, graph, [torch.tensor(3, dtype=dtype), torch.ones(4)])
    assert [source for _, source in costs.values()] == ["measured"]


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
    assert _measured(program, graph, [torch.ones(3)]) == (price(graph, profile_of("cpu")), {})
    assert timer.results == []


@pytest.mark.parametrize(("device", "timeable"), [("cpu", True), ("cuda:0", False)])
def test_what_cannot_be_captured_is_timed_where_nothing_is_captured(device: str, timeable: bool) -> None:
    _, graph = _program(lambda graph, x: (graph.call_function(aten.relu.default, (x,)),), 1)
    op = _with_op(graph, "relu_default", device=device, uncapturable="runs on the CPU").ops["relu_default"]
    assert _is_timeable(op, device) is timeable


@pytest.mark.parametrize(
    ("error", "remembered"),
    [(RuntimeError("it cannot be captured"), True), (torch.OutOfMemoryError("another time there may be more"), False)],
)
def test_an_op_that_cannot_be_timed_keeps_its_estimate_and_is_tried_in_one_run_only(
    monkeypatch: pytest.MonkeyPatch, error: Exception, remembered: bool
) -> None:
    tried: list[float] = []

    def failing(call: Callable[[], Any], restore: Restore, expected_us: float) -> Record:
        tried.append(expected_us)
        raise error

    monkeypatch.setattr(measured, "_time_calls", failing)
    program, graph = _program(lambda graph, x: (graph.call_function(aten.relu.default, (x,)),), 1)
    costs, found = _measured(program, graph, [torch.ones(3)])
    assert costs == price(graph, profile_of("cpu"))
    assert list(found.values()) == [{}] * remembered
    assert _measured(program, graph, [torch.ones(3)], found)[0] == costs
    assert len(tried) == 2, "twice in the first run, or once in each"


def test_a_capture_that_another_thread_spoils_is_tried_again(timer: _Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [RuntimeError("operation failed due to a previous error during capture")]

    def spoilt_once(call: Callable[[], Any], restore: Restore, expected_us: float) -> Record:
        if failures:
            raise failures.pop()
        return timer(call, restore, expected_us)

    monkeypatch.setattr(measured, "_time_calls", spoilt_once)
    program, graph = _program(lambda graph, x: (graph.call_function(aten.relu.default, (x,)),), 1)
    costs, _ = _measured(program, graph, [torch.ones(3)])
    assert costs["relu_default"].source == "measured"


def test_the_program_s_own_failure_reaches_the_caller() -> None:
    program, graph = _program(lambda graph, x0, x1: (graph.call_function(aten.mm.default, (x0, x1)),), 2)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        _measured(program, graph, [torch.ones(2, 3), torch.ones(2, 3)])


def test_when_the_time_is_spent_the_rest_keeps_its_estimates(timer: _Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """x0 ─▶ relu ─▶ neg ─▶ relu_1   (relu's time is known when the time is up, neg's is not)"""
    seconds = iter([0.0, 5.0])
    monkeypatch.setattr(measured.time, "perf_counter", lambda: next(seconds))

    def build(graph: Graph, x: Node) -> tuple[Node, ...]:
        relu = graph.call_function(aten.relu.default, (x,))
        neg = graph.call_function(aten.neg.default, (relu,))
        return (graph.call_function(aten.relu.default, (neg,)),)

    program, graph = _program(build, 1)
    costs, found = _measured(program, graph, [torch.ones(3)], budget_s=1.0)
    assert [cost.source for cost in costs.values()] == ["measured", "roofline", "measured"]
    assert len(found) == 1


def test_no_gradients_are_recorded(timer: _Counting) -> None:
    program, graph = _program(lambda graph, x: (graph.call_function(aten.relu.default, (x,)),), 1)
    _measure(program, graph, [torch.ones(3, requires_grad=True)])
    assert not timer.results[0].requires_grad


def test_the_least_of_five_short_calls_counts_and_one_long_call_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(durations: Sequence[float]) -> tuple[float, int]:
        clock = iter([tick for duration in durations for tick in (0.0, duration)])
        calls: list[None] = []
        monkeypatch.setattr(measured.time, "perf_counter", lambda: next(clock))
        record = measured._time_calls(lambda: calls.append(None), NOTHING, 1.0)
        assert record.keys() == {"warm_us"}
        return record["warm_us"], len(calls)

    assert timed([2e-6, 9e-6, 1e-6, 3e-6, 5e-6]) == (pytest.approx(1.0), 1 + 5)
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


# What is known


def _relu(graph: Graph, x: Node) -> tuple[Node, ...]:
    return (graph.call_function(aten.relu.default, (x,)),)


def test_what_is_known_is_not_timed_again(timer: _Counting) -> None:
    """x0 ─▶ relu, then another program: x0 ─▶ relu ─▶ neg"""

    def build(graph: Graph, x: Node) -> tuple[Node, ...]:
        return (graph.call_function(aten.neg.default, _relu(graph, x)),)

    _, known = _measured(*_program(_relu, 1), [torch.ones(3)])
    costs, found = _measured(*_program(build, 1), [torch.ones(3)], known)
    assert [cost.duration_us for cost in costs.values()] == [1.0, 2.0]
    assert (list(known.values()), list(found.values())) == ([{"warm_us": 1.0}], [{"warm_us": 2.0}])
    assert not known.keys() & found.keys()


def test_what_is_known_counts_when_no_time_is_left(timer: _Counting) -> None:
    _, known = _measured(*_program(_relu, 1), [torch.ones(3)])
    costs, found = _measured(*_program(_relu, 1), [torch.ones(3)], known, budget_s=0.0)
    assert (costs["relu_default"].source, found) == ("measured", {})


CASES = {**{name: lambda name=name: sample(name) for name in MODELS}, "fused": fused_case}


@pytest.mark.parametrize("case_of", CASES.values(), ids=CASES.keys())
def test_a_program_whose_ops_are_known_does_not_run(
    timer: _Counting, monkeypatch: pytest.MonkeyPatch, case_of: Callable[[], Case]
) -> None:
    """Tracing tells what ops will be given: the same as what they are given."""
    case = case_of()
    costs, known = _measured(case.program, case.graph, case.args())
    assert known
    monkeypatch.setattr(measured, "_run", None)
    again = case_of()
    assert _measured(again.program, again.graph, again.args(), known) == (costs, {})


def test_settings_that_change_kernels_are_content(timer: _Counting) -> None:
    """x0 ─▶ relu, with one thread and with two"""
    threads = torch.get_num_threads()
    program, graph = _program(_relu, 1)
    known: dict[str, Record] = {}
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            known |= _measured(program, graph, [torch.ones(3)], known)[1]
    finally:
        torch.set_num_threads(threads)
    assert list(known.values()) == [{"warm_us": 1.0}, {"warm_us": 2.0}]


def test_a_kernel_is_known_by_its_content(timer: _Counting) -> None:
    """Inductor numbers its kernels anew in each graph, and each process makes its own."""

    def program(content: str) -> tuple[Program, OpGraph]:
        kernel = Kernel("triton.poi_0", lambda x: None, frozenset(), frozenset(), content)
        return _program(lambda graph, x: (graph.call_function(kernel, (x,)),), 1)

    known: dict[str, Record] = {}
    for content in ("relu", "exp", "relu"):
        known |= _measured(*program(content), [torch.ones(3)], known)[1]
    assert len(known) == len(timer.results) == 2


# A GPU of ours


GPU = replace(profile_named("h200"), multiprocessors=100, same_stream_edge_us=1.0, kernel_us=0.25, replay_us=1.5)


class Gpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the time of what is launched, µs; whatever is added to empties the cache, and that takes 20 µs.

    Copying takes 3 µs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_us = 0.0
        self.is_cold = False
        self.graphs: list[float] = []
        self.pools: list[object] = []
        self.kernels: tuple[occupancy.Kernel, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "add_" in str(func):
            self.is_cold = True
            self.now_us += 20.0 + GPU.same_stream_edge_us
        elif "_foreach_copy_" in str(func):
            self.now_us += 3.0 + GPU.same_stream_edge_us
        return func(*args, **(kwargs or {}))

    def op(self, warm_us: float, cold_us: float) -> Callable[[], None]:
        def call() -> None:
            self.now_us += (cold_us if self.is_cold else warm_us) + GPU.same_stream_edge_us
            self.is_cold = False

        return call

    def capture(self, run: Callable[[], object], stream: Any, pool: Any, *, keep_nodes: bool) -> tuple[Any, None]:
        assert keep_nodes
        self.pools.append(pool)
        begin_us, self.is_cold = self.now_us, False
        run()
        self.graphs.append(self.now_us - begin_us)
        its_pool = f"pool of graph {len(self.graphs)}"
        return SimpleNamespace(us=self.graphs[-1], pool=lambda: its_pool), None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu()
    stream = SimpleNamespace(device="cpu", wait_stream=lambda other: None)
    monkeypatch.setattr(measured, "capture_stream", lambda device: stream)
    monkeypatch.setattr(measured, "capture", gpu.capture)
    monkeypatch.setattr(measured, "replay_us", lambda graph: graph.us + GPU.replay_us)
    monkeypatch.setattr(measured, "kernels_of", lambda graph: gpu.kernels)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    with gpu:
        yield gpu


def _timer(*, cold: bool = False) -> measured._GraphTimer:
    return measured._GraphTimer("cpu", replace(GPU, cache_bytes=8), cold=cold)


@pytest.mark.parametrize(
    ("expected_us", "copies"),
    [(9.0, [12]), (50.0, [2, 10]), (1000.0, [1, 9]), (0.0, [20]), (3.0, [20])],
    ids=["as expected", "shorter", "much shorter", "unknown", "longer"],
)
def test_as_many_copies_are_timed_as_hide_the_launch(gpu: Gpu, expected_us: float, copies: list[int]) -> None:
    """Replays should take 100 µs; one of less than half of that is not believed."""
    record = _timer()(gpu.op(warm_us=9.0, cold_us=30.0), NOTHING, expected_us)
    each_us = 9.0 + GPU.same_stream_edge_us
    assert [us / each_us for us in gpu.graphs] == pytest.approx(copies)
    assert record == {"warm_us": pytest.approx(each_us + GPU.replay_us / copies[-1]), "copies": copies[-1]}


def test_cold_is_what_an_op_takes_behind_a_kernel_that_empties_the_cache(gpu: Gpu) -> None:
    timer = _timer(cold=True)
    for warm_us, cold_us in ((10.0, 14.0), (100.0, 101.0)):
        record = timer(gpu.op(warm_us, cold_us), NOTHING, warm_us)
        assert record["cold_us"] == pytest.approx(cold_us + GPU.same_stream_edge_us)
    emptying = [us for us in gpu.graphs if us == pytest.approx(3 * 21.0)]
    assert len(emptying) == 1, "how long that kernel takes is measured once"


@pytest.mark.parametrize("warm_us", [2.0, 10.0, 100.0])
def test_what_putting_back_takes_is_no_part_of_a_time(gpu: Gpu, warm_us: float) -> None:
    place = Restore([torch.tensor(3)])
    with_it, without = (_timer(cold=True)(gpu.op(warm_us, 104.0), restore, warm_us) for restore in (place, NOTHING))
    assert with_it == pytest.approx(without)


def test_a_cold_time_that_noise_makes_negative_is_none(gpu: Gpu) -> None:
    """It could not be kept: no op takes less than no time."""
    assert _timer(cold=True)(gpu.op(10.0, -5.0), NOTHING, 10.0)["cold_us"] == 0.0


BEHIND_US = 0.1
"""What the model adds for the kernel before, which is another one in a program."""

RELU = Op("relu", "aten.relu.default", ("relu",), frozenset({"x"}), frozenset({"relu"}), elements=8)


@pytest.mark.parametrize(("missed", "duration_us"), [(0.0, 10.0), (0.5, 12.0), (1.0, 14.0)])
@pytest.mark.parametrize(
    "profile", [GPU, replace(GPU, same_stream_edge_us=2.0, replay_us=6.0)], ids=["a GPU", "slower edges"]
)
def test_the_profile_s_edge_and_replay_are_taken_off_what_was_kept(
    gpu: Gpu, profile: DeviceProfile, missed: float, duration_us: float
) -> None:
    """What is kept is what the clock said: a profile that is measured later changes what it means."""
    record = _timer(cold=True)(gpu.op(10.0, 14.0), NOTHING, 10.0)
    more_us = profile.same_stream_edge_us - GPU.same_stream_edge_us
    replays_us = (1 - missed) * (profile.replay_us - GPU.replay_us) / record["copies"]
    cost = measured._cost(RELU, profile, record, missed)
    assert cost.duration_us == pytest.approx(duration_us + BEHIND_US - more_us - replays_us)


def test_what_is_left_of_a_short_kernel_is_not_nothing(gpu: Gpu) -> None:
    record = _timer()(gpu.op(warm_us=0.0, cold_us=0.0), NOTHING, 1.0)
    slower = replace(GPU, same_stream_edge_us=5.0)
    assert measured._cost(RELU, slower, record, 0.0).duration_us == GPU.kernel_us + BEHIND_US


def test_all_captures_share_the_memory_of_the_first(gpu: Gpu) -> None:
    timer = _timer(cold=True)
    timer(gpu.op(10.0, 14.0), NOTHING, 10.0)
    assert gpu.pools == [None, "pool of graph 1", "pool of graph 1"]


@pytest.mark.parametrize("blocks", [(), (25,), (1, 100, 25)])
def test_an_op_keeps_busy_what_the_largest_of_its_kernels_does(gpu: Gpu, blocks: tuple[int, ...]) -> None:
    gpu.kernels = tuple(occupancy.Kernel(count, resident=1) for count in blocks)
    shares = {25: 0.5 * (0.7 + 0.3 / 4), 100: 1.0}
    record = _timer()(gpu.op(10.0, 14.0), NOTHING, 10.0)
    assert record.get("busy_share") == (pytest.approx(shares[max(blocks)]) if blocks else None)


class _Timer:
    """Stands in for a timer of a GPU: says what it is asked for."""

    asked: list[bool]

    def __init__(self, device: str, profile: DeviceProfile, *, cold: bool) -> None:
        self.asked.append(cold)
        self.record = {"warm_us": 10.0, "busy_share": 0.5} | ({"cold_us": 14.0} if cold else {})

    def __call__(self, call: Callable[[], object], restore: Restore, expected_us: float) -> Record:
        return self.record


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether ops were to be timed cold too, for each program that ran."""
    monkeypatch.setattr(_Timer, "asked", [], raising=False)
    monkeypatch.setattr(measured, "_GraphTimer", _Timer)
    monkeypatch.setattr(measured, "_current", lambda device: nullcontext())
    monkeypatch.setattr(torch.random, "fork_rng", lambda **_: nullcontext())
    return _Timer.asked


def _with_weights(size: int, known: Mapping[str, Record] | None = None, budget_s: float = 60.0) -> Any:
    """The cost of a relu, and what was found, in a program with weights of so many bytes: 100 are the cache."""
    program, graph = _program(_relu, 1, "cuda:0")
    graph = replace(graph, storages={"w": Storage("w", Role.PARAMETER, size, ("w",))})
    costs, found = measure(program, graph, replace(GPU, cache_bytes=100), [torch.ones(3)], known or {}, budget_s)
    return costs["relu_default"], found


@pytest.mark.parametrize(("size", "cold", "duration_us"), [(50, False, 10.0), (65, True, 12.0), (80, True, 14.0)])
def test_ops_are_timed_cold_only_where_something_is_missed(
    asked: list[bool], size: int, cold: bool, duration_us: float
) -> None:
    """Half of the cache is kept, four fifths are not; between them, an op costs its share of both times."""
    cost, found = _with_weights(size)
    (record,) = found.values()
    assert asked == [cold]
    assert ("cold_us" in record) is cold
    busy = 0.5 * 10.0 / duration_us  # while it waits for memory, it keeps nothing busy
    assert (cost.duration_us, cost.sm_share, cost.source) == (
        pytest.approx(duration_us),
        pytest.approx(busy),
        "measured",
    )


def test_what_is_known_warm_is_timed_anew_where_something_is_missed(asked: list[bool]) -> None:
    """And what is known cold serves both."""
    _, warm = _with_weights(0)
    cost, cold = _with_weights(80, warm)
    assert (cost.duration_us, warm.keys() == cold.keys(), asked) == (14.0, True, [False, True])
    assert _with_weights(80, cold)[1] == _with_weights(0, cold)[1] == {}
    assert _with_weights(0, cold)[0].duration_us == 10.0


def test_a_warm_time_is_better_than_none(asked: list[bool]) -> None:
    _, warm = _with_weights(0)
    cost, found = _with_weights(80, warm, budget_s=0.0)
    assert (cost.duration_us, cost.source, found) == (10.0, "measured", {})


def test_what_cannot_be_timed_is_not_tried_again_where_something_is_missed(
    asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []
    monkeypatch.setattr(_Timer, "__call__", lambda self, call, expected_us: tried.append(call) or {})
    _, known = _with_weights(80)
    assert list(known.values()) == [{}]
    before = len(tried)
    cost, found = _with_weights(80, known)
    assert (cost.source, found, len(tried)) == ("roofline", {}, before)


def test_a_cold_cache_makes_nothing_faster(asked: list[bool]) -> None:
    _, known = _with_weights(80)
    shorter = {key: {**record, "cold_us": 9.0} for key, record in known.items()}
    assert _with_weights(80, shorter)[0].duration_us == 10.0


# A GPU


def _on_gpu(build: Callable[..., Any], args: Sequence[Tensor]) -> dict[str, Any]:
    program, graph = _program(build, len(args), "cuda:0")
    costs, _ = measure(program, graph, profile_of("cuda:0"), args, {}, 60.0)
    return dict(costs)


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
    peak = profile_of("cuda:0").flops["float16"] / 0.75  # a profile has what large kernels attain of the datasheet's
    assert product_us > 2 * 4096**3 / peak


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


def test_sizes_that_data_will_tell_have_no_key_yet(timer: _Counting) -> None:
    """x0 ─▶ nonzero ─▶ relu: only the run knows how many rows the relu gets."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def build(graph: Graph, x: Node) -> tuple[Node, ...]:
        nonzero = graph.call_function(aten.nonzero.default, (x,))
        return (graph.call_function(aten.relu.default, (nonzero,)),)

    program, graph = _program(build, 1)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x, nonzero, relu, _ = program.module.graph.nodes
        x.meta["val"] = mode.from_tensor(torch.ones(4))
        nonzero.meta["val"] = aten.nonzero.default(x.meta["val"])
        relu.meta["val"] = aten.relu.default(nonzero.meta["val"])
    assert measured._expected_keys(program, graph)["relu_default"] == ""
    assert _measure(program, graph, [torch.ones(4)])["relu_default"][1] == "measured"


def test_while_an_op_waits_for_memory_the_multiprocessors_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as long again with a cold cache: as much work in more time."""
    relu = Op("relu", "aten.relu.default", ("relu",), frozenset({"x"}), frozenset({"relu"}), elements=8)
    record = {"warm_us": 10.0, "cold_us": 15.0, "busy_share": 0.6}
    cost = measured._cost(relu, profile_named("h200"), record, missed=1.0)
    assert (cost.duration_us, cost.sm_share) == (15.0, pytest.approx(0.4))
    assert measured._cost(relu, profile_named("h200"), record, missed=0.0).sm_share == pytest.approx(0.6)
