"""What functions read by name from elsewhere: numbers and flags that a graph of them would keep for good, and modules.

    loss_fn ──▶ code ──▶ names ──▶ globals, closures, defaults ──▶ numbers, modules
                                          └──▶ functions, and objects with what any code names of them ──▶ …

An object may be handed on, so that other code than what reads it asks it for its attributes: what is looked at of each
is what all the functions together name. Where they are is looked up once. From then on, one look at all of them says
whether any is another object.
"""

from __future__ import annotations

import inspect
import operator
import re
import sys
import threading
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import repeat
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from autostream.frontend.tree import exact
from autostream.tracing.bytecode import Named, names_of
from autostream.tracing.contents import MOST_ITEMS, contents_of, has_contents

Read = tuple[tuple[str, type, Hashable], ...]
"""What was read: names, with the kind and the value of what is there."""

_DEPTH = 4
"""How far to follow functions that call functions, and objects that hold objects."""


class Reads:
    """What functions read by name from elsewhere.

    Numbers, flags, strings, tuples of these, and functions are told; of objects and Python modules, what the code of
    any of the functions names. What a function writes itself is not, nor what is in lists, or found by a name that is
    computed.

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

    def unwatched(self) -> list[str]:
        """What users call the containers that cannot be looked at in each call, since they are large.

        Example:
            >>> large, small = bytearray(1 << 20), bytearray(1)
            >>> Reads([lambda x: x * large[0] * small[0]]).unwatched()
            ['large']
        """
        return [label for label, _, contents in self._now().contents if contents is None]

    def _now(self) -> _Seen:
        seen = self._seen  # one value: other threads look meanwhile
        return seen if seen.holds() else self._look()

    def _look(self) -> _Seen:
        finder = Finder()
        finder.look(self._functions)
        places = [place for place in finder.places.values() if place.name not in finder.written]
        self._seen = seen = _Seen(
            [place for place in places if isinstance(place.holder, dict)],
            [place for place in places if isinstance(place.holder, MappingProxyType)],
            [place for place in places if not isinstance(place.holder, (dict, MappingProxyType))],
            finder.contents.values(),
            finder.modules,
        )
        return seen


class _Seen:
    """What was at some places when this was made.

    Args:
        entries: of dictionaries.
        methods: of classes.
        others: attributes of something else.
        containers: the label and the value of those to be looked into.
        modules: those that were met, by name.
    """

    def __init__(
        self,
        entries: Sequence[Place],
        methods: Sequence[Place],
        others: Sequence[Place],
        containers: Iterable[tuple[str, Any]],
        modules: dict[str, nn.Module],
    ) -> None:
        self.modules = modules
        self._dicts, self._keys = [own.holder for own in entries], [own.key for own in entries]
        self._classes, self._names = [own.holder for own in methods], [own.key for own in methods]
        self._holders, self._attributes = [own.holder for own in others], [own.key for own in others]
        self._containers = list(containers)
        self._then = self._found() or []
        self.contents = self._contents()
        told = zip((own.label for own in (*entries, *methods, *others)), map(function_of, self._then), strict=False)
        self.told: Read = (*((label, *_told(value)) for label, value in told if _is_told(value)), *self.contents)

    def holds(self) -> bool:
        """Whether the very same is there now, with the same contents."""
        found = self._found()
        return (
            found is not None
            and all(map(operator.is_, found, self._then))
            and (not self._containers or self._contents() == self.contents)
        )

    def _contents(self) -> Read:
        return tuple((label, type(value), contents_of(value)) for label, value in self._containers)

    def _found(self) -> list[Any] | None:
        """What is there now; nothing where one is gone."""
        try:
            return [
                *map(dict.get, self._dicts, self._keys),
                *map(MappingProxyType.get, self._classes, self._names),
                *map(getattr, self._holders, self._attributes, repeat(_ABSENT)),
            ]
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
    """An entry of a dictionary or a class, or an attribute of something else; what code calls it, and users would."""

    holder: Any
    key: Any
    name: str
    label: str


_Found = tuple[str, Any, int]
"""What users call a value, the value, and how far from the first functions it is."""


class Finder:
    """Collects the places that functions read, the modules and containers there, and the names that they write."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self._modules: set[int] = set()
        self.places: dict[tuple[int, Any], Place] = {}
        self.contents: dict[int, tuple[str, Any]] = {}
        self._named = Named()
        self._attributes: frozenset[str] = frozenset()  # that it names, as ``getattr`` with a constant does too
        self._pending = deque[_Found]()
        self._seen: dict[int, object] = {}
        self._names = defaultdict[int, set[str]](set)
        self._asked = list[_Found]()
        self._classes: dict[type, MappingProxyType[str, Any]] = {}  # what each has, one object for all looks at it
        self._answering: dict[int, dict[Any, Any]] = {}  # what objects with a way of their own look attributes up in
        self._contexts: dict[CodeType, str] = {}  # code of autograd functions, and what it calls their context
        self._more = False

    @property
    def written(self) -> frozenset[str]:
        """The names of variables and attributes that functions write."""
        return self._named.written

    def look(self, functions: Iterable[Callable[..., Any]]) -> None:
        """Follow functions to what they read, the nearest first, and ask what is there for all that any of them names.

        What cannot be looked at, since a user's own way to do so fails, is let alone.
        """
        for function in functions:
            with suppress(Exception):
                self.follow("", _called(function), 0)
        while self._pending or self._more:
            self._more = False
            for found in tuple(self._asked):
                with suppress(Exception):
                    self._ask(*found)
            while self._pending:
                found = self._pending.popleft()
                with suppress(Exception):
                    self._into(*found)

    def follow(self, label: str, value: Any, depth: int, name: str = "") -> None:
        """Look, later, into a value that some code reads: not too deep, and once.

        Args:
            label: what users call it.
            value: what is there.
            depth: how far from the first functions.
            name: what code calls it; ``""`` where it may do anything with it.
        """
        if depth > _DEPTH or type(value) in _PLAIN or isinstance(value, Tensor):
            return
        if id(value) not in self._seen:
            self._seen[id(value)] = value  # and keep it, so that no other gets its id
            self._pending.append((label, value, depth))
        else:  # what is another object at each look asks for no more of them
            self._more |= name not in self._names[id(value)]
        self._names[id(value)].add(name)

    def _into(self, label: str, value: Any, depth: int) -> None:
        """Note what lies behind a value."""
        if isinstance(value, FunctionType):
            self._function(value, depth)
        elif isinstance(value, MethodType):
            self._method(label, value.__self__, value.__func__, depth)
        elif isinstance(value, partial):
            function = _called(value.func)
            self.follow(label, function, depth + 1)
            where = label or f"{getattr(function, '__name__', 'partial')}(…)"
            for item in (*value.args, *value.keywords.values()):
                self.follow(where, item, depth + 1)
        elif has_contents(value):
            self.contents[id(value)] = label, value
        else:
            self._asked.append((label, value, depth))
            self._ask(label, value, depth)

    def _ask(self, label: str, value: Any, depth: int) -> None:
        """Note what a value has under the names that are known by now."""
        if isinstance(value, nn.Module):
            self._module(label, value, depth)
        elif isinstance(value, dict):
            keys = self._attributes if id(value) in self._answering else self._named.keys
            for key in sorted(keys.intersection(value)):
                self._answers(value[key], id(value) in self._answering)
                self._note(Place(value, key, "", f"{label}[{key!r}]"), value[key], depth)
        elif isinstance(value, ModuleType):
            if not _is_library(value.__name__, getattr(value, "__file__", None)):
                self._entries(f"{label}.", vars(value), self._attributes.intersection(vars(value)), depth)
        elif _is_users(value):
            self._object(label, value, depth)
        elif not isinstance(value, type):
            self._held(label, value, _attributes_of(value), depth)

    def _function(self, function: FunctionType, depth: int) -> None:
        if depth and _is_library(function.__module__, function.__code__.co_filename):
            if inspect.unwrap(function) is not function:  # as by ``torch.no_grad()``
                self.follow("", inspect.unwrap(function), depth)
            return
        code, variables = function.__code__, function.__globals__
        named, known = names_of(code, self._contexts.get(code, "")), self._named
        self._named |= named
        self._attributes |= named.attributes | named.keys
        self._more |= self._named != known
        self._entries("", variables, named.variables & variables.keys(), depth)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._attribute(name, cell, "cell_contents", name, depth)
        if function.__defaults__:
            self._attribute(f"the defaults of {function.__name__}", function, "__defaults__", "", depth)
            own = code.co_varnames[code.co_argcount - len(function.__defaults__) : code.co_argcount]
            for name, item in zip(own, function.__defaults__, strict=True):
                self.follow(name, item, depth + 1, name)
        if function.__kwdefaults__:
            self._entries("", function.__kwdefaults__, function.__kwdefaults__, depth)

    def _method(self, label: str, owner: Any, function: Any, depth: int) -> None:
        self.follow(label, function, depth)
        if isinstance(function, FunctionType):
            self.follow(label or "self", owner, depth, *function.__code__.co_varnames[:1])

    def _defined(self, kind: type, name: str) -> None:
        """Note what a class itself has of a method that is followed: somebody may set another."""
        if not _is_library(kind.__module__):
            methods = self._classes.setdefault(kind, vars(kind))
            self.places.setdefault((id(methods), name), Place(methods, name, "", f"{kind.__name__}.{name}"))

    def _in_autograd(self, function: Any) -> None:
        """Note that what a function writes to its first argument, the context of one call, is nobody else's."""
        function = inspect.unwrap(function)  # as by ``once_differentiable``
        if isinstance(function, FunctionType):
            self._contexts[function.__code__] = next(iter(function.__code__.co_varnames), "")

    def _module(self, label: str, module: nn.Module, depth: int) -> None:
        """A module, and what it has of objects, and its class of anything; its own attributes others watch.

        It is noted under a name that is no path, and no other's.
        """
        if id(module) not in self._modules:
            self._modules.add(id(module))
            name = re.sub(r"\W+", "_", label)
            while name in self.modules:
                name = f"{name}_{len(self.modules)}"
            self.modules[name] = module
        label = type(module).__name__
        for name in sorted(self._attributes.intersection(vars(module))):
            self.follow(f"{label}.{name}", vars(module)[name], depth + 1, name)
        self._shared(label, module, type(module), vars(module), depth)

    def _object(self, label: str, value: Any, depth: int) -> None:
        """An object or a class: attributes of its own and of its class, and its methods."""
        own = {} if isinstance(value, type) else _attributes_of(value)
        lookups = _lookups_of(type(value))
        for item in own.values():
            self._answers(item, bool(lookups))
        if "__getattribute__" in lookups:  # which may take any for any other
            self._entries(f"{label}.", own, own, depth)
        self._held(label, value, own, depth)
        self._shared(label, value, value, own, depth)

    def _answers(self, value: Any, answers: bool) -> None:
        """Note that a dictionary has what code names as attributes, where it does."""
        if answers and isinstance(value, dict) and id(value) not in self._answering:
            self._answering[id(value)] = value
            self._more = True

    def _held(self, label: str, value: Any, own: dict[str, Any], depth: int) -> None:
        """What an object itself has, be its class a library's: under names of code, and for PyTorch's methods.

        Of what only these read, constants and lists of constants; code of libraries is not followed.
        """
        if isinstance(value, threading.local):  # it has others in each thread, or none, so these are places too
            named = {name for name in self._attributes | self.written if not hasattr(type(value), name)}
            for name in sorted(named):
                self._note(Place(value, name, name, f"{label}.{name}"), own.get(name, _ABSENT), depth)
            return
        self._entries(f"{label}.", own, self._attributes.intersection(own), depth)
        if not _is_users(value):
            for name in sorted(self._attributes.intersection(own)):
                self._listed(f"{label}.{name}", own[name], depth)
            for name in sorted(_slots_of(type(value)).intersection(self._attributes)):
                self._attribute(f"{label}.{name}", value, name, name, depth)
        read = _read_by_torchs(type(value), self._attributes).intersection(own) - self._attributes
        for name in sorted(read):
            if isinstance(own[name], CONSTANTS) or _is_list_of_constants(own[name]):
                self.places.setdefault((id(own), name), Place(own, name, name, f"{label}.{name}"))
                self._listed(f"{label}.{name}", own[name], depth)

    def _listed(self, label: str, value: Any, depth: int) -> None:
        """A list that an object of a library's has: constants, or dictionaries such as an optimizer's groups."""
        if _is_list_of_constants(value):
            self.contents[id(value)] = label, value
        elif type(value) is list and len(value) <= MOST_ITEMS:
            for at, item in enumerate(value):
                if isinstance(item, dict):
                    self.follow(f"{label}[{at}]", item, depth + 1)

    def _shared(self, label: str, value: Any, holder: Any, own: Collection[str], depth: int) -> None:
        """What a value's class has and code names, or Python calls, unless it is the value's own; at ``holder``."""
        kind = value if isinstance(value, type) else type(value)
        above = inspect.getmro(type(value)) if isinstance(value, type) else ()  # what a class has of its own
        kinds = (*kind.__mro__, *above)
        users = [each for each in kinds if not _is_library(each.__module__)]
        whole = issubclass(kind, nn.Module) or not self._names[id(value)].isdisjoint((*self._named.whole, ""))
        makes = kind is value and not issubclass(kind, nn.Module)
        run = _RUN_BY_AUTOGRAD if issubclass(kind, Function) else frozenset()
        items = [
            (name, item, each)
            for each in users
            for name, item in vars(each).items()
            if (name in self._attributes and name not in own)
            or name in run
            or (name == "forward" and issubclass(kind, nn.Module))
            or name in _LOOKING_UP
            or (whole and _is_implied(each, name, item, makes))
        ]
        for name, item, each in sorted(items, key=operator.itemgetter(0)):  # of each class: some call their like above
            if (function := function_of(item)) is not item or isinstance(item, FunctionType):
                if name in run:
                    self._in_autograd(function)
                self._defined(each, name)
                self._defined(kind, name)  # which may come to have one of its own
                self._method(label, value, function, depth + 1)
            elif isinstance(function := vars(type(item)).get("__get__"), FunctionType):
                self._method(f"{label}.{name}", item, function, depth + 1)
            elif isinstance(item, MemberDescriptorType) or not hasattr(item, "__get__"):  # others run a user's code
                self._attribute(f"{label}.{name}", holder, name, name, depth)

    def _entries(self, prefix: str, holder: dict[str, Any], keys: Iterable[str], depth: int) -> None:
        for key in sorted(keys):
            self._note(Place(holder, key, key, f"{prefix}{key}"), holder[key], depth)

    def _attribute(self, label: str, holder: Any, key: str, name: str, depth: int) -> None:
        try:
            value = getattr(holder, key)
        except Exception:  # it has no value yet, or a user's own way to look it up fails
            return
        self._note(Place(holder, key, name, label), value, depth)

    def _note(self, place: Place, value: Any, depth: int) -> None:
        with suppress(Exception):  # what one value hides, others do not
            if not isinstance(value, Tensor) and not _is_torchs(value):
                self.places.setdefault((id(place.holder), place.key), place)
                self.follow(place.label, value, depth + 1, place.name)


