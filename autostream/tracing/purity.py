"""Whether the Python of a model does nothing but compute with tensors.

Of a model that has one program, a trace sees what its Python does beside that. Of one with a program for each way that
calls take, each is traced after a call that took it: what that call wrote has been written, and what the next one on
another way would write, no graph knows of. So ways are for models of which it is plain from the code that they write to
tensors alone, and to what they have made themselves in the same call, and speak to nobody. What is not known to be
harmless is not.
"""

from __future__ import annotations

import builtins
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Set
from dataclasses import dataclass
from enum import Enum, EnumType
from functools import lru_cache, partial
from itertools import chain
from linecache import getline
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autostream.tracing.bytecode import LITERAL, Use, inner_of, makers, names_of, uses
from autostream.tracing.lines import at_line
from autostream.tracing.reads import BETWEEN_CALLS, CONSTANTS, MAKING, function_of


def impurity(model: nn.Module) -> str:
    """What the Python of a model does, or may do, beside computing with tensors, and where; ``""`` where it is nothing.

    Example:
        >>> impurity(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
        ''
    """
    try:
        finder = _Finder()
        finder.look(model, "the model")
        finder.look_at_modules()
    except _Impure as found:
        return str(found)
    except Exception as error:  # a user's own way to look something up fails
        return f"its Python cannot be looked at ({type(error).__name__})"
    return ""


class _Impure(Exception):  # noqa: N818 - a notice within this file, not an error
    """A function may do more than compute; the message says what."""


