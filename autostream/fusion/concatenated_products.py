"""Lets matrix products write into a concatenation, as Inductor's own kernels do.

    product ─▶ view in one dimension ─▶ copy ─▶ bucket        product ─▶ bucket
    kernel ───────────────────────────────────▶ bucket   ─▶   kernel ──▶ bucket

Gradients are reduced over processes in buckets: they are flattened, and concatenated. Inductor gives what is
concatenated a place in the result where it can, but copies products that are flattened before: some of them one by one,
and some together, so that each waits for all. A flat product is the same in memory, so it gets its place, too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch import fx
from torch._inductor.ir import (
    ConcatKernel,
    ExternKernelOut,
    FixedLayout,
    NonOwningLayout,
    ReinterpretView,
    StorageBox,
    TensorBox,
)
from torch._inductor.virtualized import V

_ALIGNMENT = 16
"""Bytes. cuBLAS has slower kernels for results at other addresses."""


def products_in_place() -> AbstractContextManager[object]:
    """Make Inductor give a product that is flattened and then concatenated its place in the result."""
    usual: Any = ConcatKernel.realize_into.__func__  # type: ignore[attr-defined]
    usually: Any = ConcatKernel.can_realize_into_without_copy.__func__  # type: ignore[attr-defined]

    def can_realize_into_without_copy(cls: type[ConcatKernel], source: Any, target: Any = None) -> bool:
        return usually(cls, source, target) or (target is None and _product(source) is not None)

    def realize_into(cls: type[ConcatKernel], source: Any, target: Any) -> Any:
        view: Any = source.data if isinstance(source, TensorBox) else source
        product = _product(view.data) if isinstance(view, ReinterpretView) else None
        if product is None or not _is_same_in_memory(product, view, target):
            return usual(cls, source, target)
        layout = product.layout
        there = FixedLayout(layout.device, layout.dtype, layout.size, layout.stride, target.layout.offset)
        product.layout = NonOwningLayout(ReinterpretView(data=target.data, layout=there))
        return product

    return mock.patch.multiple(
        ConcatKernel,
        realize_into=classmethod(realize_into),
        can_realize_into_without_copy=classmethod(can_realize_into_without_copy),
    )


def _product(box: Any) -> Any:
    """The product that a box holds, if the op that is lowered concatenates all of it in one dimension.

    Nothing else may use it: a collective may write to the concatenation later.
    """
    product = box.data if isinstance(box, StorageBox) else None
    if not isinstance(product, ExternKernelOut) or not isinstance(product.layout, FixedLayout):
        return None
    node: fx.Node | None = product.get_origin_node()
    elements, dimensions = 0 if node is None else node.meta["val"].numel(), 0
    while node is not None and node is not V.graph.current_node:
        if len(node.users) != 1 or node.meta["val"].numel() != elements:
            return None
        dimensions, node = node.meta["val"].dim(), next(iter(node.users))
    flat = node is not None and dimensions == 1
    return product if flat and product.layout.is_contiguous() and product.layout.offset == 0 else None


def _is_same_in_memory(product: Any, view: ReinterpretView, target: Any) -> bool:
    """Whether a view of a whole product has its elements in their order, and has a place in memory to write to."""
    if not isinstance(target, ReinterpretView) or not isinstance(target.layout, FixedLayout):
        return False
    place, sizes = target.layout, V.graph.sizevars
    return bool(
        product.layout.dtype == view.layout.dtype == place.dtype
        and view.layout.is_contiguous()
        and place.is_contiguous()
        and sizes.statically_known_list_equals(list(view.layout.size), list(place.size))
        and sizes.statically_known_multiple_of(place.offset * place.dtype.itemsize, _ALIGNMENT)
    )
