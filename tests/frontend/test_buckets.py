"""Padding: which dimensions may be padded, to which sizes, and where outputs are cut back."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autostream.errors import OptionError
from autostream.frontend.buckets import (
    Bucket,
    DynamicDim,
    NotPaddable,
    Span,
    cut,
    cuts_of,
    dynamic_dims_of,
    padded,
    spans_of,
)

LENGTH = Bucket("length", 8)


def forward(tokens: Tensor, mask: Tensor | None = None, *rest: Tensor, scale: float = 1.0) -> None:
    """Arguments of all kinds."""


def dims(dynamic: Any, function: Any = forward) -> tuple[DynamicDim, ...]:
    return dynamic_dims_of(dynamic, inspect.signature(function).parameters)


@settings(max_examples=30)
@given(st.integers(1, 5000))
def test_a_largest_size_stands_for_powers_of_two(largest: int) -> None:
    """No size is more than twice a length that it is for, and the largest is the last."""
    sizes = Bucket("n", largest).sizes
    assert sizes[-1] == largest
    assert sizes[0] == 1
    assert all(small < large <= 2 * small for small, large in pairwise(sizes))
    assert Bucket("n", [64, 8, 64]) == Bucket("n", (8, 64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", 8), "name='' is not allowed: use what the dimension is called"),
        (("n", 0), "sizes=0 is not allowed: use the largest size, such as 512, or all of them"),
        (("n", True), "sizes=True is not allowed"),
        (("n", 8, "zero"), "value='zero' is not allowed: use a number, True or False"),
    ],
)
def test_invalid_buckets_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(OptionError, match=f"^{message}"):
        Bucket(*arguments)


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ("bucket", "dynamic='bucket' is not allowed: use None or what may be padded, such as {\"tokens\": {1: "),
        ({"tokens": {"1": LENGTH}}, "dynamic={'tokens': {'1': "),
        ({"token": {1: LENGTH}}, "dynamic: there is no argument 'token' (did you mean 'tokens'?): use tokens, mask, "),
        ({"tokens": {1: LENGTH}, "mask": {1: Bucket("length", 9)}}, "dynamic: 'length' has two lists of sizes: "),
    ],
)
def test_invalid_declarations_are_refused(dynamic: Any, message: str) -> None:
    with pytest.raises(OptionError) as raised:
        dims(dynamic)
    assert str(raised.value).startswith(message)


def test_dimensions_that_do_not_fill_a_bucket_are_padded() -> None:
    """An argument that is left out, or is ``None``, has no dimensions."""
    both = dims({"tokens": {0: Bucket("batch", 4), -1: LENGTH}})
    assert spans_of(both, [torch.ones(3, 5)], {}) == {"batch": Span(3, 4), "length": Span(5, 8)}
    assert spans_of(both, [], {"tokens": torch.ones(4, 5)}) == {"length": Span(5, 8)}
    assert spans_of(both, [torch.ones(4, 8)], {}) == {}
    assert spans_of(both, [torch.ones(0, 8)], {}) == {"batch": Span(0, 1)}
    masked, x = dims({"tokens": {1: LENGTH}, "mask": {1: LENGTH}}), torch.ones(2, 3)
    for args, kwargs in (([x], {}), ([x, None], {}), ([x], {"mask": None})):
        assert spans_of(masked, args, kwargs) == {"length": Span(3, 4)}
    assert spans_of(masked, [], {}) == {}
    for value, dtype in ((float("-inf"), torch.float16), (-1, torch.int64), (0.5, torch.complex64), (1, torch.bool)):
        assert spans_of(dims({"tokens": {0: Bucket("n", 8, value)}}), [torch.ones(3, dtype=dtype)], {})


@pytest.mark.parametrize(
    ("dynamic", "args", "message"),
    [
        ({"tokens": {1: LENGTH}}, [torch.ones(3)], "tokens has no dimension 1"),
        ({"tokens": {1: LENGTH, -1: LENGTH}}, [torch.ones(2, 3)], "dimensions 1 and -1 of tokens are one"),
        ({"tokens": {0: LENGTH}}, [[torch.ones(3)]], "tokens has no dimension 0"),
        ({"tokens": {0: LENGTH}}, [torch.ones(9)], "length is longer than its largest bucket, 8"),
        ({"tokens": {0: LENGTH}, "mask": {0: LENGTH}}, [torch.ones(3), torch.ones(2)], "length has two lengths, one "),
        ({"tokens": {0: Bucket("n", 8, 0.5)}}, [torch.arange(3)], "0.5 is no value of tokens, which is torch.int64"),
        ({"tokens": {0: Bucket("n", 8, float("-inf"))}}, [torch.arange(3)], "-inf is no value of tokens"),
        ({"tokens": {0: Bucket("n", 8, 300)}}, [torch.ones(3).byte()], "300 is no value of tokens"),
    ],
)
def test_calls_that_cannot_be_padded_say_why(dynamic: Any, args: Any, message: str) -> None:
    with pytest.raises(NotPaddable) as raised:
        spans_of(dims(dynamic), args, {})
    assert str(raised.value).startswith(message)


@settings(max_examples=30)
@given(st.permutations([2, 3, 5]), st.integers(0, 2), st.sampled_from([-1.0, 0.0, 7.0]))
def test_cutting_undoes_padding(shape: list[int], dim: int, value: float) -> None:
    x, span = torch.randn(shape), {"n": Span(shape[dim], shape[dim] + 4)}
    (long,), _ = padded([DynamicDim("x", 0, dim - 3, Bucket("n", 9, value))], span, [x], {})
    assert long.sum().item() == pytest.approx(x.sum().item() + value * 4 * x.numel() / shape[dim], abs=1e-3)
    cuts = cuts_of([x], [long], span)
    assert cuts == ((long.shape, ((dim, "n"),)),)
    (back,) = cut([long], cuts, span)
    assert back.equal(x)
    assert back.stride() == x.stride()
