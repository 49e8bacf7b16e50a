"""What a model uses and a graph of it could not follow: tensors that it does not hold, and how autograd is set."""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from autostream.errors import FastPathError, TraceError
from autostream.frontend.guards import transformed
from autostream.tracing.leaks import Watched
from autostream.tracing.lines import note_line
from autostream.tracing.numbers import Numbers
from autostream.tracing.replica import ReachedOriginalError


def registered(model: nn.Module) -> frozenset[int]:
    """The ids of the parameters and buffers of a model.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> registered(model) == {id(model.weight), id(model.bias)}
        True
    """
    return frozenset(map(id, chain(model.parameters(), model.buffers())))


def attributes_of(model: nn.Module) -> frozenset[int]:
    """The ids of tensors that are attributes of a model's modules, and neither parameters nor buffers.

    Example:
        >>> model = nn.ReLU()
        >>> model.scale = torch.ones(2)
        >>> attributes_of(model) == {id(model.scale)}
        True
    """
    values = (value for module in model.modules() for value in vars(module).values())
    return frozenset(id(value) for value in values if isinstance(value, Tensor))


def names_given(tensors: Iterable[Tensor]) -> frozenset[str]:
    """The names of attributes that somebody has given to tensors.

    Example:
        >>> weight = torch.ones(2)
        >>> weight.gain = 2.0
        >>> names_given([weight])
        frozenset({'gain'})
    """
    return frozenset(chain.from_iterable(map(vars, tensors)))


