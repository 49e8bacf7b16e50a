"""What every tracer has in common: a model is called once, with fake tensors, and nothing of that is left."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import check_backward_validity

from autostream.errors import FastPathError, TraceError
from autostream.tracing.constants import attributes_of, registered
from autostream.tracing.flat import FlatModel, check_ordinary, tensors_in, watched
from autostream.frontend.tree import TENSOR, flatten


class Model(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.calls = 0

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def called(function: Callable[..., Any], *args: Any) -> tuple[FlatModel, list[torch.Size]]:
    """A model under the watch, and the shapes of its flat outputs, by a tracer that calls it with fake tensors."""
    model = Model(function)
    tensors, structure = flatten((args, {}))
    flat = FlatModel(model, structure, registered(model), "nobody", attributes_of(model))

    def tracer() -> list[torch.Size]:
        with FakeTensorMode() as mode:
            return [output.shape for output in flat(*map(mode.from_tensor, tensors))]

    return flat, watched(tracer, flat)


def test_outputs_are_flat_and_their_structure_is_kept() -> None:
    flat, shapes = called(lambda model, x, pair: {"sum": x + pair[0], "x": pair[1]}, torch.ones(2), (torch.ones(2), 3))
    assert shapes == [(2,)]
    assert flat.result.structure.context == ("sum", "x")
    assert flat.result.structure.children[0] is TENSOR  # type: ignore[index]


def refusal(function: Callable[..., Any], kind: type[TraceError] = TraceError) -> str:
    with pytest.raises(kind) as caught:
        called(function, torch.ones(2))
    return str(caught.value)


def failing(model: Model, x: Tensor) -> Tensor:
    raise ValueError("no\nway")


def test_an_error_is_a_refusal_in_one_line_with_the_tracers_name_and_the_users_line() -> None:
    reason = refusal(failing)
    assert reason.startswith("nobody cannot trace Model: ValueError: no (at ")
    assert 'raise ValueError("no\\nway"))' in reason


def raising(error: TraceError) -> Callable[..., Any]:
    def function(model: Model, x: Tensor) -> Tensor:
        raise error

    return function


def test_a_refusal_of_ours_stays_what_it_is() -> None:
    assert refusal(raising(FastPathError("a fast path")), FastPathError).startswith("a fast path (at ")


def count(model: Model, x: Tensor) -> Tensor:
    model.calls += 1
    return x


def test_what_the_model_does_to_itself_is_refused() -> None:
    assert "changes its own attribute calls" in refusal(count)


def test_what_the_model_does_to_what_it_refers_to_is_refused_too() -> None:
    calls, stream = {"count": 0}, iter(range(3))

    def counts(model: Model, x: Tensor) -> Tensor:
        calls["count"] += 1
        return x * calls["count"]

    assert refusal(counts).startswith("the model's forward changes calls.count: a graph would do so only once")
    assert calls == {"count": 0}
    assert "the model refers to stream, an iterator" in refusal(lambda model, x: x * next(stream), FastPathError)
    assert next(stream) == 0


def asks_pytorch_to_ask(model: Model, x: Tensor) -> Tensor:
    check_backward_validity([x])
    return x


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_pytorch_may_ask_what_a_tensor_is_to_autograd_and_a_model_may_not() -> None:
    called(asks_pytorch_to_ask, torch.ones(2))
    assert "the model asks (requires_grad)" in refusal(lambda model, x: x if x.requires_grad else -x, FastPathError)


def test_what_draws_from_a_generator_of_pythons_is_left_to_the_model() -> None:
    """Of TorchDynamo's graphs, too, it would get the same number in each call."""
    dice, expected = (random.Random(0) for _ in range(2))
    said = refusal(lambda model, x: x * dice.random(), FastPathError)
    assert said.startswith("the model draws from dice, a random generator: a graph would do so only once")
    assert dice.random() == expected.random()


async def later(model: Model, x: Tensor) -> Tensor:
    return x + 1


def one_by_one(model: Model, x: Tensor) -> Iterator[Tensor]:
    yield x + 1


def switches(model: Model, x: Tensor) -> Tensor:
    torch.set_grad_enabled(not torch.is_grad_enabled())
    return x + 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (later, "the model returns a coroutine"),
        (one_by_one, "the model returns a generator"),
        (switches, "leaves the recording of gradients switched on or off"),
    ],
)
def test_what_a_graph_would_do_at_once_or_not_at_all_is_left_to_the_model(
    function: Callable[..., Any], reason: str
) -> None:
    with torch.no_grad():
        assert reason in refusal(function, FastPathError)
        assert not torch.is_grad_enabled()


def test_generators_are_as_before() -> None:
    before = torch.get_rng_state()
    called(lambda model, x: x + torch.rand(2), torch.ones(2))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_of_torchscript_or_over_unusual_tensors_is_refused() -> None:
    model = nn.Linear(2, 2)
    check_ordinary(model)
    model.register_buffer("mask", torch.eye(2).to_sparse())
    with pytest.raises(TraceError, match="the model's mask has the layout"):
        check_ordinary(model)


def test_tensors_of_a_value() -> None:
    x = torch.ones(1)
    assert [tensors_in(x), tensors_in([x, 3, x]), tensors_in({"x": x}), tensors_in(None)] == [[x], [x, x], [], []]
