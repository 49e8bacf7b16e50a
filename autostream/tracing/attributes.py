"""What a model holds besides tensors, or refers to by name: noticing that it changes, and putting it back.

Tracing runs a model's Python, so what that does to the model's attributes, to global variables and the like happens
then, once, and is missing from the graph. A tracer must notice, and leave everything as it was.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CellType
from typing import Any

import torch
from torch import nn

from autostream.tracing.generators import GeneratorState, is_generator
from autostream.tracing.reads import functions_of
from autostream.tracing.writes import CONTAINERS, Writable


@dataclass(frozen=True, slots=True)
class Holder:
    """A dictionary, list, set or deque that a model leads to, with what it held at some time.

    Attributes:
        path: how to get there from the model, or what its functions call it.
        live: the container itself.
        before: a copy of it.
    """

    path: str
    live: Any
    before: Any

    @staticmethod
    def of(path: str, live: Any) -> Holder:
        """A container as it is."""
        kind = dict if isinstance(live, dict) else set if isinstance(live, set) else list
        return Holder(path, live, kind(live))

    def now(self) -> Any:
        """What it holds."""
        return self.live

    def changed(self) -> str:
        """The path of something in it that is not what it was, or ``""``."""
        if not isinstance(self.before, dict):
            return "" if _same(self.before, type(self.before)(self.live)) else self.path
        names = {**self.before, **self.live}
        changed = (n for n in names if not _same(self.before.get(n, _ABSENT), self.live.get(n, _ABSENT)))
        return next((_join(self.path, name) for name in changed if not _is_book_keeping(name)), "")

    def restore(self) -> None:
        """Put back what it held."""
        if _identical(self.before, self.live):  # others may be at it meanwhile
            return
        kind: Any = next(own for own in (OrderedDict, *CONTAINERS) if isinstance(self.live, own))
        kind.clear(self.live)  # not a method of a user's class, which may refuse or do more
        if isinstance(self.before, dict):
            for key, value in self.before.items():
                kind.__setitem__(self.live, key, value)
        elif isinstance(self.before, set):
            kind.update(self.live, self.before)
        else:
            kind.extend(self.live, self.before)


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable or an attribute, with what it was at some time.

    Attributes:
        path: what users call it.
        holder: the dictionary, cell or object that has it.
        key: its name there.
        before: its value then, if it had one.
    """

    path: str
    holder: Any
    key: str
    before: Any

    @staticmethod
    def of(path: str, holder: Any, key: str) -> Variable:
        """A variable as it is."""
        return Variable(path, holder, key, _value(holder, key))

    def now(self) -> Any:
        """Its value."""
        return _value(self.holder, self.key)

    def changed(self) -> str:
        """Its path if it is not what it was, or ``""``."""
        return "" if _same(self.before, self.now()) else self.path

    def restore(self) -> None:
        """Put back what it was."""
        if self.now() is self.before:
            return
        if isinstance(self.holder, dict):
            if self.before is _ABSENT:
                del self.holder[self.key]
            else:
                self.holder[self.key] = self.before
        elif self.before is _ABSENT:
            delattr(self.holder, self.key)
        else:
            setattr(self.holder, self.key, self.before)


def _value(holder: Any, key: str) -> Any:
    """What a dictionary, a cell or an object has there itself, not by its class."""
    if isinstance(holder, dict):
        return holder.get(key, _ABSENT)
    if inspect.isdatadescriptor(getattr(type(holder), key, None)):  # of a cell, a function, or an object with slots
        return getattr(holder, key, _ABSENT) if not isinstance(holder, CellType) else _contents(holder)
    return getattr(holder, "__dict__", {}).get(key, _ABSENT)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _ABSENT


def holders(model: nn.Module) -> list[Holder | GeneratorState]:
    """Every container and random generator that a model's attributes lead to.

    Led to through modules, containers, and objects that are its user's.

    Example:
        >>> model = nn.ReLU()
        >>> model.cache = []
        >>> before = holders(model)
        >>> model.cache.append(1)
        >>> [holder.changed() for holder in before if holder.changed()]
        ['cache']
    """
    found: list[Holder | GeneratorState] = []
    pending: list[tuple[str, object]] = [("", model)]
    seen: dict[int, object] = {}
    while pending:
        path, value = pending.pop()
        if is_generator(value):
            found.append(GeneratorState.of(path, value))
        live: Any = value if isinstance(value, (*CONTAINERS, tuple)) else _attributes(value)
        if live is None or id(live) in seen:
            continue
        seen[id(live)] = live
        if isinstance(live, dict):
            found.append(Holder.of(path, live))
            pending += [(_join(path, name), item) for name, item in live.items()]
            continue
        if not isinstance(live, tuple):
            found.append(Holder.of(path, live))
        pending += [(path, item) for item in live]
    return found


