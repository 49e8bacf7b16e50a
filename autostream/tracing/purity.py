"""Whether the Python of a model does nothing but compute with tensors.

Of a model that has one program, a trace sees what its Python does beside that. Of one with a program for each way that
calls take, each is traced after a call that took it: what that call wrote has been written, and what the next one on
another way would write, no graph knows of. So ways are for models of which it is plain from the code that they write to
tensors alone, and speak to nobody. What is not known to be harmless is not.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import math
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autostream.tracing.reads import CONSTANTS, functions_of


def impurity(model: nn.Module) -> str:
    """What the Python of a model does, or may do, beside computing with tensors, and where; ``""`` where it is nothing.

    Example:
        >>> impurity(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
        ''
    """
    try:
        finder = _Finder(model)
        for function in functions_of(list(model.modules())):
            finder.look(function)
        finder.look_at_attributes()
    except _Impure as found:
        return str(found)
    except Exception as error:  # a user's own way to look something up fails
        return f"its Python cannot be looked at ({type(error).__name__})"
    return ""


class _Impure(Exception):  # noqa: N818 - a notice within this file, not an error
    """A function may do more than compute; the message says what."""


class _Finder:
    """Looks at functions, at those that they call, and at what they use."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(module): module for module in model.modules()}
        self._attributes: set[str] = set()
        self._codes: set[CodeType] = set()

    def look(self, value: Any, name: str = "") -> None:
        """See that something that code uses, and calls perhaps, is harmless.

        Raises:
            _Impure: it is not known to be.
        """
        if isinstance(value, nn.Module):
            if id(value) not in self._modules:
                for module in value.modules():
                    self._modules.setdefault(id(module), module)
                for function in functions_of(list(value.modules())):
                    self.look(function)
        elif isinstance(value, MethodType):
            self.look(value.__self__, name)
            self.look(value.__func__, name)
        elif isinstance(value, partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.look(part, name)
        elif isinstance(value, tuple):
            for item in value:
                self.look(item, name)
        elif isinstance(value, FunctionType) and not _is_torchs(value):
            self._function(inspect.unwrap(value))
        elif not _is_harmless(value):
            raise _Impure(f"it uses {name or type(value).__name__}, of which nobody knows what it does")

    def look_at_attributes(self) -> None:
        """See that whatever attributes of modules the code names are harmless, methods included.

        Raises:
            _Impure: one is not known to be.
        """
        known = -1
        while known < len(self._codes) + len(self._modules):  # a method names more of them
            known = len(self._codes) + len(self._modules)
            for module in list(self._modules.values()):
                for name in sorted(self._attributes):
                    for value in _found(module, name):
                        self.look(value, f"{type(module).__name__}.{name}")

    def _function(self, function: Any) -> None:
        code = function.__code__
        if code in self._codes and not code.co_freevars:
            return
        self._codes.add(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.look(cell.cell_contents, name)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.look(default, function.__name__)
        self._code(code, function.__globals__)

    def _code(self, code: CodeType, variables: dict[str, Any]) -> None:
        for step in dis.get_instructions(code):
            if step.opname in _WRITES and step.argval not in code.co_cellvars:
                raise _Impure(f"{code.co_name} writes {step.argval or 'an item'} (at {code.co_filename})")
            if step.opname in _ATTRIBUTES:
                if step.argval in _CHANGING or step.argval.startswith(_BEGINNINGS):
                    raise _Impure(f"{code.co_name} uses {step.argval}, which may change a module or a setting")
                self._attributes.add(step.argval)
            elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                name = step.argval
                self.look(variables[name] if name in variables else getattr(builtins, name), name)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._code(constant, variables)


def _found(module: nn.Module, name: str) -> Iterator[Any]:
    """What a module, or its class, has under a name, unless PyTorch defines it."""
    if name in vars(module):
        yield vars(module)[name]
    for kind in type(module).__mro__:
        if name in vars(kind) and not _is_torchs(kind):
            value = vars(kind)[name]
            yield value.fget if isinstance(value, property) else getattr(value, "__func__", value)


def _is_harmless(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return _is_torchs(value) or value is math
    if isinstance(value, type):
        return _is_torchs(value) or value in _TYPES or (value.__module__ == "builtins" and issubclass(value, Exception))
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return value in _FUNCTIONS or _is_torchs(value) or value.__module__ == "math"
    return isinstance(value, (*CONSTANTS, Tensor, torch.Size, torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def _is_torchs(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0] == "torch"


_WRITES = {f"{what}_{where}" for what in ("STORE", "DELETE") for where in ("GLOBAL", "DEREF", "ATTR", "SUBSCR")}
_WRITES |= {"IMPORT_NAME", "STORE_SLICE", "STORE_NAME"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}

_METHODS = """
    add_module append apply_ backward clear discard eval extend initial_seed insert load_state_dict map_ pop popitem
    remove requires_grad_ retain_grad seed send setdefault share_memory_ throw train update zero_grad
"""
_CHANGING = frozenset(_METHODS.split())
"""Methods of modules, tensors and containers, and functions of torch, that change what is no tensor's contents."""

_BEGINNINGS = ("__", "register_", "set_", "manual_seed", "enable_", "use_", "compile", "save", "load")

_TYPES = frozenset(
    {bool, complex, dict, enumerate, filter, float, int, list, map, range, reversed, slice, str, super, tuple, zip}
)
_FUNCTIONS = frozenset({abs, all, any, divmod, isinstance, issubclass, len, max, min, pow, round, sorted, sum})
