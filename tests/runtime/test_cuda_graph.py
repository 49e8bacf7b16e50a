"""Captured graphs. Where there is no GPU, a make-believe graph records a run on the CPU and repeats it in a replay."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

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
    draws: bool = False,
    device: torch.device = CPU,
    pool: GraphPool | None = None,
) -> CapturedGraph:
    places = range(len(tensors))
    flags = ([place in chosen for place in places] for chosen in (bound, written))
    with torch.inference_mode(False), torch.no_grad():
        static = static_copies(tensors, [place for place in places if place not in bound])
    restore = Restore(static[place] for place in written)
    return CapturedGraph(run, static, *flags, device, random=draws, restore=restore, pool=pool)


class Copies(TorchDispatchMode):
    """Notes every op that copies."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if "copy" in name or name == "clone":
            self.log.append(name)
        return func(*args, **(kwargs or {}))


def copies(graph: CapturedGraph, *tensors: Tensor) -> list[str]:
    """The copies that a call makes besides its replay."""
    graph.replay = lambda: None  # type: ignore[method-assign]
    with Copies() as mode:
        graph(*tensors)
    return mode.log


def twice(x: Tensor) -> tuple[Tensor, ...]:
    return (x * 2,)


# Values


def test_a_call_computes_with_what_it_is_given(cuda: Cuda) -> None:
    graph = captured(twice, torch.tensor([1.0]))
    first, second = graph(torch.tensor([3.0])), graph(torch.tensor([5.0]))
    assert [first[0].item(), second[0].item()] == [6.0, 10.0]


def test_what_was_captured_with_is_not_touched(cuda: Cuda) -> None:
    x = torch.tensor([1.0])
    captured(lambda x: (x.add_(1),), x, written=[0])
    assert x.item() == 1.0


def test_bound_tensors_are_read_where_they_are(cuda: Cuda) -> None:
    weight = torch.tensor([2.0])
    graph = captured(lambda w, x: (w * x,), weight, torch.ones(1), bound=[0])
    assert [*graph.static] == [1]
    weight.fill_(7)
    assert graph(weight, torch.tensor([3.0]))[0].item() == 21.0


def test_bound_tensors_may_stand_anywhere(cuda: Cuda) -> None:
    """Of a piece, weights are inputs among others."""
    one, two = torch.tensor([2.0]), torch.tensor([10.0])
    graph = captured(lambda w, x, v, y: (w * x + v * y,), one, torch.ones(1), two, torch.ones(1), bound=[0, 2])
    assert graph(one, torch.tensor([3.0]), two, torch.tensor([4.0]))[0].item() == 46.0
    assert graph.unmoved([one, torch.ones(1), two, torch.ones(1)])
    assert not graph.unmoved([one, torch.ones(1), two.clone(), torch.ones(1)])


