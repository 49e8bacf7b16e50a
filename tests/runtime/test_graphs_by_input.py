"""Inputs that come in slots are read where they are, and everything else is as it would be without.

Captures are make-believe: whatever is scheduled runs on the CPU, recorded and replayed as one graph is on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.errors import CaptureError
from autostream.runtime import graphs_by_address as places
from autostream.runtime.cuda_graph import CapturedGraph
from autostream.runtime.graphs_by_input import GraphsByInput
from autostream.runtime.input_buffers import BufferTable, InputBuffers
from autostream.runtime.restore import Restore
from tests.captures import Captures
from tests.replays import CPU

HOME: Any = None


def come(slots: InputBuffers, *values: Tensor) -> list[Tensor]:
    """A batch of these values that has arrived."""
    with torch.inference_mode(False):
        return [place.copy_(value) for place, value in zip(slots.memory(values, CPU, HOME), values, strict=True)]


def x(number: float, size: int = 3) -> Tensor:
    return torch.arange(4.0 * size).reshape(size, 4) + number


class Net(nn.Module):
    """A weight, and an input that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.linear(x).relu() if y is None else self.linear(x).relu() + y  # type: ignore[no-any-return]


def copied(fast: Any, call: Callable[[], Tensor], *args: Tensor, **kwargs: Tensor) -> list[bool]:
    """Which inputs a call copies to where the graph of calls with such arguments reads them."""
    args, kwargs = fast.static_inputs(*args, **kwargs)
    static = [*args, *kwargs.values()]
    with torch.inference_mode(False), torch.no_grad():
        for tensor in static:
            tensor.fill_(torch.nan)
    assert not call().isnan().any()
    return [not bool(tensor.isnan().all()) for tensor in static]


CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "long": lambda fast, given: fast(x=given),
    "short": lambda fast, given: fast(given),
}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("way", CALLS)
def test_what_comes_in_a_slot_is_read_there(way: str, mode: Any, captures: Captures) -> None:
    """A graph of their own for either slot, whatever comes in between, until there are no slots any more."""
    model, call = Net().eval(), CALLS[way]
    fast = autostream.optimize(model)
    with mode():
        slots = InputBuffers(2, fast._autostream.slots)
        call(fast, x(0))
        for number in range(6):
            (given,) = come(slots, x(number))
            named = {} if way == "short" else {"x": given}
            assert copied(fast, lambda given=given: call(fast, given), *([] if named else [given]), **named) == [False]
            torch.testing.assert_close(call(fast, given), model(x(number)))
            torch.testing.assert_close(call(fast, x(-number)), model(x(-number)))
        assert captures.count == 3
        assert len(captures.alive) == 3
        del slots, given, named
        assert len(captures.alive) == 1
        torch.testing.assert_close(call(fast, x(7)), model(x(7)))


