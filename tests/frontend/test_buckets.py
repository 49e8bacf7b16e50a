"""Which dimensions may be padded, what a call's are padded to, and where outputs are cut back."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autostream.errors import OptionError
from autostream.frontend.buckets import (
    Bucket,
    Place,
    Span,
    Unfit,
    cut,
    cuts_of,
    narrowed,
    padded,
    places_of,
    shorter,
    spans_of,
)

LENGTH = Bucket("length", 8)


def forward(tokens: Tensor, mask: Tensor | None = None, *rest: Tensor, scale: float = 1.0) -> None:
    """What arguments are called."""


def anything(x: Tensor, **named: Tensor) -> None:
    """One argument, and others that are named when it is called."""


def places(dynamic: Any, function: Any = forward) -> tuple[Place, ...]:
    return places_of(dynamic, inspect.signature(function).parameters)


# The sizes


@given(st.integers(1, 5000))
def test_powers_of_two_up_to_the_largest(largest: int) -> None:
    """No size is more than twice a length that it is for, and the largest is the last."""
    sizes = Bucket("n", largest).sizes
    assert sizes[-1] == largest
    assert sizes[0] == 1
    assert all(small < large <= 2 * small for small, large in pairwise(sizes))


def test_sizes_are_kept_in_order() -> None:
    assert Bucket("n", [64, 8, 64]) == Bucket("n", (8, 64))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("", 8), "name='' is not allowed: use what the dimension is called"),
        ((1, 8), "name=1 is not allowed"),
        (("n", 0), "sizes=0 is not allowed: use the largest size, such as 512, or all of them"),
        (("n", ()), r"sizes=\(\) is not allowed"),
        (("n", (8, 1.5)), r"sizes=\(8, 1.5\) is not allowed"),
        (("n", True), "sizes=True is not allowed"),
        (("n", None), "sizes=None is not allowed"),
        (("n", 8, "zero"), "value='zero' is not allowed: use a number, True or False"),
    ],
)
def test_what_is_no_bucket(arguments: Any, said: str) -> None:
    with pytest.raises(OptionError, match=f"^{said}"):
        Bucket(*arguments)


# The places


def test_places_know_where_arguments_stand() -> None:
    dynamic = {"mask": {1: LENGTH, 0: Bucket("batch", 4)}, "scale": {0: LENGTH}}
    assert [(place.argument, place.position, place.dim) for place in places(dynamic)] == [
        ("mask", 1, 1), ("mask", 1, 0), ("scale", None, 0),
    ]  # fmt: skip
    assert [place.position for place in places({"x": {0: LENGTH}, "other": {0: LENGTH}}, anything)] == [0, None]


@pytest.mark.parametrize(
    ("dynamic", "said"),
    [
        ("bucket", "dynamic='bucket' is not allowed: use None or what may be padded, such as {\"tokens\": {1: "),
        ({"tokens": LENGTH}, "dynamic={'tokens': Bucket"),
        ({"tokens": {"1": LENGTH}}, "dynamic={'tokens': {'1': "),
        ({"tokens": {1: 512}}, "dynamic={'tokens': {1: 512}} is not allowed"),
        ({0: {1: LENGTH}}, "dynamic={0: "),
        ({"token": {1: LENGTH}}, "dynamic: there is no argument 'token' (did you mean 'tokens'?): use tokens, mask, "),
        ({"rest": {1: LENGTH}}, "dynamic: there is no argument 'rest': use tokens, mask, scale"),
        ({"tokens": {1: LENGTH}, "mask": {1: Bucket("length", 9)}}, "dynamic: 'length' has two lists of sizes: "),
    ],
)
def test_what_is_not_declared_right_is_told(dynamic: Any, said: str) -> None:
    with pytest.raises(OptionError) as raised:
        places(dynamic)
    assert str(raised.value).startswith(said)


# The spans


def test_only_what_fills_no_bucket_is_padded() -> None:
    both = places({"tokens": {0: Bucket("batch", 4), -1: LENGTH}})
    assert spans_of(both, [torch.ones(3, 5)], {}) == {"batch": Span(3, 4), "length": Span(5, 8)}
    assert spans_of(both, [], {"tokens": torch.ones(4, 5)}) == {"length": Span(5, 8)}
    assert spans_of(both, [torch.ones(4, 8)], {}) == {}
    assert spans_of(both, [torch.ones(0, 8)], {}) == {"batch": Span(0, 1)}


def test_arguments_that_are_left_out_have_no_length() -> None:
    masked = places({"tokens": {1: LENGTH}, "mask": {1: LENGTH}})
    for args, kwargs in (
        ([torch.ones(2, 3)], {}),
        ([torch.ones(2, 3), None], {}),
        ([torch.ones(2, 3)], {"mask": None}),
    ):
        assert spans_of(masked, args, kwargs) == {"length": Span(3, 4)}
    assert spans_of(masked, [], {}) == {}


@pytest.mark.parametrize(
    ("dynamic", "args", "said"),
    [
        ({"tokens": {1: LENGTH}}, [torch.ones(3)], "tokens has no dimension 1"),
        ({"tokens": {-2: LENGTH}}, [torch.ones(3)], "tokens has no dimension -2"),
        ({"tokens": {1: LENGTH, -1: LENGTH}}, [torch.ones(2, 3)], "dimensions 1 and -1 of tokens are one"),
        ({"tokens": {0: LENGTH}}, [[torch.ones(3)]], "tokens has no dimension 0"),
        ({"tokens": {0: LENGTH}}, [torch.ones(9)], "length is longer than its largest bucket, 8"),
        (
            {"tokens": {0: LENGTH}, "mask": {0: LENGTH}},
            [torch.ones(3), torch.ones(2)],
            "length has two lengths, one of ",
        ),
        ({"tokens": {0: Bucket("n", 8, 0.5)}}, [torch.arange(3)], "0.5 is no value of tokens, which is torch.int64"),
        ({"tokens": {0: Bucket("n", 8, float("-inf"))}}, [torch.arange(3)], "-inf is no value of tokens"),
        ({"tokens": {0: Bucket("n", 8, -1e9)}}, [torch.ones(3).half()], "-1000000000.0 is no value of tokens"),
        ({"tokens": {0: Bucket("n", 8, 300)}}, [torch.ones(3).byte()], "300 is no value of tokens"),
    ],
)
def test_what_cannot_be_padded_is_told(dynamic: Any, args: Any, said: str) -> None:
    with pytest.raises(Unfit) as raised:
        spans_of(places(dynamic), args, {})
    assert str(raised.value).startswith(said)


def test_numbers_that_a_dtype_has_are_values() -> None:
    for value, dtype in ((float("-inf"), torch.float16), (-1, torch.int64), (0.5, torch.complex64), (1, torch.bool)):
        assert spans_of(places({"tokens": {0: Bucket("n", 8, value)}}), [torch.ones(3, dtype=dtype)], {})


def test_each_dimension_in_turn_is_as_short_as_its_bucket_gets() -> None:
    declared = places({"tokens": {0: Bucket("rows", (4, 8)), 1: Bucket("length", (2, 4))}})
    assert list(shorter(declared, {"rows": Span(7, 8), "length": Span(4, 4)})) == [
        {"rows": Span(5, 8), "length": Span(4, 4)},
        {"rows": Span(7, 8), "length": Span(3, 4)},
    ]
    assert list(shorter(declared, {"rows": Span(5, 8)})) == []
    both = places({"tokens": {0: Bucket("rows", 8), 1: Bucket("length", 8)}})
    assert list(shorter(both, {"rows": Span(5, 8), "length": Span(7, 8)})) == [], "nobody could tell which is which"
    assert list(shorter(places({"tokens": {0: Bucket("rows", (8,))}}), {"rows": Span(3, 8)})) == [{"rows": Span(1, 8)}]


def test_arguments_are_narrowed_wherever_a_dimension_is() -> None:
    declared = places({"tokens": {1: LENGTH}, "mask": {-1: LENGTH}})
    args, kwargs = narrowed(declared, {"length": Span(3, 4)}, [torch.ones(2, 4)], {"mask": torch.ones(4)})
    assert ([x.shape for x in args], {name: x.shape for name, x in kwargs.items()}) == ([(2, 3)], {"mask": (3,)})


# There and back


def test_each_argument_is_filled_with_its_value() -> None:
    x, mask = torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool)
    dynamic = {"tokens": {1: Bucket("length", 8, -1)}, "mask": {-1: Bucket("length", 8, True)}, "scale": {0: LENGTH}}
    (filled,), named = padded(places(dynamic), {"length": Span(2, 3)}, [x], {"mask": mask, "scale": None})
    assert filled.tolist() == [[1, 1, -1]]
    assert named["mask"].tolist() == [[False, False, True]]
    assert named["scale"] is None
    assert (x.shape, mask.shape) == ((1, 2), (1, 2))


@given(st.permutations([2, 3, 5]), st.integers(0, 2), st.sampled_from([-1.0, 0.0, 7.0]))
def test_what_is_padded_and_cut_is_what_it_was(shape: list[int], dim: int, value: float) -> None:
    x, span = torch.randn(shape), {"n": Span(shape[dim], shape[dim] + 4)}
    place = Place("x", 0, dim - 3, Bucket("n", 9, value))
    (filled,), _ = padded([place], span, [x], {})
    assert filled.sum().item() == pytest.approx(x.sum().item() + value * 4 * x.numel() / shape[dim], abs=1e-3)
    cuts = cuts_of([x], [filled], span)
    assert cuts == ((filled.shape, ((dim, "n"),)),)
    (back,) = cut([filled], cuts, span)
    assert back.equal(x)
    assert back.stride() == x.stride()


def test_outputs_are_cut_where_they_are_as_long() -> None:
    """A size that happens to be a bucket's is none of ours."""
    spans = {"batch": Span(3, 4), "length": Span(5, 8)}
    plain, filled = (
        [torch.ones(5, 3, 8), torch.ones(()), torch.ones(5)],
        [torch.ones(8, 4, 8), torch.ones(()), torch.ones(5)],
    )
    assert [own.dims for own in cuts_of(plain, filled, spans)] == [((0, "length"), (1, "batch")), (), ()]


@pytest.mark.parametrize(
    ("plain", "filled", "spans", "said"),
    [
        ((6,), (8,), {"n": Span(3, 4)}, "dimension 0 of output 0 depends on n, and is not as long"),
        ((2, 2), (2, 3), {"n": Span(3, 4)}, "dimension 1 of output 0 depends on n"),
        ((3,), (4, 1), {"n": Span(3, 4)}, "output 0 has another number of dimensions"),
    ],
)
def test_ambiguous_sizes_are_refused(plain: Any, filled: Any, spans: Any, said: str) -> None:
    with pytest.raises(Unfit, match=said):
        cuts_of([torch.ones(plain)], [torch.ones(filled)], spans)
