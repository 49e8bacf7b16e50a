"""Measuring: every distinct op is timed once on its real inputs, and nothing of the caller's changes.

Programs are built by hand. No test reads a clock: a timer that counts replaces the real one, and a simulated GPU adds
up the times of launches.
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

from autostream.analysis.dependencies import analyze
from autostream.costs import measured, occupancy
from autostream.costs.device import profile_named, profile_of
from autostream.costs.measured import measure
from autostream.costs.records import Record
from autostream.costs.roofline import price
from autostream.ir import Costs, DeviceProfile, Op, OpGraph, Placeholder, Program, Role, Storage
from autostream.runtime.restore import Restore
from autostream.utils.kernels import Kernel
from tests.analysis.programs import Tape
from tests.runtime.programs import Case, fused_case, sample

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
NOTHING = Restore([])


def _program(build: Callable[..., Any], inputs: int = 1, device: str = "cpu") -> tuple[Program, OpGraph]:
    """Trace ``build(graph, *placeholders)`` by hand; every ATen call in it is an op that allocates its result."""
    graph = Graph()
    nodes = [graph.placeholder(f"x{index}") for index in range(inputs)]
    outputs = build(graph, *nodes)
    outputs = (outputs,) if isinstance(outputs, Node) else outputs
    graph.output(outputs)
    placeholders = tuple(Placeholder(node.name, Role.INPUT, str(at), node.name) for at, node in enumerate(nodes))
    module = GraphModule(torch.nn.Module(), graph)
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    ops = {node.name: _op(node, device) for node in calls}
    names = tuple(output.name for output in outputs)
    return Program(module, placeholders, names, "aten", device), OpGraph(ops, (), {}, (), device)


def _op(node: Node, device: str) -> Op:
    """In-place calls write their first argument; dropout generates random numbers."""
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


def _relu(graph: Graph, *inputs: Node) -> tuple[Node, ...]:
    return tuple(graph.call_function(aten.relu.default, (x,)) for x in inputs)


def _dropout(graph: Graph, x: Node) -> tuple[Node, ...]:
    return (graph.call_function(aten.native_dropout.default, (x, 0.5, True)),)


class _Counting:
    """A timer that makes each call once and returns 1 µs, 2 µs, …"""

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


# Which ops are timed


def test_ops_of_the_same_shapes_are_timed_once_without_gradients(timer: _Counting) -> None:
    """x0 ─▶ relu ─▶ relu_1 ─▶ sum   (both relus get 4 × 4 floats)"""

    def build(graph: Graph, x: Node) -> Node:
        (relu,) = _relu(graph, x)
        (relu_1,) = _relu(graph, relu)
        return graph.call_function(aten.sum.default, (relu_1,))

    costs = _measure(*_program(build), [torch.ones(4, 4, requires_grad=True)])
    assert costs["relu_default"] == costs["relu_default_1"] == (1.0, "measured")
    assert costs["sum_default"] == (2.0, "measured")
    assert [result.requires_grad for result in timer.results] == [False, False]


@pytest.mark.parametrize("other", [torch.ones(4, 5), torch.ones(4, 4).double(), torch.ones(8, 4).t()[:, ::2]], ids=str)
def test_ops_of_other_shapes_dtypes_or_strides_are_timed_each(timer: _Counting, other: Tensor) -> None:
    _measure(*_program(_relu, 2), [torch.ones(4, 4), other])
    assert len(timer.results) == 2


def test_ops_of_other_constants_are_timed_each(timer: _Counting) -> None:
    """1, 1.0 and True are equal in Python, but not the same constant."""

    def build(graph: Graph, x: Node) -> tuple[Node, ...]:
        return tuple(graph.call_function(aten.add.Tensor, (x, other)) for other in (1, 1.0, True, 2, 1))

    _measure(*_program(build), [torch.ones(4)])
    assert len(timer.results) == 4


def test_ops_are_timed_on_their_real_inputs_and_views_only_run(timer: _Counting) -> None:
    """x0 ─▶ split ─▶ getitem ─▶ mul (· x1) ─▶ add (+ x1)    (split is folded, as a view is)"""

    def build(graph: Graph, x0: Node, x1: Node) -> Node:
        split = graph.call_function(aten.split.Tensor, (x0, 2))
        item = graph.call_function(operator.getitem, (split, 1))
        mul = graph.call_function(aten.mul.Tensor, (item, x1))
        return graph.call_function(aten.add.Tensor, (mul,), {"other": x1})

    program, graph = _program(build, 2)
    graph = replace(graph, ops={name: op for name, op in graph.ops.items() if "split" not in name})
    _measure(program, graph, [torch.arange(4.0), torch.tensor(3.0)])
    assert [result.tolist() for result in timer.results] == [[6.0, 9.0], [9.0, 12.0]]


@pytest.mark.parametrize(
    "changes",
    [{"orders": frozenset({"collective"})}, {"orders": frozenset({"rng", "world"})}, {"device": "cuda:0"}],
    ids=["collective", "side effect", "other device"],
)
def test_ops_that_cannot_be_repeated_keep_their_estimates(timer: _Counting, changes: dict[str, Any]) -> None:
    program, graph = _program(_relu)
    graph = _with_op(graph, "relu_default", **changes)
    assert _measured(program, graph, [torch.ones(3)]) == (price(graph, profile_of("cpu")), {})
    assert timer.results == []


@pytest.mark.parametrize(
    ("error", "kept"), [(RuntimeError("it cannot be captured"), True), (torch.OutOfMemoryError("no memory"), False)]
)
def test_an_op_that_fails_keeps_its_estimate(monkeypatch: pytest.MonkeyPatch, error: Exception, kept: bool) -> None:
    """It is tried twice, as another thread may disturb a capture, and not again, unless memory was short."""
    failures = 0

    def failing(call: Callable[[], Any], restore: Restore, expected_us: float) -> Record:
        nonlocal failures
        failures += 1
        raise error

    monkeypatch.setattr(measured, "_time_calls", failing)
    program, graph = _program(_relu)
    costs, records = _measured(program, graph, [torch.ones(3)])
    assert costs == price(graph, profile_of("cpu"))
    assert list(records.values()) == [{}] * kept
    assert _measured(program, graph, [torch.ones(3)], records)[0] == costs
    assert failures == 2


def test_an_error_of_the_program_reaches_the_caller() -> None:
    program = _program(lambda graph, x0, x1: graph.call_function(aten.mm.default, (x0, x1)), 2)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        _measured(*program, [torch.ones(2, 3), torch.ones(2, 3)])


def test_behind_the_end_of_the_budget_ops_keep_their_estimates(
    timer: _Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x0 ─▶ relu ─▶ neg ─▶ relu_1   (relu takes longer than the budget)"""
    seconds = iter([0.0, 5.0])
    monkeypatch.setattr(measured.time, "perf_counter", lambda: next(seconds))

    def build(graph: Graph, x: Node) -> tuple[Node, ...]:
        return _relu(graph, graph.call_function(aten.neg.default, _relu(graph, x)))

    costs, records = _measured(*_program(build), [torch.ones(3)], budget_s=1.0)
    assert [cost.source for cost in costs.values()] == ["measured", "roofline", "measured"]
    assert len(records) == 1