@torch.no_grad()
def test_the_short_way_is_taken_with_slots(captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, model = autostream.optimize(Net().eval()), Net().eval()
    slots = InputBuffers(2, fast._autostream.slots)
    (first,) = come(slots, x(1))
    fast(first)
    monkeypatch.setattr(fast._autostream, "_scheduled", lambda *args: pytest.fail("it is the long way"))
    (second,) = come(slots, x(2))
    assert captures.count == 2
    torch.testing.assert_close(fast(second), model(x(2)))
    assert captures.count == 3


@torch.no_grad()
def test_what_is_not_in_a_slot_is_copied_and_what_is_in_several(captures: Captures) -> None:
    """Beside one that is read where it is; graphs for pairs of slots would be too many."""
    model = Net().eval()
    fast = autostream.optimize(model)
    slots = InputBuffers(3, fast._autostream.slots)
    (a,), (b,) = come(slots, x(1)), come(slots, x(2))
    fast(x(0), x(0))
    assert copied(fast, lambda: fast(a, x(3)), a, a.clone()) == [False, True]
    torch.testing.assert_close(fast(a, x(3)), model(x(1), x(3)))
    assert captures.count == 2
    assert copied(fast, lambda: fast(a, b), a, b) == [True, True]
    assert copied(fast, lambda: fast(x(3), a), a, b) == [True, True], "the graph of this slot is for the other place"
    torch.testing.assert_close(fast(a, b), model(x(1), x(2)))
    torch.testing.assert_close(fast(x(3), a), model(x(3), x(1)))
    assert captures.count == 2
    again = a.view(a.shape)
    assert copied(fast, lambda: fast(a, again), a, again) == [False, False], "both lie in one slot"
    torch.testing.assert_close(fast(a, again), model(x(1), x(1)))
    assert copied(fast, lambda: fast(a, a), a, a) == [False, False], "it is one input"
    torch.testing.assert_close(fast(a, a), model(x(1), x(1)))


@torch.no_grad()
def test_parts_of_a_batch_are_read_there_if_they_begin_where_it_does(captures: Captures) -> None:
    model = Net().eval()
    fast = autostream.optimize(model)
    (a,) = come(InputBuffers(1, fast._autostream.slots), x(1))
    slots = InputBuffers(1, fast._autostream.slots)
    (a,) = come(slots, x(1))
    fast(x(0, size=2))
    assert copied(fast, lambda: fast(a[:2]), a[:2]) == [False]
    assert copied(fast, lambda: fast(a[1:]), a[1:]) == [True]
    for part in (slice(0, 2), slice(1, 3)):
        torch.testing.assert_close(fast(a[part]), model(x(1)[part]))


class Writes(nn.Module):
    """Writes its input and its state, and returns views of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.count.add_(1)  # type: ignore[operator]
        x.mul_(2)
        return x, x[1:], x + self.count


@torch.no_grad()
def test_a_capture_changes_nothing_and_outputs_may_lie_in_the_slot(captures: Captures) -> None:
    model = Writes()
    fast = autostream.optimize(model)
    slots = InputBuffers(2, fast._autostream.slots)
    fast(x(0))
    for number in range(2, 6):
        (given,) = come(slots, x(number))
        whole, part, total = fast(given)
        assert whole is given
        assert part.untyped_storage().data_ptr() == given.data_ptr()
        torch.testing.assert_close(given, 2 * x(number))
        torch.testing.assert_close(part, 2 * x(number)[1:])
        torch.testing.assert_close(total, 2 * x(number) + number)
        address = given.data_ptr()
        del whole, given
        (other,) = come(slots, x(0))
        assert other.data_ptr() != address, "its part is in use"
        del part, other
    assert captures.count == 2


@torch.no_grad()
def test_it_trains_as_it_would(captures: Captures) -> None:
    """Captures run the step several times, and are undone."""

    def trained(prefetched: bool) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        step = autostream.train_step(model, optimizer, nn.MSELoss())
        slots, losses = InputBuffers(2, step.slots), []
        for number in range(7):
            batch = x(number) / 10, torch.ones(3, 4)
            batch = come(slots, *batch) if prefetched else batch  # type: ignore[assignment]
            losses.append(step(*batch).item())
            kept = batch  # noqa: F841 - as a loop's variable does
        return losses, [*model.parameters()]

    plain, count = trained(False), captures.count
    ours = trained(True)
    assert ours[0] == plain[0]
    torch.testing.assert_close(ours[1], plain[1], rtol=0, atol=0)
    assert captures.count == 2 * count + 2


@torch.no_grad()
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("way", CALLS)
def test_where_weights_have_moved_all_are_captured_again(
    way: str, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that are there for the former ones go together, where there may be one place."""
    monkeypatch.setattr(places, "MAX_GRAPHS", 1)
    monkeypatch.setattr(places, "CALLS_PER_CAPTURE", 0)
    model, call = Net().eval(), CALLS[way]
    fast = autostream.optimize(model)
    slots = InputBuffers(1, fast._autostream.slots)
    (given,) = come(slots, x(1))
    call(fast, given)
    call(fast, given)
    assert captures.count == 2
    for factor in (2, 3):
        model.linear.weight.data = model.linear.weight.data * factor
        for _ in range(2):
            torch.testing.assert_close(call(fast, given), model(x(1)))
    assert captures.count == 6
    assert len(captures.alive) == 2


@torch.no_grad()
def test_nothing_is_captured_with_weights_that_the_graph_does_not_know(captures: Captures) -> None:
    """It would be believed as soon as they are back where they were."""
    weight, table = torch.ones(4), BufferTable()
    slots = InputBuffers(1, table)
    (given,) = come(slots, x(1))
    tensors, flags = [weight, x(0)], ([True, False], [False, False])
    graph = CapturedGraph(lambda w, a: (a * w,), tensors, *flags, CPU, random=False, restore=Restore([]))
    variants = GraphsByInput(graph, [1], table, lambda *_: pytest.fail("it is captured"), pytest.fail)
    assert variants.reading([weight.clone(), given]) is graph
    assert not variants.unmoved([weight.clone(), given])


@torch.no_grad()
@pytest.mark.parametrize("failure", [CaptureError("no"), torch.OutOfMemoryError("no")])
def test_where_it_cannot_be_captured_batches_are_copied(
    failure: Exception, captures: Captures, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not tried again, and said once."""
    model = Net().eval()
    fast = autostream.optimize(model)
    slots = InputBuffers(2, fast._autostream.slots)
    fast(x(0))
    captures.failure = failure
    (given,), (other,) = come(slots, x(1)), come(slots, x(2))
    torch.testing.assert_close(fast(given), model(x(1)))
    torch.testing.assert_close(fast(other), model(x(2)))
    captures.failure = None
    torch.testing.assert_close(fast(given), model(x(1)))
    assert captures.count == 1
    (report,) = fast.reports
    assert report.mode != "plain", "the graph is still there"
    (refusal,) = (refusal for refusal in report.refusals if refusal.choice == "batches are copied in")
    assert refusal.reason.startswith("captured for the memory that batches come in, it fails: ")
    assert refusal.reason.endswith("no")
    assert caplog.text.count("batches are copied in") == 1


@torch.no_grad()
@pytest.mark.usefixtures("at_once")
def test_what_is_forgotten_is_gone_while_batches_are_there(captures: Captures) -> None:
    model = Net().eval()
    fast = autostream.optimize(model)
    slots = InputBuffers(1, fast._autostream.slots)
    (given,) = come(slots, x(1))
    fast(given)
    assert len(captures.alive) == 2
    fast._autostream.forget()
    gc.collect()  # of an entry, which traces
    assert not captures.alive
    torch.testing.assert_close(fast(given), model(x(1)))
    assert len(captures.alive) == 2


def test_calls_that_record_gradients_have_their_batches_copied(captures: Captures) -> None:
    """The backward reads what the forward leaves in one place."""
    model, twin = Net(), Net()
    fast = autostream.optimize(model, policy="sequential")
    slots = InputBuffers(2, fast._autostream.slots)
    for number in range(1, 4):
        (given,) = come(slots, x(number))
        fast(given).sum().backward()
        twin(x(number)).sum().backward()
        torch.testing.assert_close(model.linear.weight.grad, twin.linear.weight.grad)
    assert captures.count == 2, "forward and backward"