class _Finder:
    """Looks at functions, at those that they call, and at what they use; at each once."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._modules: dict[int, nn.Module] = {}
        self._asked: dict[str, str] = {"forward": ""}
        """What values are asked for, and where first."""
        self._written: dict[str, str] = {}
        """Methods of tensors whose results are written to, and where first."""
        self._converted: dict[str, str] = {}
        """What values are asked for before what they have is asked for a conversion, and where first."""
        self._fields: set[str] = set()
        self._shared = self._changed = ""
        """What has items and is there before a call, and where something may be changed in place."""

    def look(self, value: Any, name: str, where: str = "") -> None:
        """See that something that code uses, and calls perhaps, is harmless.

        Raises:
            _Impure: it is not known to be.
        """
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value  # and keep it, so that no other gets its id
        if isinstance(value, FunctionType) and not _is_torchs_own(value):
            for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
                self.look(default, f"a default of {name}", where)
            self._look_at_code(_Scope.of(value))
        elif isinstance(value, FunctionType) and not _is_harmless(value):  # as by ``torch.no_grad()``
            if not (hasattr(value, "__wrapped__") and _wraps_by_torch_alone(value)):
                raise _Impure(f"it uses {name}, of which nobody knows what it does{where}")
            self.look(value.__wrapped__, name, where)
        elif isinstance(value, _WHOLE) or type(type(value)) is EnumType:
            for part in self._parts(value, name):
                self.look(part, name, where)
        elif _is_named_tuple(value) or type(value) is EnumType:
            self._fields.update(getattr(value, "_fields", ()))
            members = vars(value).get("_member_map_", {})
            for attribute, part in (*members.items(), *_methods(value)):
                self.look(part, f"{value.__name__}.{attribute}", where)
        elif not _is_harmless(value):
            raise _Impure(f"it uses {name}, of which nobody knows what it does{where}")

    def _parts(self, value: Any, name: str) -> Iterator[Any]:
        """What code that uses a value uses of it."""
        if isinstance(value, nn.Module):
            for module in value.modules():
                self._modules[id(module)] = module
                yield from (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
                yield from (*module._parameters.values(), *module._buffers.values())
        elif isinstance(value, MethodType):
            yield from (value.__self__, value.__func__)
        elif isinstance(value, partial):
            yield from (type(value), value.func, *value.args, *value.keywords.values())
        elif type(type(value)) is EnumType:
            yield from (type(value), *vars(value).values())
        else:
            yield type(value)  # whose methods may be a user's
            self._shared = self._shared or (name if isinstance(value, _SHARED) else "")
            yield from (*value, *(value.values() if isinstance(value, dict) else ()))

    def look_at_modules(self) -> None:
        """See that what modules do when they are called, and whatever attributes of them code asks for, is harmless.

        Raises:
            _Impure: something is not known to be.
        """
        known = -1
        while known < len(self._asked) + len(self._modules):  # a method asks for more of them
            known = len(self._asked) + len(self._modules)
            modules, asked = list(self._modules.values()), self._asked.copy()
            by_torch = frozenset().union(*(_asked_by(kind) for kind in {*map(type, modules)}))
            for module in modules:
                for name, value in _used(module, asked.keys(), by_torch):
                    self.look(value, f"{type(module).__name__}.{name}", asked.get(name, ""))
        of_modules = {name for name in self._asked for module in self._modules.values() if _has(module, name)}
        for name in sorted(self._asked.keys() - of_modules - self._fields - _known()):
            raise _Impure(f"it asks for {name}, which neither tensors nor its modules have{self._asked[name]}")
        for name in sorted(self._written.keys() & of_modules):
            raise _Impure(f"it writes an item of what {name} returns{self._written[name]}")
        for name in sorted(self._converted.keys() & {name for own in self._modules.values() for name in own._modules}):
            raise _Impure(f"it converts {name}, a module{self._converted[name]}")
        if self._shared and self._changed:
            raise _Impure(f"it may change {self._shared}{self._changed}")

    def _look_at_code(self, scope: _Scope) -> None:
        code = scope.code
        for use in uses(code):
            line = getline(code.co_filename, use.line, scope.variables).strip()
            where = at_line(code.co_filename, use.line, line)
            if use.does == "reads":
                value, asked = scope.find(use.name, use.of)
                if value is not scope:
                    self.look(value, ".".join((use.name, *use.of[: len(use.of) - len(asked)])), where)
                for at, name in enumerate(asked):
                    owner = ("", asked[at - 1]) if at else (use.name if value is scope else "",)
                    self._ask(name, where, scope, *owner)
                if asked and asked[0] in _CONVERTING and isinstance(value, nn.Module):
                    raise _Impure(f"it converts {use.name}, a module{where}")
            elif use.does == "asks":
                self._ask(use.name, where, scope, *use.of)
            elif use.does == "writes" and not self._is_new(scope, where, *use.of):
                raise _Impure(f"{code.co_name} writes {use.name}{where}")
            elif use.does == "changes" and not self._is_new(scope, where, *use.of):
                self._changed = self._changed or where
        for inner in inner_of(code):
            self._look_at_code(scope.within(inner))

    def _ask(self, name: str, where: str, scope: _Scope, variable: str = "", attribute: str = "") -> None:
        """Note that code asks a value, which one of its variables or an attribute has, for an attribute."""
        if _changes(name) or (name in _OF_ITEMS and not self._is_new(scope, where, variable)):
            raise _Impure(f"{scope.code.co_name} uses {name}, which may change a module or a setting{where}")
        if name in _SORTING and not self._is_new(scope, where, variable):
            self._changed = self._changed or where
        if name in _CONVERTING:
            self._converted.setdefault(attribute, where)
        self._asked.setdefault(name, where)

    def _is_new(self, scope: _Scope, where: str, variable: str = "") -> bool:
        """Whether code made what a variable of its own has, each time that it set it."""
        made = scope.made(variable)
        if not made or () in made:
            return False
        for name, *of in made - {LITERAL}:
            if name:
                value, asked = scope.find(name, tuple(of))
                if asked or not (any(value is kind for kind in _NEW) or _computes(value)):
                    return False
            elif of[0] in _ALIASES or not (of[0] == "copy" or hasattr(Tensor, of[0])):
                return False
            else:  # as long as no module has such a method
                self._written[of[0]] = where
        return True


@dataclass(frozen=True, slots=True)
class _Scope:
    """Where code finds what it names.

    Attributes:
        code: of a function, or of one that it defines.
        variables: global ones.
        cells: variables of outer functions that have been left.
        around: the function that defines this one, while it runs.
    """

    code: CodeType
    variables: dict[str, Any]
    cells: dict[str, Any]
    around: _Scope | None = None

    @staticmethod
    def of(function: FunctionType) -> _Scope:
        """That of a function."""
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        known = {name: cell.cell_contents for name, cell in cells}
        return _Scope(function.__code__, function.__globals__, known)

    def within(self, code: CodeType) -> _Scope:
        """That of a function which this code defines."""
        own = self.code.co_cellvars
        return _Scope(code, self.variables, {name: self.cells[name] for name in self.cells.keys() - {*own}}, self)

    def find(self, name: str, of: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
        """What a variable of others has, or what that has, where it is a module of Python's or an enumeration.

        Returns:
            The value, or this itself for a variable of a function that still runs, and the rest of the attributes.
        """
        if name in self.code.co_freevars:
            value = self.cells.get(name, self)
        else:
            value = self.variables.get(name, getattr(builtins, name, None))  # what is not there, nobody can use
        while of and isinstance(value, (ModuleType, torch._ops.OpOverloadPacket)):
            if not (_is_torchs_own(value) or of[0] in vars(value)):  # a user's own way to look something up
                break
            value, of = getattr(value, of[0]), of[1:]
        if of and isinstance(value, EnumType) and of[0] in value.__members__:
            return value.__members__[of[0]], of[1:]
        return value, of

    def made(self, variable: str) -> frozenset[tuple[str, ...]]:
        """What made the values of a variable, as :func:`~autostream.tracing.bytecode.makers` tells."""
        if variable in self.code.co_freevars:
            return frozenset() if self.around is None or variable in self.cells else self.around.made(variable)
        return makers(self.code).get(variable, frozenset())


def _used(module: nn.Module, asked: Set[str], by_torch: Set[str]) -> Iterator[tuple[str, Any]]:
    """What a module has under names that its code or PyTorch's asks for, and what Python calls of its class."""
    own = vars(module)
    yield from ((name, own[name]) for name in own.keys() & asked)
    yield from ((name, own[name]) for name in own.keys() & by_torch if not isinstance(own[name], _SHARED))
    for kind in type(module).__mro__:
        for name, item in () if _is_trusted(kind) else vars(kind).items():
            if name in asked or name in by_torch or ("format" in asked and isinstance(item, property)):
                yield name, function_of(item)  # "{.name}".format(module) gets a property
    yield from ((name, value) for name, value in _methods(type(module)) if name.startswith("__"))


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    """What a class has, and its bases have, that runs when it is called or asked for, unless it is of a library."""
    for base in kind.__mro__:
        for name, item in () if _is_trusted(base) else vars(base).items():
            value = function_of(item)
            runs = callable(value) or hasattr(type(value), "__get__")
            if runs and name not in _BEFORE and not isinstance(value, _SLOTS) and not _is_made(value):
                yield name, value


