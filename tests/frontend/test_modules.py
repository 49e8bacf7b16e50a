"""Functions as modules: what they refer to is part of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autostream.errors import TargetError
from autostream.frontend.modules import check_loss, loss_of, module_of, parameters_of

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


def test_of_what_python_cannot_look_into_nothing_is_known() -> None:
    assert not list(module_of(max).children())


def test_modules_that_other_callables_are_given_are_its_submodules() -> None:
    """One level deep: what a function that it calls refers to is that function's business."""

    class Called:
        def __init__(self) -> None:
            self.inner = layer

        def __call__(self, x: Tensor) -> Tensor:
            return self.inner(x)

    inner = nn.Linear(2, 2)
    assert dict(module_of(functools.partial(uses_a_global)).named_children()) == {"layer": layer}
    assert dict(module_of(functools.partial(torch.add, other=inner)).named_children()) == {"other": inner}
    assert dict(module_of(lambda x, by=inner: by(x)).named_children()) == {"by": inner}
    assert dict(module_of(Called()).named_children()) == {"inner": layer}
    assert not list(module_of(lambda x: uses_a_global(x)).children())


def test_a_variable_that_is_not_there_yet_is_passed_over() -> None:
    def function(x: Tensor) -> Tensor:
        return later(x)

    module = module_of(function)
    later = nn.ReLU()
    assert not list(module.children())
    assert module(torch.ones(1)).item() == 1


def test_its_mode_is_that_of_its_submodules() -> None:
    inner = nn.Dropout()
    module = module_of(lambda x: inner(x))
    assert module.training
    inner.eval()
    assert not module.training


def test_what_it_takes_is_what_the_function_takes() -> None:
    assert list(parameters_of(module_of(uses_a_global))) == ["x"]
    assert list(parameters_of(nn.Bilinear(1, 1, 1))) == ["input1", "input2"]
    assert list(parameters_of(module_of(max))) == [], "Python cannot tell"


# Losses

X, Y = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0]])


class Weighted(nn.MSELoss):
    """A loss that is derived from one of PyTorch's."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return 2 * super().forward(input, target)


class Own(nn.Module):
    """A loss of somebody's."""

    def forward(self, model: nn.Module, x: Tensor, y: Tensor | None = None) -> Tensor:
        return model(x).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (nn.MSELoss(), 6.5),
        (F.mse_loss, 6.5),
        (functools.partial(F.mse_loss, reduction="sum"), 13.0),
        (Weighted(), 13.0),
        (Own(), 3.0),
        (lambda model, x, y: model(x).sum() + y.sum(), 11.0),
    ],
)
def test_losses_of_pytorch_take_outputs_and_others_the_model(loss: Any, expected: float) -> None:
    module = loss_of(loss)
    check_loss(module, 2)
    assert module(nn.Identity(), X, Y).item() == expected


def test_the_inputs_are_all_of_a_batch_but_the_last() -> None:
    assert loss_of(nn.L1Loss())(nn.Bilinear(2, 2, 1, bias=False).requires_grad_(False), X, X, Y[:, :1]).dim() == 0
    with pytest.raises(TargetError, match="MSELoss compares outputs with a target: call the step with"):
        loss_of(nn.MSELoss())(nn.Identity(), X)


def test_a_loss_that_takes_no_model_is_told_from_one_that_does() -> None:
    for loss in (lambda output, target: output, nn.Identity()):
        with pytest.raises(TargetError, match=r"is called with the model and a batch of 2, and takes \("):
            check_loss(module_of(loss), 2)
    check_loss(module_of(dict.get), 2)
    check_loss(module_of(lambda *args: args), 5)
