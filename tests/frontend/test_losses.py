"""Loss functions: PyTorch's and users', and the modules that they refer to."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autostream
from autostream.errors import TargetError
from autostream.frontend.losses import Loss, modules_in


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def test_modules_that_a_loss_refers_to_are_found() -> None:
    first, second, third = nn.Linear(1, 1), nn.ReLU(), nn.Tanh()

    class Holder:
        def __init__(self) -> None:
            self.models = {"third": [third]}

        def __call__(self, model: nn.Module, x: Tensor, *, own: nn.Module = second) -> Tensor:
            return first(own(model(x)))  # type: ignore[no-any-return]

    assert {id(module) for module in modules_in(Holder())} >= {id(own) for own in (first, second, third)}
    assert modules_in(mse) == []


class Weighted(nn.MSELoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return 2 * super().forward(input, target)


class Own(nn.Module):
    def forward(self, model: nn.Module, x: Tensor, y: Tensor | None = None) -> Tensor:
        return model(x).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("loss_fn", "expected"),
    [
        (nn.MSELoss(), 6.5),
        (F.mse_loss, 6.5),
        (partial(F.mse_loss, reduction="sum"), 13.0),
        (Weighted(), 13.0),
        (Own(), 3.0),
        (lambda model, x, y: model(x).sum() + y.sum(), 11.0),
    ],
)
def test_losses_of_pytorch_take_outputs_and_others_the_model(loss_fn: Any, expected: float) -> None:
    loss = Loss(loss_fn, nn.Identity())
    loss.check(2)
    assert loss(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0]]))[0].item() == expected


def test_losses_that_do_not_take_the_batch_are_refused() -> None:
    for loss_fn in (lambda output, target: output, nn.Identity()):
        with pytest.raises(TargetError, match=r"is called with the model and a batch of 2, and takes \("):
            Loss(loss_fn, nn.Identity()).check(2)
    with pytest.raises(TargetError, match="MSELoss compares outputs with a target: call the step with"):
        Loss(nn.MSELoss(), nn.Identity()).check(1)
    Loss(dict.get, nn.Identity()).check(2)
    Loss(lambda *args: args, nn.Identity()).check(5)


def test_what_a_step_has_captured_is_no_module_of_its_function() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = nn.Linear(3, 1)
            self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.step: Any = autostream.step(optimizers=[self.sgd], strict=True, kernels="eager")(self.update)

        def update(self, x: Tensor) -> None:
            self.model(x).sum().backward()
            self.sgd.step()
            self.sgd.zero_grad()

    trainer = Trainer()
    for _ in range(3):
        trainer.step(torch.ones(2, 3))
    assert modules_in(trainer.update) == modules_in(trainer.step) == [trainer.model]