def test_what_is_written_is_written_to_the_callers(cuda: Cuda) -> None:
    """Of three inputs, the first is read, the second is written, the third is written and bound."""

    def run(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        z.add_(1)
        return (y.add_(x),)

    bound = torch.tensor([0.0])
    graph = captured(run, torch.ones(1), torch.ones(1), bound, bound=[2], written=[1, 2])
    bound.zero_()
    x, y = torch.tensor([3.0]), torch.tensor([4.0])
    (output,) = graph(x, y, bound)
    assert (x.item(), y.item(), bound.item()) == (3.0, 7.0, 1.0)
    assert output is y


def test_a_view_of_an_input_is_a_view_of_the_callers(cuda: Cuda) -> None:
    graph = captured(lambda x: (x[1:], x * 2), torch.arange(3.0))
    x = torch.tensor([4.0, 5.0, 6.0])
    view, product = graph(x)
    assert view.data_ptr() == x[1:].data_ptr()
    assert view.tolist() == [5.0, 6.0]
    assert product.tolist() == [8.0, 10.0, 12.0]


def test_a_view_of_a_weight_is_one(cuda: Cuda) -> None:
    weight = torch.nn.Parameter(torch.arange(4.0))
    with torch.no_grad():
        whole, part = captured(lambda w: (w, w[2:]), weight, bound=[0])(weight)
        plain = weight[2:]
    assert whole is weight
    assert part.data_ptr() == plain.data_ptr()
    assert part.requires_grad == plain.requires_grad


# Copies


def test_nothing_is_copied_in_that_is_there_already(cuda: Cuda) -> None:
    graph = captured(lambda x, y: (x + y,), torch.ones(2), torch.ones(2))
    assert copies(graph, *graph.static.values()) == ["clone"]
    assert copies(graph, torch.ones(2), graph.static[1]) == ["copy_", "clone"]
    assert copies(graph, torch.ones(2), torch.ones(2)) == ["_foreach_copy_", "clone"]


def test_bound_tensors_are_not_copied(cuda: Cuda) -> None:
    tensors = torch.ones(2), torch.ones(2)
    assert copies(captured(lambda x, y: (x + y,), *tensors, bound=[0, 1]), *tensors) == ["clone"]


def test_only_what_is_written_is_copied_back(cuda: Cuda) -> None:
    graph = captured(lambda x, y: (x + 1, y.add_(1)), torch.ones(2), torch.ones(2), written=[1])
    assert copies(graph, torch.ones(2), torch.ones(2)) == ["_foreach_copy_", "copy_", "clone"]


def test_an_expanded_input_is_copied_as_the_memory_that_it_covers(cuda: Cuda) -> None:
    x = torch.tensor([1.0]).expand(5)
    graph = captured(twice, x)
    assert graph.static[0].untyped_storage().nbytes() == 4
    assert graph(torch.tensor([3.0]).expand(5))[0].tolist() == [6.0] * 5


def test_static_tensors_may_be_passed_in_another_order(cuda: Cuda) -> None:
    """Each is read before it is written, on the way in and on the way back."""

    def run(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return x.add_(10), y.add_(20), z.add_(30)

    graph = captured(run, torch.ones(1), torch.ones(1), torch.ones(1), written=[0, 1, 2])
    x, y, z = graph.static.values()
    for tensor, value in ((x, 1.0), (y, 2.0), (z, 3.0)):
        tensor.fill_(value)
    outputs = graph(y, z, x)
    assert [output.item() for output in outputs] == [12.0, 23.0, 31.0]
    assert [tensor.item() for tensor in (y, z, x)] == [12.0, 23.0, 31.0]


def test_static_tensors_are_ordinary_ones_even_if_made_in_inference_mode(cuda: Cuda) -> None:
    """Who is called in inference mode first may be called outside of it later."""
    with torch.inference_mode():
        graph = captured(twice, torch.ones(1))
    assert not graph.static[0].is_inference()
    assert graph(torch.tensor([4.0]))[0].item() == 8.0


# Moved weights


def test_a_weight_that_moved_is_noticed_before_anything_is_done(cuda: Cuda) -> None:
    weight, x = torch.ones(2), torch.ones(2)
    graph = captured(lambda w, x: (w * x,), weight, torch.ones(2), bound=[0])
    done: list[None] = []
    graph.replay = lambda: done.append(None)  # type: ignore[method-assign]
    graph.static[1].fill_(5)
    with pytest.raises(Moved):
        graph(weight.clone(), x)
    assert not done
    assert graph.static[1].tolist() == [5.0, 5.0]
    graph(weight, x)
    assert len(done) == 1


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
def test_whatever_a_graph_takes_for_granted_of_a_weight_is_compared(
    cuda: Cuda, other: Callable[[Tensor], Tensor]
) -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    graph = captured(lambda w: (w + 0,), weight, bound=[0])
    graph(weight.view(2, 2))
    with pytest.raises(Moved):
        graph(other(weight))


@pytest.mark.parametrize("shared", [frozenset[int](), frozenset({0, 1})])
def test_a_graph_does_not_keep_what_it_reads_where_it_is(shared: frozenset[int], cuda: Cuda) -> None:
    """Nor do views of that which it returns."""

    def run(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return w * x, w + x, w, w[1:], w.view(torch.int32)

    weight = torch.nn.Parameter(torch.ones(2))
    is_there = storages_alive([weight])
    with torch.no_grad():
        graph = captured(run, weight, torch.ones(2), bound=[0])
    graph.share_outputs(shared)
    assert graph.shared == shared
    graph._graph.outputs = []  # type: ignore[attr-defined]  # a real one has none
    assert is_there()
    weight.data = torch.zeros(2)
    assert not is_there()


# Streams


def test_a_call_on_another_stream_comes_after_the_one_before(cuda: Cuda) -> None:
    graph, other = captured(twice, torch.ones(1)), Stream("other")
    cuda.home.waits.clear()
    graph(torch.ones(1))
    assert cuda.home.waits == []
    for _ in range(2):
        with cuda.on(other):
            graph(torch.ones(1))
    assert other.waits == [cuda.home]
    graph(torch.ones(1))
    assert cuda.home.waits == [other]


def test_memory_of_a_graph_that_dies_comes_after_its_last_replay(cuda: Cuda) -> None:
    """Its static tensors go back to the stream on which they were made, where the last replay was not."""
    for stream, expected in (cuda.home, []), (Stream("other"), ["other"]):
        graph = captured(twice, torch.ones(1))
        with cuda.on(stream):
            graph(torch.ones(1))
        cuda.home.waits.clear()
        del graph
        gc.collect()
        assert [waited.name for waited in cuda.home.waits] == expected


def test_graphs_that_draw_come_after_each_other_and_others_do_not(cuda: Cuda) -> None:
    """The generator tells all graphs in the same memory what to draw."""
    one, two, quiet = (captured(twice, torch.ones(1), random=draws) for draws in (True, True, False))
    streams = [Stream("s1"), Stream("s2"), Stream("s3")]
    for graph, stream in zip((one, two, quiet), streams, strict=True):
        with cuda.on(stream):
            graph(torch.ones(1))
    first, second, third = ([waited.name for waited in stream.waits] for stream in streams)
    assert first == ["home"]
    assert second == ["home", "s1"]
    assert third == ["home"]
    with cuda.on(streams[0]):
        one.replay()
    assert [waited.name for waited in streams[0].waits] == ["home", "s2"]


def test_calls_of_several_threads_take_turns(cuda: Cuda) -> None:
    graph = captured(twice, torch.zeros(64))

    def work(value: int) -> None:
        for _ in range(50):
            (output,) = graph(torch.full((64,), float(value)))
            assert torch.equal(output, torch.full((64,), 2.0 * value))

    in_threads(8, work)


# Pools


def power(exponent: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    return lambda x: (x**exponent,)


def together(count: int) -> list[CapturedGraph]:
    """The square, the cube and so on, in one pool."""
    pool = GraphPool(CPU)
    return [captured(power(number + 2), torch.zeros(64), pool=pool) for number in range(count)]


def test_what_graphs_of_one_pool_overwrite_has_been_copied(cuda: Cuda) -> None:
    """In whatever order they are called, among them the one that was captured last before the first."""
    graphs = together(3)
    outputs = [(place, graphs[place](torch.full((64,), 2.0))[0]) for place in (2, 0, 1, 1, 0, 2)]
    assert all(torch.equal(output, torch.full((64,), 2.0 ** (place + 2))) for place, output in outputs)


def test_threads_that_call_graphs_of_one_pool_take_turns(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = together(4)

    def work(number: int) -> None:
        for turn in range(50):
            (output,) = graphs[number % 4](torch.full((64,), float(turn)))
            assert torch.equal(output, torch.full((64,), float(turn) ** (number % 4 + 2)))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads(8, work)
    finally:
        sys.setswitchinterval(interval)


def test_calls_of_graphs_in_one_pool_come_after_each_other(cuda: Cuda) -> None:
    """A on the left, B on the right, then both in the middle."""
    a, b = together(2)
    left, right, middle = (Stream(name) for name in ("left", "right", "middle"))
    cuda.home.waits.clear()
    for graph, stream in ((a, left), (b, right), (a, middle), (b, middle)):
        with cuda.on(stream):
            graph(torch.zeros(64))
    assert (left.waits, right.waits, middle.waits) == ([cuda.home], [left], [right])
    assert cuda.home.waits == []


def test_graphs_in_pools_of_their_own_do_not_wait_for_each_other(cuda: Cuda) -> None:
    a, b = captured(twice, torch.ones(1)), captured(twice, torch.ones(1))
    left, right = Stream("left"), Stream("right")
    for graph, stream in ((a, left), (b, right), (a, left), (b, right)):
        with cuda.on(stream):
            graph(torch.ones(1))
    assert (left.waits, right.waits) == ([cuda.home], [cuda.home])


def test_calls_come_after_the_making_of_the_latest_graph_in_the_pool(cuda: Cuda) -> None:
    """Its static tensors have been filled on the stream on which it was made."""
    first, left, right = captured(twice, torch.ones(1)), Stream("left"), Stream("right")
    with cuda.on(left):
        first(torch.ones(1))
    cuda.home.waits.clear()
    second = captured(twice, torch.ones(1), pool=first.pool)
    assert cuda.home.waits == [cuda.capturing, cuda.capturing, left]
    with cuda.on(right):
        second(torch.ones(1))
    assert right.waits == [cuda.home]


def test_memory_of_a_graph_that_dies_comes_after_the_last_turn_in_its_pool(cuda: Cuda) -> None:
    a, b = together(2)
    left, right = Stream("left"), Stream("right")
    with cuda.on(left):
        a(torch.zeros(64))
    with cuda.on(right):
        b(torch.zeros(64))
    cuda.home.waits.clear()
    del a
    gc.collect()
    assert cuda.home.waits == [right]


@pytest.mark.parametrize("shared", [True, False])
def test_memory_that_two_graphs_read_comes_after_the_last_turn_where_it_was_made(shared: bool, cuda: Cuda) -> None:
    """Also if the graph that it was made for is gone before the other, which was captured on another stream."""
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


def test_a_graph_that_is_captured_again_is_the_same_in_other_memory(cuda: Cuda) -> None:
    """Where its weight lies now, and among other graphs: what it writes, it writes there."""

    def run(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return w * x, y.add_(x)

    weight, other = torch.tensor([2.0]), captured(twice, torch.ones(1))
    former = captured(run, weight, torch.ones(1), torch.ones(1), bound=[0], written=[2], random=True)
    moved = torch.tensor([5.0])
    again = former.recaptured([moved, *former.static.values()], other.pool, NOTHING)
    assert again.pool is other.pool
    assert former.pool is not other.pool
    x, y = torch.tensor([3.0]), torch.tensor([4.0])
    product, total = again(moved, x, y)
    other(torch.ones(1))
    assert (product.item(), total.item(), y.item()) == (15.0, 7.0, 7.0)
    assert total is y
    with pytest.raises(Moved):
        again(weight, x, y)
    assert y.item() == 7.0


def test_what_is_lent_is_overwritten_by_the_next_call_and_the_rest_is_not(cuda: Cuda) -> None:
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


def test_a_run_is_warmed_up_and_captured_on_a_stream_between_the_callers_work(cuda: Cuda) -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        cuda.log.append(f"run on {cuda.current.name}")
        return (x,)

    captured(run, torch.ones(1))
    # Tables that a library copies to the device in its first run are there by the time that another stream reads them.
    assert cuda.log[:2] == [f"run on {cuda.home.name}", "run on capturing"]
    assert cuda.log[2].startswith("capture on capturing")
    assert (cuda.capturing.waits, cuda.home.waits) == ([cuda.home] * 2, [cuda.capturing] * 2)


def test_workspaces_of_the_warm_up_are_nobody_elses_and_are_given_back(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on a stream of all captures, and other graphs' kernels may be running with what is there."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        cuda.log.append("run")
        return (x,)

    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: cuda.log.append("clear"), raising=False)
    captured(run, torch.ones(1))
    assert cuda.log[:3] == ["clear", "run", "run"]
    assert cuda.log[-1] == "clear"


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError, KeyError])
def test_a_run_that_fails_is_a_capture_error_that_says_what_failed(cuda: Cuda, kind: type[Exception]) -> None:
    def fails(x: Tensor) -> Tensor:
        raise kind("no way\nand so on")

    graph = fx.Graph()
    graph.output((graph.call_function(fails, (graph.placeholder("x"),)),))
    module = fx.GraphModule({}, graph)
    with pytest.raises(CaptureError, match=r"no way.* at fails = .*fails\(x\)") as caught:
        captured(module.forward, torch.ones(1))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, kind)
    assert cuda.current is cuda.home
    assert cuda.home.waits == [cuda.capturing] * 2
    assert not cuda_graph._capturing.locked()


def after(runs: int, error: BaseException) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """A run that raises once it has run so often."""
    left = [None] * runs

    def run(x: Tensor) -> tuple[Tensor, ...]:
        if not left:
            raise error
        left.pop()
        return (x * 2,)

    return run


@pytest.mark.parametrize("error", [RuntimeError("no way"), torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
@pytest.mark.parametrize(("runs", "failed"), [(0, False), (1, False), (2, True)])
def test_a_pool_knows_that_a_capture_into_it_has_failed(
    cuda: Cuda, runs: int, failed: bool, error: BaseException
) -> None:
    """What fails while it is warmed up has not touched it."""
    graph = captured(twice, torch.ones(1))
    with pytest.raises((CaptureError, KeyboardInterrupt)):
        captured(after(runs, error), torch.ones(1), pool=graph.pool)
    assert graph.pool.failed == failed
    assert (cuda.current, cuda.home.waits[-1]) == (cuda.home, cuda.capturing)
    assert not cuda_graph._capturing.locked()
    assert not graph.pool.lock.locked()
    assert graph(torch.tensor([3.0]))[0].item() == 6.0


def test_an_interrupt_is_no_capture_error(cuda: Cuda) -> None:
    def interrupted(x: Tensor) -> tuple[Tensor, ...]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        captured(interrupted, torch.ones(1))
    assert not cuda_graph._capturing.locked()


def test_what_the_allocator_keeps_for_nobody_goes_back_while_nothing_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[bool] = []

    def give_back() -> None:
        held.append(cuda_graph._capturing.locked())
        raise RuntimeError("somebody else captures")

    monkeypatch.setattr(torch.cuda, "empty_cache", give_back)
    release_unused_memory("cpu")
    assert held == []
    release_unused_memory("cuda:0")
    assert held == [True]
    assert not cuda_graph._capturing.locked()


# On a GPU

GPU = torch.device("cuda:0")
SIZE = 2048


def chain(weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Some hundred µs of large products, in integers small enough to be exact."""
    for _ in range(4):
        x = (x @ weight) % 7
    return (x,)


def integers(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(seed)).float().to(GPU)


@pytest.mark.gpu
def test_two_graphs_side_by_side_compute_what_they_do_alone() -> None:
    """200 times, each on a stream of its own: they share weights, but no memory that either writes."""
    weight = integers(0, SIZE, SIZE)
    inputs = [integers(seed, SIZE, SIZE) for seed in range(1, 5)]
    expected = [chain(weight, x)[0] for x in inputs]
    graphs = [captured(chain, weight, inputs[0], bound=[0], device=GPU) for _ in range(2)]
    streams = [torch.cuda.Stream(GPU) for _ in graphs]
    torch.cuda.synchronize()
    wrong = torch.zeros(2, device=GPU)
    torch.cuda.synchronize()
    for turn in range(200):
        for place, (graph, stream) in enumerate(zip(graphs, streams, strict=True)):
            with torch.cuda.stream(stream):
                (output,) = graph(weight, inputs[(turn + place) % 4])
                wrong[place] += (output != expected[(turn + place) % 4]).any()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]


@pytest.mark.gpu
def test_one_graph_on_two_streams_computes_what_it_does_on_one() -> None:
    weight = integers(0, SIZE, SIZE)
    inputs = [integers(seed, SIZE, SIZE) for seed in range(1, 5)]
    expected = [chain(weight, x)[0] for x in inputs]
    graph = captured(chain, weight, inputs[0], bound=[0], device=GPU)
    streams = [torch.cuda.Stream(GPU) for _ in range(2)]
    torch.cuda.synchronize()
    outputs = []
    for turn in range(40):
        with torch.cuda.stream(streams[turn % 2]):
            outputs.append(graph(weight, inputs[turn % 4])[0])
    torch.cuda.synchronize()
    assert all(torch.equal(output, expected[turn % 4]) for turn, output in enumerate(outputs))


@pytest.mark.gpu
def test_graphs_side_by_side_draw_what_they_do_in_turn() -> None:
    """Each first computes for long, so that the other is told where to draw before it does."""

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


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_all_as_it_was() -> None:
    """In the middle of it, the host waits for the device, which no graph can hold."""

    def waits(x: Tensor) -> Tensor:
        return x * x.sum().item()

    graph = fx.Graph()
    graph.output((graph.call_function(waits, (graph.placeholder("x"),)),))
    run = fx.GraphModule({}, graph).forward
    x, stream = torch.ones(8, device=GPU), torch.cuda.Stream(GPU)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        with pytest.raises(CaptureError, match="at waits = "):
            captured(run, x, device=GPU)
        assert torch.cuda.current_stream(GPU) == stream
        assert torch.cuda.current_device() == GPU.index
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.rand(8, device=GPU).max().item() < 1
        assert captured(twice, x, device=GPU)(x)[0].tolist() == [2.0] * 8


@pytest.mark.gpu
def test_nothing_is_copied_into_a_real_graph_that_is_there_already() -> None:
    graph = captured(lambda x, y: (x + y,), torch.ones(2, device=GPU), torch.ones(2, device=GPU), device=GPU)
    graph.static[0].fill_(3)
    graph.static[1].fill_(4)
    with Copies() as mode:
        (output,) = graph(*graph.static.values())
    assert mode.log == ["clone"]
    assert output.tolist() == [7.0, 7.0]
    static = [*graph.static.values()]
    (swapped,) = captured(lambda x, y: (x - y,), *static, device=GPU)(*reversed(static))
    assert swapped.tolist() == [1.0, 1.0]


@pytest.mark.gpu
def test_a_view_of_an_input_of_a_real_graph_is_a_view_of_the_callers() -> None:
    graph = captured(lambda x: (x[1:], x.add_(1)), torch.arange(3.0, device=GPU), written=[0], device=GPU)
    x = torch.tensor([4.0, 5.0, 6.0], device=GPU)
    view, whole = graph(x)
    assert whole is x
    assert view.data_ptr() == x[1:].data_ptr()
    assert view.tolist() == [6.0, 7.0]
