"""What ``torch.export`` does to the process while it traces, kept from those who did not ask for it."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode


@contextmanager
def tamed() -> Iterator[None]:
    """Trace inside this: PyTorch says nothing, compiles nothing in between, and has its flags put back."""
    with undisturbed(), _preserved_flags(), _told_to_this_thread(), _quiet(), _uncompiled():
        yield


def undisturbed() -> AbstractContextManager[object]:
    """Let TorchDynamo wait with what other threads compile: like export and Inductor, it changes what all threads see.

    Private to PyTorch (seen in 2.11 and 2.13); where a version lacks the lock, nobody waits.
    """
    try:
        from torch._dynamo.convert_frame import compile_lock
    except ImportError:
        return nullcontext()
    return compile_lock


_TALKATIVE = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor", "torch.export._trace")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what PyTorch says while it traces, at length; what matters of it becomes the refusal.

    What the model itself warns of is said once; where warnings are errors, it cannot be traced, as it cannot be run.
    """
    loggers = list(map(logging.getLogger, _TALKATIVE))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for logger in loggers:
            logger.addFilter(_nothing)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(_nothing)
    said = {(str(w.message), w.category, w.filename, w.lineno): w for w in caught if not _is_tracer(w.filename)}
    for own in said.values():
        warnings.warn_explicit(own.message, own.category, own.filename, own.lineno)


def _is_tracer(filename: str) -> bool:
    return any(Path(filename).is_relative_to(folder) for folder in _TRACERS)


_TRACERS = (Path(torch.__file__).parent, Path(__file__).parents[1], Path(contextlib.__file__))
"""Who traces, and the file that a warning is from where a context manager of theirs gives it."""


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _uncompiled() -> AbstractContextManager[None]:
    """Let export not compile the graph anew after each of its passes, since nobody runs it in between.

    Private to PyTorch; where a version lacks it, export compiles.
    """
    lazily = getattr(getattr(torch.fx, "_lazy_graph_module", None), "_use_lazy_graph_module", None)
    return lazily(True) if lazily else nullcontext()


def unreferenced(modes: Iterable[FakeTensorMode]) -> None:
    """Let modes forget which tensors their fake ones stand for.

    They remember by weak references, for as long as a graph of theirs lives, and ``torch.utils.swap_tensors``, by which
    modules can be told to convert themselves, refuses a tensor that has one.

    Private to PyTorch (seen in 2.11 and 2.13); where a version remembers in another way, the references stay.

    Example:
        >>> import weakref
        >>> mode, weight = FakeTensorMode(), torch.ones(2)
        >>> fake = mode.from_tensor(weight)
        >>> unreferenced([mode])
        >>> weakref.getweakrefs(weight)
        []
    """
    for mode in modes:
        with suppress(AttributeError):
            mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


_UNPATCHED = {name: nn.Module.__dict__[name] for name in ("__call__", "__getattr__")}


@contextmanager
def patched_for_this_thread() -> Iterator[None]:
    """Let other threads' modules run as ever, while fx has methods of ``nn.Module`` patched to follow this thread's."""
    patched = {name: nn.Module.__dict__[name] for name in _UNPATCHED}
    tracing = threading.get_ident()

    def of_thread(name: str) -> Callable[..., Any]:
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            methods = patched if threading.get_ident() == tracing else _UNPATCHED
            return methods[name](self, *args, **kwargs)

        return method

    try:
        for name in patched:
            setattr(nn.Module, name, of_thread(name))
        yield
    finally:
        for name, method in patched.items():
            setattr(nn.Module, name, method)


@contextmanager
def _preserved_flags() -> Iterator[None]:
    """Put back the flags by which PyTorch knows that it is exporting; an export that fails on 2.11 leaves them set.

    Private to PyTorch; where a version has no such flags, there is nothing to put back.
    """
    flags = {name: getattr(torch.compiler, name) for name in _FLAGS if hasattr(torch.compiler, name)}
    try:
        yield
    finally:
        for name, flag in flags.items():
            setattr(torch.compiler, name, flag)


@contextmanager
def _told_to_this_thread() -> Iterator[None]:
    """Let this thread alone be told that something is exported.

    In others, attention would compute otherwise, and what Dynamo is not to look at would write to what is being traced.
    PyTorch has one flag of each kind for the process. The functions that tell them get other code, for models may have
    imported these functions.

    Private to PyTorch (seen in 2.11 and 2.13); where a version tells it in another way, all threads are told.
    """
    told = {getattr(torch.compiler, own.__name__, None): own.__code__ for own in (is_compiling, is_exporting)}
    codes = {function: function.__code__ for function in told if isinstance(function, FunctionType)}
    tellers = [function for function, code in codes.items() if not set(_FLAGS).isdisjoint(code.co_names)]
    try:
        for function in tellers:
            function.__code__ = _of_this_thread(told[function], codes[function])
        yield
    finally:
        for function in tellers:
            function.__code__ = codes[function]


def is_compiling() -> bool:
    """What that of PyTorch does for a time."""
    from threading import get_ident  # among PyTorch's names there is only this way to it

    return torch.compiler._is_compiling_flag and get_ident() == -1


def is_exporting() -> bool:
    """Likewise."""
    from threading import get_ident

    return torch.compiler._is_exporting_flag and get_ident() == -1


def _of_this_thread(code: CodeType, place: CodeType) -> CodeType:
    """Code with this thread for -1, said to be where that was whose place it takes: TorchScript reads there."""
    constants = tuple(threading.get_ident() if constant == -1 else constant for constant in code.co_consts)
    return code.replace(co_consts=constants, co_filename=place.co_filename, co_firstlineno=place.co_firstlineno)


_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
