"""Nested values to flat tensors and back.

``torch.utils._pytree`` does this for the containers that it knows or that somebody registered, for the whole process. A
library must not register its user's dataclasses behind their back, so containers are opened here; types that are
registered there are opened as registered.

A :class:`Structure` is hashable: two values with equal structures differ in their tensors only.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from autostream.errors import TraceError

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, range, type, Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Structure:
    """A nested value without its tensors.

    Attributes:
        kind: the container's type, the constant's type, or ``Tensor``.
        context: what else is needed to rebuild it: keys, field names, or the constant (floats by their bits).
        children: structures of what it contains.
    """

    kind: type
    context: Hashable = None
    children: tuple[Structure, ...] = ()


TENSOR = Structure(Tensor)


def flatten(value: object) -> tuple[list[Tensor], Structure]:
    """Take a nested value apart.

    Returns:
        Its tensors in order (one that occurs twice stands there twice), and its structure.

    Raises:
        TraceError: it contains an object that is neither a container known here nor a constant.

    Example:
        >>> tensors, structure = flatten({"x": torch.ones(2), "n": 3})
        >>> len(tensors)
        1
        >>> unflatten(structure, [torch.zeros(1)])
        {'x': tensor([0.]), 'n': 3}
    """
    tensors: list[Tensor] = []
    return tensors, _flatten(value, tensors)


def unflatten(structure: Structure, tensors: Sequence[Tensor]) -> Any:
    """Put a nested value together again; the inverse of :func:`flatten`."""
    return _unflatten(structure, iter(tensors))


def _flatten(value: object, tensors: list[Tensor]) -> Structure:
    if isinstance(value, Tensor):
        tensors.append(value)
        return TENSOR
    if isinstance(value, _CONSTANTS):
        # 0.0 == -0.0 and nan != nan, yet the first pair differs and the second does not.
        return Structure(type(value), value.hex() if isinstance(value, float) else value)
    opened = _open(value)
    if opened is None:
        raise TraceError(
            f"a value of type {type(value).__module__}.{type(value).__qualname__} is neither a tensor, a constant nor "
            "a known container: register it with torch.utils._pytree.register_pytree_node, or pass its tensors"
        )
    context, children = opened
    try:
        hash(context)
    except TypeError as error:
        raise TraceError(f"the container {type(value).__qualname__} cannot be compared: {error}") from error
    return Structure(type(value), context, tuple(_flatten(child, tensors) for child in children))


def _open(value: Any) -> tuple[Hashable, Sequence[object]] | None:
    """A container's context and children, or ``None`` for what is no known container."""
    kind: type[Any] = type(value)
    if kind in (list, tuple):
        return None, value
    if kind in (dict, OrderedDict):
        return tuple(value), list(value.values())
    if kind is defaultdict:
        return (value.default_factory, tuple(value)), list(value.values())
    if kind is slice:
        return None, (value.start, value.stop, value.step)
    if issubclass(kind, tuple) and (hasattr(kind, "_fields") or hasattr(kind, "n_sequence_fields")):
        return None, value
    if kind in _pytree.SUPPORTED_NODES:
        children, context = _pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        return _hashable(context), children
    fields: Mapping[str, object] | None = getattr(kind, "__dataclass_fields__", None)
    if fields is None:
        return None
    if issubclass(kind, OrderedDict):  # transformers' ModelOutput
        return tuple(value), list(value.values())
    present = [name for name in fields if hasattr(value, name)]
    return tuple(present), [getattr(value, name) for name in present]


def _unflatten(structure: Structure, tensors: Iterator[Tensor]) -> Any:
    kind, context = structure.kind, structure.context
    if kind is Tensor:
        return next(tensors)
    if issubclass(kind, _CONSTANTS):
        return float.fromhex(context) if kind is float else context  # type: ignore[arg-type]
    return _close(kind, context, [_unflatten(child, tensors) for child in structure.children])


def _close(kind: Any, context: Any, children: list[Any]) -> Any:
    """The inverse of :func:`_open`."""
    if kind in (list, tuple):
        return kind(children)
    if kind in (dict, OrderedDict):
        return kind(zip(context, children, strict=True))
    if kind is defaultdict:
        return defaultdict(context[0], zip(context[1], children, strict=True))
    if kind is slice:
        return slice(*children)
    if hasattr(kind, "_fields"):
        return kind(*children)
    if hasattr(kind, "n_sequence_fields"):
        return kind(children)
    if kind in _pytree.SUPPORTED_NODES:
        return _pytree.SUPPORTED_NODES[kind].unflatten_fn(children, _original(context))
    if issubclass(kind, OrderedDict):
        return kind(**dict(zip(context, children, strict=True)))
    # The fields are those of an object that was already initialised: running __init__ again could change them.
    value = object.__new__(kind)
    for name, child in zip(context, children, strict=True):
        object.__setattr__(value, name, child)
    return value


@dataclass(frozen=True, slots=True)
class _ListContext:
    """A list in the context of a registered container, made hashable."""

    items: tuple[Hashable, ...]


def _hashable(context: Any) -> Hashable:
    return _ListContext(tuple(_hashable(item) for item in context)) if isinstance(context, list) else context


def _original(context: Any) -> Any:
    return [_original(item) for item in context.items] if isinstance(context, _ListContext) else context
