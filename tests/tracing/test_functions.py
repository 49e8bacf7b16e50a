"""Functions as modules: what they refer to is part of them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from autostream.tracing.functions import module_of

layer = nn.Linear(2, 2)


def uses_a_global(x: Tensor) -> Tensor:
    return layer(x)


def test_a_module_is_itself() -> None:
    assert module_of(layer) is layer


def test_modules_that_a_function_names_are_its_submodules() -> None:
    inner = nn.Linear(2, 3)
    assert dict(module_of(lambda x: inner(layer(x))).named_children()) == {"inner": inner, "layer": layer}
    assert dict(module_of(uses_a_global).named_children()) == {"layer": layer}


def test_a_method_has_the_module_that_it_is_of() -> None:
    assert dict(module_of(layer.forward).named_children())["self"] is layer


def test_it_computes_what_the_function_does_and_is_called_like_it() -> None:
    module = module_of(uses_a_global)
    x = torch.ones(1, 2)
    assert torch.equal(module(x), layer(x))
    assert module._get_name() == "uses_a_global"


def test_of_other_callables_nothing_is_known() -> None:
    assert not list(module_of(functools.partial(uses_a_global)).children())


def test_its_mode_is_that_of_its_submodules() -> None:
    inner = nn.Dropout()
    module = module_of(lambda x: inner(x))
    assert module.training
    inner.eval()
    assert not module.training
