"""Nested values to flat tensors and back.

``torch.utils._pytree`` does this for the containers that it knows or that somebody registered, for the whole process. A
library must not register its user's dataclasses behind their back, so containers are opened here; types that are
registered there are opened as registered.

A :class:`Structure` is hashable: two values with equal structures differ in their tensors only.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, UserList, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import repeat
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from autostream.errors import TraceError
from autostream.utils.operators import is_unknown, symbols_of

_CONSTANTS = {
    type(None), type(...), bool, int, float, complex, str, bytes, range,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
}  # fmt: skip


class Structure(NamedTuple):
    """A nested value without its tensors: a tuple, because it is hashed and compared at each call.

    Attributes:
        kind: the container's type, the constant's type, or ``Tensor``.
        context: what else is needed to rebuild it: keys, field names, or the constant (floats by their bits).
        children: structures of what it contains; ``None`` for what contains nothing: constants and tensors.
    """

    kind: type
    context: Hashable = None
    children: tuple[Structure, ...] | None = None


TENSOR = Structure(Tensor)


class UnknownNumberError(TraceError):
    """Python gets a number that only a run tells.

    Attributes:
        symbols: the names of what it is computed from.
    """

    def __init__(self, number: Any) -> None:
        super().__init__("the number of a tensor goes to Python: return the tensor instead")
        self.symbols = symbols_of(number)


class Constant:
    """An immutable value that is a constant as it is: hashable, and equal to what no program can tell from it."""

    __slots__ = ()

    def unlike(self, other: Self) -> Iterator[str]:
        """What of it differs from another, by names that tell users something."""
        yield from ()


def constants_of(structure: Structure) -> Iterator[Constant]:
    """The constants of our own that a structure holds, in order."""
    if isinstance(structure.context, Constant):
        yield structure.context
    for child in structure.children or ():
        yield from constants_of(child)


def flatten(value: object) -> tuple[list[Tensor], Structure]:
    """Take a nested value apart.

    Returns:
        Its tensors in order (one that occurs twice stands there twice), and its structure.

    Raises:
        TraceError: it contains an object that is neither a container known here nor a constant, or itself.

    Example:
        >>> tensors, structure = flatten({"x": torch.ones(2), "n": 3})
        >>> len(tensors)
        1
        >>> unflatten(structure, [torch.zeros(1)])
        {'x': tensor([0.]), 'n': 3}
    """
    tensors: list[Tensor] = []
    try:
        return tensors, _flatten(value, tensors)
    except RecursionError:
        raise _too_deep(value) from None


def tensors_like(structure: Structure, value: object) -> list[Tensor] | None:
    """The tensors of a value of this structure, in a third of the time that :func:`flatten` takes.

    ``None`` where it has another structure, or one that takes longer to compare than tuples, lists and dictionaries.

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
    if type(value) is not kind:
        return False
    if children is None:
        return value is context or bool(exact(value) == context)
    if kind is dict:
        if not _has_keys(value, context):
            return False
        value = value.values()
    elif not (kind in (tuple, list) and len(value) == len(children)):
        return False
    return all(map(_gather, children, value, repeat(tensors)))


def unflatten(structure: Structure, tensors: Sequence[Tensor | None]) -> Any:
    """Put a nested value together again; the inverse of :func:`flatten`."""
    return _unflatten(structure, iter(tensors))


def shares_containers(value: Any, again: Any) -> bool:
    """Whether two values have a container in common, which neither was made anew for.

    Example:
        >>> kept = [1]
        >>> shares_containers((kept, 2), (kept, 2)), shares_containers((1, [2]), (1, [2]))
        (True, False)
    """
    if isinstance(value, Tensor) or not isinstance(value, list | tuple | dict):
        return False
    if value is again and value:
        return True
    both = (value.values(), again.values()) if isinstance(value, dict) else (value, again)
    return any(map(shares_containers, *both))


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same nested value with what ``function`` makes of each tensor.

    Mappings and sequences of other types are opened, too. What is no container stays as it is, and so do keys of
    dictionaries, whatever they are, and the batch sizes of a ``PackedSequence``: the host's.

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
        twin = copy.copy(value)
        twin.data = _map_tensors(function, value.data)
        return twin
    opened = _open(value)
    if opened is None:
        return _map_other(function, value)
    context, children = opened
    stays = value.batch_sizes if isinstance(value, PackedSequence) else None
    twins = [child if child is stays else _map_tensors(function, child) for child in children]
    return _close(type(value), context, twins)


