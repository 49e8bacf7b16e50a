"""Losses as graphs: what they take, what they stand for, and what they return."""

from __future__ import annotations

from collections.abc import Callable
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


def test_what_it_takes_is_a_part_of_the_batch_or_held() -> None:
    found = captured(lambda model, batch: mse(model, batch["x"], batch["y"][0]), ({"x": BATCH[0], "y": [BATCH[1]]},))
    assert sorted(at for at in found.takes if at is not None) == [0, 1]
    assert [tuple(own.shape) for own in found.held] == [(2, 3), (2,)]


def test_held_tensors_are_found_again() -> None:
    found = captured(mse)
    before = found.held
    found.let_go()
    assert all(mine is its for mine, its in zip(found.held_now(BATCH), before, strict=True))


def test_it_stands_for_batches_of_as_many_rows_in_each_part() -> None:
    found = captured(mse, (torch.ones(8, 3), torch.ones(8, 2)), 2)
    assert found.stands_for((torch.zeros(8, 3), torch.zeros(8, 2)))
    assert not found.stands_for(BATCH)
    assert found.failed(BATCH)


def with_outputs(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    outputs = model(x)
    return F.mse_loss(outputs, y), {"outputs": outputs, "rows": len(x)}


def test_what_is_returned_is_put_together_of_outputs() -> None:
    loss, rest = captured(with_outputs).result(OUTPUTS, BATCH)
    assert loss is OUTPUTS[0]
    assert rest["outputs"] is OUTPUTS[1]
    assert rest["rows"] == 4


def test_numbers_of_outputs_are_computed_anew() -> None:
    found = captured(lambda model, x, y: (loss := mse(model, x, y), loss.item()))
    number = torch.tensor(0.25, dtype=torch.float64)
    assert found.result([OUTPUTS[0], number], BATCH)[1] == 0.25


def test_what_is_no_output_is_detached() -> None:
    loss = Loss(lambda model, x, y: (mse(model, x, y), model.weight), nn.Linear(3, 2))
    _, weight = CapturedLoss(loss, BATCH, 1).result(OUTPUTS[:1], BATCH)
    assert not weight.requires_grad
    assert weight.data_ptr() == loss.model.weight.data_ptr()


def test_what_it_writes_is_written_with_each_result_and_not_before() -> None:
    told: list[int] = []

    def telling(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        told.append(1)
        return mse(model, x, y)

    found = captured(telling)
    assert told == []
    assert found.result(OUTPUTS[:1], BATCH) is not None
    assert told == [1]


@pytest.mark.parametrize(
    ("loss", "parts", "error", "message"),
    [
        (with_outputs, 2, TargetError, "return the loss alone"),
        (mse, 3, TargetError, "no 3 equal parts"),
        (lambda model, x, y: mse(model, x, y) if x.sum() > 0 else y.sum(), 1, TraceError, "branching"),
    ],
)
def test_what_cannot_be_captured_says_why(
    loss: Callable[..., Any], parts: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        captured(loss, parts=parts)


def test_modules_are_found_wherever_a_loss_refers_to_them() -> None:
    first, second, third = nn.Linear(1, 1), nn.ReLU(), nn.Tanh()

    class Holder:
        def __init__(self) -> None:
            self.models = {"third": [third]}

        def __call__(self, model: nn.Module, x: Tensor, *, own: nn.Module = second) -> Tensor:
            return first(own(model(x)))  # type: ignore[no-any-return]

    assert {id(module) for module in modules_in(Holder())} >= {id(own) for own in (first, second, third)}
    assert modules_in(mse) == []