def function_of(item: Any) -> Any:
    """The function behind what a class has under a name: of a property, what gets its value; others are themselves."""
    if isinstance(item, property):
        return item.fget
    return item.__func__ if isinstance(item, (staticmethod, classmethod)) else item


def _is_implied(kind: type, name: str, item: Any, makes: bool) -> bool:
    """Whether Python calls what a class has under a name where no code names it, such as ``__getitem__``.

    Args:
        kind: the class.
        name: in the class.
        item: what it has there.
        makes: whether code makes objects of it.
    """
    function = function_of(item)
    if not (name.startswith("__") and isinstance(function, FunctionType)):
        return False
    generated = "__dataclass_fields__" in vars(kind) and function.__code__.co_filename == "<string>"
    return not generated and (name not in BETWEEN_CALLS if name not in MAKING else makes)


MAKING = frozenset({"__init__", "__new__"})
BETWEEN_CALLS = frozenset({"__repr__", "__del__", "__dir__", "__init_subclass__", "__copy__", "__deepcopy__"})
BETWEEN_CALLS |= {"__getstate__", "__setstate__", "__reduce__", "__reduce_ex__"}
"""What is called where objects are copied, told or come to an end, not in a call of a model."""


_LOOKING_UP = frozenset({"__getattr__", "__getattribute__"})
"""What Python calls of a class where code names an attribute."""

