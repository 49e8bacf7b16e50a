"""What a model holds besides tensors: noticing that it changes, and putting it back.

Tracing runs a model's Python, so what that does to the model's attributes happens then, once, and is missing from the
graph. A tracer must notice, and leave the model as it was.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Holder:
    """A dictionary, list or set that a model's attributes lead to, with what it held at some time.

    Attributes:
        path: how to get there from the model.
        live: the container itself.
        before: a copy of it.
    """

    path: str
    live: Any
    before: Any

    def changed(self) -> str:
        """The path of something in it that is not what it was, or ``""``."""
        if not isinstance(self.before, dict):
            return "" if _same(self.before, self.live) else self.path
        names = {**self.before, **self.live}
        changed = (n for n in names if not _same(self.before.get(n, _ABSENT), self.live.get(n, _ABSENT)))
        return next((_join(self.path, name) for name in changed if not _is_book_keeping(name)), "")

    def restore(self) -> None:
        """Put back what it held."""
        if isinstance(self.before, list):
            self.live[:] = self.before
        elif not (isinstance(self.before, dict) and _identical(self.before, self.live)):
            self.live.clear()
            self.live.update(self.before)


def holders(model: nn.Module) -> list[Holder]:
    """Every container that a model's attributes lead to: through modules, containers, and objects that are its user's.

    Example:
        >>> model = nn.ReLU()
        >>> model.cache = []
        >>> before = holders(model)
        >>> model.cache.append(1)
        >>> [holder.changed() for holder in before if holder.changed()]
        ['cache']
    """
    found: list[Holder] = []
    pending: list[tuple[str, object]] = [("", model)]
    seen: dict[int, object] = {}
    while pending:
        path, value = pending.pop()
        live: Any = value if isinstance(value, (dict, list, set, tuple)) else _attributes(value)
        if live is None or id(live) in seen:
            continue
        seen[id(live)] = live
        if isinstance(live, dict):
            found.append(Holder(path, live, dict(live)))
            pending += [(_join(path, name), item) for name, item in live.items()]
            continue
        if not isinstance(live, tuple):
            found.append(Holder(path, live, list(live) if isinstance(live, list) else set(live)))
        pending += [(path, item) for item in live]
    return found


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore a model's attributes, and what they contain, and all random generators afterwards.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> with untouched(model):
        ...     model.bias = None
        >>> model.bias is None
        False
    """
    before = holders(model)
    with _preserved_generators():
        try:
            yield
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
        return getattr(value, "__dict__", None)
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
    if type(old) is not type(new):
        return False
    if isinstance(old, (bool, int, float, complex, str, bytes, set, torch.device)):
        return old == new
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        return list(old) == list(new) and all(map(_same, old.values(), new.values()))
    return old is new


def _identical(old: dict[Any, Any], new: dict[Any, Any]) -> bool:
    return list(map(id, old)) == list(map(id, new)) and list(map(id, old.values())) == list(map(id, new.values()))
