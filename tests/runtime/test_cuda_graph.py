"""Calls of captured graphs. Without a GPU, a fake graph (``tests/replays.py``) repeats a run on the CPU."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, fx

from autostream.errors import CaptureError
from autostream.runtime import cuda_graph
from autostream.runtime.cuda_graph import CapturedGraph, GraphPool, GraphPools, Moved, release_unused_memory
from autostream.runtime.restore import Restore
from autostream.runtime.static_inputs import static_copies
from autostream.runtime.writes import storages_alive
from tests.replays import CPU, Cuda, Stream
from tests.threads import in_threads

NOTHING = Restore([])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda.installed(monkeypatch)


def captured(
    run: Callable[..., Sequence[Tensor]],
    *tensors: Tensor,
    bound: Sequence[int] = (),
    written: Sequence[int] = (),
    random: bool = False,
    device: torch.device = CPU,
    pool: GraphPool | None = None,
) -> CapturedGraph:
    indices = range(len(tensors))
    flags = ([at in chosen for at in indices] for chosen in (bound, written))
    with torch.inference_mode(False), torch.no_grad():
        static = static_copies(tensors, [at for at in indices if at not in bound])
    restore = Restore(static[at] for at in written)
    return CapturedGraph(run, static, *flags, device, random=random, restore=restore, pool=pool)


def twice(x: Tensor) -> tuple[Tensor, ...]:
    return (x * 2,)


# Values


def test_inputs_are_copied_and_bound_tensors_are_read_in_place(cuda: Cuda) -> None:
    """Bound arguments may be at any position, and outputs of earlier calls stay."""
    one, two = torch.tensor([2.0]), torch.tensor([10.0])
    graph = captured(lambda w, x, v, y: (w * x + v * y,), one, torch.ones(1), two, torch.ones(1), bound=[0, 2])
    assert ([*graph.static], graph.bound) == ([1, 3], (0, 2))
    first = graph(one, torch.tensor([3.0]), two, torch.tensor([4.0]))
    one.fill_(7)
    second = graph(one, torch.tensor([3.0]), two, torch.tensor([5.0]))
    assert (first[0].item(), second[0].item()) == (46.0, 71.0)
    assert not graph.unmoved([one, torch.ones(1), two.clone(), torch.ones(1)])


def test_mutations_reach_the_callers_tensors_and_the_capture_mutates_nothing(cuda: Cuda) -> None:
    """Of three inputs, the first is read, the second is written, the third is written and bound."""

    def run(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        z.add_(1)
        return (y.add_(x),)

    first, bound = torch.ones(1), torch.tensor([0.0])
    graph = captured(run, torch.ones(1), first, bound, bound=[2], written=[1, 2])
    assert (first.item(), bound.item()) == (1.0, 1.0), "the fake capture is itself a run"
    bound.zero_()
    x, y = torch.tensor([3.0]), torch.tensor([4.0])
    (output,) = graph(x, y, bound)
    assert (x.item(), y.item(), bound.item()) == (3.0, 7.0, 1.0)
    assert output is y


def test_views_of_inputs_and_weights_are_views_of_the_callers(cuda: Cuda) -> None:
    weight = torch.nn.Parameter(torch.arange(4.0))
    with torch.no_grad():
        graph = captured(lambda w, x: (x[1:], x * 2, w, w[2:]), weight, torch.arange(3.0), bound=[0])
        x = torch.tensor([4.0, 5.0, 6.0])
        view, product, whole, part = graph(weight, x)
        eager = weight[2:]
    assert (view.data_ptr(), view.tolist()) == (x[1:].data_ptr(), [5.0, 6.0])
    assert product.tolist() == [8.0, 10.0, 12.0]
    assert whole is weight
    assert (part.data_ptr(), part.requires_grad) == (eager.data_ptr(), eager.requires_grad)


# Weights


@pytest.mark.parametrize(
    "other",
    [
        lambda w: w.clone(),
        lambda w: w[:1],
        lambda w: w.t(),
        lambda w: w.view(torch.int32),
        lambda w: w.as_strided((2, 2), (0, 1)),
    ],
    ids=["address", "shape", "strides", "dtype", "expanded"],
)
def test_a_weight_that_moved_or_changed_its_layout_is_noticed_before_the_call(
    cuda: Cuda, other: Callable[[Tensor], Tensor]
) -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    graph = captured(lambda w, x: (w * x, x.add_(1)), weight, torch.ones(1), bound=[0], written=[1])
    x = torch.tensor([3.0])
    graph(weight.view(2, 2), x)
    with pytest.raises(Moved):
        graph(other(weight), x)
    assert (x.item(), graph.static[1].item()) == (4.0, 4.0)


@pytest.mark.parametrize("shared", [frozenset[int](), frozenset({0, 1})])
def test_a_graph_does_not_keep_weights_alive(shared: frozenset[int], cuda: Cuda) -> None:
    """Nor do the views of them that it returns."""

    def run(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return w * x, w + x, w, w[1:], w.view(torch.int32)

    weight = torch.nn.Parameter(torch.ones(2))
    alive = storages_alive([weight])
    with torch.no_grad():
        graph = captured(run, weight, torch.ones(2), bound=[0])
    graph.share_outputs(shared)
    assert graph.shared == shared
    graph._graph.outputs = []  # type: ignore[attr-defined]  # a real one has none
    assert alive()
    weight.data = torch.zeros(2)
    assert not alive()


# Streams and pools


def test_random_graphs_wait_for_each_other_and_others_do_not(cuda: Cuda) -> None:
    """A generator passes seed and offset to all graphs in the same memory."""
    graphs = [captured(twice, torch.ones(1), random=random) for random in (True, True, False)]
    streams = [Stream("s1"), Stream("s2"), Stream("s3")]
    for graph, stream in zip(graphs, streams, strict=True):
        with cuda.on(stream):
            graph(torch.ones(1))
    assert [[waited.name for waited in stream.waits] for stream in streams] == [["home"], ["home", "s1"], ["home"]]
    with cuda.on(streams[0]):
        graphs[0].replay()
    assert [waited.name for waited in streams[0].waits] == ["home", "s2"]


def power(exponent: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    return lambda x: (x**exponent,)


def together(count: int) -> list[CapturedGraph]:
    """The square, the cube and so on, in one pool."""
    pool = GraphPool(CPU)
    return [captured(power(number + 2), torch.zeros(64), pool=pool) for number in range(count)]


def test_graphs_of_one_pool_may_be_called_in_any_order_and_by_any_threads(cuda: Cuda) -> None:
    """Outputs are copied before another graph overwrites them."""
    graphs = together(4)
    outputs = [(at, graphs[at](torch.full((64,), 2.0))[0]) for at in (2, 0, 1, 1, 0, 2)]
    assert all(torch.equal(output, torch.full((64,), 2.0 ** (at + 2))) for at, output in outputs)

    def work(number: int) -> None:
        for value in range(50):
            (output,) = graphs[number % 4](torch.full((64,), float(value)))
            assert torch.equal(output, torch.full((64,), float(value) ** (number % 4 + 2)))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads(8, work)
    finally:
        sys.setswitchinterval(interval)


def test_calls_of_graphs_in_one_pool_wait_for_each_other_and_others_do_not(cuda: Cuda) -> None:
    """A on the left, B on the right, then both in the middle."""
    left, right, middle = (Stream(name) for name in ("left", "right", "middle"))
    (a, b), apart = together(2), captured(twice, torch.ones(1))
    cuda.home.waits.clear()
    for graph, stream in ((a, left), (b, right), (a, middle), (b, middle)):
        with cuda.on(stream):
            graph(torch.zeros(64))
    assert (left.waits, right.waits, middle.waits) == ([cuda.home], [left], [right])
    with cuda.on(middle):
        apart(torch.ones(1))
    assert middle.waits == [right, cuda.home]


def test_calls_wait_for_the_latest_capture_into_the_pool(cuda: Cuda) -> None:
    """Its static inputs have been filled on the stream on which it was made."""
    first, left, right = captured(twice, torch.ones(1)), Stream("left"), Stream("right")
    with cuda.on(left):
        first(torch.ones(1))
    cuda.home.waits.clear()
    second = captured(twice, torch.ones(1), pool=first.pool)
    assert cuda.home.waits == [cuda.capturing, cuda.capturing, left]
    with cuda.on(right):
        second(torch.ones(1))
    assert right.waits == [cuda.home]


@pytest.mark.parametrize("shared", [True, False])
def test_memory_that_two_graphs_read_is_reused_after_both_on_the_stream_that_allocated_it(
    shared: bool, cuda: Cuda
) -> None:
    """Also if the graph that it was made for is freed before the other, which was captured on another stream."""
    former, left, right = captured(twice, torch.ones(1)), Stream("left"), Stream("right")
    with cuda.on(left):
        again = former.recaptured([*former.static.values()] if shared else [torch.ones(1)], former.pool, NOTHING)
    del former
    gc.collect()
    with cuda.on(right):
        again(torch.ones(1))
    cuda.home.waits.clear()
    left.waits.clear()
    del again
    gc.collect()
    assert (cuda.home.waits, left.waits) == (([right], []) if shared else ([], [right]))


def test_a_pool_lives_as_long_as_a_graph_in_it(cuda: Cuda) -> None:
    pools, (a, b) = GraphPools(), together(2)
    pools[CPU] = a.pool
    del a
    gc.collect()
    assert pools[CPU] is b.pool
    del b
    gc.collect()
    assert CPU not in pools


def test_shared_outputs_are_overwritten_by_the_next_call_and_others_are_not(cuda: Cuda) -> None:
    """Of four outputs the first is copied, the second shared; the third and the fourth share memory, so are copied."""

    def run(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        product = w * x
        return w + x, product.exp(), product, product[:1]

    weight = torch.tensor([2.0])
    graph = captured(run, weight, torch.ones(1), bound=[0])
    graph.share_outputs(frozenset({1, 2, 3}))
    assert graph.shared == {1}
    moved = torch.tensor([5.0])
    for each, w in ((graph, weight), (graph.recaptured([moved, *graph.static.values()], graph.pool, NOTHING), moved)):
        first, second = each(w, torch.zeros(1)), each(w, torch.ones(1))
        assert [value.item() for value in first[1:]] == [second[1].item(), 0.0, 0.0]
        assert first[0].item() == w.item()
        assert first[1] is second[1]


# Capturing


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError, KeyError])
def test_the_error_of_a_failed_run_names_the_failing_node(cuda: Cuda, kind: type[Exception]) -> None:
    def fails(x: Tensor) -> Tensor:
        raise kind("no way\nand so on")

    graph = fx.Graph()
    graph.output((graph.call_function(fails, (graph.placeholder("x"),)),))
    module = fx.GraphModule({}, graph)
    with pytest.raises(CaptureError, match=r"no way.* at fails = .*fails\(x\)") as caught:
        captured(module.forward, torch.ones(1))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, kind)


def after(runs: int, error: BaseException) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """A run that raises after so many runs."""
    left = [None] * runs

    def run(x: Tensor) -> tuple[Tensor, ...]:
        if not left:
            raise error
        left.pop()
        return (x * 2,)

    return run


@pytest.mark.parametrize("error", [RuntimeError("no way"), torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
@pytest.mark.parametrize(("runs", "failed"), [(0, False), (1, False), (2, True)])
def test_only_a_failed_capture_spoils_the_pool_for_others(
    cuda: Cuda, runs: int, failed: bool, error: BaseException
) -> None:
    """A run that fails while it is warmed up has not touched the pool. An interrupt is no CaptureError."""
    graph = captured(twice, torch.ones(1))
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CaptureError):
        captured(after(runs, error), torch.ones(1), pool=graph.pool)
    assert graph.pool.failed == failed
    assert (cuda.current, cuda.home.waits[-1]) == (cuda.home, cuda.capturing)
    assert not cuda_graph._capturing.locked()
    assert graph(torch.tensor([3.0]))[0].item() == 6.0


def test_cached_memory_is_returned_to_the_driver_while_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[bool] = []

    def empty_cache() -> None:
        locked.append(cuda_graph._capturing.locked())
        raise RuntimeError("other code captures")

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    release_unused_memory("cpu")
    assert locked == []
    release_unused_memory("cuda:0")
    assert locked == [True]
    assert not cuda_graph._capturing.locked()


# On a GPU

GPU = torch.device("cuda:0")


@pytest.mark.gpu
def test_random_graphs_side_by_side_generate_the_numbers_that_they_do_in_turn() -> None:
    """Each first computes for long, so that the other gets its seed and offset before it generates numbers."""

    def drops(x: Tensor) -> tuple[Tensor, ...]:
        torch.cuda._sleep(3_000_000)
        return (torch.dropout(x, 0.5, True),)

    x = torch.ones(4096, device=GPU)
    graphs = [captured(drops, x, random=True, device=GPU) for _ in range(2)]
    torch.cuda.manual_seed(0)
    expected = [graph(x)[0] for _ in range(5) for graph in graphs]
    torch.cuda.synchronize()
    torch.cuda.manual_seed(0)
    streams, outputs = [torch.cuda.Stream(GPU) for _ in graphs], []
    for _ in range(5):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(graph(x)[0])
    torch.cuda.synchronize()
    assert [torch.equal(a, b) for a, b in zip(outputs, expected, strict=True)] == [True] * 10