class Constants(TorchFunctionMode):
    """Refuses tensors that a graph could not follow, and questions whose answer it would keep.

    For export, a tensor that is neither an argument nor registered as a parameter or buffer is a constant. It executes
    ops that write one while it traces. And whoever calls the graph later knows where to look for another tensor in its
    place if it is an attribute of a module, but not if it is in a container or in a module that is in one.

    What a tensor is to autograd may be another thing in the next call. No signature says it, for hardly a model asks.

    Args:
        originals: what is :func:`registered` with the live model.
        outermost: the code that calls the model; ops keep the lines of what it calls.
        attributes: other tensors that may be used, but not written.

    Attributes:
        seen: the fake tensors of the trace.
        numbers: what is asked of them.
        last: the function of PyTorch's that was called last.
        requires: whether the model says of a tensor that it requires gradients, which no op of a graph does.
    """

    def __init__(
        self, originals: frozenset[int], outermost: CodeType, attributes: frozenset[int] = frozenset()
    ) -> None:
        super().__init__()
        self._originals = originals
        self._held = originals | attributes
        self._outermost = outermost
        self.seen: Watched = []
        self.numbers = Numbers(outermost)
        self.requires = False
        self.last: Any = None
        self._default_dtype = torch.get_default_dtype()

    def watch(self, value: Any) -> None:
        """Remember the fake tensors in a value, as long as somebody else holds them."""
        self.seen += [weakref.ref(leaf) for leaf in tree_leaves(value) if isinstance(leaf, FakeTensor)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function.

        Raises:
            TraceError: it uses or writes such a tensor, or gives one other memory, which no op of a graph does.
            ReachedOriginalError: it writes to what is registered with the live model.
            FastPathError: it asks what a tensor is to autograd, adds to its backward, or has changed the default
                dtype.
        """
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # the branches of a torch.cond
            return func(*args, **kwargs)
        note_line(sys._getframe(1), self._outermost)
        self.last = func
        if func in _QUESTIONS:
            _refuse_question(_QUESTIONS[func], sys._getframe(1))
        if torch.get_default_dtype() is not self._default_dtype:
            raise FastPathError("the model sets the default dtype, which the ops of a graph would not see")
        if func in _BACKWARD:
            raise FastPathError(f"the model calls {func.__name__}, which a graph would not")
        if func in _REPLACING:
            raise TraceError("the model gives a tensor other memory (.data = …), which a graph would not")
        self.requires |= func in _REQUIRING
        writes = _IN_PLACE.fullmatch(func.__name__.partition(".")[0])
        written = [*tree_leaves(kwargs.get("out")), *tree_leaves(args[0] if writes and args else None)]
        if real := {id(value) for value in written if _is_real(value)}:
            kind = TraceError if self._originals.isdisjoint(real) else ReachedOriginalError
            hint = "" if real <= self._held else _HOLD
            raise kind(f"the model writes ({func.__name__}) to a tensor that is no buffer: register it as one{hint}")
        used = [] if func.__name__ == "__get__" else tree_leaves((args, kwargs))
        if any(_is_real(value) and id(value) not in self._held for value in used):
            raise TraceError(
                f"the model uses ({func.__name__}) a tensor that is not registered with it: make it a buffer{_HOLD}"
            )
        result = func(*args, **kwargs)
        self.watch(result)
        self.numbers.note(func, result, sys._getframe(1))
        return result


_HOLD = ", or make the function that uses it, such as a loss, an nn.Module that holds it"


@contextmanager
def unasked(question: str) -> Iterator[None]:
    """Refuse, in this thread, a model that asks PyTorch for a mode which tracing turns off.

    Whoever has imported the function by its name is not noticed.

    Args:
        question: the name of a function of ``torch``, which takes no arguments.

    Example:
        >>> with unasked("is_inference_mode_enabled"):
        ...     torch.is_inference_mode_enabled()
        Traceback (most recent call last):
        autostream.errors.FastPathError: the model asks (is_inference_mode_enabled) what may change from call to call
    """
    tracing: int | None = threading.get_ident()
    answer = getattr(torch, question)

    def ask() -> bool:
        if threading.get_ident() == tracing:
            _refuse_question(question, sys._getframe(1))
        return bool(answer())

    try:
        with mock.patch.object(torch, question, ask):
            yield
    finally:
        tracing = None  # a module that is first imported in between keeps what it imports


@contextmanager
def ungiven(names: frozenset[str]) -> Iterator[None]:
    """Refuse, in this thread, a model that asks a tensor of a trace for attributes that only those of a user have.

    Their values are in no signature, and a tensor of a batch is another in each call.

    Args:
        names: of the attributes.

    Example:
        >>> with ungiven(frozenset({"gain"})):
        ...     getattr(torch.ones(2), "gain", 1.0)
        Traceback (most recent call last):
        autostream.errors.FastPathError: the model asks (tensor.gain) what may change from call to call
    """
    tracing = threading.get_ident()

    def ask(tensor: Tensor, name: str) -> Any:
        if name in names and threading.get_ident() == tracing:
            _refuse_question(f"tensor.{name}", sys._getframe(1))
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {name!r}", name=name, obj=tensor)

    # Found after all others: of what a tensor has, nothing is asked here.
    with mock.patch.object(Tensor, "__getattr__", ask, create=True) if names else nullcontext():
        yield


def _refuse_question(name: str, asking: FrameType) -> None:
    """Raise an error unless it is PyTorch that asks, for whose ops it makes no difference where nothing is recorded.

    Its interpreter of graphs asks what the graph does, which is the model's. Training steps ask for gradients.
    """
    while asking.f_back is not None and asking.f_code.co_name == "__torch_function__":  # another mode passes it on
        asking = asking.f_back
    module = str(asking.f_globals.get("__name__"))
    torchs = module.partition(".")[0] == "torch" and module != "torch.fx.interpreter"
    if not torchs and module not in _STEPS:
        raise FastPathError(f"the model asks ({name}) what may change from call to call")


_STEPS = {f"autostream.tracing.{name}" for name in ("steps", "lines")}
"""Where training steps ask."""


_ATTRIBUTES = ("requires_grad", "is_leaf", "grad_fn", "grad", "_version", "retains_grad", "_base")
_QUESTIONS = {
    **{getattr(Tensor, name).__get__: name for name in _ATTRIBUTES},
    Tensor._is_view: "_is_view",
    Tensor.is_inference: "is_inference",
    torch.is_inference: "is_inference",
}

_REQUIRING = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_BACKWARD = {Tensor.backward, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad}
_REPLACING = {Tensor.data.__set__}  # type: ignore[attr-defined]


def _is_real(tensor: object) -> bool:
    # Not isinstance: parameters and buffers are fake in a trace, and so is what is computed from them.
    real = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    return real and not transformed(tensor)  # type: ignore[arg-type]


_IN_PLACE = re.compile(
    r"(?!__).*[^_]_|__setitem__|__set__|__i(add|sub|mul|(true|floor)?div|mod|pow|and|or|xor|[lr]shift)__"
)
