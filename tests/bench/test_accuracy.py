"""The distance from a reference, and how large it may be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from autostream.bench.accuracy import MOST, allowed_error, dtype_of, reference, relative_error

INF = float("inf")


# The reference


def test_the_reference_is_computed_in_float64_and_the_model_stays_as_it_is() -> None:
    model = nn.Linear(2, 2).half()
    (output,) = reference(model, [torch.ones(1, 2, dtype=torch.float16)])
    assert output.dtype is torch.float64
    torch.testing.assert_close(output, copy_in_float64(model)(torch.ones(1, 2, dtype=torch.float64)))
    assert model.weight.dtype is torch.float16


def copy_in_float64(model: nn.Linear) -> nn.Linear:
    twin = nn.Linear(model.in_features, model.out_features).double()
    twin.load_state_dict(model.state_dict())
    return twin


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


def test_where_there_is_neither_there_is_no_reference() -> None:
    with pytest.raises(NotImplementedError, match=r"no kernel for torch\.float32"):
        reference(Picky(torch.float64, torch.float32), [torch.ones(1)])


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


def test_the_distance_is_relative_and_over_all_outputs() -> None:
    """Off by 3 and by 4, of a norm of √(6² + 8²): 5 / 10."""
    expected = [torch.tensor([6.0, 0.0]), torch.tensor([8.0])]
    assert relative_error([torch.tensor([9.0, 0.0]), torch.tensor([4.0])], expected) == 0.5
    assert relative_error(expected, expected) == 0.0


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


def test_integers_that_are_the_same_have_no_distance() -> None:
    assert (
        relative_error((torch.tensor([1, 2]), torch.tensor([3.0])), [torch.tensor([1, 2]), torch.tensor([2.0])]) == 0.5
    )


# What is right


def test_a_mode_may_be_some_times_as_far_as_the_plain_model() -> None:
    assert allowed_error(1e-2, torch.float32) == 4e-2


@pytest.mark.parametrize(
    ("dtype", "roundings"), [(torch.float16, 2**-7), (torch.bfloat16, 2**-4), (torch.float32, 2**-20)]
)
def test_or_a_few_roundings_where_the_plain_model_happens_to_be_exact(dtype: torch.dtype, roundings: float) -> None:
    assert allowed_error(0.0, dtype) == roundings


@pytest.mark.parametrize("eager_error", [0.3, INF])
def test_but_zeros_are_never_right(eager_error: float) -> None:
    """Not even for a plain model that is wrong itself, as one is whose halves overflow."""
    zeros = relative_error(torch.zeros(3), [torch.ones(3)])
    assert allowed_error(eager_error, torch.float16) == MOST < zeros


def test_the_dtype_is_that_of_the_parameters_before_that_of_the_inputs() -> None:
    assert dtype_of(nn.Linear(1, 1).half(), [torch.ones(1)]) is torch.float16
    assert dtype_of(nn.ReLU(), [torch.tensor([1]), [torch.ones(1).double()]]) is torch.float64
    assert dtype_of(nn.ReLU(), [torch.tensor([1])]) is torch.float32