# Nothing of the caller's changes


@pytest.mark.parametrize(
    "mutate",
    [
        lambda graph, relu: graph.call_function(aten.add_.Tensor, (relu, 1)),
        lambda graph, relu: graph.call_function(aten._foreach_add_.Scalar, ([relu], 1)),
    ],
    ids=["tensor", "list"],
)
def test_an_op_in_place_is_timed_on_a_copy(timer: _Counting, mutate: Callable[[Graph, Node], Node]) -> None:
    """x0 ─▶ relu ─▶ add_ (+ 1) ─▶ neg    (timing add_ must not add twice)"""

    def build(graph: Graph, x: Node) -> Node:
        (relu,) = _relu(graph, x)
        mutate(graph, relu)
        return graph.call_function(aten.neg.default, (relu,))

    _measure(*_program(build), [torch.ones(3)])
    assert timer.results[2].tolist() == [-2.0, -2.0, -2.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_position_that_an_op_increments_is_restored_between_runs(dtype: torch.dtype) -> None:
    """x1 = 3 ─▶ count_: reads x0[x1], the last element, then adds 1 to x1"""

    def count(position: Tensor, table: Tensor) -> None:
        table[position.long()]
        position.add_(1)

    kernel = Kernel("fused.count_", count, frozenset({0}), frozenset())
    program, graph = _program(lambda graph, x0, x1: graph.call_function(kernel, (x0, x1)), 2)
    costs = _measure(program, graph, [torch.tensor(3, dtype=dtype), torch.ones(4)])
    assert [source for _, source in costs.values()] == ["measured"]


def test_arguments_are_not_mutated(timer: _Counting) -> None:
    """x0 ─▶ add_ (+ 1)    while x1 is another view of the same memory, read afterwards"""

    def build(graph: Graph, x0: Node, x1: Node) -> tuple[Node, ...]:
        return graph.call_function(aten.add_.Tensor, (x0, 1)), graph.call_function(aten.neg.default, (x1,))

    program, graph = _program(build, 2)
    first, second = program.placeholders
    program = replace(program, placeholders=(first, replace(second, storage="x0")))
    memory = torch.zeros(6)
    _measure(program, graph, [memory[:4], memory[2:]])
    assert memory.tolist() == [0.0] * 6
    assert timer.results[1].tolist() == [-1.0, -1.0, -0.0, -0.0], "the copies alias as the arguments do"


def test_running_statistics_are_not_mutated(timer: _Counting) -> None:
    """x1 = 0 ─▶ relu ─▶ batch_norm(x0, mean=relu, var=x2) ─▶ neg(relu)

    In training, batch_norm writes running_mean, which its schema calls an input: the mean of x0 is 1, momentum 1/2.
    """

    def build(graph: Graph, x: Node, zero: Node, var: Node) -> tuple[Node, ...]:
        (mean,) = _relu(graph, zero)
        norm = graph.call_function(aten.batch_norm.default, (x, None, None, mean, var, True, 0.5, 1e-5, False))
        return norm, graph.call_function(aten.neg.default, (mean,))

    program, graph = _program(build, 3)
    graph = _with_op(graph, "batch_norm_default", writes=frozenset({"batch_norm_default", "relu_default", "x2"}))
    mean, var = torch.zeros(3), torch.ones(3)
    _measure(program, graph, [torch.ones(8, 3), mean, var])
    assert timer.results[2].tolist() == [-0.5, -0.5, -0.5]
    assert (mean.tolist(), var.tolist()) == ([0.0] * 3, [1.0] * 3)


def test_random_states_are_restored() -> None:
    before = torch.get_rng_state()
    assert _measure(*_program(_dropout), [torch.ones(64)])["native_dropout_default"][1] == "measured"
    assert torch.equal(torch.get_rng_state(), before)


# Records of earlier measurements


def test_known_ops_are_not_timed_again(timer: _Counting) -> None:
    """x0 ─▶ relu, then another program: x0 ─▶ relu ─▶ neg"""

    def build(graph: Graph, x: Node) -> Node:
        return graph.call_function(aten.neg.default, _relu(graph, x))

    _, known = _measured(*_program(_relu), [torch.ones(3)])
    costs, records = _measured(*_program(build), [torch.ones(3)], known)
    assert [cost.duration_us for cost in costs.values()] == [1.0, 2.0]
    assert (list(known.values()), list(records.values())) == ([{"warm_us": 1.0}], [{"warm_us": 2.0}])
    assert not known.keys() & records.keys()
    costs, records = _measured(*_program(_relu), [torch.ones(3)], known, budget_s=0.0)
    assert (costs["relu_default"].source, records) == ("measured", {})
    without_time = {key: {"busy_share": 0.5} for key in known}
    costs, records = _measured(*_program(_relu), [torch.ones(4)[:3]], without_time)
    assert (costs["relu_default"].source, records.keys()) == ("measured", known.keys())


CASES = {name: lambda name=name: sample(name) for name in ("views", "normalized", "several")} | {"fused": fused_case}


@pytest.mark.parametrize("case_of", CASES.values(), ids=CASES.keys())
def test_a_program_whose_ops_are_all_known_does_not_run(
    timer: _Counting, monkeypatch: pytest.MonkeyPatch, case_of: Callable[[], Case]
) -> None:
    """Keys that are computed from the trace equal those of the run."""
    case = case_of()
    costs, known = _measured(case.program, case.graph, case.args())
    assert known
    monkeypatch.setattr(measured, "_run", None)
    again = case_of()
    assert _measured(again.program, again.graph, again.args(), known) == (costs, {})


def test_the_number_of_threads_is_part_of_the_key(timer: _Counting) -> None:
    threads = torch.get_num_threads()
    known: dict[str, Record] = {}
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            known |= _measured(*_program(_relu), [torch.ones(3)], known)[1]
    finally:
        torch.set_num_threads(threads)
    assert list(known.values()) == [{"warm_us": 1.0}, {"warm_us": 2.0}]


def test_the_key_of_a_kernel_is_its_content(timer: _Counting) -> None:
    """Inductor's names of kernels have numbers that differ from graph to graph."""

    def program(content: str) -> tuple[Program, OpGraph]:
        kernel = Kernel("triton.poi_0", lambda x: None, frozenset(), frozenset(), content)
        return _program(lambda graph, x: graph.call_function(kernel, (x,)))

    known: dict[str, Record] = {}
    for content in ("relu", "exp", "relu"):
        known |= _measured(*program(content), [torch.ones(3)], known)[1]
    assert len(known) == len(timer.results) == 2


def test_data_dependent_sizes_have_no_key_before_the_run(timer: _Counting) -> None:
    """x0 ─▶ nonzero ─▶ relu: only the run tells how many rows the relu gets."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    program, graph = _program(lambda graph, x: _relu(graph, graph.call_function(aten.nonzero.default, (x,))))
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x, nonzero, relu, _ = program.module.graph.nodes
        x.meta["val"] = mode.from_tensor(torch.ones(4))
        nonzero.meta["val"] = aten.nonzero.default(x.meta["val"])
        relu.meta["val"] = aten.relu.default(nonzero.meta["val"])
    _, known = _measured(program, graph, [torch.ones(4)])
    assert len(timer.results) == 2
    costs, records = _measured(program, graph, [torch.tensor([1.0, 0.0, 1.0, 1.0])], known)
    assert costs["relu_default"].source == "measured"
    assert len(records) == 1, "the relu of fewer rows is another op"


# Timers


def test_on_the_cpu_the_least_of_five_calls_counts_or_one_long_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(durations: Sequence[float]) -> tuple[float, int]:
        clock = iter([tick for duration in durations for tick in (0.0, duration)])
        calls: list[None] = []
        monkeypatch.setattr(measured.time, "perf_counter", lambda: next(clock))
        record = measured._time_calls(lambda: calls.append(None), NOTHING, 1.0)
        return record["warm_us"], len(calls)

    assert timed([2e-6, 9e-6, 1e-6, 3e-6, 5e-6]) == (pytest.approx(1.0), 1 + 5)
    assert timed([0.5]) == (pytest.approx(5e5), 1 + 1)


GPU = replace(profile_named("h200"), multiprocessors=100, same_stream_edge_us=1.0, kernel_us=0.25, replay_us=1.5)


class Gpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the time of launches, µs. In-place additions evict the cache and take 20 µs; copies take 3 µs."""

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
        elif "copy_" in str(func):
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
        pool_of_graph = f"pool of graph {len(self.graphs)}"
        return SimpleNamespace(us=self.graphs[-1], pool=lambda: pool_of_graph), None


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


def test_the_cold_time_is_behind_a_kernel_that_evicts_the_cache(gpu: Gpu) -> None:
    timer = _timer(cold=True)
    for warm_us, cold_us in ((10.0, 14.0), (100.0, 101.0)):
        record = timer(gpu.op(warm_us, cold_us), NOTHING, warm_us)
        assert record["cold_us"] == pytest.approx(cold_us + GPU.same_stream_edge_us)
    assert gpu.pools == [None] + ["pool of graph 1"] * (len(gpu.pools) - 1), "all graphs share one memory pool"
    assert timer(gpu.op(10.0, -5.0), NOTHING, 10.0)["cold_us"] == 0.0, "noise must not make a time negative"


@pytest.mark.parametrize("warm_us", [2.0, 10.0, 100.0])
def test_the_time_of_restoring_is_subtracted(gpu: Gpu, warm_us: float) -> None:
    position = Restore([torch.tensor(3)])
    restored, plain = (_timer(cold=True)(gpu.op(warm_us, 104.0), restore, warm_us) for restore in (position, NOTHING))
    assert restored == pytest.approx(plain)


OTHER_KERNEL_US = 0.1
"""The model's surcharge for a kernel behind another kernel."""

RELU = Op("relu", "aten.relu.default", ("relu",), frozenset({"x"}), frozenset({"relu"}), elements=8)


@pytest.mark.parametrize(("missed", "duration_us"), [(0.0, 10.0), (0.5, 12.0), (1.0, 14.0)])
@pytest.mark.parametrize(
    "profile", [GPU, replace(GPU, same_stream_edge_us=2.0, replay_us=6.0)], ids=["a GPU", "slower edges"]
)
def test_edges_and_replays_are_subtracted_when_a_record_is_used(
    gpu: Gpu, profile: DeviceProfile, missed: float, duration_us: float
) -> None:
    """Records have the clock's times, so that a profile that is measured later applies to them."""
    record = _timer(cold=True)(gpu.op(10.0, 14.0), NOTHING, 10.0)
    more_us = profile.same_stream_edge_us - GPU.same_stream_edge_us
    replays_us = (1 - missed) * (profile.replay_us - GPU.replay_us) / record["copies"]
    cost = measured._cost(RELU, profile, record, missed)
    assert cost.duration_us == pytest.approx(duration_us + OTHER_KERNEL_US - more_us - replays_us)
    short = measured._cost(RELU, profile, {"warm_us": 1.0, "copies": 20}, 0.0)
    assert short.duration_us == GPU.kernel_us + OTHER_KERNEL_US, "at least that of the shortest kernel"


# Programs that exceed the cache


class _Timer:
    """Replaces the timer of a GPU; records for each program that runs whether cold times are measured."""

    cold: list[bool]

    def __init__(self, device: str, profile: DeviceProfile, *, cold: bool) -> None:
        self.cold.append(cold)
        self.record = {"warm_us": 10.0, "busy_share": 0.5} | ({"cold_us": 14.0} if cold else {})

    def __call__(self, call: Callable[[], object], restore: Restore, expected_us: float) -> Record:
        return self.record


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    monkeypatch.setattr(_Timer, "cold", [], raising=False)
    monkeypatch.setattr(measured, "_GraphTimer", _Timer)
    monkeypatch.setattr(measured, "_current", lambda device: nullcontext())
    monkeypatch.setattr(torch.random, "fork_rng", lambda **_: nullcontext())
    return _Timer.cold


def _with_weights(size: int, known: Mapping[str, Record] | None = None, budget_s: float = 60.0) -> Any:
    """The cost of a relu and the new records, in a program with weights of so many bytes; the cache has 100."""
    program, graph = _program(_relu, 1, "cuda:0")
    graph = replace(graph, storages={"w": Storage("w", Role.PARAMETER, size, ("w",))})
    costs, records = measure(program, graph, replace(GPU, cache_bytes=100), [torch.ones(3)], known or {}, budget_s)
    return costs["relu_default"], records


@pytest.mark.parametrize(("size", "is_cold", "duration_us"), [(50, False, 10.0), (65, True, 12.0), (80, True, 14.0)])
def test_cold_times_are_measured_if_the_program_exceeds_the_cache(
    cold: list[bool], size: int, is_cold: bool, duration_us: float
) -> None:
    """Half of the cache is kept, four fifths are not; between them, an op costs its share of both times."""
    cost, records = _with_weights(size)
    (record,) = records.values()
    assert cold == [is_cold]
    assert ("cold_us" in record) is is_cold
    assert (cost.duration_us, cost.source) == (pytest.approx(duration_us), "measured")
    assert cost.sm_share == pytest.approx(0.5 * 10.0 / duration_us), "waiting for memory leaves multiprocessors free"


def test_a_warm_record_is_completed_if_cold_times_are_needed(cold: list[bool]) -> None:
    _, warm = _with_weights(0)
    cost, records = _with_weights(80, warm, budget_s=0.0)
    assert (cost.duration_us, cost.source, records) == (10.0, "measured", {}), "a warm time is better than none"
    cost, complete = _with_weights(80, warm)
    assert (cost.duration_us, warm.keys() == complete.keys(), cold) == (14.0, True, [False, True, True])
    assert _with_weights(80, complete)[1] == _with_weights(0, complete)[1] == {}
    assert _with_weights(0, complete)[0].duration_us == 10.0
    shorter = {key: {**record, "cold_us": 9.0} for key, record in complete.items()}
    assert _with_weights(80, shorter)[0].duration_us == 10.0, "a cold cache makes nothing faster"
    cost, records = _with_weights(80, {key: {} for key in complete})
    assert (cost.source, records) == ("roofline", {}), "an op that cannot be timed is not tried again"


# A real GPU


def _on_gpu(build: Callable[..., Any], args: Sequence[Tensor]) -> dict[str, Any]:
    program, graph = _program(build, len(args), "cuda:0")
    costs, _ = measure(program, graph, profile_of("cuda:0"), args, {}, 60.0)
    return dict(costs)


def _mlp(graph: Graph, x: Node, w0: Node, b0: Node, w1: Node, b1: Node) -> Node:
    hidden = graph.call_function(aten.linear.default, (x, w0, b0))
    return graph.call_function(aten.linear.default, (*_relu(graph, hidden), w1, b1))


@pytest.mark.gpu
def test_every_op_of_an_mlp_is_measured_on_the_gpu() -> None:
    shapes = [(64, 512), (1024, 512), (1024,), (256, 1024), (256,)]
    costs = _on_gpu(_mlp, [torch.randn(shape, device="cuda:0", requires_grad=True) for shape in shapes])
    assert {cost.source for cost in costs.values()} == {"measured"}
    assert all(0.1 < cost.duration_us < 1000 for cost in costs.values())


@pytest.mark.gpu
def test_a_large_product_takes_far_longer_than_a_relu_and_no_less_than_the_peak_allows() -> None:
    def build(graph: Graph, x: Node, w: Node) -> tuple[Node, ...]:
        return _relu(graph, graph.call_function(aten.mm.default, (x, w)))

    args = [torch.randn(4096, 4096, device="cuda:0", dtype=torch.float16) for _ in range(2)]
    costs = _on_gpu(build, args)
    product_us, relu_us = costs["mm_default"].duration_us, costs["relu_default"].duration_us
    assert product_us > 3 * relu_us
    peak = profile_of("cuda:0").flops["float16"] / 0.75  # a profile has three quarters of the datasheet's
    assert product_us > 2 * 4096**3 / peak


@pytest.mark.gpu
def test_the_states_of_the_gpu_are_left_as_found() -> None:
    """x0 ─▶ nonzero, x0 ─▶ relu ─▶ native_dropout, x1 ─▶ add_ (nonzero synchronizes and cannot be captured)"""

    def build(graph: Graph, x: Node, y: Node) -> tuple[Node, ...]:
        indices = graph.call_function(aten.nonzero.default, (x,))
        return indices, *_dropout(graph, *_relu(graph, x)), graph.call_function(aten.add_.Tensor, (y, 1))

    args = [torch.ones(4096, device="cuda:0"), torch.zeros(1024, device="cuda:0")]
    for run in range(2):  # the first one warms up
        before, memory = torch.cuda.get_rng_state(0), torch.cuda.memory_allocated()
        costs = _on_gpu(build, args)
        assert [cost.source for cost in costs.values()] == ["roofline", "measured", "measured", "measured"]
        assert torch.equal(torch.cuda.get_rng_state(0), before)
        assert torch.cuda.get_sync_debug_mode() == 0
        assert args[1].count_nonzero().item() == 0
        assert run == 0 or torch.cuda.memory_allocated() <= memory
    torch.rand(3, device="cuda:0")


def test_collectives_are_not_run_and_keep_their_estimates() -> None:
    """Other processes would have to be there; and a wait takes no time, whatever a clock says."""
    tape = Tape()
    x = tape.input(2, 3)
    in_place = tape.call(c10d.all_reduce_.default, tape.call(aten.sin.default, x), "sum", "nobody's")
    gathered = tape.call(c10d.all_gather_into_tensor.default, x, 2, "nobody's")
    waited = [tape.call(c10d.wait_tensor.default, started) for started in (in_place, gathered)]
    last = tape.call(aten.cat.default, [*waited, x])
    program = tape.case([last]).program
    graph = analyze(program)
    costs, _ = _measured(program, graph, [torch.ones(2, 3)])
    measured = {name for name, cost in costs.items() if cost.source == "measured"}
    assert measured == {"sin_default", "cat_default"}
    estimates = price(graph, profile_of("cpu"))
    assert all(costs[name] == estimates[name] for name in costs.keys() - measured)
