"""Captured graphs of models whose weights lie elsewhere in one call than in another; captures are make-believe."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

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
from autostream.runtime import graphs_by_address as places
from autostream.runtime.cuda_graph import CapturedGraph, GraphPools
from autostream.runtime.graphs_by_address import BoundGraph, GraphsByAddress
from autostream.runtime.graphs_by_input import GraphsByInput
from autostream.runtime.input_buffers import BufferTable
from autostream.runtime.restore import Restore
from autostream.runtime.static_inputs import static_copies
from autostream.runtime.writes import storages_alive
from tests.captures import Captures
from tests.replays import CPU
from tests.semantics import Viewed
from tests.threads import in_threads

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[CapturedGraph]:
    """The graphs that are replayed, one after the other."""
    seen, replay = [], CapturedGraph.replay

    def noted(graph: CapturedGraph) -> None:
        seen.append(graph)
        replay(graph)

    monkeypatch.setattr(CapturedGraph, "replay", noted)
    return seen


X = torch.arange(12.0).reshape(3, 4) / 12


class Block(nn.Module):
    """Two pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.second(x) if x.sum() > 1e9 else self.second(x).relu()


def alike(count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count))).eval()


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4).eval()


def mode(fast: Any) -> str:
    return str(fast.reports[0].mode)


# Many places, in turn


@torch.no_grad()
def test_blocks_that_are_alike_have_a_graph_each(captures: Captures, replays: list[CapturedGraph]) -> None:
    """Captured in the first call, and launched once for each block from then on."""
    model = alike(6)
    fast = autostream.optimize(model)
    torch.testing.assert_close(fast(X), model(X))
    assert mode(fast) == "graph breaks"
    count = captures.count
    assert len(captures.alive) == 12
    for number in range(4):
        del replays[:]
        torch.testing.assert_close(fast(X - number), model(X - number))
        assert len(set(replays)) == len(replays) == 12
    assert captures.count == count
    assert len({graph.pool for graph in captures.alive}) == 1


