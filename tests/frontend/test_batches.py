"""Batches in parts, and what is found in what a loss function returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from autostream.errors import TargetError
from autostream.frontend.batches import detached, loss_in, parts_of, summed


def test_parts_are_equal_and_what_has_no_rows_is_part_of_all() -> None:
    x = torch.arange(6)
    batch = ({"x": x, "weight": torch.tensor(2.0)}, "mean", (x,))
    parts = parts_of(batch, 3)
    assert [part[0]["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [part[2][0].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert {(part[0]["weight"].item(), part[1]) for part in parts} == {(2.0, "mean")}
    assert parts_of(batch, 1) == [batch]


@dataclass
class Rows:
    x: Tensor
    y: Tensor


def test_parts_of_dataclasses_are_dataclasses() -> None:
    rows = Rows(torch.arange(4), torch.arange(4) + 1)
    assert [part[0].y.tolist() for part in parts_of((rows,), 2)] == [[1, 2], [3, 4]]
    assert type(parts_of((rows,), 2)[0][0]) is Rows


def test_tensors_with_another_number_of_rows_are_part_of_all() -> None:
    class_weights = torch.ones(2)
    parts = parts_of((torch.tensor(0.5), torch.ones(4, 3), class_weights, torch.ones(4)), 2)
    assert [[len(tensor) for tensor in part[1:]] for part in parts] == [[2, 2, 2]] * 2
    assert all(part[2] is class_weights for part in parts)


def test_what_cannot_be_opened_has_noparts_of() -> None:
    with pytest.raises(TargetError, match=r"no 2 equal parts: a value of type builtins\.object is neither a tensor"):
        parts_of((torch.ones(4), object()), 2)


def test_a_batch_of_one_part_is_itself_and_need_not_be_opened() -> None:
    batch = (object(),)
    assert parts_of(batch, 1) == [batch]


def test_rows_that_are_not_divided_evenly_are_refused() -> None:
    with pytest.raises(TargetError, match=r"a batch of 5 has no 2 equal parts: .* drop_last=True"):
        parts_of((torch.ones(5),), 2)


@pytest.mark.parametrize("pack", [lambda loss: loss, lambda loss: (loss, "outputs"), lambda loss: [loss]])
def test_the_loss_is_what_was_returned_or_the_first_of_it(pack: Any) -> None:
    loss = torch.ones(1, 1)
    assert loss_in(pack(loss)) is loss


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (0.5, "loss_fn returned a float: let it return the loss"),
        ((), "loss_fn returned a tuple"),
        ({"loss": torch.ones(())}, "loss_fn returned a dict"),
        (torch.ones(2, 3), "loss_fn returned a loss of shape 2x3: let it return a scalar"),
        (torch.ones(0), "loss_fn returned a loss of shape 0"),
    ],
)
def test_what_is_no_loss_is_named(result: Any, reason: str) -> None:
    with pytest.raises(TargetError, match=reason):
        loss_in(result)


def test_losses_of_parts_are_added_and_a_single_result_is_handed_on() -> None:
    result = (torch.ones(()), {"outputs": torch.ones(2)})
    assert summed([result]) is result
    assert summed([torch.tensor(0.5), torch.tensor(1.0), torch.tensor(2.0)]).item() == 3.5


def test_what_is_returned_has_no_gradients() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss, outputs = detached((weight.sum(), {"outputs": weight * 2}))
    assert not loss.requires_grad
    assert not outputs["outputs"].requires_grad


def test_what_contains_itself_is_returned_as_it_is() -> None:
    result: list[Any] = [torch.ones(())]
    result.append(result)
    assert detached(result) is result
