"""Proxies of models: all is the model's, except that calls are redirected."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream.frontend.model_proxy import proxy_of

X = torch.tensor([[-1.0, 1.0]])


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Tanh())
        self.scale = 2.0

    def encode(self, x: Tensor) -> Tensor:
        return self[0](x) * self.scale  # type: ignore[no-any-return]


def unused(x: Tensor) -> Tensor:
    raise AssertionError(x)


def test_calls_are_redirected_and_all_else_is_the_models() -> None:
    model, called = Net(), list[str]()
    model.register_forward_hook(lambda *_: called.append("hook"))

    def run(x: Tensor) -> Tensor:
        return model(x) + 1  # type: ignore[no-any-return]

    proxy: Any = proxy_of(model, run)
    assert isinstance(proxy, Net)
    assert torch.equal(proxy(X), model(X) + 1)
    assert called == ["hook"] * 2, "no hook of the proxy's"
    assert torch.equal(proxy.encode(X), model.encode(X))
    assert ([*proxy], len(proxy)) == ([*model], 2)
    assert (repr(proxy), type(proxy).__name__, proxy.__class__) == (repr(model), "Net", Net)
    proxy.scale = 3.0
    proxy.append(nn.ReLU())
    assert (model.scale, len(model)) == (3.0, 3)
    assert all(map(lambda one, other: one is other, proxy.parameters(), model.parameters()))
    proxy.train(False)
    assert not model.training

    class Deeper(Net):
        pass

    proxy.__class__ = Deeper  # as parametrizations do
    assert (type(proxy), proxy.__class__) == (Deeper, Deeper)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def itself(proxy: Any) -> Any:
    return proxy


def constructed(proxy: Any) -> Any:
    return type(proxy)()


def bare(proxy: Any) -> Any:
    """As users' methods copy."""
    other = type(proxy).__new__(type(proxy))
    vars(other).update(copy.deepcopy(vars(proxy)))
    return other


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, copy.copy])
@pytest.mark.parametrize("make", [itself, constructed, bare])
def test_copies_are_plain_models(make: Any, copied: Any) -> None:
    """Of the proxy, and of other instances of its class, also where an attribute refers to the copied object."""
    model = Net()
    proxy = proxy_of(model, unused)
    original = make(proxy)
    if original is proxy:
        plain = model
    else:
        plain = original
        original.scale, original.known = 3.0, [original]
    other = copied(original)
    assert type(other) is Net
    assert other is not original
    assert other is not model
    assert torch.equal(other(X), plain(X))
    assert (other[0].weight is original[0].weight) == (copied is copy.copy)
    if original is not proxy:
        assert (other.scale, model.scale) == (3.0, 2.0)
        other.scale = 4.0
        assert original.scale == 3.0
        assert other.known[0] is (original if copied is copy.copy else other)


def test_a_proxy_does_not_keep_the_model_alive() -> None:
    model = Net()
    proxy: Any = proxy_of(model, unused)
    weight = weakref.ref(model[0].weight)
    gc.disable()
    try:
        del model, proxy
        assert weight() is None
    finally:
        gc.enable()


class Slotted(nn.Module):
    __slots__ = ("extra",)


class Deleting(nn.Module):
    def __del__(self) -> None:
        pass


class Final(nn.Module):
    def __init_subclass__(cls) -> None:
        raise TypeError("nobody derives from this")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_some_models_have_no_proxy() -> None:
    for model in (Slotted(), Deleting(), Final(), torch.jit.script(nn.ReLU())):
        assert proxy_of(model, len) is None
