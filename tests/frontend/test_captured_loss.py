"""Captured losses: their inputs, when they may be reused, and what they return."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autostream.errors import TargetError, TraceError
from autostream.frontend.captured_loss import CapturedLoss
from autostream.frontend.losses import Loss, modules_in

BATCH = (torch.ones(4, 3), torch.zeros(4, 2))
OUTPUTS = [torch.tensor(0.5), torch.ones(4, 2)]


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def captured(loss: Callable[..., Any], batch: Any = BATCH, parts: int = 1) -> CapturedLoss:
    return CapturedLoss(Loss(loss, nn.Linear(3, 2)), batch, parts)


def test_inputs_are_tensors_of_the_batch_or_held() -> None:
    loss = captured(lambda model, batch: mse(model, batch["x"], batch["y"][0]), ({"x": BATCH[0], "y": [BATCH[1]]},))
    assert sorted(at for at in loss.takes if at is not None) == [0, 1]
    assert [tuple(tensor.shape) for tensor in loss.held] == [(2, 3), (2,)]
    loss = captured(mse)
    held = loss.held
    loss.let_go()
    assert all(mine is its for mine, its in zip(loss.held_now(BATCH), held, strict=True))


def test_it_may_be_reused_for_batches_with_as_many_rows_in_each_part() -> None:
    loss = captured(mse, (torch.ones(8, 3), torch.ones(8, 2)), 2)
    assert loss.stands_for((torch.zeros(8, 3), torch.zeros(8, 2)))
    assert not loss.stands_for(BATCH)
    assert loss.failed(BATCH)


def with_outputs(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    outputs = model(x)
    return F.mse_loss(outputs, y), {"outputs": outputs, "rows": len(x)}


def test_results_are_rebuilt_from_outputs() -> None:
    """Numbers of outputs are computed anew, and other tensors are detached."""
    loss, rest = captured(with_outputs).result(OUTPUTS, BATCH)
    assert (loss is OUTPUTS[0], rest["outputs"] is OUTPUTS[1], rest["rows"]) == (True, True, 4)
    with_number = captured(lambda model, x, y: (loss := mse(model, x, y), loss.item()))
    assert with_number.result([OUTPUTS[0], torch.tensor(0.25, dtype=torch.float64)], BATCH)[1] == 0.25
    with_weight = Loss(lambda model, x, y: (mse(model, x, y), model.weight), nn.Linear(3, 2))
    _, weight = CapturedLoss(with_weight, BATCH, 1).result(OUTPUTS[:1], BATCH)
    assert not weight.requires_grad
    assert weight.data_ptr() == with_weight.model.weight.data_ptr()


def test_side_effects_come_with_each_result_and_not_before() -> None:
    seen: list[int] = []

    def appending(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(1)
        return mse(model, x, y)

    loss = captured(appending)
    assert seen == []
    assert loss.result(OUTPUTS[:1], BATCH) is not None
    assert seen == [1]


@pytest.mark.parametrize(
    ("loss", "parts", "error", "message"),
    [
        (with_outputs, 2, TargetError, "return the loss alone"),
        (mse, 3, TargetError, "no 3 equal parts"),
        (lambda model, x, y: mse(model, x, y) if x.sum() > 0 else y.sum(), 1, TraceError, "branching"),
    ],
)
def test_a_loss_that_cannot_be_captured_says_why(
    loss: Callable[..., Any], parts: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        captured(loss, parts=parts)


def test_modules_that_a_loss_refers_to_are_found() -> None:
    first, second, third = nn.Linear(1, 1), nn.ReLU(), nn.Tanh()

    class Holder:
        def __init__(self) -> None:
            self.models = {"third": [third]}

        def __call__(self, model: nn.Module, x: Tensor, *, own: nn.Module = second) -> Tensor:
            return first(own(model(x)))  # type: ignore[no-any-return]

    assert {id(module) for module in modules_in(Holder())} >= {id(own) for own in (first, second, third)}
    assert modules_in(mse) == []


# Losses of PyTorch's and of users


class Weighted(nn.MSELoss):
    """Derived from a loss of PyTorch's."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return 2 * super().forward(input, target)


class Own(nn.Module):
    """A loss that is a module of the user's."""

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