@dataclass(frozen=True, slots=True)
class Outside:
    """What the functions that a model is made of may change elsewhere, as far as they name it.

    Attributes:
        holders: what can be put back, such as the list ``history`` for ``module_of(lambda x: history.append(x))``.
        iterators: the names of what cannot, such as ``numbers`` for ``module_of(lambda x: x * next(numbers))``.
    """

    holders: Sequence[Holder | Variable | GeneratorState]
    iterators: Sequence[str]


def referred_to(model: nn.Module) -> Outside:
    """Everything outside of a model that it may change."""
    found = Writable(functions_of(list(model.modules())))
    containers = (Holder.of(label, value) for label, value in found.containers)
    variables = (Variable.of(label, holder, key) for holder, key, label in found.variables)
    generators = (GeneratorState.of(label, value) for label, value in found.generators)
    return Outside((*containers, *variables, *generators), tuple(found.iterators))


@contextmanager
def untouched(model: nn.Module) -> Iterator[Outside]:
    """Restore a model's attributes, what they contain, what it refers to, and random generators afterwards.

    These are the global ones of PyTorch, Python and NumPy, and those that are among the rest.

    Yields:
        What it refers to, as it is restored; what is taken from iterators is not.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> with untouched(model):
        ...     model.bias = None
        >>> model.bias is None
        False
    """
    outside = referred_to(model)
    before = [*holders(model), *outside.holders]
    with _preserved_generators():
        try:
            yield outside
        finally:
            for holder in before:
                holder.restore()


def host_generators() -> tuple[object, ...]:
    """The states of Python's and of NumPy's global generator, and PyTorch's seed, to compare.

    Example:
        >>> before = host_generators()
        >>> _ = random.random()
        >>> host_generators() == before
        False
    """
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        return torch.initial_seed(), random.getstate(), name, keys.tobytes(), *rest
    return torch.initial_seed(), random.getstate()


@contextmanager
def _preserved_generators() -> Iterator[None]:
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    with ExitStack() as stack:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        stack.enter_context(torch.random.fork_rng(devices))
        try:
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(numpy_state)


def _attributes(value: object) -> dict[str, Any] | None:
    """The attributes of a module or of an object of the user's, ``None`` for what a library looks after itself."""
    library = type(value).__module__.partition(".")[0]
    if isinstance(value, nn.Module) or not (library in _LIBRARIES or library in sys.stdlib_module_names):
        found = getattr(value, "__dict__", None)
        return found if isinstance(found, dict) else None  # a class shows its own, but not to be written to
    return None


_LIBRARIES = frozenset({"torch", __name__.partition(".")[0]})
"""Ours too: from what a step knows of its loss, it is not far to the globals of a user's file."""


def _join(path: str, name: object) -> str:
    # In these dictionaries, a module holds what are its attributes to everybody else.
    return path if name in ("_parameters", "_buffers", "_modules") else f"{path}.{name}".lstrip(".")


def _is_book_keeping(name: object) -> bool:
    """Whether PyTorch sets it for itself.

    Recurrent layers renew lists of their weights when export exchanges those for fake ones, and a module of fx, such as
    a piece of a model that Dynamo has split, generates its code when it is first called.
    """
    return isinstance(name, str) and (name.startswith("_flat_weight") or name in _GENERATED_CODE)


_GENERATED_CODE = frozenset({"_code", "_lineno_map", "_prologue_start"})


_ABSENT = object()


def _same(old: object, new: object) -> bool:
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, (bool, int, float, complex, str, bytes, set, torch.device)):
        return old == new
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        return list(old) == list(new) and all(map(_same, old.values(), new.values()))
    return old is new


def _identical(old: Any, new: Any) -> bool:
    if isinstance(old, dict) and not _identical([*old.values()], [*new.values()]):
        return False
    return [*map(id, old)] == [*map(id, new)]