def _is_made(value: Any) -> bool:
    """Whether a function is one that a library puts into classes."""
    return isinstance(value, FunctionType) and value.__globals__.get("__name__") in ("collections", "enum")


@lru_cache(maxsize=1024)
def _asked_by(kind: type) -> frozenset[str]:
    """What PyTorch's code asks modules of a class for, and others that they have; of all modules, their own methods."""
    asked = set[str]()
    for base in filter(_is_trusted, kind.__mro__):
        functions = (item for item in map(function_of, vars(base).values()) if isinstance(item, FunctionType))
        names = {name for function in functions for name in names_of(function.__code__).attributes}
        asked |= names & {*dir(nn.Module)} if base is nn.Module else names
    return frozenset(name for name in asked - _BEFORE if not _changes(name))


def _has(module: nn.Module, name: str) -> bool:
    """Whether a module has an attribute, without its code being run."""
    places = (vars(module), module._parameters, module._buffers, module._modules, *map(vars, type(module).__mro__))
    return any(name in place for place in places)


def _is_harmless(value: Any) -> bool:
    """Whether code may have a value, call it, and do with it what no name tells."""
    if isinstance(value, type):
        torchs = value.__module__.startswith("torch.nn.modules.") or value in _TORCH_TYPES
        errors = issubclass(value, Exception) and (value.__module__ == "builtins" or _is_torchs_own(value))
        return torchs or errors or value in _TYPES
    if isinstance(value, _CALLED):
        maths = isinstance(value, BuiltinFunctionType) and value.__module__ == "math"
        return maths or value in _FUNCTIONS or _computes(value) or _asks(value)
    constant = isinstance(value, CONSTANTS) and _is_trusted(type(value))
    return constant or type(value) in _TORCH_TYPES or _computes(value)


