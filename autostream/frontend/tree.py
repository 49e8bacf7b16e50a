"""Flattening: nested values to flat lists of tensors and back.

``torch.utils._pytree`` does so for types that are registered for the whole process. A library must not register its
user's dataclasses for them, so this module flattens containers itself; registered types are flattened as registered.

A :class:`Structure` is hashable: two values with equal structures differ in their tensors only.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, UserDict, UserList, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from autostream.errors import TraceError
from autostream.utils.operators import is_unknown

_CONSTANTS = {
    type(None), type(...), bool, int, float, complex, str, bytes, range,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
}  # fmt: skip


class Structure(NamedTuple):
    """A nested value without its tensors. A tuple, because it is hashed and compared in each call.

    Attributes:
        kind: the container's type, the constant's type, or ``Tensor``.
        context: what else is needed to rebuild the value: keys, field names, or the constant (floats by their bits);
            ``None`` stands for any integer.
        children: the structures of its items; ``None`` for constants and tensors.
    """

    kind: type
    context: Any = None
    children: tuple[Structure, ...] | None = None


TENSOR = Structure(Tensor)


class Same:
    """The kind of structures that stand for one object alone, which is not opened: ``context`` refers to it weakly."""


def same(value: object) -> Structure:
    """The structure of an object that only this object has.

    Raises:
        TypeError: there are no weak references to such objects.

    Example:
        >>> one, other = Same(), Same()
        >>> _, structure = flatten([one], same)
        >>> tensors_like(structure, [one]), tensors_like(structure, [other])
        ([], None)
    """
    return Structure(Same, weakref.ref(value))


class Constant:
    """Base class of values that count as constants: immutable, hashable, and equal only if interchangeable."""

    __slots__ = ()


def flatten(value: object, unknown: Callable[[object], Structure] | None = None) -> tuple[list[Tensor], Structure]:
    """Flatten a nested value.

    Args:
        value: any.
        unknown: the structure of an object that is neither a known container nor a constant; without it, there is none.

    Returns:
        Its tensors in order (twice, if one occurs twice), and its structure.

    Raises:
        TraceError: it contains an object that is neither a known container nor a constant, or it contains itself.

    Example:
        >>> tensors, structure = flatten({"x": torch.ones(2), "n": 3})
        >>> len(tensors)
        1
        >>> unflatten(structure, [torch.zeros(1)])
        {'x': tensor([0.]), 'n': 3}
    """
    tensors: list[Tensor] = []
    try:
        return tensors, _flatten(value, tensors, unknown)
    except RecursionError:
        raise _too_deep(value) from None


def tensors_like(structure: Structure, value: object) -> list[Tensor] | None:
    """The tensors of a value with this structure: a fast path, in a third of the time of :func:`flatten`.

    ``None`` if the value has another structure, or one with other containers than tuples, lists and dictionaries.

    Example:
        >>> _, structure = flatten((torch.ones(2), {"n": 3}))
        >>> tensors_like(structure, (torch.zeros(1), {"n": 3}))
        [tensor([0.])]
        >>> tensors_like(structure, (torch.zeros(1), {"n": 3.0}))
    """
    tensors: list[Tensor] = []
    return tensors if _gather(structure, value, tensors) else None


def _gather(structure: Structure, value: Any, tensors: list[Tensor]) -> bool:
    kind: Any
    kind, context, children = structure
    if kind is Tensor:
        tensors.append(value)
        return isinstance(value, Tensor)
    if kind is Same:
        return context() is value
    if type(value) is not kind:
        return False
    if children is None:
        return value is context or (kind is int and context is None) or bool(exact(value) == context)
    if kind is dict:
        if not _has_keys(value, context):
            return False
        value = value.values()
    elif not (kind in (tuple, list) and len(value) == len(children)):
        return False
    return all(map(_gather, children, value, repeat(tensors)))


def without_integers(structure: Structure) -> Structure:
    """The structure with any integers."""
    if structure.kind is int:
        return Structure(int)
    children = structure.children
    return structure._replace(children=None if children is None else tuple(map(without_integers, children)))


def merged(one: Structure, other: Structure) -> Structure:
    """The structure of values of either structure, with any integer where these differ in integers alone.

    Where they differ in more, it is the other one.

    Example:
        >>> (_, first), (_, second) = flatten((1, 2)), flatten((1, 3))
        >>> [tensors_like(merged(first, second), value) is not None for value in ((1, 4), (5, 2), (1, 4.0))]
        [True, False, False]
    """
    return _merged(one, other) if without_integers(one) == without_integers(other) else other


def _merged(one: Structure, other: Structure) -> Structure:
    if one == other:
        return one
    if other.children is None:
        return Structure(int)
    return other._replace(children=tuple(map(_merged, one.children or (), other.children)))


def objects_in(structure: Structure) -> tuple[weakref.ref[Any], ...]:
    """Weak references to the objects that it has by :func:`same`."""
    if structure.kind is Same:
        return (structure.context,)
    return tuple(reference for child in structure.children or () for reference in objects_in(child))


def unflatten(structure: Structure, tensors: Sequence[Tensor | None]) -> Any:
    """The inverse of :func:`flatten`."""
    return _unflatten(structure, iter(tensors))


def kinds_in(structure: Structure) -> Iterator[type]:
    """The kinds of all items: constants, tensors and containers.

    Example:
        >>> [kind.__name__ for kind in kinds_in(flatten([1, torch.ones(2)])[1])]
        ['list', 'int', 'Tensor']
    """
    yield structure.kind
    for child in structure.children or ():
        yield from kinds_in(child)


def shares_containers(value: Any, again: Any) -> bool:
    """Whether two values contain the same container object at the same position.

    Example:
        >>> shared = [1]
        >>> shares_containers((shared, 2), (shared, 2)), shares_containers((1, [2]), (1, [2]))
        (True, False)
    """
    opened, others = _open(value), _open(again)
    if isinstance(value, Tensor) or opened is None or others is None:
        return False
    if value is again and opened[1]:
        return True
    return any(map(shares_containers, opened[1], others[1]))


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to each tensor of a nested value.

    Unlike :func:`flatten`, this maps the items of any mapping or sequence, and leaves unknown objects as they are. Keys
    of dictionaries are not mapped, nor are the batch sizes of a ``PackedSequence``, which have to stay on the CPU.

    Raises:
        TraceError: it contains itself.

    Example:
        >>> map_tensors(torch.neg, {"x": [torch.ones(2), "a name"], "path": object})
        {'x': [tensor([-1., -1.]), 'a name'], 'path': <class 'object'>}
    """
    try:
        return _map_tensors(function, value)
    except RecursionError:
        raise _too_deep(value) from None


