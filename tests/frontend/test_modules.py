"""Functions as modules: their submodules, names and parameters."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from autostream.frontend.modules import forward_parameters, module_of, name_of

layer = nn.Linear(2, 2)


def uses_a_global(x: Tensor) -> Tensor:
    return layer(x)


class Called:
    def __init__(self) -> None:
        self.inner = layer

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_function_as_a_module_computes_the_same() -> None:
    module, x = module_of(uses_a_global), torch.ones(1, 2)
    assert module_of(layer) is layer
    assert torch.equal(module(x), layer(x))
    assert name_of(module) == "uses_a_global"
    assert list(forward_parameters(module)) == ["x"]
    assert list(forward_parameters(nn.Bilinear(1, 1, 1))) == ["input1", "input2"]
    assert list(forward_parameters(module_of(max))) == [], "Python cannot tell"


def test_modules_that_a_callable_refers_to_are_submodules() -> None:
    """Directly: not those that a function refers to that it calls."""
    inner = nn.Linear(2, 3)
    for function, submodules in [
        (lambda x: inner(layer(x)), {"inner": inner, "layer": layer}),
        (uses_a_global, {"layer": layer}),
        (functools.partial(uses_a_global), {"layer": layer}),
        (functools.partial(torch.add, other=inner), {"other": inner}),
        (lambda x, by=inner: by(x), {"by": inner}),
        (Called(), {"inner": layer}),
        (lambda x: uses_a_global(x), {}),
        (max, {}),
    ]:
        assert dict(module_of(function).named_children()) == submodules


def test_a_variable_without_a_value_is_skipped() -> None:
    def function(x: Tensor) -> Tensor:
        return later(x)

    module = module_of(function)
    later = nn.ReLU()
    assert not list(module.children())
    assert module(torch.ones(1)).item() == 1
