"""A model whose calls lead elsewhere for a while."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autostream.tracing.rerouted import ForwardOf, rerouted

X = torch.tensor([-1.0, 1.0])


def test_calls_lead_elsewhere_inside_and_are_what_they_were_there() -> None:
    layer = nn.ReLU()
    with rerouted(layer, lambda x: layer(x) + layer.forward(x)):
        assert layer(X).tolist() == layer.forward(X).tolist() == [0, 2]
    assert layer(X).tolist() == [0, 1]
    assert "forward" not in vars(layer)


def test_a_forward_of_the_instance_itself_comes_back() -> None:
    layer = nn.ReLU()
    layer.forward = own = lambda input: input * 3  # type: ignore[method-assign]
    with rerouted(layer, lambda x: layer(x) + 1):
        assert layer(X).tolist() == [-2, 4]
    assert layer.forward is own


def test_so_it_does_after_errors_inside_and_outside() -> None:
    layer = nn.ReLU()

    def failing(x: Tensor) -> Tensor:
        assert "forward" not in vars(layer)
        raise ValueError(x)

    for _ in range(2):
        with pytest.raises(ValueError, match="tensor"), rerouted(layer, failing):
            with pytest.raises(ValueError, match="tensor"):
                layer(X)
            assert "forward" in vars(layer)
            layer(X)
        assert "forward" not in vars(layer)


def test_one_within_another() -> None:
    layer = nn.ReLU()
    with rerouted(layer, lambda x: layer(x) + 1):
        with rerouted(layer, lambda x: layer(x) * 10):
            assert layer(X).tolist() == [10, 20]
        assert layer(X).tolist() == [1, 2]
    assert layer(X).tolist() == [0, 1]


def test_hooks_are_called_once_by_a_call_that_leads_to_the_forward_alone() -> None:
    layer, called = nn.ReLU(), list[str]()
    layer.register_forward_hook(lambda *_: called.append("hook"))
    forward = ForwardOf(layer)
    with rerouted(layer, forward):
        layer(X)
    assert called == ["hook"]
    assert repr(forward).startswith("ReLU(")
