"""A row times a matrix becomes a multiplication and a sum; other products stay products."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autostream.fusion import matvec
from autostream.fusion.matvec import matvec_decompositions

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)


def products(function, *tensors: Tensor) -> list[object]:
    """The matrix products that are left in a function's graph."""
    traced = make_fx(function, decomposition_table=matvec_decompositions({}))(*tensors)
    return [node.target for node in traced.graph.nodes if node.target in PRODUCTS]


def error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_linear_layer_of_one_row_is_decomposed_and_as_accurate(dtype: torch.dtype, bias: bool) -> None:
    layer, row = nn.Linear(64, 48, bias=bias).to(dtype), torch.randn(1, 64, dtype=dtype)
    with torch.no_grad():
        assert products(layer, row) == []
        traced = make_fx(layer, decomposition_table=matvec_decompositions({}))(row)
        result, eager, exact = traced(row), layer(row), nn.Linear.double(layer)(row.double())
    assert result.dtype is dtype
    assert error(result, exact) <= 1.5 * error(eager, exact) + 4 * torch.finfo(dtype).eps


@given(rows=st.integers(0, 2), inner=st.integers(0, 4), columns=st.integers(0, 4), transposed=st.booleans())
@settings(max_examples=30)
def test_products_of_any_shape_are_right(rows: int, inner: int, columns: int, transposed: bool) -> None:
    left = torch.randn(rows, inner)
    right = torch.randn(columns, inner).t() if transposed else torch.randn(inner, columns)
    bias = torch.randn(columns)
    function = make_fx(lambda a, b, c: (a @ b, torch.addmm(c, a, b)), decomposition_table=matvec_decompositions({}))
    product, sum_ = function(left, right, bias)(left, right, bias)
    torch.testing.assert_close(product, left @ right)
    torch.testing.assert_close(sum_, torch.addmm(bias, left, right))


def test_other_products_are_not_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    row, rows, matrix, bias = torch.ones(1, 4), torch.ones(2, 4), torch.ones(4, 3), torch.full((3,), torch.nan)
    assert products(torch.mm, rows, matrix) == [aten.mm.default]
    assert products(torch.addmm, bias, rows, matrix) == [aten.addmm.default]
    assert products(torch.mm, row.long(), matrix.long()) == [aten.mm.default]
    # beta=0 ignores NaNs of the bias, which a multiplication by 0 would not.
    assert products(lambda *args: torch.addmm(*args, beta=0), bias, row, matrix) == [aten.addmm.default]
    assert products(torch.mm, row, matrix) == []
    monkeypatch.setattr(matvec, "LARGEST", 11)
    assert products(torch.mm, row, matrix) == [aten.mm.default]
    table = matvec_decompositions(
        {aten.mm.default: lambda a, b: "mm", aten.addmm.default: lambda c, a, b, beta, alpha: "addmm"}
    )
    assert table[aten.mm.default](rows, rows.t()) == "mm"
    assert table[aten.addmm.default](bias, rows, matrix) == "addmm"