def _map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, UserDict):  # such as the batches of tokenizers
        copied = copy.copy(value)
        copied.data = _map_tensors(function, value.data)
        return copied
    opened = _open(value)
    if opened is None:
        return _map_other(function, value)
    context, children = opened
    unmapped = value.batch_sizes if isinstance(value, PackedSequence) else None
    mapped = [child if child is unmapped else _map_tensors(function, child) for child in children]
    return _close(type(value), context, mapped)


def _map_other(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Map the items of an unknown mapping or sequence, as PyTorch's data loaders do to pin tensors.

    The result has the same type, or is a plain container where that type cannot be made of other items. The user's
    container is not written, and neither is a copy that may share memory with it.
    """
    keys = _keys_of_items(value)
    if keys is None:
        return value
    children = [value[key] for key in keys]
    mapped = [_map_tensors(function, child) for child in children]
    has_tensors = any(new is not old or isinstance(old, Tensor) for new, old in zip(mapped, children, strict=True))
    if isinstance(value, tuple) and not has_tensors:
        return value
    items = dict(zip(keys, mapped, strict=True))
    plain = items if isinstance(value, Mapping) else tuple(mapped) if isinstance(value, tuple) else mapped
    for rebuild in (_copied, _constructed):
        with suppress(Exception):  # user code, which may raise anything
            rebuilt = rebuild(value, items, plain)
            if len(rebuilt) == len(mapped) and all(rebuilt[key] is items[key] for key in keys):
                return rebuilt
    return plain if has_tensors else value


def _keys_of_items(value: Any) -> Sequence[Any] | None:
    """The keys or indices of a mapping or sequence; ``None`` for other objects."""
    if isinstance(value, Mapping):
        return list(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview | range):
        return range(len(value))
    return None


def _copied(value: Any, items: Mapping[Any, Any], plain: Any) -> Any:
    """A copy with other items, and the same attributes.

    Raises:
        TypeError: a shallow copy might share the items with the original.
    """
    if isinstance(value, tuple):
        rebuilt: Any = tuple.__new__(type(value), plain)
        if hasattr(value, "__dict__"):
            vars(rebuilt).update(vars(value))
        return rebuilt
    if not isinstance(value, dict | list | UserList):
        raise TypeError(f"a copy of {type(value).__qualname__} may share its items")
    rebuilt = copy.copy(value)
    if rebuilt is not value:
        for key, item in items.items():
            rebuilt[key] = item
    return rebuilt


def _constructed(value: Any, items: Mapping[Any, Any], plain: Any) -> Any:
    return type(value)(plain)


def _too_deep(value: object) -> TraceError:
    kind = type(value).__qualname__
    return TraceError(f"a value of type {kind} is nested too deeply, or contains itself: pass its tensors side by side")


def _flatten(value: object, tensors: list[Tensor], unknown: Callable[[object], Structure] | None) -> Structure:
    if isinstance(value, Tensor):
        tensors.append(value)
        return TENSOR
    kind = type(value)
    if kind in _CONSTANTS or isinstance(value, (Enum, type, Constant)):
        return Structure(kind, exact(value))
    opened = _open(value)
    if is_unknown(value):
        raise TraceError("the number of a tensor goes to Python: return the tensor instead")
    if opened is None and unknown is not None:
        return unknown(value)
    if opened is None:
        raise TraceError(
            f"a value of type {kind.__module__}.{kind.__qualname__} is neither a tensor, a constant nor "
            "a known container: register it with torch.utils._pytree.register_pytree_node, or pass "
            f"{'it as a dict' if isinstance(value, Mapping) else 'its tensors'}"
        )
    context, children = opened
    return Structure(kind, _comparable(kind, context), tuple(_flatten(child, tensors, unknown) for child in children))


def _unflatten(structure: Structure, tensors: Iterator[Tensor | None]) -> Any:
    if structure.kind is Tensor:
        return next(tensors)
    if structure.kind is Same:
        return structure.context()
    if structure.children is None:
        return _constant(structure.kind, structure.context)
    children = [_unflatten(child, tensors) for child in structure.children]
    return _close(structure.kind, _original(structure.kind, structure.context), children)


def exact(value: Any) -> Hashable:
    """A key for a constant, equal for two constants of one type only if they are interchangeable.

    Needed because 0.0 == -0.0, and nan != nan.

    Example:
        >>> exact(0.0) == exact(-0.0), exact(float("nan")) == exact(float("nan"))
        (False, True)
    """
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, complex):
        return value.real.hex(), value.imag.hex()
    if isinstance(value, range):
        return value.start, value.stop, value.step
    return value  # type: ignore[no-any-return]


def _constant(kind: type, exact: Any) -> Any:
    """The inverse of :func:`exact`."""
    if kind is float:
        return float.fromhex(exact)
    if kind is complex:
        return complex(*map(float.fromhex, exact))
    return range(*exact) if kind is range else exact


def _open(value: Any) -> tuple[Any, Sequence[object]] | None:
    """A container's context (keys, names of fields, …) and its children; ``None`` for other objects."""
    kind: type[Any] = type(value)
    if kind in (list, tuple):
        return None, value
    if kind in (dict, OrderedDict):
        return tuple(value), list(value.values())
    if kind is defaultdict:
        return (value.default_factory, tuple(value)), list(value.values())
    if kind is slice:
        return None, (value.start, value.stop, value.step)
    if kind in _pytree.SUPPORTED_NODES:
        children, context = _pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        return context, list(children)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return None, value
    if is_dataclass(kind) and not issubclass(kind, _BUILT_IN):
        # Attributes that are not fields belong to the object too.
        names = [field.name for field in fields(kind) if hasattr(value, field.name)]
        names = list(dict.fromkeys([*names, *getattr(value, "__dict__", ())]))
        return tuple(names), [getattr(value, name) for name in names]
    return None


_BUILT_IN = (list, tuple, dict, set, frozenset, int, float, complex, str, bytes)
"""A dataclass that inherits from these has contents besides its attributes, and is not flattened."""


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
    if kind in _pytree.SUPPORTED_NODES:
        return _pytree.SUPPORTED_NODES[kind].unflatten_fn(children, context)
    if hasattr(kind, "_fields"):
        return tuple.__new__(kind, children)
    # Without __init__, which could change the values of fields.
    value = object.__new__(kind)
    for name, child in zip(context, children, strict=True):
        object.__setattr__(value, name, child)
    return value


def _comparable(kind: type, context: Any) -> Hashable:
    """A container's context as a hashable key, equal only for interchangeable contexts.

    Raises:
        TraceError: a key is not a constant or made of constants, or a registered container cannot be compared.
    """
    if kind in (dict, OrderedDict):
        return _keys(context)
    if kind is defaultdict:
        return context[0], _keys(context[1])
    return _registered(kind, context) if kind in _pytree.SUPPORTED_NODES and context is not None else context


def _original(kind: type, context: Any) -> Any:
    """The inverse of :func:`_comparable`."""
    if kind is defaultdict:
        return context[0], _original(dict, context[1])
    return unflatten(context, ()) if isinstance(context, Structure) else context


def _keys(value: Iterable[Any]) -> tuple[str, ...] | Structure:
    """The keys of a dictionary; as a structure unless all are strings, to distinguish 1 from True."""
    keys = tuple(value)
    return keys if all(type(key) is str for key in keys) else _without_tensors(keys)


def _has_keys(value: dict[Any, Any], keys: Hashable) -> bool:
    """Whether a dictionary has these keys, as :func:`_keys` returns them, in this order."""
    try:
        return _keys(value) == keys
    except TraceError:
        return False


def _without_tensors(value: object) -> Structure:
    tensors, structure = flatten(value)
    if tensors:
        raise TraceError("a tensor is a key of a dictionary, or part of what a container is compared by")
    return structure


def _registered(kind: type, context: Any) -> Structure:
    """The context of a registered container as a structure, or as it is where it is not made of constants."""
    try:
        return _without_tensors(context)
    except TraceError:
        if isinstance(context, Tensor):
            raise
        try:
            hash(context)
        except TypeError as error:
            raise TraceError(f"the container {kind.__qualname__} cannot be compared: {error}") from error
        return Structure(type(context), context)
