"""Counts the FLOPs and bytes of nodes, from which their costs are estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import conv_flop_count, flop_registry

from autostream.analysis.effects import ALLOCATES_ONLY, Effects, effects_of, wrapped_graph
from autostream.analysis.values import concrete, input_tensors, tensors_in, value_of
from autostream.utils.operators import base_name

# Of their first argument, gathers read only what they return, and scatters write only as much as they are given.
_GATHERS = frozenset({"embedding", "embedding_bag", "gather", "index", "index_select", "take", "take_along_dim"})
_SCATTERS = frozenset({"index_add_", "index_copy_", "index_fill_", "index_put_", "scatter_", "scatter_add_"})


@dataclass(frozen=True, slots=True)
class Work:
    """The arithmetic and memory traffic of one node.

    Attributes:
        flops: floating-point operations of its matrix products and convolutions; other operations count 0.
        bytes_read: bytes of its arguments that it touches.
        bytes_written: bytes of its results that it touches.
        elements: elements of its largest result.
        dtype: the type that it computes in, e.g. ``"float16"``.
    """

    flops: int
    bytes_read: int
    bytes_written: int
    elements: int
    dtype: str


def count_work(effects: Mapping[fx.Node, Effects]) -> dict[str, Work]:
    """Count the work of nodes, by name. A node that launches nothing moves no bytes.

    FLOPs are those of :mod:`torch.utils.flop_counter`. A composite operator is run on meta tensors, once for each
    combination of shapes. FLOPs that the counter cannot count are 0.

    Example:
        >>> graph = fx.Graph()
        >>> a, b = graph.placeholder("a"), graph.placeholder("b")
        >>> product = graph.call_function(torch.ops.aten.mm.default, (a, b))
        >>> a.meta["val"], b.meta["val"], product.meta["val"] = torch.ones(2, 3), torch.ones(3, 5), torch.ones(2, 5)
        >>> count_work({product: effects_of(product)})["mm_default"]
        Work(flops=60, bytes_read=84, bytes_written=40, elements=10, dtype='float32')
    """
    flops = _Flops()
    return {node.name: _work_of(node, effect, flops) for node, effect in effects.items()}


def _work_of(node: fx.Node, effects: Effects, flops: _Flops) -> Work:
    body = wrapped_graph(node)
    if body is not None:
        return _sum([_work_of(step, effects_of(step), flops) for step in body.nodes if step.op == "call_function"])
    results = tensors_in(value_of(node)) or _tensors_of(effects.writes)
    elements = max((_numel(result) for result in results), default=0)
    dtype = _compute_dtype(results + input_tensors(node))
    if not effects.launches:
        return Work(0, 0, 0, elements, dtype)
    read, written = _traffic(node, effects, results)
    return Work(flops.of(node), read, written, elements, dtype)


def _sum(works: list[Work]) -> Work:
    """The work of several nodes together, with the dtype of the node of most FLOPs."""
    return Work(
        flops=sum(work.flops for work in works),
        bytes_read=sum(work.bytes_read for work in works),
        bytes_written=sum(work.bytes_written for work in works),
        elements=max((work.elements for work in works), default=0),
        dtype=max(works, key=lambda work: work.flops).dtype if works else "float32",
    )


# --- memory traffic --------------------------------------------------------------------------------------------------


def _traffic(node: fx.Node, effects: Effects, results: list[torch.Tensor]) -> tuple[int, int]:
    """Bytes read and written."""
    name = base_name(node.target) if isinstance(node.target, OpOverload) else ""
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    base = _bytes(_tensors_of(source for source in effects.reads if source is first))
    others = _bytes(_tensors_of(source for source in effects.reads if source is not first))
    written = _bytes(results)
    if name in _SCATTERS:
        base = written = min(base, others)
    elif name in _GATHERS:
        base = min(base, written)
    elif name.startswith("new_") or name.endswith("_like"):
        base = 0
    return base + others, 0 if name in ALLOCATES_ONLY else written


def _tensors_of(nodes: Iterable[fx.Node]) -> list[torch.Tensor]:
    return [tensor for node in nodes for tensor in tensors_in(value_of(node))]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(map(_touched, tensors))


def _touched(tensor: torch.Tensor) -> int:
    """The bytes that a tensor covers, at most those of its storage: an expanded tensor has more elements than bytes."""
    size = _numel(tensor) * tensor.itemsize
    return min(size, concrete(tensor.untyped_storage().nbytes())) if tensor.layout is torch.strided else size


def _numel(tensor: torch.Tensor) -> int:
    product = 1
    for size in tensor.shape:
        product *= concrete(size)
    return product


def _compute_dtype(tensors: list[torch.Tensor]) -> str:
    """The first floating-point dtype of these tensors, else the first dtype."""
    dtypes = [tensor.dtype for tensor in tensors] or [torch.float32]
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
    packet = target.overloadpacket
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return packet in flop_registry or packet in _FORMULAS or target.has_kernel_for_dispatch_key(composite)


def _count_flops(node: fx.Node, target: OpOverload) -> int:
    args: Any
    kwargs: Any
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: _on_meta(value_of(source)))
    try:
        formula = _FORMULAS.get(target.overloadpacket) or flop_registry.get(target.overloadpacket)
        if formula is not None:
            args, kwargs = _in_order(target, args, kwargs)
            return int(formula(*args, **kwargs, out_val=_on_meta(value_of(node))))
        with torch.inference_mode(False), torch.no_grad(), _FlopCount() as count:
            target(*args, **kwargs)
        return int(count.total)
    except Exception:
        # Formulas reject some inputs that the operator accepts. A missing count must not prevent scheduling.
        return 0


def _in_order(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """A call's arguments, by position as far as possible: the formulas' parameter names differ from the schema's."""
    named, ordered = dict(kwargs), list(args)
    for argument in target._schema.arguments[len(args) :]:
        if argument.kwarg_only:
            break
        ordered.append(named.pop(argument.name, argument.default_value))
    return ordered, named


class _FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the FLOPs of the operators that this thread calls.

    ``FlopCounterMode`` also hooks every module of the process while it is active, even those that other threads run.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += int(formula(*args, **(kwargs or {}), out_val=result))
        return result


def _attention_flops(query: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Self-attention over ``query`` (batch, time, width): four projections, two products over all pairs of times."""
    batch, time, width = query.shape
    return 2 * batch * time * (4 * width * width + 2 * time * width)


def _encoder_flops(source: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Self-attention, then two linear layers; the 14th argument after ``source`` is the weight of the first layer."""
    batch, time, width = source.shape
    return _attention_flops(source) + 2 * 2 * batch * time * width * int(args[13].shape[0])


def _cudnn_flops(x: torch.Tensor, weight: torch.Tensor, *args: Any, out_val: torch.Tensor, **kwargs: Any) -> int:
    """The counter's formula is for ``aten.convolution``, whose further arguments differ."""
    return int(conv_flop_count(list(x.shape), list(weight.shape), list(out_val.shape), transposed=False))


_FORMULAS: Mapping[Any, Callable[..., int]] = {
    torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm],
    torch.ops.aten.cudnn_convolution: _cudnn_flops,
    torch.ops.aten._native_multi_head_attention: _attention_flops,
    torch.ops.aten._transformer_encoder_layer_fwd: _encoder_flops,
}
"""Formulas that the counter lacks or has wrong. Attention modules call the last two in eval mode."""


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