_RUN_BY_AUTOGRAD = frozenset({"forward", "backward", "vjp", "jvp", "setup_context", "vmap"})
"""What PyTorch calls of a :class:`torch.autograd.Function`, of which code names ``apply`` alone."""


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


def _attributes_of(value: Any) -> dict[str, Any]:
    """The attributes that an object has itself, looked up without any code of its class."""
    for kind in type(value).__mro__:
        if "__dict__" in vars(kind):
            found = vars(kind)["__dict__"]
            return found.__get__(value) if isinstance(found, (GetSetDescriptorType, MemberDescriptorType)) else {}
    return {}


def _lookups_of(kind: type) -> frozenset[str]:
    """The methods of a user's by which objects of a class say themselves what attributes they have."""
    users = (vars(each).keys() for each in kind.__mro__ if not _is_library(each.__module__))
    return frozenset().union(*(_LOOKING_UP & names for names in users))


def _slots_of(kind: type) -> frozenset[str]:
    """The names of the slots that objects of a class have, if that looks them up as Python does."""
    if not isinstance(inspect.getattr_static(kind, "__getattribute__"), WrapperDescriptorType):
        return frozenset()
    slots = (name for each in kind.__mro__ for name, item in vars(each).items() if type(item) is MemberDescriptorType)
    return frozenset(slots)


