"""Inputs in buffers are read in place, and results are as without. Captures are fake (``tests/captures.py``)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.errors import CaptureError
from autostream.runtime import graphs_by_address
from autostream.runtime.input_buffers import InputBuffers
from tests.captures import Captures
from tests.replays import CPU

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

STREAM: Any = None


def arrived(buffers: InputBuffers, *values: Tensor) -> list[Tensor]:
    """A batch of these values in a buffer."""
    with torch.inference_mode(False):
        memory = buffers.memory(values, CPU, STREAM)
        return [tensor.copy_(value) for tensor, value in zip(memory, values, strict=True)]


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
    """Which inputs a call copies to the static inputs of the graph for such arguments."""
    args, kwargs = fast.static_inputs(*args, **kwargs)
    static = [*args, *kwargs.values()]
    with torch.inference_mode(False), torch.no_grad():
        for tensor in static:
            tensor.fill_(torch.nan)
    assert not call().isnan().any()
    return [not bool(tensor.isnan().all()) for tensor in static]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("keyword", "mode"), [(False, torch.inference_mode), (True, torch.no_grad)])
def test_a_batch_in_a_buffer_is_read_there(keyword: bool, mode: Any, captures: Captures) -> None:
    """Each buffer has a graph, which is freed with it. A keyword argument takes the slow path."""
    model = Net().eval()
    fast = autostream.optimize(model)
    call = (lambda batch: fast(x=batch)) if keyword else fast
    with mode():
        buffers = InputBuffers(2, fast._autostream.input_buffers)
        call(x(0))
        for number in range(6):
            (batch,) = arrived(buffers, x(number))
            arguments: Any = ([], {"x": batch}) if keyword else ([batch], {})
            assert copied(fast, lambda batch=batch: call(batch), *arguments[0], **arguments[1]) == [False]
            torch.testing.assert_close(call(batch), model(x(number)))
            torch.testing.assert_close(call(x(-number)), model(x(-number)))
        assert captures.count == len(captures.alive) == 3
        del buffers, batch, arguments
        assert len(captures.alive) == 1
        torch.testing.assert_close(call(x(7)), model(x(7)))


@torch.no_grad()
def test_inputs_outside_of_the_buffer_or_in_several_are_copied(captures: Captures) -> None:
    """Graphs for pairs of buffers would be too many. A part of a batch has to begin where the batch does."""
    model = Net().eval()
    fast = autostream.optimize(model)
    buffers = InputBuffers(3, fast._autostream.input_buffers)
    (a,), (b,) = arrived(buffers, x(1)), arrived(buffers, x(2))
    again = a.view(a.shape)
    fast(x(0), x(0))
    for args, expected in (
        *(((a, x(3)), [False, True]), ((a, b), [True, True]), ((x(3), a), [True, True])),
        *(((a, again), [False, False]), ((a, a), [False, False])),
        *(((a[:2],), [False]), ((a[1:],), [True])),
    ):
        values = [tensor.clone() for tensor in args]
        assert copied(fast, lambda args=args: fast(*args), *args) == expected
        torch.testing.assert_close(fast(*args), model(*values))


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
def test_a_capture_changes_nothing_and_outputs_may_be_views_of_the_buffer(captures: Captures) -> None:
    model = Writes()
    fast = autostream.optimize(model)
    buffers = InputBuffers(2, fast._autostream.input_buffers)
    fast(x(0))
    for number in range(2, 6):
        (batch,) = arrived(buffers, x(number))
        whole, part, total = fast(batch)
        assert whole is batch
        assert part.untyped_storage().data_ptr() == batch.data_ptr()
        torch.testing.assert_close([batch, part], [2 * x(number), 2 * x(number)[1:]])
        torch.testing.assert_close(total, 2 * x(number) + number)
        address = batch.data_ptr()
        del whole, batch
        (other,) = arrived(buffers, x(0))
        assert other.data_ptr() != address, "its part is in use"
        del part, other
    assert captures.count == 2


@torch.no_grad()
def test_training_with_batches_in_buffers_is_the_same_to_the_bit(captures: Captures) -> None:
    """Captures run the step several times, which is undone."""

    def trained(prefetched: bool) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        step = autostream.train_step(model, optimizer, nn.MSELoss())
        buffers, losses = InputBuffers(2, step.input_buffers), []
        for number in range(5):
            batch = x(number) / 10, torch.ones(3, 4)
            batch = arrived(buffers, *batch) if prefetched else batch  # type: ignore[assignment]
            losses.append(step(*batch).item())
            alive = batch  # noqa: F841 - as a loop's variable is
        return losses, [*model.parameters()]

    expected, count = trained(False), captures.count
    losses, parameters = trained(True)
    assert losses == expected[0]
    torch.testing.assert_close(parameters, expected[1], rtol=0, atol=0)
    assert captures.count == 2 * count + 2


@torch.no_grad()
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("keyword", [False, True])
def test_graphs_for_buffers_are_captured_again_for_moved_weights_and_freed_with_the_model(
    keyword: bool, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs_by_address, "MAX_GRAPHS", 1)
    monkeypatch.setattr(graphs_by_address, "CALLS_PER_CAPTURE", 0)
    model = Net().eval()
    fast = autostream.optimize(model)
    call = (lambda batch: fast(x=batch)) if keyword else fast
    buffers = InputBuffers(1, fast._autostream.input_buffers)
    (batch,) = arrived(buffers, x(1))
    call(batch)
    call(batch)
    for factor in (2, 3):
        model.linear.weight.data = model.linear.weight.data * factor
        for _ in range(2):
            torch.testing.assert_close(call(batch), model(x(1)))
    assert (captures.count, len(captures.alive)) == (6, 2)
    gc.collect()
    fast._autostream.forget()
    gc.collect()
    assert not captures.alive
    torch.testing.assert_close(call(batch), model(x(1)))


@torch.no_grad()
@pytest.mark.parametrize("failure", [CaptureError("no"), torch.OutOfMemoryError("no")])
def test_if_a_capture_fails_batches_are_copied_and_the_reason_is_reported_once(
    failure: Exception, captures: Captures, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net().eval()
    fast = autostream.optimize(model)
    buffers = InputBuffers(2, fast._autostream.input_buffers)
    fast(x(0))
    captures.failure = failure
    (first,), (second,) = arrived(buffers, x(1)), arrived(buffers, x(2))
    torch.testing.assert_close(fast(first), model(x(1)))
    torch.testing.assert_close(fast(second), model(x(2)))
    captures.failure = None
    torch.testing.assert_close(fast(first), model(x(1)))
    assert captures.count == 1, "it is not tried again"
    (report,) = fast.reports
    assert report.mode != "plain"
    (refusal,) = (refusal for refusal in report.refusals if refusal.choice == "batches are copied in")
    assert refusal.reason.startswith("captured for the memory that batches come in, it fails: ")
    assert refusal.reason.endswith("no")
    assert caplog.text.count("batches are copied in") == 1


def test_calls_that_record_gradients_copy_their_batches(captures: Captures) -> None:
    """The backward reads what the forward leaves at one address."""
    model, eager = Net(), Net()
    fast = autostream.optimize(model, policy="sequential")
    buffers = InputBuffers(2, fast._autostream.input_buffers)
    for number in range(1, 4):
        (batch,) = arrived(buffers, x(number))
        fast(batch).sum().backward()
        eager(x(number)).sum().backward()
        torch.testing.assert_close(model.linear.weight.grad, eager.linear.weight.grad)
    assert captures.count == 2, "forward and backward"
