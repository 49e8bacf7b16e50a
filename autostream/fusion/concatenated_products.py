"""Lets matrix products write into a concatenation, as Inductor's own kernels do.

    product ─▶ view in one dimension ─▶ copy ─▶ bucket        product ─▶ bucket
    kernel ───────────────────────────────────▶ bucket   ─▶   kernel ──▶ bucket

Gradients are reduced over processes in buckets: they are flattened, and concatenated. Inductor gives what is
concatenated a place in the result where it can, but copies products that are flattened before: some of them one by one,
and some together, so that each waits for all. A flat product is the same in memory, so it gets its place, too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
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

from autostream.frontend.all_reduces import ALIGNMENT

aten = torch.ops.aten

_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}


def products_in_place() -> AbstractContextManager[object]:
    """Make Inductor give a product that is flattened and then concatenated its place in the result."""
    realize: Any = ConcatKernel.realize_into.__func__  # type: ignore[attr-defined]
    can_realize: Any = ConcatKernel.can_realize_into_without_copy.__func__  # type: ignore[attr-defined]

    def can_realize_into_without_copy(cls: type[ConcatKernel], source: Any, target: Any = None) -> bool:
        return can_realize(cls, source, target) or (target is None and _product(source) is not None)

    def realize_into(cls: type[ConcatKernel], source: Any, target: Any) -> Any:
        view: Any = source.data if isinstance(source, TensorBox) else source
        product = _product(view.data) if isinstance(view, ReinterpretView) else None
        if product is None or not _is_same_in_memory(product, view, target):
            return realize(cls, source, target)
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
    # A lowering that returns the box of its argument, as that of squeeze, makes its own node the origin.
    node, cat = product.get_origin_node(), V.graph.current_node
    if node is None or node.target not in _PRODUCTS or not _is_flat(cat) or not _is_aligned(cat):
        return None
    elements = node.meta["val"].numel()
    while node is not cat:
        value = node.meta.get("val")
        if len(node.users) != 1 or not isinstance(value, Tensor) or value.numel() != elements:
            return None
        node = next(iter(node.users))
    return product if product.layout.is_contiguous() and product.layout.offset == 0 else None


def _is_flat(node: fx.Node) -> bool:
    return node.target is aten.cat.default and node.meta["val"].dim() == 1


def _is_aligned(cat: fx.Node) -> bool:
    """Whether all products have aligned places. Else Inductor copies all parts, in one kernel or a few."""
    parts: Any = cat.args[0]
    sizes = [part.meta["val"].numel() * part.meta["val"].itemsize for part in parts]
    if not all(isinstance(size, int) for size in sizes):  # some depend on data
        return False
    places = accumulate(sizes, initial=0)
    return not any(place % ALIGNMENT and _is_product(part) for part, place in zip(parts, places, strict=False))


def _is_product(node: fx.Node) -> bool:
    while node.target not in _PRODUCTS and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node.target in _PRODUCTS


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
    )
