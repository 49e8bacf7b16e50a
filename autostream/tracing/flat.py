"""A model as a function of flat tensors, watched while it is traced: what every tracer has in common.

A tracer runs the model's Python once. What that does besides computing with tensors would be missing from the graph, so
it is looked for, and refused; and it is undone, so that a trace leaves nothing behind.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.traceback import preserve_node_meta

from autostream import collector
from autostream.errors import BranchError, ChangeError, ChoiceError, FastPathError, TraceError, first_line
from autostream.frontend.guards import has_torchscript, unusual
from autostream.frontend.tree import TENSOR, Structure, UnknownNumberError, flatten, unflatten
from autostream.operators import symbols_of
from autostream.storages import storage_of
from autostream.tracing.attention import fused_attention
from autostream.tracing.attributes import Holder, Variable, holders, host_generators, referred_to, untouched
from autostream.tracing.branches import ASKING, Assumed, Way
from autostream.tracing.comparisons import ReflectedComparisons
from autostream.tracing.constants import Constants, unasked, ungiven
from autostream.tracing.draws import draws
from autostream.tracing.dropouts import IdleDropouts
from autostream.tracing.generators import GeneratorState
from autostream.tracing.leaks import recalled, taken_back
from autostream.tracing.lines import error_line
from autostream.tracing.numbers import unknown_in
from autostream.tracing.reads import Reads, functions_of
from autostream.tracing.state import name_of
from autostream.tracing.tamed import patched_for_this_thread, tamed, unreferenced

Graph = TypeVar("Graph")


def check_ordinary(model: nn.Module) -> None:
    """See that a model is one of Python, over ordinary tensors.

    Raises:
        FastPathError: it has TorchScript in it, which Dynamo leaves alone, or will not even look at.
        TraceError: it is not; the message says why.

    Example:
        >>> model = nn.Module()
        >>> model.register_buffer("mask", torch.eye(2).to_sparse())
        >>> check_ordinary(model)
        Traceback (most recent call last):
        ...
        autostream.errors.TraceError: the model's mask has the layout torch.sparse_coo
    """
    if has_torchscript(model):
        raise FastPathError("TorchScript cannot be traced: use the module that it was made from")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if reason := unusual(tensor):
            raise TraceError(f"the model's {name} {reason}")


class _Result:
    """Carries what is learnt out of a trace. Export restores attributes that are containers, but no others."""

    structure = TENSOR
    """Of the outputs."""

    modes: frozenset[FakeTensorMode] = frozenset()
    """Of the fake tensors that the model ran on."""

    puts_back = False
    """Whether a random generator's state was set."""


