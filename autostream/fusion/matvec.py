"""A row times a matrix, as multiplications and a sum, of which Inductor makes one kernel.

At batch 1 a linear layer reads a matrix and computes next to nothing. Inductor leaves it to cuBLAS. On an H200 cuBLAS
takes clusters of thread blocks for it: they start about one every 1.5 µs, however many streams there are, and what
follows the product is a kernel of its own. A sum is a reduction like any other, runs beside others, and takes bias and
activation in: eight towers of three layers took 12 µs rather than 36 (``docs/fused-kernels.md``).

TorchInductor has this decomposition too, for ``mm`` alone and only together with ``coordinate_descent_tuning``, which
times every kernel in many variants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Decomposition = Callable[..., Any]

LARGEST = 4 * 2**20
"""Elements of a matrix. Beyond, reading it takes longest, and side by side cuBLAS's kernels read faster."""

aten = torch.ops.aten


def with_rows(table: Mapping[Any, Decomposition]) -> dict[Any, Decomposition]:
    """A table of decompositions that takes apart a row times a matrix as well.

    Args:
        table: decompositions by ATen op; other products go by it.

    Example:
        >>> table = with_rows({})
        >>> table[aten.mm.default](torch.ones(1, 3), torch.ones(3, 2))
        tensor([[3., 3.]])
        >>> table[aten.mm.default](torch.ones(2, 3), torch.ones(3, 2))
        NotImplemented
    """
    mm_otherwise, addmm_otherwise = table.get(aten.mm.default, _kept), table.get(aten.addmm.default, _kept)

    def mm(row: Tensor, matrix: Tensor) -> Any:
        return _product(row, matrix).to(row.dtype) if _is_row(row, matrix) else mm_otherwise(row, matrix)

    def addmm(bias: Tensor, row: Tensor, matrix: Tensor, *, beta: complex = 1, alpha: complex = 1) -> Any:
        if beta == alpha == 1 and _is_row(row, matrix):
            return (_product(row, matrix) + bias).to(row.dtype)
        return addmm_otherwise(bias, row, matrix, beta=beta, alpha=alpha)

    return {**table, aten.mm.default: mm, aten.addmm.default: addmm}


def _is_row(row: Tensor, matrix: Tensor) -> bool:
    """Whether this is (1, K) times (K, N) in real numbers, and neither too much to read nor nothing at all."""
    return row.shape[0] == 1 and row.is_floating_point() and 0 < matrix.numel() <= LARGEST


def _product(row: Tensor, matrix: Tensor) -> Tensor:
    """(1, K) times (K, N), added up in float32 at least, as cuBLAS does.

    The matrix is widened by the multiplication: a cast of its own would be folded into a weight that is frozen.
    """
    wide = torch.promote_types(row.dtype, torch.float32)
    return (row.to(wide).unsqueeze(2) * matrix.unsqueeze(0)).sum(1)


def _kept(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented
