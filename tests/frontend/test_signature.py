"""Signatures: equal where one schedule serves both calls, different where it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autostream.frontend.signature import Signature, signature_of
from autostream.frontend.tree import flatten


def signature(*args: object, training: bytes = b"\0", gradients: bool = False) -> Signature:
    tensors, structure = flatten((args, {}))
    return signature_of(structure, tensors, training, gradients)


def test_calls_that_differ_in_values_alone_share_a_signature() -> None:
    one, other = signature(torch.ones(2, 3), 1), signature(torch.zeros(2, 3), 1)
    assert one == other
    assert hash(one) == hash(other)


X = torch.ones(4, 4)


@pytest.mark.parametrize(
    "other",
    [
        signature(X.half()),
        signature(X.t()),
        signature(X[:2]),
        signature(X, 1),
        signature(X, training=b"\1"),
        signature(X, gradients=True),
        signature([X]),
        signature(X.to("meta")),
    ],
    ids=["dtype", "strides", "shape", "argument", "training", "gradients", "structure", "device"],
)
def test_what_tracing_depends_on_makes_another_signature(other: Signature) -> None:
    assert signature(X) != other


def test_the_same_numbers_of_another_kind_make_another_signature() -> None:
    assert len({signature(X, value) for value in (1, True, 1.0, "1", 0.0, -0.0)}) == 6


def test_inputs_that_share_memory_are_told_from_those_that_do_not() -> None:
    r"""Pairs of two elements of a row of eight::

    apart    [. .]  elsewhere [. .]
    same     [. .]
             [. .]
    behind   [. .]
                 [. .]
    before       [. .]
             [. .]
    """
    row = torch.arange(8.0)
    apart = signature(row[0:2].clone(), row[0:2].clone())
    same = signature(row[0:2], row[0:2])
    behind = signature(row[0:2], row[2:4])
    before = signature(row[2:4], row[0:2])
    assert len({apart, same, behind, before}) == 4
    assert apart.aliases == ()
    assert behind.aliases == ((0, 0), (0, 8))


def test_where_both_lie_in_memory_does_not_matter() -> None:
    row = torch.arange(8.0)
    assert signature(row[0:2], row[1:3]) == signature(row[4:6], row[5:7])
    assert signature(row[0:2]) == signature(row[3:5])


def test_distances_are_in_bytes_whatever_the_dtypes() -> None:
    """Half a float is two bytes: element 2 of the floats is element 4 of the halves."""
    row = torch.arange(8.0)
    halves = row.view(torch.float16)
    assert signature(row[2:4], halves[4:8]) == signature(row[0:2], halves[0:4])
    assert signature(row[2:4], halves[4:8]) != signature(row[0:2], halves[2:6])


def test_who_shares_with_whom_matters() -> None:
    a, b = torch.ones(2), torch.ones(2)
    assert signature(a, a, b) != signature(a, b, b)
    assert signature(a, b, a).aliases == ((0, 0), (1, 0), (0, 0))


def test_what_the_choice_of_kernels_depends_on_makes_another_signature() -> None:
    before = signature(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert signature(X) != before
    assert signature(X) == before


def test_a_call_with_gradients_enabled_is_another_even_if_nothing_requires_them() -> None:
    with torch.enable_grad():
        enabled = signature(X)
    with torch.no_grad():
        assert signature(X) != enabled
    with torch.inference_mode():
        assert signature(X) != enabled


def test_a_signature_reads_well() -> None:
    image, scalar = torch.ones(1, 3, 8, 8, dtype=torch.float16), torch.tensor(1)
    assert str(signature(image, scalar)) == "1x3x8x8:float16 on cpu, scalar:int64 on cpu, eval, no gradients"
    assert str(signature(training=b"\0\1", gradients=True)) == "no tensors, train, gradients"


def test_tensors_are_not_kept_alive() -> None:
    x = torch.ones(3)
    holds = signature(x)
    assert not any(isinstance(item, Tensor) for item in (*holds.tensors[0], *holds.aliases))


def test_what_differs_is_named() -> None:
    x, same = torch.ones(2), signature(X, X)
    assert signature(X, x).unlike(signature(X, torch.ones(3))) == "shapes, strides, dtypes or devices"
    assert signature(X, X.clone()).unlike(same) == "which tensors share memory"
    assert signature(X, X, training=b"\1").unlike(same) == "training modes"
    assert signature(X, X, gradients=True).unlike(same) == "what requires gradients"
    with torch.autocast("cpu", torch.bfloat16):
        assert signature(X, X).unlike(same) == "autocast, precisions or other numerics"
    with torch.no_grad():
        assert signature(X, X).unlike(same) == "whether gradients are recorded"
    one, two = (signature_of(flatten(((number,), {}))[1], [], b"") for number in (1, 2))
    assert one.unlike(two) == "arguments"