class FlatModel(nn.Module):
    """A model that takes and returns flat tensors, so that a tracer never sees a container.

    Args:
        model: the module; it is called with fake tensors, which stand in for its own meanwhile.
        structure: of ``(args, kwargs)``.
        originals: what is :func:`~autostream.tracing.constants.registered` with the live model.
        tracer: who calls it, for messages.
        attributes: the ids of other tensors that the live model may use.
        way: of branches on values, the outcomes to assume; by default such a model is refused.
        names: of attributes that somebody gave to the live model's tensors, or to the arguments.

    Attributes:
        result: what is learnt in a trace.
        constants: looks at every call of PyTorch's functions.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        originals: frozenset[int],
        tracer: str,
        attributes: frozenset[int] = frozenset(),
        way: Way | None = None,
        names: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.model = model
        self._way = way
        self._names = names
        self._tracer = tracer
        self._structure = structure
        self._grad_mode = torch.is_grad_enabled()
        self.result = _Result()
        self.constants = Constants(originals, _called.__code__, attributes)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The model's flat outputs."""
        args, kwargs = unflatten(self._structure, tensors)
        outside = referred_to(self.model)
        if named := outside.iterators:
            raise FastPathError(f"the model refers to {named[0]}, an iterator: a graph would take from it once")
        if unwatched := Reads(functions_of(list(self.model.modules()))).unwatched():
            raise TraceError(
                f"the model reads {unwatched[0]}, whose contents are too large to be compared in each call: make it a "
                "tensor, and a buffer"
            )
        before = holders(self.model)
        self.constants.watch(tensors)
        given = [*tensors, *self.model.parameters(), *self.model.buffers()]
        self.result.modes = frozenset(tensor.fake_mode for tensor in given if isinstance(tensor, FakeTensor))
        layouts = list(map(_layout, given))
        required = list(map(_REQUIRED, given))
        torch.default_generator.manual_seed(_UNLIKELY_SEED)
        generators, grad_mode = host_generators(), torch.is_grad_enabled()
        assumed = None if self._way is None else Assumed(self._way)
        try:
            with (
                patched_for_this_thread(),
                self.watched_generators(),
                preserve_node_meta(),
                IdleDropouts(),
                self.constants,
                self.constants.numbers.untold(),
                self._unasked(),
                assumed or nullcontext(),
                ReflectedComparisons(),
            ):
                result = _called(self.model, args, kwargs)
            if assumed:
                assumed.check_used()
        except Exception as error:
            # Translated here, for export itself would print its graph to stderr, and PyTorch's frames hide the user's.
            raise self.refusal(error) from error
        if isinstance(result, (Coroutine, Generator)):
            result.close()
            raise FastPathError(f"the model returns a {type(result).__name__}, which computes when it is asked to")
        if torch.is_grad_enabled() != grad_mode:
            torch.set_grad_enabled(grad_mode)
            raise FastPathError("the model leaves the recording of gradients switched on or off: a graph would not")
        self._check_unchanged(before, outside.holders)
        if host_generators() != generators:
            raise TraceError(
                "the model draws random numbers from Python or NumPy, or sets a seed: a graph would do so once"
            )
        after, structure = flatten((args, kwargs))
        if structure != self._structure or any(new is not old for new, old in zip(after, tensors, strict=True)):
            raise TraceError("the model changes a container (list, dict, …) that it is given")
        if list(map(_layout, given)) != layouts:
            raise TraceError("the model changes the shape or the memory of a tensor in place (resize_, set_)")
        try:
            outputs, output_structure = flatten(result)
        except UnknownNumberError as error:
            raise self.refusal(error) from error
        if self.constants.requires and (list(map(_REQUIRED, given)) != required or any(map(_REQUIRED, outputs))):
            raise FastPathError("the model says of a tensor that it requires gradients, and a caller can see that")
        self.result.structure = output_structure
        return tuple(outputs)

    def _check_unchanged(
        self, attributes: Sequence[Holder | GeneratorState], outside: Sequence[Holder | Variable | GeneratorState]
    ) -> None:
        """See that a model has left alone what it has and what it refers to.

        Raises:
            TraceError: it has not.
        """
        own = [holder for holder in attributes if holder.changed()]
        others = [holder for holder in outside if holder.changed()]
        if numbers := unknown_in([holder.now() for holder in (*own, *others)]):
            raise self.constants.numbers.refusal(symbols_of(numbers[0]))
        drawn = [holder.changed() for holder in (*own, *others) if isinstance(holder, GeneratorState)]
        if drawn:  # TorchDynamo, too, makes a constant of what it draws from Python's
            raise FastPathError(f"the model draws from {drawn[0]}: a graph would do so only once")
        if own or others:
            what = f"its own attribute {own[0].changed()}" if own else others[0].changed()
            raise ChangeError(f"the model's forward changes {what}: a graph would do so only once")

    def refusal(self, error: Exception) -> TraceError:
        """What keeps the model from being traced, in one line, with the user's own if there is one."""
        if isinstance(error, UnknownNumberError):
            return self.constants.numbers.refusal(error.symbols)
        if isinstance(error, TraceError):
            reason, _, _ = str(error).partition("\n")  # torch.fx adds pages to errors in graphs that it interprets
            return type(error)(f"{reason}{error_line(error)}")
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # tracing has imported it by now

        why, where = f"{self._tracer} cannot trace {name_of(self.model)}:", error_line(error)
        if not isinstance(error, GuardOnDataDependentSymNode):
            return TraceError(f"{why} {first_line(error)}{where}")
        kind = ChoiceError if self.constants.last in ASKING else BranchError
        asked, _, _ = first_line(error).partition(" (unhinted")
        return kind(f"{why} Python asks for a number that only a run tells (torch.where does not): {asked}{where}")

    @contextmanager
    def _unasked(self) -> Iterator[None]:
        """Refuse questions about what is otherwise in a trace, such as modes that export turns off."""
        grad_mode = unasked("is_grad_enabled") if self._grad_mode else nullcontext()
        with (
            unasked("is_inference_mode_enabled"),
            unasked("is_anomaly_enabled"),
            unasked("initial_seed"),
            grad_mode,
            ungiven(self._names),
        ):
            yield

    @contextmanager
    def watched_generators(self) -> Iterator[None]:
        """Note when this thread puts a random generator's state back, which a graph would not."""
        tracing: int | None = threading.get_ident()

        def noting(function: Callable[..., None]) -> Callable[..., None]:
            def put(*args: Any, **kwargs: Any) -> None:
                # Dynamo, which traces the branches of a torch.cond, only undoes what it has drawn itself.
                by_dynamo = str(sys._getframe(1).f_globals.get("__name__")).startswith("torch._dynamo.")
                if threading.get_ident() == tracing and not by_dynamo:
                    self.result.puts_back = True
                function(*args, **kwargs)

            return put

        with ExitStack() as stack:
            for module in (torch, torch.random, torch.cuda):
                stack.enter_context(mock.patch.object(module, "set_rng_state", noting(module.set_rng_state)))
            yield