def _computes(value: Any) -> bool:
    """Whether a value is a function of torch's that makes tensors, of tensors or of numbers, and does nothing else."""
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        library, name = str(value).split(".")[:2]
        return library in _LIBRARIES and not (_changes(name) or name in _ALIASES | _OF_ITEMS)
    if not isinstance(value, _CALLED):
        return False
    name = value.__name__
    makes = isinstance(value, BuiltinFunctionType) and value.__self__ is None and value.__module__ == "torch"
    known = (makes and not name.startswith("_")) or value in _of_tensors()
    return known and not (_changes(name) or name in _ALIASES | _OF_ITEMS)


def _asks(value: Any) -> bool:
    """Whether a function is one of torch's that only tells what is so, or complains."""
    return _is_torchs_own(value) and value.__name__.startswith(_TELLING)


def _wraps_by_torch_alone(function: Any) -> bool:
    """Whether what a wrapper of torch's has beside the function that it wraps is torch's as well."""
    values = (
        cell.cell_contents for cell in function.__closure__ or () if cell.cell_contents is not function.__wrapped__
    )
    owners = (value.__self__ if isinstance(value, MethodType) else value for value in values)
    return all(
        isinstance(own, CONSTANTS) or _is_torchs_own(own if isinstance(own, type) else type(own)) for own in owners
    )


@lru_cache(maxsize=1)
def _of_tensors() -> frozenset[Any]:
    """The functions that PyTorch lets others define for tensors of their own."""
    every = torch.overrides.get_overridable_functions().values()
    return frozenset(function for functions in every for function in functions if isinstance(function, Hashable))


@lru_cache(maxsize=1)
def _known() -> frozenset[str]:
    """What tensors, PyTorch's modules and what else code may have, can be asked for."""
    kinds = (Tensor, nn.Module, Enum, *_TORCH_TYPES, *_TYPES, *_OTHERS, *CONSTANTS)
    results = (kind for kind in vars(torch.return_types).values() if isinstance(kind, type))
    return frozenset(name for kind in (*kinds, *results) for name in dir(kind)) | _NAMES


def _changes(name: str) -> bool:
    """Whether what has this name changes what is no tensor's contents."""
    ours = name.startswith(_BEGINNINGS) and (hasattr(nn.Module, name) or hasattr(Tensor, name))
    return ours or name in _CHANGING or (name.startswith("__") and name not in _NAMES)


def _is_torchs_own(value: Any) -> bool:
    """Whether PyTorch defines a module of Python's or a function, whatever that says of itself."""
    if isinstance(value, FunctionType):
        name = value.__globals__.get("__name__")
    else:
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0] == "torch"


def _is_trusted(kind: type) -> bool:
    """Whether what a class does is known to be harmless."""
    return f"{kind.__module__}.".startswith(_TRUSTED)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, type) and value.__bases__ == (tuple,) and hasattr(value, "_fields")


