"""What functions read by name from elsewhere: numbers and flags that a graph of them would keep for good, and modules.

    loss_fn ──▶ code ──▶ names ──▶ globals, closures, defaults ──▶ numbers, modules
                                          └──▶ functions, and objects with what the code names of them ──▶ …

Where they are is looked up once. From then on, one look at all of them says whether any is another object.
"""

from __future__ import annotations

import inspect
import operator
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch import Tensor, nn

from autostream.tracing.bytecode import Named, names_of
from autostream.tracing.tree import exact

Read = tuple[tuple[str, type, Hashable], ...]
"""What was read: names, with the kind and the value of what is there."""

_DEPTH = 4
"""How far to follow functions that call functions, and objects that hold objects."""


class Reads:
    """What functions read by name from elsewhere.

    Numbers, flags, strings, tuples of these, and functions are told; of objects and Python modules, what the code names
    of them. What a function writes itself is not, nor what is in lists, or found by a name that is computed.

    Args:
        functions: those to look at. Of what they call, libraries are left out.

    Example:
        >>> settings = {"scale": 2.0}
        >>> reads = Reads([lambda x: x * settings["scale"]])
        >>> reads()
        (("settings['scale']", <class 'float'>, '0x1.0000000000000p+1'),)
        >>> settings["scale"] = 1.0
        >>> reads()
        (("settings['scale']", <class 'float'>, '0x1.0000000000000p+0'),)
    """

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        self._functions = list(functions)
        self._look()

    def __call__(self) -> Read:
        """What they read now; the same object as long as nothing has changed."""
        return self._now().told

    def modules(self) -> dict[str, nn.Module]:
        """The modules that they refer to now, each by a name that a submodule may have.

        Example:
            >>> teacher = nn.Linear(1, 1)
            >>> Reads([lambda x: teacher(x)]).modules()
            {'teacher': Linear(in_features=1, out_features=1, bias=True)}
        """
        return self._now().modules

    def _now(self) -> _Seen:
        seen = self._seen  # one value: other threads look meanwhile
        found = seen.found()
        return self._look() if found is None or not all(map(operator.is_, found, seen.then)) else seen

    def _look(self) -> _Seen:
        finder = Finder()
        for function in self._functions:
            finder.look(function)
        places = [place for place in finder.places.values() if place.name not in finder.written]
        self._seen = seen = _Seen(
            [place for place in places if isinstance(place.holder, dict)],
            [place for place in places if not isinstance(place.holder, dict)],
            finder.modules,
        )
        return seen


class _Seen:
    """What was at some places when this was made.

    Args:
        entries: of dictionaries.
        others: attributes of something else.
        modules: those that were met, by name.
    """

    def __init__(self, entries: Sequence[Place], others: Sequence[Place], modules: dict[str, nn.Module]) -> None:
        self.modules = modules
        self._dicts, self._keys = [own.holder for own in entries], [own.key for own in entries]
        self._holders, self._attributes = [own.holder for own in others], [own.key for own in others]
        self.then = self.found() or []
        told = zip((own.label for own in (*entries, *others)), self.then, strict=False)
        self.told: Read = tuple((label, *_told(value)) for label, value in told if _is_told(value))

    def found(self) -> list[Any] | None:
        """What is there now; nothing where one is gone."""
        try:
            return [*map(dict.get, self._dicts, self._keys), *map(getattr, self._holders, self._attributes)]
        except Exception:  # a variable has no value any more, or a user's own way to look something up fails
            return None


def unlike(one: Read, other: Read) -> Iterator[str]:
    """The names of what differs between two looks.

    Example:
        >>> list(unlike((("n", int, 1), ("m", int, 1)), (("n", int, 2), ("m", int, 1))))
        ['n']
    """
    return iter(sorted({name for name, _, _ in set(one) ^ set(other)}))


@dataclass(frozen=True, slots=True)
class Place:
    """An entry of a dictionary, or an attribute of something else; what code calls it, and what users would."""

    holder: Any
    key: Any
    name: str
    label: str


_NOTHING = Named()


