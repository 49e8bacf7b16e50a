"""Microbatches: splitting batches, and joining what a loss function returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from autostream.errors import TargetError
from autostream.frontend.batches import detached, parts_of, summed


@dataclass
class Rows:
    x: Tensor
    y: Tensor


def test_tensors_with_as_many_rows_as_the_first_are_split() -> None:
    x, class_weights = torch.arange(6), torch.ones(2)
    batch = (torch.tensor(2.0), {"x": x}, "mean", (x,), class_weights, Rows(x, x + 1))
    parts = parts_of(batch, 3)
    assert [part[1]["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [part[3][0].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [part[5].y.tolist() for part in parts] == [[1, 2], [3, 4], [5, 6]]
    assert {type(part[5]) for part in parts} == {Rows}
    assert {(part[0].item(), part[2]) for part in parts} == {(2.0, "mean")}
    assert all(part[4] is class_weights for part in parts)
    assert parts_of(batch, 1) == [batch]


def test_batches_without_equal_parts_are_refused() -> None:
    with pytest.raises(TargetError, match=r"no 2 equal parts: a value of type builtins\.object is neither a tensor"):
        parts_of((torch.ones(4), object()), 2)
    with pytest.raises(TargetError, match=r"a batch of 5 has no 2 equal parts: .* drop_last=True"):
        parts_of((torch.ones(5),), 2)
    batch = (object(),)
    assert parts_of(batch, 1) == [batch]


def test_losses_of_parts_are_added_and_results_are_detached() -> None:
    weight = torch.ones(2, requires_grad=True)
    result: Any = (weight.sum(), {"outputs": weight * 2})
    assert summed([result]) is result
    assert summed([torch.tensor(0.5), torch.tensor(1.0), torch.tensor(2.0)]).item() == 3.5
    loss, outputs = detached(result)
    assert not loss.requires_grad
    assert not outputs["outputs"].requires_grad
    endless: list[Any] = [torch.ones(())]
    endless.append(endless)
    assert detached(endless) is endless
