"""Which tensors a model may use while it is traced, besides its arguments."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from autostream.errors import FastPathError, TraceError
from autostream.tracing.constants import Constants, attributes_of, names_given, registered, unasked, ungiven
from autostream.tracing.replica import ReachedOriginalError

HELD, ATTRIBUTE, OTHER = torch.ones(3), torch.ones(3), torch.ones(3)


@pytest.fixture
def constants() -> Constants:
    return Constants(frozenset({id(HELD)}), registered.__code__, frozenset({id(ATTRIBUTE)}))


@pytest.fixture
def argument() -> Tensor:
    return FakeTensorMode(allow_non_fake_inputs=True).from_tensor(torch.ones(3))


def test_parameters_and_buffers_of_all_modules_are_registered_and_tensors_beside_them_attributes() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    model[0].shift = shift = torch.ones(2)
    model[0].pair = [torch.ones(2)]
    norm = model[0]
    expected = [norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked]
    assert registered(model) == set(map(id, expected))
    assert attributes_of(model) == {id(shift)}


def test_what_is_held_may_be_used(constants: Constants, argument: Tensor) -> None:
    with constants:
        assert (argument + HELD + ATTRIBUTE).shape == (3,)
        assert torch.cat([HELD, argument]).shape == (6,)


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda x: x + OTHER, "add"),
        (lambda x: OTHER.relu(), "relu"),
        (lambda x: torch.cat([x, OTHER]), "cat"),
        (lambda x: torch.where(condition=x > 0, input=x, other=OTHER), "where"),
        (lambda x: x.mul_(OTHER), "mul_"),
    ],
)
def test_what_nobody_holds_may_not_be_used(
    constants: Constants, argument: Tensor, use: Callable[[Tensor], Tensor], name: str
) -> None:
    with constants, pytest.raises(TraceError, match=rf"uses \({name}\) a tensor that is not registered with it"):
        use(argument)


def test_its_shape_and_dtype_may_be_looked_at(constants: Constants) -> None:
    with constants:
        assert (OTHER.shape, OTHER.dtype, OTHER.ndim) == ((3,), torch.float32, 1)


@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.add_(1),
        lambda tensor: torch.relu_(tensor),
        lambda tensor: tensor.__setitem__(0, 1.0),
        lambda tensor: torch.ones(3, out=tensor),
        lambda tensor: tensor.__iadd__(1),
    ],
)
def test_what_is_no_buffer_may_not_be_written_even_if_it_is_held(
    constants: Constants, write: Callable[[Tensor], object]
) -> None:
    with constants, pytest.raises(ReachedOriginalError, match="no buffer: register it as one"):
        write(HELD)
    assert HELD.tolist() == [1, 1, 1]


def test_what_is_not_registered_is_no_original(constants: Constants) -> None:
    for tensor, advice in ((ATTRIBUTE, "as one$"), (OTHER, "as one, or make the function that uses it")):
        with constants, pytest.raises(TraceError, match=rf"no buffer: register it {advice}") as info:
            tensor.add_(1)
        assert not isinstance(info.value, ReachedOriginalError)
        assert tensor.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.requires_grad,
        lambda x: x.is_leaf,
        lambda x: x.grad_fn,
        lambda x: x.grad,
        lambda x: x._version,
        lambda x: x.retains_grad,
        lambda x: x.is_inference(),
        lambda x: torch.is_inference(x),
        lambda x: x._base,
        lambda x: x._is_view(),
    ],
)
def test_what_a_tensor_is_to_autograd_may_not_be_asked(
    ask: Callable[[Tensor], bool], constants: Constants, argument: Tensor
) -> None:
    for tensor in (argument, HELD):
        with constants, pytest.raises(FastPathError, match="may change from call to call"):
            ask(tensor)


def test_pytorch_itself_may_ask(constants: Constants, argument: Tensor) -> None:
    asks = eval("lambda x: x.requires_grad", {"__name__": "torch.nn.somewhere"})
    with constants:
        assert asks(argument) is False


def test_a_graph_that_pytorch_interprets_may_not(constants: Constants, argument: Tensor) -> None:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(getattr, (graph.placeholder("x"), "requires_grad")))
    with constants, pytest.raises(FastPathError, match="requires_grad"):
        torch.fx.Interpreter(torch.fx.GraphModule({}, graph)).run(argument)


@pytest.mark.parametrize("ask", [lambda x: x.gain, lambda x: getattr(x, "gain", 1.0), lambda x: hasattr(x, "gain")])
def test_what_a_user_gave_to_tensors_may_not_be_asked_of_those_of_a_trace(
    ask: Callable[[Tensor], Any], argument: Tensor
) -> None:
    given, mine = torch.ones(2), torch.ones(2)
    given.gain = mine.gain = 2.0  # type: ignore[attr-defined]
    names = names_given([given, torch.ones(2)])
    with ungiven(names):
        with pytest.raises(FastPathError, match=r"asks \(tensor.gain\)"):
            ask(argument)
        assert ask(mine)
        assert getattr(argument, "another", 1) == 1
        with pytest.raises(AttributeError, match="'FakeTensor' object has no attribute 'another'"):
            argument.another  # noqa: B018
        with ThreadPoolExecutor() as pool:
            assert pool.submit(getattr, argument, "gain", 3.0).result() == 3.0
    assert getattr(argument, "gain", 1) == 1
    assert not hasattr(Tensor, "__getattr__")


def test_pytorch_may_ask_for_them() -> None:
    asks = eval("lambda x: getattr(x, 'gain', 1)", {"__name__": "torch.somewhere"})
    with ungiven(frozenset({"gain"})):
        assert asks(torch.ones(2)) == 1


def test_whether_inference_mode_is_on_may_not_be_asked_but_by_pytorch_and_other_threads() -> None:
    answers: list[bool] = []
    pytorchs = eval("lambda: torch.is_inference_mode_enabled()", {"__name__": "torch.somewhere", "torch": torch})
    with unasked("is_inference_mode_enabled"):
        with pytest.raises(FastPathError, match="is_inference_mode_enabled"):
            torch.is_inference_mode_enabled()
        with torch.inference_mode():
            assert pytorchs() is True
        other = threading.Thread(target=lambda: answers.append(torch.is_inference_mode_enabled()))
        other.start()
        other.join()
    assert answers == [torch.is_inference_mode_enabled()] == [False]


@pytest.mark.parametrize("question", ["is_inference_mode_enabled", "is_grad_enabled"])
def test_who_imports_the_function_meanwhile_gets_its_answers_afterwards(question: str) -> None:
    with unasked(question):
        imported = getattr(torch, question)
        with pytest.raises(FastPathError, match=question):
            imported()
    assert imported() == getattr(torch, question)()
    assert getattr(torch, question) is not imported