class Finder:
    """Collects the places that functions read, the modules that are there, and the names that they write."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self._modules: set[int] = set()
        self.places: dict[tuple[int, Any], Place] = {}
        self.written: set[str] = set()
        self._seen: dict[tuple[int, int], object] = {}

    def look(self, function: Callable[..., Any]) -> None:
        """Follow a function, as far as the objects that it names can be looked at: some fail, or have no end."""
        with suppress(Exception):
            self.follow("", _called(function), _NOTHING, 0)

    def follow(self, label: str, value: Any, named: Named, depth: int) -> None:
        """Note what lies behind a value that some code reads, and what else that code names of it."""
        if not self._enters(value, named, depth) or isinstance(value, Tensor):
            return
        if isinstance(value, nn.Module):
            self._module(label, value, named, depth)
        elif isinstance(value, FunctionType):
            self._function(value, depth)
        elif isinstance(value, MethodType):
            self._method(label, value.__self__, value.__func__, depth)
        elif isinstance(value, partial):
            function = _called(value.func)
            self.follow(label, function, named, depth + 1)
            code = getattr(function, "__code__", None)
            where = label or f"{getattr(function, '__name__', 'partial')}(…)"
            for item in (*value.args, *value.keywords.values()):
                self.follow(where, item, names_of(code) if code else named, depth + 1)
        elif isinstance(value, dict):
            self._entries(label, value, named.keys & value.keys(), named, "{}[{!r}]", depth)
        elif isinstance(value, ModuleType):
            if not _is_library(value.__name__, getattr(value, "__file__", None)):
                self._entries(label, vars(value), named.attributes & vars(value).keys(), named, "{}.{}", depth)
        elif _is_users(value):
            self._object(label, value, named, depth)

    def _enters(self, value: Any, named: Named, depth: int) -> bool:
        """Whether to look into a value for what some code names of it: not too deep, and once."""
        key = id(value), id(named)
        if depth > _DEPTH or key in self._seen:
            return False
        self._seen[key] = value, named  # and keep both, so that no other gets their ids
        return True

    def _function(self, function: FunctionType, depth: int) -> None:
        if depth and _is_library(function.__module__, function.__code__.co_filename):
            if inspect.unwrap(function) is not function:  # as by ``torch.no_grad()``
                self.follow("", inspect.unwrap(function), _NOTHING, depth)
            return
        code, variables = function.__code__, function.__globals__
        named = names_of(code)
        self.written |= named.written
        self._entries("", variables, named.variables & variables.keys(), named, "{}{}", depth)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._attribute(name, cell, "cell_contents", name, named, depth)
        if function.__defaults__:
            self._attribute(f"the defaults of {function.__name__}", function, "__defaults__", "", named, depth)
            own = code.co_varnames[code.co_argcount - len(function.__defaults__) : code.co_argcount]
            for name, item in zip(own, function.__defaults__, strict=True):
                self.follow(name, item, named, depth + 1)
        if function.__kwdefaults__:
            self._entries("", function.__kwdefaults__, frozenset(function.__kwdefaults__), named, "{}{}", depth)

    def _method(self, label: str, owner: Any, function: Any, depth: int) -> None:
        self.follow(label, function, _NOTHING, depth)
        if isinstance(function, FunctionType):
            self.follow(label or "self", owner, names_of(function.__code__), depth)

    def _module(self, label: str, module: nn.Module, named: Named, depth: int) -> None:
        """A module, and what code names of the objects that it has, and of its class; its own attributes others watch.

        It is noted under a name that is no path, and no other's.
        """
        if id(module) not in self._modules:
            self._modules.add(id(module))
            name = re.sub(r"\W+", "_", label)
            while name in self.modules:
                name = f"{name}_{len(self.modules)}"
            self.modules[name] = module
        label = type(module).__name__
        for name in sorted(named.attributes & vars(module).keys()):
            self.follow(f"{label}.{name}", vars(module)[name], named, depth + 1)
        self._shared(label, module, type(module), named, named.attributes - vars(module).keys(), depth)

    def _object(self, label: str, value: Any, named: Named, depth: int) -> None:
        """What code names of an object or a class: attributes of its own and of its class, and its methods."""
        own = vars(value) if not isinstance(value, type) and hasattr(value, "__dict__") else {}
        self._entries(label, own, named.attributes & own.keys(), named, "{}.{}", depth)
        self._shared(label, value, value, named, named.attributes - own.keys(), depth)

    def _shared(
        self, label: str, value: Any, holder: Any, named: Named, attributes: Collection[str], depth: int
    ) -> None:
        """These attributes of a value's class, as they are found at ``holder``."""
        classes = (value if isinstance(value, type) else type(value)).__mro__
        users = [each for each in classes if not _is_library(each.__module__)]
        items = [(name, item) for each in users for name, item in vars(each).items() if name in attributes]
        for name, item in sorted(items, key=operator.itemgetter(0)):  # of each class: some call their like above
            if (function := function_of(item)) is not item or isinstance(item, FunctionType):
                self._method(label, value, function, depth + 1)
            elif isinstance(item, MemberDescriptorType) or not hasattr(item, "__get__"):  # others run a user's code
                self._attribute(f"{label}.{name}", holder, name, name, named, depth)

    def _entries(
        self, label: str, holder: dict[str, Any], keys: Iterable[str], named: Named, form: str, depth: int
    ) -> None:
        for key in sorted(keys):
            self._note(Place(holder, key, key, form.format(label, key)), holder[key], named, depth)

    def _attribute(self, label: str, holder: Any, key: str, name: str, named: Named, depth: int) -> None:
        try:
            value = getattr(holder, key)
        except Exception:  # it has no value yet, or a user's own way to look it up fails
            return
        self._note(Place(holder, key, name, label), value, named, depth)

    def _note(self, place: Place, value: Any, named: Named, depth: int) -> None:
        if isinstance(value, Tensor) or _is_torchs(value):
            return
        self.places.setdefault((id(place.holder), place.key), place)
        self.follow(place.label, value, named, depth + 1)