def _read_by_torchs(kind: type, names: Set[str]) -> frozenset[str]:
    """The attributes that methods and properties of these names, which a class has of PyTorch, read and do not write.

    Example:
        >>> sorted(_read_by_torchs(torch.optim.lr_scheduler.StepLR, {"get_last_lr"}))
        ['_last_lr']
    """
    torchs = (vars(each) for each in kind.__mro__ if str(each.__module__).partition(".")[0] == "torch")
    items = (function_of(own[name]) for own in torchs for name in names & own.keys())
    named = [names_of(inspect.unwrap(item).__code__) for item in items if isinstance(item, FunctionType)]
    return frozenset().union(*(each.attributes - each.written for each in named))


def _is_list_of_constants(value: Any) -> bool:
    return type(value) is list and len(value) <= MOST_ITEMS and all(isinstance(item, CONSTANTS) for item in value)


_NAMESPACES = (SimpleNamespace, Namespace)
"""Of Python's library, and yet with what is a user's."""

_ABSENT = object()
"""What is in a place where nothing is."""

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
"""What leads to nothing else."""

_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
"""The same of most values, at one look."""

_BY_IDENTITY = (FunctionType, BuiltinFunctionType, type, nn.Module)


def _is_told(value: Any, depth: int = 0) -> bool:
    if type(value) is tuple:
        return depth <= _DEPTH and all(_is_told(item, depth + 1) for item in value)
    return isinstance(value, (*CONSTANTS, *_BY_IDENTITY))