_REQUIRED = attrgetter("requires_grad")

_UNLIKELY_SEED = 0x5EED_0F_A_7ACE
"""Tells whether a model sets the seed. The generators are put back when tracing is done."""


def _called(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a model; if it is a graph, such as a piece that Dynamo made, let each op keep the user's line."""
    if not isinstance(model, torch.fx.GraphModule) or kwargs:
        return model(*args, **kwargs)
    return torch.fx.Interpreter(model).run(*args)


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return storage_of(tensor), tensor.shape, tensor.stride(), tensor.storage_offset()


def watched(tracer: Callable[[], Graph], flat: FlatModel) -> Graph:
    """Call a tracer, which calls a model, and leave everything but what it returns as it was.

    Raises:
        TraceError: it fails, or the model does what a graph of it would not do; the message says why, and where.
    """
    with ExitStack() as stack:
        stack.callback(lambda: unreferenced(flat.result.modes | _modes_of(flat.model)))
        stack.enter_context(untouched(flat.model))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(tamed())
        stack.enter_context(fused_attention())
        stack.enter_context(collector.paused())
        try:
            graph = tracer()
        except Exception as error:
            _let_go(error)
            taken_back([*flat.constants.seen, *flat.constants.numbers.seen])
            raise flat.refusal(error) from error
    if recalled(flat.constants.seen):
        raise TraceError("the model keeps a tensor in a cache, list or dict: a graph would not put it there again")
    kept = flat.constants.numbers.kept()
    if recalled(flat.constants.numbers.seen) and kept:
        raise kept
    return graph


def check_graph(flat: FlatModel, module: torch.fx.GraphModule) -> None:
    """See that a graph does what was traced: of random numbers, and of those that were taken from tensors.

    Raises:
        TraceError: it draws random numbers, and puts back a generator's state, or from another generator than
            PyTorch's own; or Python looked at a number that the graph does not use.
    """
    flat.constants.numbers.check_used(module)
    parts = (part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule))
    drawing = [node for graph in parts for node in graph.nodes if draws(node)]
    if drawing and flat.result.puts_back:
        raise TraceError(
            "random numbers are drawn again from a state that is put back (set_rng_state, as checkpointing does): a "
            "graph would draw others"
        )
    if any(node.kwargs.get("generator") is not None for node in drawing):
        raise TraceError("random numbers are drawn from a generator of the model's own: a graph would draw from a copy")


def _modes_of(model: nn.Module) -> frozenset[FakeTensorMode]:
    """The modes of fake tensors in the notes of a graph, which is what a piece that Dynamo made is."""
    nodes = model.graph.nodes if isinstance(model, torch.fx.GraphModule) else ()
    values = (value for node in nodes for value in tensors_in(node.meta.get("example_value")))
    return frozenset(value.fake_mode for value in values if isinstance(value, FakeTensor))


def _let_go(error: BaseException | None) -> None:
    """Drop what the frames of an error and of its causes hold: to look for who else holds a fake tensor takes long."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def tensors_in(value: object) -> list[Tensor]:
    """The tensors of an fx node's value."""
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, (list, tuple)) else []