def function_of(item: Any) -> Any:
    """The function behind what a class has under a name: of a property, what gets its value; others are themselves."""
    if isinstance(item, property):
        return item.fget
    return item.__func__ if isinstance(item, (staticmethod, classmethod)) else item


def _called(function: Any) -> Any:
    """What runs when something is called."""
    return function if isinstance(function, (FunctionType, MethodType, partial)) else function.__call__


_OURS = __name__.partition(".")[0]


def _is_library(module: str | None, file: str | None = None) -> bool:
    """Whether somebody else looks after what is defined in a module."""
    root = str(module).partition(".")[0]
    installed = file is not None and ("site-packages" in file or "dist-packages" in file)
    return installed or root in ("torch", _OURS) or (root in sys.stdlib_module_names and root != "__main__")


def _is_users(value: Any) -> bool:
    """Whether what an object or a class has may be a user's."""
    kind = value if isinstance(value, type) else type(value)
    return isinstance(value, _NAMESPACES) or not _is_library(kind.__module__)


def _is_torchs(value: Any) -> bool:
    """Whether a value is one of PyTorch's modules, classes or functions, which stay what they are."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(value, (ModuleType, type, FunctionType, BuiltinFunctionType)) and _is_library(str(name))


_NAMESPACES = (SimpleNamespace, Namespace)
"""Of Python's library, and yet with what is a user's."""

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
"""What leads to nothing else."""

_BY_IDENTITY = (FunctionType, BuiltinFunctionType, type, nn.Module)


def _is_told(value: Any, depth: int = 0) -> bool:
    if type(value) is tuple:
        return depth <= _DEPTH and all(_is_told(item, depth + 1) for item in value)
    return isinstance(value, (*CONSTANTS, *_BY_IDENTITY))


def _told(value: Any) -> tuple[type, Hashable]:
    """The kind of a constant, and the value so that only those that no program can tell apart are equal."""
    return type(value), tuple(map(_told, value)) if type(value) is tuple else exact(value)


def functions_of(modules: Sequence[nn.Module]) -> list[Callable[..., Any]]:
    """The functions that modules of a user's are made of: those that they were made from, or how each goes forward.

    Example:
        >>> functions_of([nn.Linear(1, 1)])
        []
    """
    made = [vars(module)["_autostream_function"] for module in modules if "_autostream_function" in vars(module)]
    users = [module for module in modules if not _is_library(type(module).__module__)]
    forwards = (MethodType(type(own).forward, own) for own in users if isinstance(type(own).forward, FunctionType))
    return [*(function for function in made if not _is_torchs(function)), *forwards]
