"""How Dynamo is run here: its settings, its lock, its timers, and what it logs.

Private to PyTorch; see the table in ``frontend/__init__.py``.
"""

from __future__ import annotations

import importlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, TypeVar
from unittest import mock

import torch

from autostream.errors import first_line

SETTINGS: Mapping[str, Any] = {
    "assume_static_by_default": True,
    "automatic_dynamic_shapes": False,  # another size is another graph
    "specialize_float": True,
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    "trace_autograd_ops": True,
    "allow_rnn": True,
    "skip_nnmodule_hook_guards": False,  # a hook that is registered later must take effect
    "use_recursive_dict_tags_for_guards": False,  # guards.py says which guards may be skipped
    "error_on_nested_fx_trace": False,
    "trace_numpy": False,  # traced, NumPy's functions give other random numbers, and arrays instead of scalars
    "suppress_errors": False,
}
"""Dynamo's settings during capture. Those that this version of PyTorch lacks are left out."""

_CONVERT_FRAME = "torch._dynamo.convert_frame"
_FAKE_TENSORS = "torch._subclasses.fake_tensor"
_TRACES = "torch.__trace"
_CHANGES = "torch._dynamo.side_effects.__side_effects"
_REPLAY = "side_effect_replay_policy"


@contextmanager
def compiling(**settings: Any) -> Iterator[None]:
    """Hold Dynamo's lock, with :data:`SETTINGS` and these on top of them, and without PyTorch's own warnings."""
    with ExitStack() as stack:
        stack.enter_context(compile_lock())
        stack.enter_context(configured(**settings))
        stack.enter_context(lazy_modules())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"torch\.")  # what Dynamo refuses is reported with its reason
        stack.enter_context(_constants_without_sources())
        yield


@contextmanager
def _constants_without_sources() -> Iterator[None]:
    """Let Dynamo load ``None``, ``True`` and ``False`` as constants, wherever it has read them.

    In torch 2.13 all traces share one variable for each. One that is read as ``tensor.grad`` or
    ``tensor.requires_grad`` gets that source, and bytecode, of later traces too, loads the constant from there.
    """
    from torch._dynamo.variables import constant

    class Constant(constant.ConstantVariable):
        source = property(lambda self: None, lambda self, source: None)

    names = {f"CONSTANT_VARIABLE_{value}".upper(): value for value in (None, True, False)}
    own: dict[str, Any] = {name: Constant(value) for name, value in names.items() if hasattr(constant, name)}
    with mock.patch.multiple(constant, **own) if own else nullcontext():
        yield


def configured(**settings: Any) -> AbstractContextManager[Any]:
    """Patch Dynamo's settings only."""
    from torch._dynamo import config

    known = {name: value for name, value in {**SETTINGS, **settings}.items() if hasattr(config, name)}
    if getattr(config, _REPLAY, "") == "info" and not _logs_side_effects():
        known[_REPLAY] = "silent"
    patched: AbstractContextManager[Any] = config.patch(known)
    return patched


def _logs_side_effects() -> bool:
    """Whether a log takes what a trace changes of Python objects, and where: Dynamo formats a stack for each change."""
    is_traced = bool(logging.getLogger(_TRACES).handlers)
    return is_traced or logging.getLogger(_CHANGES).isEnabledFor(logging.DEBUG)


def lazy_modules() -> AbstractContextManager[Any]:
    """Let PyTorch write a graph that it makes as Python code when it first runs: most are only read and changed.

    Like Dynamo's own switch it is seen by all threads, and is held with Dynamo's lock.
    """
    with suppress(ImportError):
        from torch.fx._lazy_graph_module import _use_lazy_graph_module

        lazy: AbstractContextManager[Any] = _use_lazy_graph_module(True)
        return lazy
    return nullcontext()


def leaves_out_functions() -> bool:
    """Whether the user lets Dynamo leave out calls of some functions that print or log, or move them."""
    from torch._dynamo import config

    return any(getattr(config, f"{kind}_logging_functions", ()) for kind in ("ignore", "reorderable"))


Function = TypeVar("Function", bound=Callable[..., Any])


def graph_break(function: Function) -> Function:
    """The function as a graph break: where ``torch.compile`` traces what calls it, it runs as it is.

    Unlike ``torch.compiler.disable``, this imports Dynamo in the first call only, as optimizers of PyTorch do.

    Example:
        >>> graph_break(lambda x: x + 1)(1)
        2
    """
    disabled: Function = getattr(torch, "_disable_dynamo", lambda function: function)(function)
    return disabled


def compile_lock() -> AbstractContextManager[Any]:
    """Dynamo's lock: Dynamo, its tracers and Inductor change state that all threads see."""
    with suppress(ImportError):
        # The first import, as in torch.compile: Dynamo and Inductor import each other, and where two threads begin with
        # different ones, both find half of a module.
        importlib.import_module("torch._inductor.compiler_bisector")
    lock: AbstractContextManager[Any] = getattr(torch._dynamo.convert_frame, "compile_lock", None) or nullcontext()
    return lock


def compile_session() -> AbstractContextManager[Any]:
    """Let ``torch.compiler.is_compiling()`` be true, as Dynamo does around its backends since torch 2.13.

    While ``make_fx`` traces, ``torch.fx`` has a flag set that all threads see, and what ``torch.compile`` has compiled
    refuses to run, unless this is a compilation. This flag is one for all threads as well, and PyTorch has none that is
    not; it is held with Dynamo's lock.
    """
    return mock.patch.object(torch.compiler, "_is_compiling_flag", True)


@contextmanager
def timed() -> Iterator[None]:
    """Enter the metrics contexts that Dynamo's entry points enter, and that its internals rely on."""
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    with get_metrics_context(), dynamo_timed("autostream.capture", log_pt2_compile_event=True):
        yield


@contextmanager
def errors_not_logged(on_skip: Callable[[str], None]) -> Iterator[None]:
    """Keep errors with tracebacks out of PyTorch's logs, in this thread only: the caller gets them as exceptions.

    Args:
        on_skip: gets the reason for which Dynamo skips a frame, and so runs it eagerly.
    """
    thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        if record.thread != thread or not record.exc_info:
            return True
        if record.name == _CONVERT_FRAME and isinstance(record.exc_info[1], Exception):
            on_skip(first_line(record.exc_info[1]))
        return False

    loggers = [logging.getLogger(name) for name in (_CONVERT_FRAME, _FAKE_TENSORS)]
    for logger in loggers:
        logger.addFilter(passes)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(passes)
