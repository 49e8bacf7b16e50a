"""What stands in for a model: it is all that the model is, and its calls lead elsewhere."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream.frontend.model_proxy import stand_in

X = torch.tensor([[-1.0, 1.0]])


class Net(nn.Sequential):
    """With a method, an attribute and a hook."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Tanh())
        self.scale = 2.0

    def encode(self, x: Tensor) -> Tensor:
        return self[0](x) * self.scale  # type: ignore[no-any-return]


def test_calls_lead_elsewhere_and_all_else_is_the_models() -> None:
    model = Net()

    def run(x: Tensor) -> Tensor:
        return model(x) + 1  # type: ignore[no-any-return]

    found: Any = stand_in(model, run)
    assert isinstance(found, Net)
    assert torch.equal(found(X), model(X) + 1)
    assert torch.equal(found.encode(X), model.encode(X))
    assert found[0] is model[0]
    assert [*found] == [*model]
    assert len(found) == 2
    assert (repr(found), type(found).__name__, found.__class__) == (repr(model), "Net", Net)
    found.scale = 3.0
    found.append(nn.ReLU())
    assert (model.scale, len(model)) == (3.0, 3)
    assert all(map(lambda one, other: one is other, found.parameters(), model.parameters()))
    found.train(False)
    assert not model.training


def test_hooks_are_the_business_of_what_calls_lead_to() -> None:
    model, called = Net(), list[str]()
    model.register_forward_hook(lambda *_: called.append("hook"))

    def run(x: Tensor) -> Tensor:
        return model(x)  # type: ignore[no-any-return]

    stand_in(model, run)(X)  # type: ignore[misc]
    assert called == ["hook"]


def pickled(found: Any) -> Any:
    return pickle.loads(pickle.dumps(found))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, copy.copy])
def test_a_copy_is_one_of_the_model(copied: Any) -> None:
    model = Net()

    def run(x: Tensor) -> Tensor:
        raise AssertionError(x)

    other = copied(stand_in(model, run))
    assert type(other) is Net
    assert torch.equal(other(X), model(X))
    if copied is not copy.copy:
        with torch.no_grad():
            other[0].weight.zero_()
        assert not torch.equal(other(X), model(X))


def constructed(found: Any) -> Any:
    return type(found)()


def bare(found: Any) -> Any:
    """As users write methods that copy."""
    other = type(found).__new__(type(found))
    vars(other).update(copy.deepcopy(vars(found)))
    return other


def test_it_may_become_another_class() -> None:
    """As modules do that are parametrized."""

    class Deeper(Net):
        pass

    found: Any = stand_in(Net(), len)
    found.__class__ = Deeper
    assert (type(found), found.__class__) == (Deeper, Deeper)


@pytest.mark.parametrize("made", [constructed, bare])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, copy.copy])
def test_what_else_is_made_of_its_class_is_copied_as_a_model_of_its_own(made: Any, copied: Any) -> None:
    """One that leads to itself, as a copy of it does."""
    model = Net()

    def run(x: Tensor) -> Tensor:
        raise AssertionError(x)

    found = made(stand_in(model, run))
    found.scale, found.known = 3.0, [found]
    other = copied(found)
    assert type(other) is Net
    assert other is not found
    assert torch.equal(other(X), found(X))
    assert (other.scale, model.scale) == (3.0, 2.0)
    other.scale = 4.0
    assert found.scale == 3.0
    assert (other[0].weight is found[0].weight) == (copied is copy.copy)
    assert other.known[0] is (found if copied is copy.copy else other)


def test_nothing_of_it_keeps_the_model_alive() -> None:
    model = Net()

    def run(x: Tensor) -> Tensor:
        return x

    found: Any = stand_in(model, run)
    weight = weakref.ref(model[0].weight)
    gc.disable()
    try:
        del model, found
        assert weight() is None
    finally:
        gc.enable()


class Slotted(nn.Module):
    __slots__ = ("extra",)


class Ending(nn.Module):
    def __del__(self) -> None:
        pass


class Last(nn.Module):
    def __init_subclass__(cls) -> None:
        raise TypeError("nobody derives from this")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [Slotted, Ending, Last, lambda: torch.jit.script(nn.ReLU())])
def test_some_models_have_none(make: Any) -> None:
    assert stand_in(make(), len) is None