_CALLED = (FunctionType, BuiltinFunctionType, MethodDescriptorType)
_SHARED = (list, dict, set)
_WHOLE = (nn.Module, MethodType, partial, tuple, frozenset, *_SHARED)
"""What is harmless if all that is in it is."""

_TRUSTED = (
    "torch.nn.modules.",
    "torch.nn.utils.",
    "torch.ao.nn.",
    "autostream.overlap.parallel.",
    "autostream.tracing.functions.",
    "builtins.",
    "abc.",
    "enum.",
    "numpy.",
    "typing.",
)

_NAMES = frozenset({"__class__.__name__", "__module__", "__name__", "__qualname__"})

_METHODS = """
    _apply add_module apply apply_ backward eval initial_seed load_state_dict map_ requires_grad_ retain_grad seed send
    share_memory share_memory_ throw to_empty train zero_grad
"""
_CHANGING = frozenset(_METHODS.split())
"""Methods of modules and tensors that change what is no tensor's contents."""

_TELLING = ("is_", "are_", "get_autocast_", "get_default_", "_check", "_assert", "_log_api_usage_once")

_BEGINNINGS = ("register_", "set_", "manual_seed", "compile", "load")

_METHODS_OF_ITEMS = """
    append clear discard extend insert move_to_end pop popitem remove setdefault update
    as_strided_ detach_ rename_ resize_ resize_as_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_
"""
_OF_ITEMS = frozenset(_METHODS_OF_ITEMS.split())
"""Those of containers that change what is in them, and of tensors that change their shape."""

_SORTING = frozenset({"add", "reverse", "sort"})
"""Methods of containers that change them, whose names methods of tensors have as well."""

_ALIASES = frozenset({"from_file", "from_numpy", "frombuffer", "numpy", "storage", "untyped_storage"})
"""What lets others than tensors write to a tensor's memory."""

_CONVERTING = frozenset({"bfloat16", "cpu", "cuda", "double", "float", "half", "ipu", "to", "type", "xpu"})
"""Methods that change modules, and make other tensors of tensors."""

_LIBRARIES = ("aten", "autostream", "prims", "torchvision")
"""Of ops, none of which is a user's Python."""

_BEFORE = (MAKING | BETWEEN_CALLS | {"__setattr__", "__delattr__"}) - {"__repr__"}  # which a format string calls
_BEFORE |= {"_load_from_state_dict", "_save_to_state_dict", "state_dict", "reset_parameters"}
_BEFORE |= {"get_extra_state", "set_extra_state", "_member_type_", "_new_member_"}
"""What is not called in a call, but where modules are made, copied, saved or written to."""

_SLOTS = (GetSetDescriptorType, MemberDescriptorType, WrapperDescriptorType, type(vars(Use)["does"]))
"""What C code gets a field of an object, or the method behind an operator, by."""

_NEW = (list, dict, set, OrderedDict)
_OTHERS = (nn.Module, str, list, tuple, dict, set, OrderedDict)

_TYPES = frozenset(
    {
        *(bool, complex, dict, enumerate, filter, float, frozenset, int, list, map, range, reversed, set, slice, str),
        *(super, tuple, zip, chain, partial, OrderedDict, FunctionType),
    }
)
_TORCH_TYPES = frozenset(
    {
        *(Tensor, nn.Parameter, nn.Module, torch.Size, torch.device, torch.dtype, torch.finfo, torch.iinfo),
        *(torch.layout, torch.memory_format),
        *(torch.no_grad, torch.enable_grad, torch.inference_mode, torch.autocast, torch.profiler.record_function),
    }
)
_FUNCTIONS = frozenset(
    {abs, all, any, divmod, isinstance, issubclass, iter, len, max, min, next, pow, round, sorted, sum}
) | {checkpoint, torch.vmap}
"""What calls others calls what code has, which is looked at."""
