"""Decomposes a vector-matrix product into a multiplication and a sum, for which Inductor generates one kernel.

At batch 1 a linear layer is limited by reading its matrix. Inductor calls cuBLAS for it. On an H200 cuBLAS uses
clusters of thread blocks, which start about one every 1.5 µs on however many streams, and the pointwise op behind the
product is a kernel of its own. A reduction by Inductor runs concurrently with others, and bias and activation are fused
into it: eight towers of three layers took 12 µs instead of 36 (``docs/fused-kernels.md``).

TorchInductor has this decomposition for ``mm`` only, and only together with ``coordinate_descent_tuning``, which times
every kernel in many variants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Decomposition = Callable[..., Any]

LARGEST = 4 * 2**20
"""The most elements of a matrix to decompose for. Larger ones are limited by bandwidth, where cuBLAS is faster."""

aten = torch.ops.aten


def matvec_decompositions(table: Mapping[Any, Decomposition]) -> dict[Any, Decomposition]:
    """Add decompositions of vector-matrix products to a table.

    Args:
        table: decompositions by ATen op; they apply to other products.

    Example:
        >>> table = matvec_decompositions({})
        >>> table[aten.mm.default](torch.ones(1, 3), torch.ones(3, 2))
        tensor([[3., 3.]])
        >>> table[aten.mm.default](torch.ones(2, 3), torch.ones(3, 2))
        NotImplemented
    """
    other_mm, other_addmm = table.get(aten.mm.default, _not_decomposed), table.get(aten.addmm.default, _not_decomposed)

    def mm(row: Tensor, matrix: Tensor) -> Any:
        return _product(row, matrix).to(row.dtype) if _is_row(row, matrix) else other_mm(row, matrix)

    def addmm(bias: Tensor, row: Tensor, matrix: Tensor, *, beta: complex = 1, alpha: complex = 1) -> Any:
        if beta == alpha == 1 and _is_row(row, matrix):
            return (_product(row, matrix) + bias).to(row.dtype)
        return other_addmm(bias, row, matrix, beta=beta, alpha=alpha)

    return {**table, aten.mm.default: mm, aten.addmm.default: addmm}


def _is_row(row: Tensor, matrix: Tensor) -> bool:
    """Whether this is (1, K) times (K, N) in real numbers, with a matrix that is neither empty nor too large."""
    return row.shape[0] == 1 and row.is_floating_point() and 0 < matrix.numel() <= LARGEST


def _product(row: Tensor, matrix: Tensor) -> Tensor:
    """(1, K) times (K, N), accumulated in at least float32, as in cuBLAS.

    The matrix is cast by the multiplication: freezing would fold a separate cast into a larger constant.
    """
    wide = torch.promote_types(row.dtype, torch.float32)
    return (row.to(wide).unsqueeze(2) * matrix.unsqueeze(0)).sum(1)


def _not_decomposed(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented
