"""The tensors and flags of a live model, as they are now.

A program takes parameters and buffers as arguments, so that whoever changes a weight, however they do it, changes what
the next call reads. Fetching them must not walk the module tree: the dictionaries that hold them are remembered, and
reading some hundred entries of remembered dictionaries takes some µs.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache, partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from autostream.frontend.tree import exact
from autostream.ir import Placeholder, Role
from autostream.tracing.bytecode import names_of
from autostream.tracing.functions import References
from autostream.tracing.reads import Read, Reads, functions_of


def name_of(model: nn.Module) -> str:
    """What a model calls itself, usually by its class."""
    return str(model._get_name())  # type: ignore[no-untyped-call]


class Entries:
    """Entries of dictionaries, and what each of them held: one look at all of them is quicker than one at each.

    Args:
        dicts: the dictionary of each entry.
        keys: its key there.
        values: what it held, ``None`` where there was no such entry.

    Example:
        >>> settings = {"eps": 1e-5}
        >>> entries = Entries([settings], ["eps"], [settings["eps"]])
        >>> entries.unchanged()
        True
        >>> settings["eps"] = 0.1
        >>> entries.unchanged()
        False
    """

    def __init__(self, dicts: Iterable[dict[str, Any]], keys: Iterable[str], values: Iterable[Any]) -> None:
        self._dicts, self._keys, self._values = list(dicts), list(keys), list(values)

    def unchanged(self) -> bool:
        """Whether the dictionaries hold these very values."""
        return all(map(operator.is_, map(dict.get, self._dicts, self._keys), self._values))


class Contents:
    """What containers contain, to the last constant: 2 is not 2.0, nor 0.0 the same as -0.0; and the order counts.

    The common answer takes one look at all items: none can have changed while all are the very same.

    Args:
        values: made of constants, functions and containers of these.

    Example:
        >>> sizes = ([1, 2], "name")
        >>> contents = Contents([sizes])
        >>> contents.unchanged()
        True
        >>> sizes[0][1] = 2.0
        >>> contents.unchanged()
        False
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = [value for value in values if any(True for _ in _changing(value))]
        self._then = list(map(_exactly, self._values))
        self._views = [view for value in self._values for container in _changing(value) for view in _views(container)]
        self._items = list(chain.from_iterable(self._views))
        self._containers = [(held, _items(held)) for value in self._values for held in _changing(value)]

    def unchanged(self) -> bool:
        """Whether they contain what they did when this was made, or what no program can tell from it."""
        return (
            not self._views
            or all(map(operator.is_, chain.from_iterable(self._views), self._items))
            or list(map(_exactly, self._values)) == self._then
        )

    @contextmanager
    def as_then(self) -> Iterator[None]:
        """The containers contain for a while what they did when this was made."""
        changed = [] if self.unchanged() else [(held, then, _items(held)) for held, then in self._containers]
        try:
            for held, then, _ in changed:
                _fill(held, then)
            yield
        finally:
            for held, _, now in changed:
                _fill(held, now)


_UNCHANGING = (tuple, frozenset)
_CONTAINERS = (list, dict, set, *_UNCHANGING)


def _items(container: Any) -> tuple[Any, ...]:
    return tuple(container.items() if isinstance(container, dict) else container)


def _fill(container: Any, items: tuple[Any, ...]) -> None:
    """Let a list, dictionary or set contain these."""
    container.clear()
    container.extend(items) if isinstance(container, list) else container.update(items)


def _changing(value: Any) -> Iterator[Any]:
    """The containers that can change in a value, at any depth, and the value itself if it is one."""
    if isinstance(value, _CONTAINERS):
        if not isinstance(value, _UNCHANGING):
            yield value
        yield from chain.from_iterable(map(_changing, _items(value)))


def _views(container: Any) -> Iterator[Iterable[Any]]:
    """What gives the items of a container as they are now, and says where they end."""
    yield container
    if isinstance(container, dict):
        yield dict.values(container)
    yield _END


_END = (object(),)


def _exactly(value: Any) -> tuple[type, object]:
    """A plain value so that only values that no program can tell apart are equal."""
    return type(value), tuple(map(_exactly, _items(value))) if isinstance(value, _CONTAINERS) else exact(value)


_TRAINING = operator.itemgetter("training")


class ModelWatch:
    """Tells, without walking the module tree, whether a model is still made of the same modules.

    Args:
        model: the module to watch. Its functions get for submodules what they refer to now.
    """

    def __init__(self, model: nn.Module) -> None:
        self._references = References(model)
        self.modules = list(model.modules())
        # A few kinds of modules compute the flag, or keep it elsewhere; frozen TorchScript has none.
        self._flags = [vars(module) for module in self.modules if "training" in vars(module)]
        self._others = [module for module in self.modules if "training" not in vars(module)]
        # TorchScript modules have something else there, which never changes.
        children = [module._modules for module in self.modules if isinstance(module._modules, dict)]
        slots = [slots for module in self.modules if _may_grow(module) for slots in _slots_of(module)]
        self._empty = [names for names in (*children, *slots) if not names]  # most of them
        self._children = list(filter(None, children))
        self._children_then = list(map(dict, self._children))
        # Dictionaries are equal in any order, which is that of the modules of an ``nn.Sequential``.
        self._ordered = [names for names in self._children if len(names) > 1]
        self._order_then = list(chain.from_iterable(self._ordered))
        self._filled = list(filter(None, slots))
        self._names_then = list(map(list, self._filled))
        self._parameters = [names for module in self.modules if isinstance(names := module._parameters, dict)]
        self._hooks: list[Mapping[int, Any]] = [
            *(hooks for module in self.modules for hooks in (module._forward_hooks, module._forward_pre_hooks)),
            *(nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks),
        ]
        self._backward_hooks: list[Mapping[int, Any]] = [
            hooks for module in self.modules for hooks in (module._backward_hooks, module._backward_pre_hooks)
        ]
        self._reads = Reads(functions_of(self.modules))

    def intact(self) -> bool:
        """Whether the modules, their order, and the names of their tensors are as when this object was made.

        Those that functions refer to are among them.
        """
        return (
            self._references.hold()
            and not any(self._empty)
            and self._children == self._children_then
            and list(chain.from_iterable(self._ordered)) == self._order_then
            and list(map(list, self._filled)) == self._names_then
        )

    def training(self) -> bytes:
        """The training flags of all modules, one byte each."""
        flags = bytes(map(_TRAINING, self._flags))
        return flags + bytes([getattr(module, "training", False) for module in self._others]) if self._others else flags

    def read(self) -> Read:
        """What the functions that modules of a user's are made of read elsewhere, such as numbers that are globals."""
        return self._reads()

    def required(self) -> bytes:
        """Which parameters require gradients, one byte each; tied ones as often as they are tied."""
        values = chain.from_iterable(map(dict.values, self._parameters))
        return bytes([value is not None and value.requires_grad for value in values])

    def hooked(self) -> bool:
        """Whether a module has forward hooks, which a traced graph would not call."""
        return any(self._hooks)

    def hooked_backward(self) -> bool:
        """Whether a module has backward hooks, which a traced graph would not call."""
        everywhere = nn_module._global_backward_hooks, nn_module._global_backward_pre_hooks
        return any(self._backward_hooks) or any(everywhere)


class LiveState:
    """The parameters, buffers and constants that a program's placeholders stand for.

    Args:
        model: the traced module.
        placeholders: those of the program; inputs are passed over.
        constants: values of the constants that no attribute of the model holds, by placeholder target.
    """

    def __init__(self, model: nn.Module, placeholders: Sequence[Placeholder], constants: dict[str, Tensor]) -> None:
        held = [item for item in placeholders if item.role is not Role.INPUT]
        slots = [_slot(model, item, constants) for item in held]
        self._dicts = [holder for holder, _ in slots]
        self._keys = [key for _, key in slots]
        # A plain attribute, unlike a parameter or buffer, can become anything.
        self._loose = [index for index, item in enumerate(held) if item.role is Role.CONSTANT]
        tensors = self.tensors()
        places = {id(tensor): index for index, tensor in enumerate(tensors)}
        # A tied weight has one placeholder and several names; when one of the names gets another tensor, it is untied.
        ties = [
            (holder, key, places[id(tensor)])
            for module in model.modules()
            for holder in (module._parameters, module._buffers)
            for key, tensor in holder.items()
            if id(tensor) in places
            and (holder is not self._dicts[places[id(tensor)]] or key != self._keys[places[id(tensor)]])
        ]
        self._tied_dicts: list[dict[str, Any]] = [holder for holder, _, _ in ties]
        self._tied_keys = [key for _, key, _ in ties]
        self._tied_places = [place for _, _, place in ties]
        idle = list(_idle(model, places))
        self._idle_dicts: list[dict[str, Any]] = [holder for holder, _ in idle]
        self._idle_keys = [key for _, key in idle]
        self._idle_then = self._idle_kinds()
        settings = list(_settings(model))
        self._setting_dicts: list[dict[str, Any]] = [holder for holder, _ in settings]
        self._setting_names = [name for _, name in settings]
        self._settings_then = self._settings()
        self._absent = [name not in holder for holder, name in settings]
        self._contents = Contents(filter(_is_plain, self._settings_then))

    def tensors(self) -> list[Tensor | None]:
        """The tensors in placeholder order, as the model holds them now; ``None`` for one that was removed."""
        tensors = list(map(dict.get, self._dicts, self._keys))
        for index in self._loose:
            if not isinstance(tensors[index], Tensor):
                tensors[index] = None
        return tensors

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the model holds these very tensors where :meth:`tensors` finds them, tied as they were."""
        now = map(dict.get, self._dicts, self._keys)
        return all(map(operator.is_, now, tensors)) and self.tied(tensors)

    def tied(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether weights that were tied when the program was traced still are, among these tensors."""
        named = map(dict.get, self._tied_dicts, self._tied_keys)
        return all(map(operator.is_, named, map(tensors.__getitem__, self._tied_places)))

    def configured(self) -> bool:
        """Whether what modules hold besides tensors is as it was: numbers, flags, functions, and containers of them."""
        now = self._settings()
        if not all(map(operator.is_, now, self._settings_then)) and not all(map(_equal, now, self._settings_then)):
            return False
        return self.contents_intact()

    @contextmanager
    def as_traced(self) -> Iterator[None]:
        """What modules hold besides tensors is for a while what it was when the program was traced."""
        then = zip(self._setting_dicts, self._setting_names, self._settings_then, self._absent, strict=True)
        changed = [
            (holder, name, value, absent)
            for holder, name, value, absent in then
            if holder.get(name) is not value or (name not in holder) is not absent
        ]
        now = [(holder, name, holder.get(name), name not in holder) for holder, name, *_ in changed]
        try:
            _put(changed)
            with self._contents.as_then():
                yield
        finally:
            _put(now)

    def contents_intact(self) -> bool:
        """Whether what another look at the same objects may find changed is as it was.

        That is what containers contain, and what tensors are like that the program does not read: a model may go by
        the shape, dtype or device of one, or by whether it is there.
        """
        return self._contents.unchanged() and (not self._idle_keys or self._idle_kinds() == self._idle_then)

    def entries(self, tensors: Sequence[Tensor]) -> Entries:
        """What modules hold while they hold these tensors and are, containers aside, :meth:`configured`."""
        tied = [tensors[place] for place in self._tied_places]
        dicts = (*self._dicts, *self._tied_dicts, *self._setting_dicts)
        keys = (*self._keys, *self._tied_keys, *self._setting_names)
        return Entries(dicts, keys, (*tensors, *tied, *self._settings_then))

    def _idle_kinds(self) -> list[object]:
        try:
            return list(map(_KIND, map(dict.get, self._idle_dicts, self._idle_keys)))
        except AttributeError:  # one is gone
            return []

    def _settings(self) -> list[Any]:
        return list(map(dict.get, self._setting_dicts, self._setting_names))


def _put(entries: Iterable[tuple[dict[str, Any], str, Any, bool]]) -> None:
    """Let dictionaries hold values under names, or, where they are absent, nothing."""
    for holder, name, value, absent in entries:
        if absent:
            holder.pop(name, None)
        else:
            holder[name] = value


_SETTINGS = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range, type, Enum,
    FunctionType, BuiltinFunctionType, MethodType, partial,
)  # fmt: skip


def _may_grow(module: nn.Module) -> bool:
    """Whether a tensor under a new name may matter to a module: PyTorch's layers know the names of theirs."""
    owner = type(module).__module__
    return not owner.startswith("torch.nn.modules.") or owner == "torch.nn.modules.container"


def _slots_of(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The dictionaries of a module's tensors; TorchScript modules have something else there, which never grows."""
    yield from (slots for slots in (module._parameters, module._buffers) if isinstance(slots, dict))


_KIND = operator.attrgetter("shape", "dtype", "device")


def _idle(model: nn.Module, read: Container[int]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where modules hold tensors that a program does not read, by the ids of those that it reads.

    Batch norm counts in one of its buffers while it learns; nobody looks at that otherwise, and it would take long.
    """
    for module in model.modules():
        for slots in _slots_of(module):
            names = (name for name, tensor in slots.items() if tensor is not None and id(tensor) not in read)
            yield from ((slots, name) for name in names if name != "num_batches_tracked")


_TORCHS_OWN = (
    *("p", "eps", "momentum", "track_running_stats", "mode", "dropout"),
    *("negative_slope", "alpha", "beta", "threshold", "value", "lambd", "lower", "upper", "min_val", "max_val"),
)
"""What is watched of PyTorch's own layers, of which a model has thousands: looking at everything would take longer than
the model does."""

_FEW = ("torch.nn.modules.loss", "torch.nn.modules.distance")
"""Where PyTorch has modules of which there are few: everything is watched."""


def _settings(model: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Where modules hold what a graph takes for granted: the dictionary of their attributes, and the key."""
    common = vars(nn.Module())
    for module in model.modules():
        attributes = vars(module)
        for slots in _slots_of(module):
            yield from ((slots, name) for name, tensor in slots.items() if tensor is None)
        yield attributes, "forward"  # of the class, unless somebody sets another one on the module
        kind: type = type(module)
        if kind.__module__.startswith("torch.") and kind.__module__ not in _FEW:
            yield from ((attributes, name) for name in _TORCHS_OWN if name in attributes)
            given = (name for name in attributes.keys() - common.keys() if name not in _set_by(kind))
            yield from ((attributes, name) for name in given if _is_plain(attributes[name]))
            continue
        own = (name for name, value in attributes.items() if name not in common and not isinstance(value, Tensor))
        yield from ((attributes, name) for name in own if name != "forward")
        yield from ((attributes, name) for name in _defaults(kind) if name not in attributes)


@cache
def _set_by(kind: type) -> frozenset[str]:
    """The attributes that a class of PyTorch's sets itself; others are of a user's, who reads them."""
    classes = kind.__mro__[: kind.__mro__.index(nn.Module)]
    functions = (value for each in classes for value in vars(each).values() if isinstance(value, FunctionType))
    return frozenset(_TORCHS_OWN).union(*(names_of(function.__code__).written for function in functions))


def _defaults(kind: type) -> set[str]:
    """Attributes of a class of modules that one of a module may take the place of; not methods, which are many."""
    classes = kind.__mro__[: kind.__mro__.index(nn.Module)]
    return {
        name
        for each in classes
        for name, value in vars(each).items()
        if not name.startswith("__") and not isinstance(value, FunctionType) and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    """Whether comparing a value with itself at another time is a matter of constants."""
    if isinstance(value, _CONTAINERS):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _SETTINGS)


def _equal(now: Any, then: Any) -> bool:
    return now is then or (type(now) is type(then) and _is_plain(then) and _exactly(now) == _exactly(then))


def _slot(model: nn.Module, placeholder: Placeholder, constants: dict[str, Tensor]) -> tuple[dict[str, Any], str]:
    """The dictionary that holds a placeholder's tensor, and its key there."""
    if placeholder.target in constants:
        return constants, placeholder.target
    path, _, name = placeholder.target.rpartition(".")
    owner = model.get_submodule(path)
    for holder in (owner._parameters, owner._buffers):
        if name in holder:
            return cast(dict[str, Any], holder), name
    return vars(owner), name