@torch.no_grad()
def test_of_too_many_that_are_alike_some_have_graphs_and_others_run_plainly(
    captures: Captures, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(places, "MAX_GRAPHS", 3)
    model = alike(6)
    fast = autostream.optimize(model)
    for number in range(5):
        torch.testing.assert_close(fast(X - number), model(X - number))
        assert len(captures.alive) == 2 * 3
    (report,) = fast.reports
    reasons = [refusal.reason for part in report.parts for refusal in part.refusals]
    assert sum("in too many places" in reason for reason in reasons) == 2
    assert caplog.text.count("in too many places") == 2


@torch.no_grad()
def test_what_was_captured_for_a_model_goes_with_it(captures: Captures) -> None:
    """Though Dynamo keeps what it has compiled."""
    model = alike(3)
    fast = autostream.optimize(model)
    fast(X)
    assert captures.alive
    del fast, model
    gc.collect()
    assert not captures.alive


@torch.no_grad()
@pytest.mark.usefixtures("at_once")
def test_what_is_forgotten_is_gone_at_once(captures: Captures) -> None:
    fast = autostream.optimize(linear())
    for _ in range(3):
        fast(X)
    gc.collect()  # of what traces
    fast._autostream.forget()
    assert not captures.alive


def exchanged(model: nn.Linear, other: nn.Linear) -> None:
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        one.data, two.data = two.data, one.data


def replaced(model: nn.Linear, other: nn.Linear) -> None:
    model.weight, other.weight = other.weight, model.weight
    model.bias, other.bias = other.bias, model.bias


@torch.no_grad()
@pytest.mark.parametrize("swap", [exchanged, replaced])
def test_two_sets_of_weights_may_change_places(swap: Callable[..., None], captures: Captures) -> None:
    model, average = linear(), nn.Linear(4, 4)
    fast = autostream.optimize(model)
    for _ in range(6):
        for number in range(3):
            torch.testing.assert_close(fast(X - number), model(X - number))
        swap(model, average)
    assert captures.count == 2
    assert len(captures.alive) == 2


@torch.no_grad()
def test_weights_that_take_turns_have_a_graph_each(captures: Captures) -> None:
    """As ``functional_call`` puts them into a model."""
    model = linear()
    fast = autostream.optimize(model)
    sets = [dict(nn.Linear(4, 4).named_parameters()) for _ in range(3)]
    for number in range(9):
        torch.testing.assert_close(
            functional_call(fast, sets[number % 3], (X,)), functional_call(model, sets[number % 3], (X,))
        )
    assert captures.count == 3


@torch.no_grad()
def test_inputs_that_are_written_are_those_of_one_graph(captures: Captures) -> None:
    """Captures run with what a graph reads, while a replay of another may be under way."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.mul_(self.w) + y

    model = Writes()
    fast, weights = autostream.optimize(model), [torch.full((4,), float(number)) for number in (2, 3)]
    for number in range(6):
        model.w.data = weights[number % 2]
        x = X.clone()
        torch.testing.assert_close(fast(x, X), X * (2 + number % 2) + X)
        torch.testing.assert_close(x, X * (2 + number % 2))
    first, *others = captures.alive
    assert all(first.static[at] is not other.static[at] for other in others for at in first.static)


# GraphsByAddress that do not come back


def moved(model: nn.Linear) -> Tensor:
    """Gives the weight other memory, and returns that which it had."""
    former = model.weight.data
    model.weight.data = former * 0.9
    return former


@torch.no_grad()
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("inplace", [False, True])
def test_weights_that_move_in_every_call_are_not_captured_without_end(
    inplace: bool,
    captures: Captures,
    replays: list[CapturedGraph],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whether or not a run once too often would do harm. Former memory is kept, so that no address comes again."""
    monkeypatch.setattr(places, "MAX_GRAPHS", 5)
    model, former = linear(), []
    both = nn.Sequential(model, nn.ReLU(inplace=True), nn.Identity()) if not inplace else nn.Sequential(Adds(), model)
    fast = autostream.optimize(both)
    for number in range(12):
        former.append(moved(model))
        del replays[:]
        torch.testing.assert_close(fast(X.clone()), both(X.clone()))
        assert captures.count == min(number + 1, 5)
        wrong = 0 < number <= 5 and not inplace  # a guess, after a call with a graph
        assert len(replays) == (number < 5) + wrong
    assert caplog.text.count("call after call") == 1
    reasons = [refusal.reason for report in fast.reports for refusal in report.refusals]
    assert any("call after call" in reason and "copy_" in reason for reason in reasons)


@torch.no_grad()
def test_former_weights_are_held_no_longer_while_others_are_captured(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short way holds those of the call before."""
    model = linear()
    fast = autostream.optimize(model)
    fast(X)
    fast(X)
    held, add, is_there = [], GraphsByAddress.add, storages_alive([model.weight])

    def noting(self: GraphsByAddress, arguments: Any) -> BoundGraph:
        held.append(is_there())
        return add(self, arguments)

    monkeypatch.setattr(GraphsByAddress, "add", noting)
    moved(model)
    assert is_there()
    torch.testing.assert_close(fast(X), model(X))
    assert held == [False]


@torch.no_grad()
def test_a_call_that_goes_plainly_does_not_wait_for_what_is_prepared(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "MAX_GRAPHS", 1)
    model = linear()
    fast = autostream.optimize(model)
    fast(X)
    former = moved(model)
    for module in ("compiled", "dispatch", "scheduled"):
        monkeypatch.setattr(f"autostream.{module}.preparing", None)  # nobody can take it
    torch.testing.assert_close(fast(X), model(X))
    assert captures.count == 1
    assert former.data_ptr() != model.weight.data_ptr()


class Adds(nn.Module):
    """Writes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


@torch.no_grad()
def test_after_calls_that_were_worth_it_there_are_captures_again(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any time, as many as in the beginning, and one for each so many calls, whichever way these take."""
    monkeypatch.setattr(places, "MAX_GRAPHS", 2)
    monkeypatch.setattr(places, "CALLS_PER_CAPTURE", 4)
    model, former = linear(), []
    fast = autostream.optimize(model)
    fast(X)
    for way in ("short", "long"):
        if way == "long":
            monkeypatch.setattr(CapturedCall, "replay", lambda *_, **__: None)
        count = captures.count
        former.append(moved(model))
        fast(X)
        assert captures.count == count + 1
        back, model.weight.data = model.weight.data, model.weight * 2
        fast(X)
        assert captures.count == count + 1
        model.weight.data = back
        for _ in range(6):
            torch.testing.assert_close(fast(X), model(X))
        assert captures.count == count + 1


@torch.no_grad()
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("way", ["long", "short"])
def test_memory_stays_until_a_call_notices_that_the_weight_has_moved(
    way: str, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "long":
        monkeypatch.setattr(CapturedCall, "replay", lambda *_, **__: None)
    model = linear()
    fast = autostream.optimize(model)
    fast(X)
    fast(X)
    is_there = storages_alive([model.weight])
    moved(model)
    assert is_there() == (way == "short"), "a graph that reads it may be launched before anybody looks"
    fast(X)
    assert not is_there()


@torch.no_grad()
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("rows", [2, 3, 1])
def test_so_it_does_until_a_call_of_another_shape_notices(rows: int, captures: Captures) -> None:
    """Of the shape of the last call, of the other, or the first of its shape."""
    model = linear()
    fast = autostream.optimize(model)
    for x in (X, X[:2]):
        for _ in range(3):
            fast(x)
    is_there = storages_alive([model.weight])
    moved(model)
    assert is_there()
    torch.testing.assert_close(fast(X[:rows]), model(X[:rows]))
    assert not is_there()
    for x in (X, X[:2]):
        torch.testing.assert_close(fast(x), model(x))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("rows", [2, 3, 1])
def test_so_it_does_where_gradients_are_recorded(rows: int, captures: Captures) -> None:
    model = linear()
    fast = autostream.optimize(model, policy="sequential")
    for x in (X, X[:2]):
        for _ in range(3):
            fast(x).sum().backward()
    is_there = storages_alive([model.weight])
    with torch.no_grad():
        moved(model)
    for _ in range(2):
        fast(X[:rows]).sum().backward()
    assert {report.mode for report in fast.reports} == {"forward and backward"}
    assert not is_there()


# Apart from models


class Lot:
    """``weight * x`` at places, captured again by what counts.

    Args:
        weights: of the first graph.
    """

    def __init__(self, weight: Tensor) -> None:
        arguments = [weight, torch.zeros(4)]
        static = static_copies(arguments, [1])
        graph = CapturedGraph(
            lambda w, x: (w * x, w + x), static, [True, False], [False, False], CPU, random=False, restore=Restore([])
        )
        self.places = GraphsByAddress(graph, arguments, self._variants, self._again)

    @staticmethod
    def _again(graph: CapturedGraph, read: Any, arguments: Any) -> CapturedGraph:
        return graph.recaptured(read, graph.pool, Restore([]))

    def _variants(self, graph: CapturedGraph) -> GraphsByInput:
        return GraphsByInput(graph, [1], BufferTable(), lambda *_: pytest.fail("there are no slots"), pytest.fail)


@torch.no_grad()
def test_only_the_latest_graph_lends(captures: Captures) -> None:
    """What is saved for a backward is large."""
    weights = [torch.full((4,), float(number)) for number in range(3)]
    lot = Lot(weights[0])
    lot.places.graph.share_outputs(frozenset({0}))
    for weight in (*weights[1:], weights[0]):
        arguments = [weight, torch.ones(4)]
        assert lot.places.find(arguments) is None
        product, total = lot.places.add(arguments).launch(arguments)
        torch.testing.assert_close([product, total], [weight, weight + 1])
        assert lot.places.graph.shared == {0}
        gc.collect()
        assert len(captures.alive) == 1


@torch.no_grad()
def test_the_first_captured_goes_for_one_that_calls_have_been_worth(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "MAX_GRAPHS", 2)
    monkeypatch.setattr(places, "CALLS_PER_CAPTURE", 2)
    weights = [torch.full((4,), float(number)) for number in range(4)]
    lot, (first, *others) = Lot(weights[0]), [[weight, torch.ones(4)] for weight in weights]
    for arguments in others:
        assert not lot.places.over
        lot.places.add(arguments)
        for _ in range(1 + 2):  # the first one settles it
            assert lot.places.find(arguments) is not None
        assert lot.places.find([torch.ones(4), torch.ones(4)]) is None
    found = [lot.places.find(arguments) is not None for arguments in (first, *others)]
    assert found == [False, False, True, True]


def at(weight: Tensor) -> list[Tensor]:
    return [weight, torch.ones(4)]


@pytest.fixture
def lot(captures: Captures, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], Lot]]:
    """Of the most captures and the calls that are worth one, with ones for weights."""

    def made(most: int, worth: int) -> Lot:
        monkeypatch.setattr(places, "MAX_GRAPHS", most)
        monkeypatch.setattr(places, "CALLS_PER_CAPTURE", worth)
        return Lot(ONES)

    with torch.no_grad():
        yield made


ONES, TWOS, THREES = (torch.full((4,), float(number)) for number in (1, 2, 3))


def test_calls_between_moves_are_worth_a_capture_together(lot: Callable[[int, int], Lot]) -> None:
    here = lot(1, 5).places
    for calls, over in ((4, True), (2, False)):  # the first after a move settles it
        for _ in range(calls):
            assert here.find(at(ONES)) is not None
        assert here.find(at(TWOS)) is None
        assert bool(here.over) == over


def test_no_more_captures_are_saved_up_than_there_were_at_first(lot: Callable[[int, int], Lot]) -> None:
    here = lot(2, 2).places
    for _ in range(20):
        assert here.find(at(ONES)) is not None
    for weight in (TWOS, THREES):
        assert here.find(at(weight)) is None
        assert not here.over
        here.add(at(weight))
    assert here.over


def test_refused_calls_that_find_all_where_the_one_before_did_are_worth_a_capture_too(
    lot: Callable[[int, int], Lot],
) -> None:
    here = lot(1, 3).places
    assert all(here.refused(at(weight)) for weight in 4 * (TWOS, THREES)), "each finds another than the one before"
    assert [bool(here.refused(at(THREES))) for _ in range(3)] == [True, True, False]
    here.add(at(THREES))
    assert here.over
    assert here.find(at(THREES)) is not None


@pytest.mark.parametrize("for_good", [False, True])
def test_a_capture_that_failed_is_tried_again_after_as_many_calls_as_are_worth_one(
    for_good: bool, lot: Callable[[int, int], Lot], captures: Captures
) -> None:
    """Unless nothing can be captured into the pool any more."""
    here = lot(5, 3).places
    captures.failure = torch.OutOfMemoryError("too little")
    with pytest.raises(torch.OutOfMemoryError):
        here.add(at(TWOS))
    captures.failure = None
    here.graph.pool.failed = for_good
    assert "it fails: OutOfMemoryError: too little" in here.over
    assert [bool(here.refused(at(TWOS))) for _ in range(1 + 3)] == [True, True, True, for_good]
    if not for_good:
        here.add(at(TWOS))
        assert "call after call" in here.over, "it is no longer the failure"


def passing(lot: Lot, memory: bytearray) -> BoundGraph:
    """The place of a weight that is made for one call, in memory that others have had; it is captured if need be."""
    weight = torch.frombuffer(memory, dtype=torch.float32)
    arguments = at(weight)
    place = lot.places.find(arguments) or lot.places.add(arguments)
    weight.data = torch.empty(0)  # what was recorded holds on to the tensor, as a CUDA graph does not
    return place


def test_weights_that_are_made_anew_in_the_memory_of_former_ones_have_the_graphs_of_these(
    lot: Callable[[int, int], Lot], captures: Captures
) -> None:
    here, blocks = lot(4, 100), [bytearray(16) for _ in range(3)]
    first = [passing(here, block) for block in blocks]
    for _ in range(3):
        assert [passing(here, block) for block in blocks] == first
    assert captures.count == 1 + 3


def test_of_too_many_graphs_the_first_goes_that_reads_what_nobody_has(lot: Callable[[int, int], Lot]) -> None:
    made, first, second = lot(4, 100), bytearray(16), bytearray(16)
    here, place = made.places, passing(made, first)
    passing(made, second)
    here.add(at(TWOS))
    again = torch.frombuffer(first, dtype=torch.float32)
    assert here.find(at(again)) is place
    assert here.find(at(TWOS)) is not None
    here.add(at(THREES))
    assert here.find(at(torch.frombuffer(second, dtype=torch.float32))) is None
    for weight in (ONES, again, TWOS, THREES):
        assert here.find(at(weight)) is not None


def test_a_graph_that_goes_leaves_its_memory_to_the_next(
    lot: Callable[[int, int], Lot], captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, again = [], Lot._again

    def noting(*args: Any) -> CapturedGraph:
        alive.append(len(captures.alive))
        return again(*args)

    monkeypatch.setattr(Lot, "_again", staticmethod(noting))
    here = lot(3, 100).places
    for weight in (TWOS, THREES, torch.zeros(4)):
        assert here.find(at(weight)) is None
        here.add(at(weight))
    assert alive == [1, 2, 2]
    assert len(captures.alive) == 3


def test_after_a_capture_that_failed_there_are_the_graphs_of_before(
    lot: Callable[[int, int], Lot], captures: Captures
) -> None:
    """What lends goes for the next, but only when that is there."""
    here = lot(3, 100).places
    here.graph.share_outputs(frozenset({0}))
    captures.failure = torch.OutOfMemoryError("too little")
    with pytest.raises(torch.OutOfMemoryError):
        here.add(at(TWOS))
    assert not here.unusable
    assert here.find(at(ONES)) is not None


@torch.no_grad()
def test_weights_that_stay_at_last_have_a_graph_again(
    captures: Captures, replays: list[CapturedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "MAX_GRAPHS", 3)
    monkeypatch.setattr(places, "CALLS_PER_CAPTURE", 8)
    model, former = linear(), []
    fast = autostream.optimize(model)
    for number in range(6):
        former.append(moved(model))
        torch.testing.assert_close(fast(X - number), model(X - number))
    for _ in range(8):
        fast(X)
    del replays[:]
    torch.testing.assert_close(fast(X), model(X))
    assert (captures.count, len(replays)) == (3 + 1, 1)


@torch.no_grad()
def test_a_graph_of_weights_that_are_gone_leaves_its_memory_to_what_comes_in_its_place(captures: Captures) -> None:
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
@pytest.mark.usefixtures("fresh_dynamo")
def test_an_input_that_is_a_view_of_a_buffer_stays_one(captures: Captures) -> None:
    """Behind a graph break, what was viewed before it is an input; copied, it would not see what is written."""
    ours, theirs = Viewed(), Viewed()
    fast = autostream.optimize(ours)
    for number in range(4):
        x = torch.full((4, 4), float(number))
        torch.testing.assert_close(fast(x.clone()), theirs(x.clone()))
        torch.testing.assert_close(ours.state, theirs.state)
    assert captures.count


@torch.no_grad()
def test_a_sparse_tensor_is_nowhere(captures: Captures) -> None:
    lot = Lot(torch.ones(4))
    assert lot.places.find([torch.ones(4).to_sparse(), torch.ones(4)]) is None


@torch.no_grad()
def test_a_tensor_that_lies_there_in_another_way_is_not_there(captures: Captures) -> None:
    weights = torch.ones(4), torch.ones(4)
    lot = Lot(weights[0])
    lot.places.add([weights[1], torch.ones(4)])
    assert lot.places.find([weights[0].view(2, 2), torch.ones(4)]) is None
    assert lot.places.find([weights[0], torch.ones(4)]) is not None


@torch.no_grad()
def test_threads_with_weights_of_their_own_get_what_is_theirs(captures: Captures) -> None:
    """A graph that is called with the weights of several blocks at a time."""
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


class Product(nn.Module):
    """Of its inputs."""

    def forward(self, weight: Tensor, x: Tensor) -> tuple[Tensor]:
        return (weight * x,)
