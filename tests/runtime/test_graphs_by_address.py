"""Captured graphs of models whose weights move from call to call. Captures are fake (``tests/captures.py``)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import symbolic_trace

import autostream
from autostream.dispatch.captured_call import CapturedCall
from autostream.dispatch.compiled_graph import CompiledGraph
from autostream.dispatch.scheduled_program import ModelContext
from autostream.ir import Role
from autostream.options import Options
from autostream.runtime import graphs_by_address
from autostream.runtime.cuda_graph import CapturedGraph, GraphPools
from autostream.runtime.graphs_by_address import BoundGraph, GraphsByAddress
from autostream.runtime.graphs_by_input import GraphsByInput
from autostream.runtime.input_buffers import BufferTable
from autostream.runtime.restore import Restore
from autostream.runtime.static_inputs import static_copies
from autostream.runtime.writes import storages_alive
from autostream.utils.locks import preparing
from tests.captures import Captures
from tests.replays import CPU
from tests.semantics import Viewed
from tests.threads import in_threads

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[CapturedGraph]:
    """The graphs that are replayed, one after the other."""
    replayed, replay = [], CapturedGraph.replay

    def logged(graph: CapturedGraph) -> None:
        replayed.append(graph)
        replay(graph)

    monkeypatch.setattr(CapturedGraph, "replay", logged)
    return replayed


Budget = Callable[[int, int], None]


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> Budget:
    """Sets the number of captures at first, and that of calls after which there may be one more."""

    def set_budget(graphs: int, calls: int) -> None:
        monkeypatch.setattr(graphs_by_address, "MAX_GRAPHS", graphs)
        monkeypatch.setattr(graphs_by_address, "CALLS_PER_CAPTURE", calls)

    return set_budget


X = torch.arange(12.0).reshape(3, 4) / 12


class Block(nn.Module):
    """Two graphs, with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.second(x) if x.sum() > 1e9 else self.second(x).relu()


def blocks(count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count))).eval()


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4).eval()


@torch.no_grad()
@pytest.mark.parametrize("budgeted", [False, True])
def test_equal_blocks_have_a_graph_each_within_the_budget(
    budgeted: bool, captures: Captures, replays: list[CapturedGraph], budget: Budget, caplog: pytest.LogCaptureFixture
) -> None:
    """Dynamo compiles the blocks once and keeps that, but graphs are freed with the model."""
    if budgeted:
        budget(2, 64)
    model = blocks(3)
    fast, graphs = autostream.optimize(model), 2 * (2 if budgeted else 3)
    torch.testing.assert_close(fast(X), model(X))
    (report,) = fast.reports
    assert report.mode == "graph breaks"
    count = captures.count
    for number in range(3):
        del replays[:]
        torch.testing.assert_close(fast(X - number), model(X - number))
        assert len(captures.alive) == len(set(replays)) == graphs
    assert captures.count == count
    assert len({graph.pool for graph in captures.alive}) == 1
    reasons = [refusal.reason for part in fast.reports[0].parts for refusal in part.refusals]
    assert sum("in too many places" in reason for reason in reasons) == 2 * budgeted
    assert caplog.text.count("in too many places") == budgeted, "the same for both graphs"
    del fast, model, report, replays[:]
    gc.collect()
    assert not captures.alive


def exchanged(model: nn.Linear, other: nn.Linear) -> None:
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        one.data, two.data = two.data, one.data


def replaced(model: nn.Linear, other: nn.Linear) -> None:
    model.weight, other.weight = other.weight, model.weight
    model.bias, other.bias = other.bias, model.bias


@torch.no_grad()
@pytest.mark.usefixtures("at_once")
def test_sets_of_weights_that_alternate_have_a_graph_each(captures: Captures) -> None:
    """A model and its average, which are swapped in two ways, and weights that ``functional_call`` passes."""
    for swap in (exchanged, replaced):
        model, average = linear(), nn.Linear(4, 4)
        fast, count = autostream.optimize(model), captures.count
        for _ in range(4):
            for number in range(2):
                torch.testing.assert_close(fast(X - number), model(X - number))
            swap(model, average)
        assert captures.count == count + 2
    sets = [dict(nn.Linear(4, 4).named_parameters()) for _ in range(2)]
    for number in range(6):
        results = [functional_call(module, sets[number % 2], (X,)) for module in (fast, model)]
        torch.testing.assert_close(*results)
    assert captures.count == count + 2 + 2
    gc.collect()
    fast._autostream.forget()
    del fast
    assert not captures.alive, "without a collection of garbage"


class Writes(nn.Module):
    """Writes its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(self.weight) + y


@torch.no_grad()
def test_graphs_that_write_their_inputs_share_no_static_inputs(captures: Captures) -> None:
    """A capture runs with its static inputs, while another graph may be replayed."""
    model = Writes()
    fast, weights = autostream.optimize(model), [torch.full((4,), float(number)) for number in (2, 3)]
    for number in range(6):
        model.weight.data = weights[number % 2]
        x = X.clone()
        torch.testing.assert_close(fast(x, X), X * (2 + number % 2) + X)
        torch.testing.assert_close(x, X * (2 + number % 2))
    first, *others = captures.alive
    assert all(first.static[at] is not other.static[at] for other in others for at in first.static)


def move(model: nn.Linear) -> Tensor:
    """Give the weight other memory, and return its former memory."""
    former = model.weight.data
    model.weight.data = former * 0.9
    return former


class Adds(nn.Module):
    """Writes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


