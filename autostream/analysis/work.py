"""How much arithmetic and memory traffic one node stands for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from autostream.analysis.effects import effects_of, wrapped_graph
from autostream.analysis.values import base_name, concrete, tensors_given, tensors_in, value_of

# Of their first argument they touch no more than what they pick, or put there.
_GATHERS = frozenset({"embedding", "embedding_bag", "gather", "index", "index_select", "take", "take_along_dim"})
_SCATTERS = frozenset({"index_add_", "index_copy_", "index_fill_", "index_put_", "scatter_", "scatter_add_"})

_OVERWRITES = frozenset({"copy_", "fill_", "zero_"})
_ALLOCATES_ONLY = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"})


@dataclass(frozen=True, slots=True)
class Work:
    """What one node computes and moves.

    Attributes:
        flops: floating-point operations of its matrix products and convolutions; others count nothing.
        bytes_read: bytes of its arguments that it touches.
        bytes_written: bytes of its results that it touches.
        elements: elements of its largest result.
        dtype: what it computes in, e.g. ``"float16"``.
    """

    flops: int
    bytes_read: int
    bytes_written: int
    elements: int
    dtype: str


def count_work(nodes: Iterable[fx.Node]) -> dict[str, Work]:
    """Count the work of nodes that carry fake values, by name.

    FLOPs are those of :mod:`torch.utils.flop_counter`; for operators that are made of others it follows the operator
    down on meta tensors, once for each combination of shapes. Where it cannot say, they count as 0.

    Example:
        >>> graph = fx.Graph()
        >>> a, b = graph.placeholder("a"), graph.placeholder("b")
        >>> product = graph.call_function(torch.ops.aten.mm.default, (a, b))
        >>> a.meta["val"], b.meta["val"], product.meta["val"] = torch.ones(2, 3), torch.ones(3, 5), torch.ones(2, 5)
        >>> count_work([product])["mm_default"]
        Work(flops=60, bytes_read=84, bytes_written=40, elements=10, dtype='float32')
    """
    flops = _Flops()
    return {node.name: _work_of(node, flops) for node in nodes}


def _work_of(node: fx.Node, flops: _Flops) -> Work:
    body = wrapped_graph(node)
    if body is not None:
        return _sum([_work_of(step, flops) for step in body.nodes if effects_of(step).launches], node)
    results = tensors_in(value_of(node)) or _written_tensors(node)
    read, written = _traffic(node, results)
    elements = max((_numel(result) for result in results), default=0)
    return Work(flops.of(node), read, written, elements, _compute_dtype(node, results))


def _sum(works: list[Work], node: fx.Node) -> Work:
    return Work(
        sum(work.flops for work in works),
        sum(work.bytes_read for work in works),
        sum(work.bytes_written for work in works),
        max((work.elements for work in works), default=0),
        max(works, key=lambda work: work.flops).dtype if works else _compute_dtype(node, []),
    )


# --- memory traffic --------------------------------------------------------------------------------------------------


def _traffic(node: fx.Node, results: list[torch.Tensor]) -> tuple[int, int]:
    """Bytes read and written."""
    name = base_name(node.target) if isinstance(node.target, OpOverload) else ""
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    others = sum(_bytes(value_of(source)) for source in node.all_input_nodes if source is not first)
    base = _bytes(value_of(first)) if first is not None else 0
    written = _bytes(results)
    if name in _SCATTERS:
        base = written = min(base, others)
    elif name in _GATHERS:
        base = min(base, written)
    elif name in _OVERWRITES or name.startswith("new_") or name.endswith("_like"):
        base = 0
    return base + others, 0 if name in _ALLOCATES_ONLY else written


def _bytes(value: Any) -> int:
    return sum(_touched(tensor) for tensor in tensors_in(value))


def _touched(tensor: torch.Tensor) -> int:
    """The bytes that a tensor covers: an expanded one covers no more than its storage."""
    size = _numel(tensor) * tensor.itemsize
    return min(size, concrete(tensor.untyped_storage().nbytes())) if tensor.layout is torch.strided else size


def _numel(tensor: torch.Tensor) -> int:
    product = 1
    for size in tensor.shape:
        product *= concrete(size)
    return product


def _written_tensors(node: fx.Node) -> list[torch.Tensor]:
    """What a node without results changes."""
    return [tensor for source in effects_of(node).writes for tensor in tensors_in(value_of(source))]


def _compute_dtype(node: fx.Node, results: list[torch.Tensor]) -> str:
    """The first floating-point type of the results, else of the arguments, else whatever type there is."""
    dtypes = [tensor.dtype for tensor in results + tensors_given(node)] or [torch.float32]
    chosen = next((dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex), dtypes[0])
    return str(chosen).removeprefix("torch.")


# --- arithmetic ------------------------------------------------------------------------------------------------------


class _Flops:
    """FLOPs of nodes, counted once for each operator and combination of arguments."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def of(self, node: fx.Node) -> int:
        target = node.target
        if not isinstance(target, OpOverload) or not _may_multiply(target):
            return 0
        key = (target, _key(node.args), _key(node.kwargs))
        if key not in self._known:
            self._known[key] = _count_flops(node, target)
        return self._known[key]


def _may_multiply(target: OpOverload) -> bool:
    return target.overloadpacket in flop_registry or target.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd
    )


def _count_flops(node: fx.Node, target: OpOverload) -> int:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: _on_meta(value_of(source)))
    try:
        formula = flop_registry.get(target.overloadpacket)
        if formula is not None:
            return int(formula(*args, **kwargs, out_val=_on_meta(value_of(node))))
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            target(*args, **kwargs)
        return int(counter.get_total_flops())
    except Exception:
        # A count is worth less than a schedule: formulas reject inputs that the operator itself accepts.
        return 0


def _on_meta(value: Any) -> Any:
    return tree_map(_leaf_on_meta, value)


def _leaf_on_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        shape, stride = map(concrete, leaf.shape), map(concrete, leaf.stride())
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=leaf.dtype, device="meta")
    return concrete(leaf) if isinstance(leaf, torch.SymInt) else leaf


def _key(argument: Any) -> Any:
    """An argument as something hashable in which a tensor is its shape and dtype."""
    if isinstance(argument, fx.Node):
        return _key(value_of(argument))
    if isinstance(argument, torch.Tensor):
        return (tuple(map(concrete, argument.shape)), argument.dtype)
    if isinstance(argument, (list, tuple)):
        return tuple(map(_key, argument))
    if isinstance(argument, dict):
        return tuple((name, _key(value)) for name, value in argument.items())
    return argument if isinstance(argument, (int, float, str, bool, type(None))) else str(argument)
