"""A row times a matrix becomes a sum; every other product stays what it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
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
def test_a_linear_layer_of_one_row_holds_no_product_and_is_as_exact(dtype: torch.dtype, bias: bool) -> None:
    layer, row = nn.Linear(64, 48, bias=bias).to(dtype), torch.randn(1, 64, dtype=dtype)
    with torch.no_grad():
        assert products(layer, row) == []
        traced = make_fx(layer, decomposition_table=matvec_decompositions({}))(row)
        result, eager, exact = traced(row), layer(row), nn.Linear.double(layer)(row.double())
    assert result.dtype is dtype
    assert error(result, exact) <= 1.5 * error(eager, exact) + 4 * torch.finfo(dtype).eps


@given(rows=st.integers(0, 3), inner=st.integers(0, 9), columns=st.integers(0, 9), transposed=st.booleans())
def test_products_of_any_shape_are_right(rows: int, inner: int, columns: int, transposed: bool) -> None:
    left = torch.randn(rows, inner)
    right = torch.randn(columns, inner).t() if transposed else torch.randn(inner, columns)
    bias = torch.randn(columns)
    function = make_fx(lambda a, b, c: (a @ b, torch.addmm(c, a, b)), decomposition_table=matvec_decompositions({}))
    product, sum_ = function(left, right, bias)(left, right, bias)
    torch.testing.assert_close(product, left @ right)
    torch.testing.assert_close(sum_, torch.addmm(bias, left, right))


def test_several_rows_stay_a_product() -> None:
    assert products(torch.mm, torch.ones(2, 4), torch.ones(4, 3)) == [aten.mm.default]
    assert products(torch.addmm, torch.ones(3), torch.ones(2, 4), torch.ones(4, 3)) == [aten.addmm.default]


def test_a_large_matrix_stays_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products(torch.mm, torch.ones(1, 4), torch.ones(4, 3)) == []
    monkeypatch.setattr(matvec, "LARGEST", 11)
    assert products(torch.mm, torch.ones(1, 4), torch.ones(4, 3)) == [aten.mm.default]


def test_whole_numbers_stay_a_product() -> None:
    row, matrix = torch.ones(1, 4, dtype=torch.int64), torch.ones(4, 3, dtype=torch.int64)
    assert products(torch.mm, row, matrix) == [aten.mm.default]


def test_a_scaled_sum_stays_a_product() -> None:
    """``beta=0`` ignores what is in the bias, even NaN, which a multiplication would not."""
    bias, row, matrix = torch.full((3,), torch.nan), torch.ones(1, 4), torch.ones(4, 3)

    def scaled(bias: Tensor, row: Tensor, matrix: Tensor) -> Tensor:
        return torch.addmm(bias, row, matrix, beta=0)

    assert products(scaled, bias, row, matrix) == [aten.addmm.default]


def test_the_tables_own_way_is_taken_for_other_products() -> None:
    table = matvec_decompositions(
        {aten.mm.default: lambda a, b: "mm", aten.addmm.default: lambda c, a, b, beta, alpha: "addmm"}
    )
    assert table[aten.mm.default](torch.ones(2, 2), torch.ones(2, 2)) == "mm"
    assert table[aten.addmm.default](torch.ones(2), torch.ones(2, 2), torch.ones(2, 2)) == "addmm"