@torch.no_grad()
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("case", ["reads", "writes", "slow path"])
def test_weights_that_move_in_every_call_are_captured_a_few_times_and_again_when_they_stay(
    case: str,
    captures: Captures,
    replays: list[CapturedGraph],
    budget: Budget,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Former memory is kept, so that no address is used again."""
    budget(3, 8)
    if case == "slow path":
        monkeypatch.setattr(CapturedCall, "replay", lambda *_, **__: None)
    layer, former = linear(), []
    model = nn.Sequential(Adds(), layer) if case == "writes" else nn.Sequential(layer, nn.ReLU())
    fast = autostream.optimize(model)
    for number in range(7):
        former.append(move(layer))
        del replays[:]
        torch.testing.assert_close(fast(X.clone()), model(X.clone()))
        assert captures.count == min(number + 1, 3)
        wrong = 0 < number <= 3 and case == "reads"  # a replay before the guards are checked
        assert len(replays) == (number < 3) + wrong
    assert caplog.text.count("call after call") == 1
    reasons = [refusal.reason for report in fast.reports for refusal in report.refusals]
    assert any("call after call" in reason and "copy_" in reason for reason in reasons)
    for _ in range(8):
        fast(X.clone())
    del replays[:]
    torch.testing.assert_close(fast(X.clone()), model(X.clone()))
    assert (captures.count, len(replays)) == (3 + 1, 1)
    for _ in range(8):
        fast(X.clone())
    former.append(move(layer))
    torch.testing.assert_close(fast(X.clone()), model(X.clone()))
    assert captures.count == 3 + 2, "so many calls with a graph allow one more"


@torch.no_grad()
def test_a_call_that_runs_eagerly_does_not_wait_for_another_preparation(captures: Captures, budget: Budget) -> None:
    budget(1, 64)
    model = linear()
    fast = autostream.optimize(model)
    fast(X)
    former = move(model)
    with preparing, ThreadPoolExecutor(1) as other:
        torch.testing.assert_close(other.submit(torch.no_grad()(fast), X).result(60), model(X))
    assert captures.count == 1
    assert former.data_ptr() != model.weight.data_ptr()


@torch.no_grad()
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("path", "rows"), [("fast", 2), ("fast", 1), ("slow", 3)])
def test_former_weights_are_freed_by_the_next_call(
    path: str, rows: int, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the shape of the last call, another, or a new one. The fast path may replay before it checks addresses."""
    if path == "slow":
        monkeypatch.setattr(CapturedCall, "replay", lambda *_, **__: None)
    model = linear()
    fast = autostream.optimize(model)
    for x in (X, X[:2]):
        fast(x)
        fast(x)
    alive = storages_alive([model.weight])
    move(model)
    assert alive() is (path == "fast")
    torch.testing.assert_close(fast(X[:rows]), model(X[:rows]))
    assert not alive()
    torch.testing.assert_close(fast(X), model(X))


@pytest.mark.usefixtures("at_once")
def test_former_weights_are_freed_where_gradients_are_recorded(captures: Captures) -> None:
    model = linear()
    fast = autostream.optimize(model, policy="sequential")
    for x in (X, X[:2]):
        for _ in range(2):
            fast(x).sum().backward()
    alive = storages_alive([model.weight])
    with torch.no_grad():
        move(model)
    for _ in range(2):
        fast(X[:1]).sum().backward()
    assert {report.mode for report in fast.reports} == {"forward and backward"}
    assert not alive()


@torch.no_grad()
def test_if_the_only_graphs_weights_are_freed_and_no_other_can_be_captured_it_is_dropped(captures: Captures) -> None:
    model = linear()
    fast = autostream.optimize(model)
    fast(X)
    model.weight.data = model.weight.data.clone()
    captures.failure = torch.OutOfMemoryError("too little")
    torch.testing.assert_close(fast(X), model(X))
    captures.failure = None
    assert not captures.alive
    torch.testing.assert_close(fast(X), model(X))
    assert len(fast.reports) == 1


@torch.no_grad()
def test_an_input_that_is_a_view_of_a_buffer_is_read_in_place(captures: Captures) -> None:
    """A graph after a graph break takes it as an input; a copy would miss later writes to the buffer."""
    ours, theirs = Viewed(), Viewed()
    fast = autostream.optimize(ours)
    for number in range(4):
        x = torch.full((4, 4), float(number))
        torch.testing.assert_close(fast(x.clone()), theirs(x.clone()))
        torch.testing.assert_close(ours.state, theirs.state)
    assert captures.count


class Product(nn.Module):
    """Of its inputs."""

    def forward(self, weight: Tensor, x: Tensor) -> tuple[Tensor]:
        return (weight * x,)


@torch.no_grad()
def test_threads_that_call_with_weights_of_their_own_get_their_own_results(captures: Captures) -> None:
    context = ModelContext(Options(), GraphPools(), BufferTable())
    names = [(Role.PARAMETER, "weight"), (Role.INPUT, "x")]
    compiled = CompiledGraph(symbolic_trace(Product()), names, "Product", context)
    weights = [torch.full((4,), float(number)) for number in range(4)]

    def work(number: int) -> None:
        for turn in range(60):
            weight = weights[(number + turn // 7) % 4]
            with torch.no_grad():
                torch.testing.assert_close(compiled(weight, X + turn)[0], weight * (X + turn))

    in_threads(4, work)
    assert captures.count <= 4 + 1


# Without a model: graphs of ``weight * x, weight + x``

ONES, TWOS, THREES = (torch.full((4,), float(number)) for number in (1, 2, 3))


def call(weight: Tensor) -> list[Tensor]:
    return [weight, torch.ones(4)]


def graphs(alive: Callable[[], object] = lambda: None) -> GraphsByAddress:
    """Graphs of which one is captured for ONES; ``alive`` is called before each other capture."""

    def again(graph: CapturedGraph, read: Sequence[Tensor], arguments: Sequence[Tensor]) -> CapturedGraph:
        alive()
        return graph.recaptured(read, graph.pool, Restore([]))

    def by_input(graph: CapturedGraph) -> GraphsByInput:
        return GraphsByInput(graph, [1], BufferTable(), lambda *_: pytest.fail("there are no buffers"), pytest.fail)

    static = static_copies(call(ONES), [1])
    flags = [True, False], [False, False]
    graph = CapturedGraph(lambda w, x: (w * x, w + x), static, *flags, CPU, random=False, restore=Restore([]))
    return GraphsByAddress(graph, call(ONES), by_input, again)


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


unit = pytest.mark.usefixtures("captures", "without_gradients")


@unit
def test_of_graphs_that_share_outputs_there_is_one(captures: Captures) -> None:
    """Saved activations are large. If the next capture fails, the former graph is still there."""
    made = graphs()
    made.graph.share_outputs(frozenset({0}))
    captures.failure = torch.OutOfMemoryError("too little")
    with pytest.raises(torch.OutOfMemoryError):
        made.add(call(TWOS))
    captures.failure = None
    assert not made.unusable
    assert made.find(call(ONES)) is not None
    for weight in (TWOS, THREES, ONES):
        assert made.find(call(weight)) is None
        torch.testing.assert_close(made.add(call(weight)).launch(call(weight)), [weight, weight + 1])
        assert made.graph.shared == {0}
        gc.collect()
        assert len(captures.alive) == 1


@unit
@pytest.mark.parametrize("pool_failed", [False, True])
def test_a_failed_capture_is_tried_again_after_further_calls_unless_the_pool_has_failed(
    pool_failed: bool, budget: Budget, captures: Captures
) -> None:
    budget(5, 3)
    made = graphs()
    captures.failure = torch.OutOfMemoryError("too little")
    with pytest.raises(torch.OutOfMemoryError):
        made.add(call(TWOS))
    captures.failure = None
    made.graph.pool.failed = pool_failed
    assert "it fails: OutOfMemoryError: too little" in made.over
    assert [bool(made.refused(call(TWOS))) for _ in range(1 + 3)] == [True, True, True, pool_failed]
    if not pool_failed:
        made.add(call(TWOS))
        assert "call after call" in made.over, "it is no longer the failure"


def temporary(made: GraphsByAddress, memory: bytearray) -> BoundGraph:
    """The graph for a weight of one call only, in this memory; it is captured if there is none."""
    weight = torch.frombuffer(memory, dtype=torch.float32)
    graph = made.find(call(weight)) or made.add(call(weight))
    weight.data = torch.empty(0)  # the fake capture keeps the tensor alive, as a CUDA graph does not
    return graph


@unit
def test_of_too_many_graphs_one_is_dropped_whose_weights_are_freed(budget: Budget, captures: Captures) -> None:
    """New weights in the memory of freed ones use their graph."""
    budget(4, 100)
    made, first, second = graphs(), bytearray(16), bytearray(16)
    graph = temporary(made, first)
    temporary(made, second)
    assert temporary(made, first) is graph
    made.add(call(TWOS))
    assert captures.count == 4
    again = torch.frombuffer(first, dtype=torch.float32)
    assert made.find(call(again)) is graph
    made.find(call(TWOS))
    made.add(call(THREES))
    assert made.find(call(torch.frombuffer(second, dtype=torch.float32))) is None
    for weight in (ONES, again, TWOS, THREES):
        assert made.find(call(weight)) is not None


@unit
def test_no_graph_reads_sparse_weights_or_other_layouts_at_the_same_address() -> None:
    made = graphs()
    made.add(call(TWOS))
    assert made.find(call(TWOS.to_sparse())) is None
    assert made.find(call(ONES.view(2, 2))) is None
    assert made.find(call(ONES)) is not None
