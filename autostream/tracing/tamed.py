"""What ``torch.export`` does to the process while it traces, kept from those who did not ask for it."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.fx._symbolic_trace
from torch import nn
from torch._subclasses import FakeTensorMode


@contextmanager
def tamed() -> Iterator[None]:
    """Trace inside this: PyTorch says nothing, compiles nothing in between, and has its flags put back."""
    with undisturbed(), _preserved_flags(), _told_to_this_thread(), _quiet(), _uncompiled(), _through_compiled():
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


def _through_compiled() -> AbstractContextManager[None]:
    """Let a tracer see the ops of what the user compiled with ``torch.compile``, as if it were not compiled.

    Private to PyTorch (seen in 2.11 and 2.13); where a version lacks the setting, such models are refused.
    """
    config: Any = torch._dynamo.config
    known = hasattr(config, "error_on_nested_fx_trace")
    return config.patch(error_on_nested_fx_trace=False) if known else nullcontext()


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
    """Let nobody else be told that something is traced.

    In other threads, attention would compute otherwise, what Dynamo is not to look at would write to what is being
    traced, and what Dynamo has compiled would refuse to run.
    """
    before, _here.thread = _here.thread, threading.get_ident()
    try:
        yield
    finally:
        _here.thread = before


@contextmanager
def compiling() -> Iterator[None]:
    """Let what this thread runs, and nobody else, be told that it is compiled, as ``torch.compile`` tells it.

    Example:
        >>> with compiling():
        ...     torch.compiler.is_compiling()
        True
        >>> torch.compiler.is_compiling()
        False
    """
    with _preserved_flags(), _told_to_this_thread():
        torch.compiler._is_compiling_flag = True
        yield


class _Here:
    """Where something is traced: as PyTorch's flags, one for the process.

    Attributes:
        thread: which traces by way of :func:`tamed`, if one does.
    """

    thread: int | None = None


_here = _Here()


def traced_elsewhere() -> bool:
    """Whether another thread than this traces by way of :func:`tamed`."""
    return _here.thread not in (None, threading.get_ident())


def is_compiling() -> bool:
    """What that of ``torch.compiler`` does; it has no other names than those there."""
    if not torch.compiler._is_compiling_flag:
        return False
    from autostream.tracing.tamed import traced_elsewhere

    return not traced_elsewhere()


def is_exporting() -> bool:
    """What that of ``torch.compiler`` does."""
    if not torch.compiler._is_exporting_flag:
        return False
    from autostream.tracing.tamed import traced_elsewhere

    return not traced_elsewhere()


def is_fx_symbolic_tracing() -> bool:
    """What that of ``torch.fx`` does, by which what Dynamo has compiled refuses to run."""
    if not torch.fx._symbolic_trace._is_fx_tracing_flag or torch.compiler.is_compiling():
        return False
    from autostream.tracing.tamed import traced_elsewhere

    return not traced_elsewhere()


def tell_by_thread(function: Any, own: Callable[[], bool], flag: str) -> bool:
    """Let a function of PyTorch's, that tells what is the case in the process, tell what is in the thread that asks.

    It gets the code of another, for good: many have imported it, and Dynamo compiles anew what has called it, if its
    code becomes another. The code says that it is where the old one was, for TorchScript reads there.

    Private to PyTorch (seen in 2.11 and 2.13).

    Args:
        function: the function.
        own: whose code it gets.
        flag: the global variable that it looks at.

    Returns:
        Whether it could be done: where a version has another such function, all threads are told.
    """
    code = getattr(function, "__code__", None)
    if code is None or flag not in code.co_names or code.co_freevars or code.co_argcount:
        return False
    function.__code__ = own.__code__.replace(co_filename=code.co_filename, co_firstlineno=code.co_firstlineno)
    return True


_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
_TELLERS = (
    (torch.compiler, is_compiling, "_is_compiling_flag"),
    (torch.compiler, is_exporting, "_is_exporting_flag"),
    (torch.fx._symbolic_trace, is_fx_symbolic_tracing, "_is_fx_tracing_flag"),
)
for _module, _own, _flag in _TELLERS:
    tell_by_thread(getattr(_module, _own.__name__, None), _own, _flag)