def _map_other(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Containers of the user's own: any mapping or sequence, as PyTorch's loaders open them when they pin tensors.

    What comes back is of the same type, or a plain container where that cannot be made of other items. Nothing is
    written to the user's own, nor to a copy of theirs that may share memory with it.
    """
    places = _places(value)
    if places is None:
        return value
    children = [value[place] for place in places]
    twins = [_map_tensors(function, child) for child in children]
    holds = any(twin is not child or isinstance(child, Tensor) for twin, child in zip(twins, children, strict=True))
    if isinstance(value, tuple) and not holds:
        return value
    items = dict(zip(places, twins, strict=True))
    plain = items if isinstance(value, Mapping) else tuple(twins) if isinstance(value, tuple) else twins
    for remade in (_copied, _constructed):
        with suppress(Exception):  # of code of theirs, which may refuse in any way
            twin = remade(value, items, plain)
            if len(twin) == len(twins) and all(twin[place] is items[place] for place in places):
                return twin
    return plain if holds else value


def _places(value: Any) -> Sequence[Any] | None:
    """Where a container of the user's own has its items; ``None`` for what is none."""
    if isinstance(value, Mapping):
        return list(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview | range):
        return range(len(value))
    return None


def _copied(value: Any, items: Mapping[Any, Any], plain: Any) -> Any:
    """With all that it knows besides its items, if it has those where no copy shares them.

    Raises:
        TypeError: they may be shared.
    """
    if isinstance(value, tuple):
        twin: Any = tuple.__new__(type(value), plain)
        if hasattr(value, "__dict__"):
            vars(twin).update(vars(value))
        return twin
    if not isinstance(value, dict | list | UserList):
        raise TypeError(f"a copy of {type(value).__qualname__} may share its items")
    twin = copy.copy(value)
    if twin is not value:
        for place, item in items.items():
            twin[place] = item
    return twin


def _constructed(value: Any, items: Mapping[Any, Any], plain: Any) -> Any:
    return type(value)(plain)


def _too_deep(value: object) -> TraceError:
    kind = type(value).__qualname__
    return TraceError(f"a value of type {kind} is nested too deeply, or contains itself: pass its tensors side by side")


def _flatten(value: object, tensors: list[Tensor]) -> Structure:
    if isinstance(value, Tensor):
        tensors.append(value)
        return TENSOR
    kind = type(value)
    if kind in _CONSTANTS or isinstance(value, (Enum, type, Constant)):
        return Structure(kind, exact(value))
    opened = _open(value)
    if is_unknown(value):
        raise UnknownNumberError(value)
    if opened is None:
        raise TraceError(
            f"a value of type {kind.__module__}.{kind.__qualname__} is neither a tensor, a constant nor "
            "a known container: register it with torch.utils._pytree.register_pytree_node, or pass "
            f"{'it as a dict' if isinstance(value, Mapping) else 'its tensors'}"
        )
    context, children = opened
    return Structure(kind, _comparable(kind, context), tuple(_flatten(child, tensors) for child in children))


def _unflatten(structure: Structure, tensors: Iterator[Tensor | None]) -> Any:
    if structure.kind is Tensor:
        return next(tensors)
    if structure.children is None:
        return _constant(structure.kind, structure.context)
    children = [_unflatten(child, tensors) for child in structure.children]
    return _close(structure.kind, _original(structure.kind, structure.context), children)


def exact(value: Any) -> Hashable:
    """A constant so that only constants of its type that no program can tell apart are equal.

    For 0.0 == -0.0, and nan != nan.

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
    """What else a container is rebuilt from, and its children; ``None`` for what is no known container."""
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
    if issubclass(kind, tuple) and (hasattr(kind, "_fields") or kind.__module__ == _RESULTS):
        return None, value
    if is_dataclass(kind) and not issubclass(kind, _BUILT_IN):
        # Attributes that are no fields belong to the object too.
        names = [field.name for field in fields(kind) if hasattr(value, field.name)]
        names = list(dict.fromkeys([*names, *getattr(value, "__dict__", ())]))
        return tuple(names), [getattr(value, name) for name in names]
    return None


_BUILT_IN = (list, tuple, dict, set, frozenset, int, float, complex, str, bytes)
"""What a dataclass that inherits from them contains besides its attributes is not known here."""

_RESULTS = "torch.return_types"
"""Where the tuples are from that ops return; others of their making, such as ``os.stat_result``, have more fields."""


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
    if kind.__module__ == _RESULTS:
        return kind(children)
    # The fields are those of an object that was already initialised: running __init__ again could change them.
    value = object.__new__(kind)
    for name, child in zip(context, children, strict=True):
        object.__setattr__(value, name, child)
    return value


def _comparable(kind: type, context: Any) -> Hashable:
    """A container's context so that it can be hashed, and is equal only where no program can tell two apart.

    Raises:
        TraceError: a key is no constant, nor made of constants, or a registered container cannot be compared.
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
    """The keys of a dictionary; as a structure unless all are strings, to tell 1 from True."""
    keys = tuple(value)
    return keys if all(type(key) is str for key in keys) else _without_tensors(keys)


def _has_keys(value: dict[Any, Any], keys: Hashable) -> bool:
    """Whether a dictionary has these keys, which :func:`_keys` has found, in this order."""
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
    """The context of a registered container as a structure; what is no constant in there counts as it compares."""
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