def _told(value: Any) -> tuple[type, Hashable]:
    """The kind of a constant, and the value so that only those that no program can tell apart are equal."""
    return type(value), tuple(map(_told, value)) if type(value) is tuple else exact(value)


def functions_of(modules: Sequence[nn.Module]) -> list[Callable[..., Any]]:
    """A user's functions that modules call: those that they were made from or have, and how each goes forward.

    Example:
        >>> functions_of([nn.Linear(1, 1)])
        []
    """
    own = (value for module in modules for value in vars(module).values() if _is_called(value, type(module)))
    users = [module for module in modules if not _is_library(type(module).__module__)]
    forwards = (MethodType(type(own).forward, own) for own in users if isinstance(type(own).forward, FunctionType))
    return [*own, *forwards]


def _is_called(value: Any, owner: type) -> bool:
    """Whether what a module of some kind has is a function of a user's; or an object to be called, by a library's."""
    kind = type(value)
    if kind in (FunctionType, MethodType, partial):
        of_users = kind is MethodType and isinstance(value.__self__, type) and _is_users(value.__self__)
        return of_users or not _is_torchs(value.__func__ if kind is MethodType else value)
    of_library = _is_library(owner.__module__) and not _is_library(kind.__module__)
    return of_library and callable(value) and not issubclass(kind, (type, nn.Module))
