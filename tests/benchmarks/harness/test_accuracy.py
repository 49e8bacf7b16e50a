"""The distance from a reference, and how large it may be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from autostream.cli.modes import relative_error
from benchmarks.harness.accuracy import MOST, allowed_error, dtype_of, reference

INF = float("inf")


# The reference


class Picky(nn.Module):
    """Has no kernel for some dtypes."""

    def __init__(self, *missing: torch.dtype) -> None:
        super().__init__()
        self.missing = missing

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype in self.missing:
            raise NotImplementedError(f"no kernel for {x.dtype}")
        return x + 1


def test_where_there_is_no_float64_the_reference_is_in_float32() -> None:
    (output,) = reference(Picky(torch.float64), [torch.ones(1, dtype=torch.float16)])
    assert output.dtype is torch.float32


def test_arguments_may_be_nested_and_integers_stay_integers() -> None:
    seen = []

    class Lookup(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor], scale: float) -> dict[str, Tensor]:
            seen.extend(tensor.dtype for tensor in pair)
            return {"row": pair[0][pair[1]] * scale}

    (output,) = reference(Lookup(), [(torch.tensor([1.0, 2.0]), torch.tensor([1])), 3.0])
    assert output.tolist() == [6.0]
    assert seen == [torch.float64, torch.int64]


# The distance


def test_what_is_expected_to_be_zero_has_an_absolute_distance() -> None:
    assert relative_error(torch.tensor([3.0, 4.0]), [torch.zeros(2)]) == 5.0


def test_small_differences_are_seen_in_half_precision() -> None:
    """Squares of these are not: they are below the smallest half."""
    ours, theirs = torch.tensor([3e-4], dtype=torch.float16), torch.tensor([1e-4], dtype=torch.float16)
    assert relative_error(ours, [theirs]) == pytest.approx(2.0, rel=1e-2)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 1.0]), id="a NaN"),
        pytest.param(torch.tensor([1.0, INF]), torch.tensor([1.0, 1.0]), id="an infinity"),
        pytest.param(torch.ones(1, 2), torch.ones(2), id="a shape that would broadcast"),
        pytest.param(torch.tensor([1, 2]), torch.tensor([1, 3]), id="an integer"),
        pytest.param(torch.tensor([True]), torch.tensor([False]), id="a truth value"),
        pytest.param((torch.ones(1), torch.ones(1)), torch.ones(1), id="a tensor too many"),
        pytest.param((), torch.ones(1), id="a tensor too few"),
    ],
)
def test_another_result_altogether_is_infinitely_far(found: object, expected: Tensor) -> None:
    assert relative_error(found, [expected]) == INF


# What is right


@pytest.mark.parametrize("eager_error", [0.3, INF])
def test_but_zeros_are_never_right(eager_error: float) -> None:
    """Not even for a plain model that is wrong itself, as one is whose halves overflow."""
    zeros = relative_error(torch.zeros(3), [torch.ones(3)])
    assert allowed_error(eager_error, torch.float16) == MOST < zeros


def test_the_dtype_is_that_of_the_parameters_before_that_of_the_inputs() -> None:
    assert dtype_of(nn.Linear(1, 1).half(), [torch.ones(1)]) is torch.float16
    assert dtype_of(nn.ReLU(), [torch.tensor([1]), [torch.ones(1).double()]]) is torch.float64
    assert dtype_of(nn.ReLU(), [torch.tensor([1])]) is torch.float32
