"""Capture of a training step: a function with any number of losses, backwards and optimizer steps, as one graph.

    function ──capture──▶ graph of torch ops, with ``autograd.grad`` for each backward, ``optimizer_step`` for each step

Dynamo traces ``loss.backward()`` as ``torch.autograd.grad`` and writes to ``.grad``. It does not trace optimizers, so
while it traces, their ``step`` is one op that stands for the update, and ``zero_grad`` only sets gradients to ``None``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autostream.analysis.source import user_line
from autostream.errors import TraceError
from autostream.frontend.capture import Capture, capture, is_argument
from autostream.frontend.dynamo import compile_lock
from autostream.frontend.freezing import freezing_traced
from autostream.frontend.optimizers import values
from autostream.frontend.parameters import clear_gradients, have_no_gradients, set_aside
from autostream.frontend.scalers import call
from autostream.frontend.tensor_parallel import is_distributed, stand_in
from autostream.frontend.traceable import either, is_traceable_method, traceable_methods

_LIBRARY = torch.library.Library("autostream", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("optimizer_step(int index, Tensor[] parameters, Tensor?[] gradients) -> ()")  # type: ignore[no-untyped-call]
"""Stands for the update of the optimizer with this index in a captured graph; it is never run there."""


def _no_update(index: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None: ...


torch.library.register_fake("autostream::optimizer_step", _no_update)
_LIBRARY.impl("optimizer_step", _no_update, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]

OPTIMIZER_STEP = torch.ops.autostream.optimizer_step.default

_STAND_INS = "autostream::optimizer_step", "autostream::scaler"


class Body:
    """The step that Dynamo traces: a user's function, with its results detached.

    Subclasses are steps that autostream writes.

    Args:
        function: the user's.

    Attributes:
        parameters: of each optimizer, as they are now: they are set before each call. To the graph they are parameters
            of this object, whichever way the function gets at them, as Dynamo would take those that it meets in an
            optimizer first for constants.
        owner: one module with all modules of the step, whose classes are guarded.
    """

    takes_gradients = True
    """Whether the step may read gradients that parameters have when it begins."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.parameters: Sequence[Sequence[Tensor]] = ()
        self.owner = nn.Module()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        for parameters in self.parameters:
            for parameter in parameters:
                parameter.dtype  # noqa: B018 - Dynamo meets each here first
        from torch._dynamo.comptime import comptime

        result = _detached(self.run(*args, **kwargs))
        comptime(_allow_results)
        return result

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the step does."""
        return self.function(*args, **kwargs)


def _detached(value: Any) -> Any:
    """A result without gradients, if it is a tensor or in one of the usual containers."""
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)([_detached(each) for each in value])
    if type(value) is dict:
        return {key: _detached(each) for key, each in value.items()}
    return value


def _allow_results(context: Any) -> None:
    """Let Dynamo return tensors that a backward has gone through, which no step differentiates again.

    They are results in other containers, and what the step leaves on modules. A program returns them detached.
    """
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    translator.output.autograd_grad_consumed_grad_fns.clear()


def capture_step(body: Body, optimizers: Sequence[Optimizer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
    """Capture a call of a step. Nothing is computed, and nothing changes.

    A graph takes no gradients from one call to the next. So the function has to clear those that it finds, or to leave
    none, in which case the capture is of calls that find none.

    Args:
        body: the step. The caller guards its parameters, the capture does not.
        optimizers: those that it steps.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        FastPathError: a captured graph would not do what the function does.
        TraceError: it cannot be captured as one graph, changes an optimizer itself, or takes gradients from one call to
            the next.
    """
    every = {id(parameter): parameter for parameter in chain.from_iterable(body.parameters)}
    read: set[int] = set()
    if any(map(is_distributed, every.values())):
        stand_in(*_STAND_INS)

    def is_replaced(owner: object, name: str) -> bool:
        if owner is body:
            return name == "parameters"
        of_optimizer = name in _REPLACED and any(owner is optimizer for optimizer in optimizers)
        return of_optimizer or is_traceable_method(owner, name)

    def is_replaced_or_gradient(owner: object, name: str) -> bool:
        if name == "grad" and id(owner) in every:
            read.add(id(owner))
            return True
        return is_replaced(owner, name)

    def captured(unguarded: Callable[[object, str], bool]) -> Capture:
        with _without_updates(body, optimizers), _dynamo_changed(), _unmarked(every.values()):
            found = capture(body, args, kwargs, unguarded=unguarded)
        if found is None:
            raise TraceError("it computes nothing with tensors")
        for optimizer in optimizers:
            if any(owner is one for owner, _ in found.changed for one in (optimizer, *optimizer.param_groups)):
                raise TraceError(
                    f"it changes {type(optimizer).__name__} other than by step(), such as its learning rate"
                )
        tensors = dict(zip(found.module.graph.find_nodes(op="placeholder"), found.tensors, strict=True))
        for node in found.module.graph.nodes:
            if getattr(node.target, "__name__", "") == "set_" and id(tensors.get(node.args[0])) in every:
                raise TraceError("it sets the data of a parameter, whose gradient would be lost: write it in place")
        for node in found.module.graph.find_nodes(op="call_method", target="__delattr__"):  # Dynamo deletes nothing
            raise TraceError(f"it deletes a gradient: set it to None ({user_line(node.stack_trace)})")
        numbers = {id(value) for each in optimizers for value in values(each) if isinstance(value, Tensor)}
        if any(id(tensor) in numbers for tensor in found.tensors):
            raise TraceError("it reads a hyperparameter of an optimizer that is a tensor")
        return found

    begins_without = have_no_gradients(every.values())
    with torch.enable_grad(), set_aside(every.values()):
        if not body.takes_gradients:
            return captured(is_replaced_or_gradient)
        for parameter in every.values():
            parameter.grad = torch.zeros_like(parameter)
        with_gradients = captured(is_replaced_or_gradient)
        inputs = zip(with_gradients.tensors, with_gradients.inputs, strict=True)
        added = {id(tensor) for tensor, item in inputs if item.source.endswith(".grad")}
        if not added and not read:
            return with_gradients
        known = chain(every.values(), body.owner.parameters())
        asked = [each for each in known if id(each.grad) in added or (not added and id(each) in read)]
        reason = (_ADDS if added else _ASKS).format(_named(body.owner, asked))
        clear_gradients(every.values())
        if not added and _are_alike(with_gradients, captured(is_replaced_or_gradient)):
            return with_gradients  # it asks, and does the same whatever the answer is, as ``Module.zero_grad`` does
        if not begins_without:
            raise TraceError(reason)
        without_gradients = captured(is_replaced)
    if without_gradients.leaves_gradients:
        raise TraceError(reason)
    return without_gradients


def _are_alike(one: Capture, other: Capture) -> bool:
    """Whether two captures compute the same, and have the same results and effects."""
    inputs = [[item.source for item in captured.inputs] for captured in (one, other)]
    return inputs[0] == inputs[1] and one.module.code == other.module.code and one.bytecode == other.bytecode


def _named(owner: nn.Module, parameters: Sequence[Tensor]) -> str:
    """The first of these parameters, by its name where a module has it."""
    names = {id(parameter): name for name, parameter in owner.named_parameters()}
    for parameter in parameters:
        shape = "x".join(map(str, parameter.shape)) or "scalar"
        return f"{names.get(id(parameter), 'a parameter')} ({shape})"
    return "a parameter"


_ASKS = "it asks for the gradient of {}, which may be there when it is called: do that after zero_grad()"
_ADDS = (
    "it adds to the gradient of {}, which is there when it is called: call zero_grad() before each backward, or where "
    "it ends, and without set_to_none=False"
)


_REPLACED = ("step", "zero_grad", "scaled")


@contextmanager
def _without_updates(body: Body, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Replace methods of these optimizers, and of some classes, by functions that Dynamo can trace.

    Other threads, which may call them meanwhile, get what they do otherwise.
    """
    before = [{name: vars(each)[name] for name in _REPLACED if name in vars(each)} for each in optimizers]
    groups = [group for each in optimizers for group in each.param_groups if "capturable" in group]
    capturable = [group["capturable"] for group in groups]
    try:
        for index, optimizer in enumerate(optimizers):
            vars(optimizer).update(
                step=either(_step_of(body, index), optimizer.step),
                zero_grad=either(_zero_grad_of(body, index), optimizer.zero_grad),
                scaled=_scaled_of(body, index),
            )
        with compile_lock(), traceable_methods(), freezing_traced():  # Dynamo in other threads traces what is there
            yield
    finally:
        for optimizer, attributes in zip(optimizers, before, strict=True):
            for name in _REPLACED:
                vars(optimizer).pop(name, None)
            vars(optimizer).update(attributes)
        for group, value in zip(groups, capturable, strict=True):  # Dynamo sets it in groups that it traces
            group["capturable"] = value


@contextmanager
def _dynamo_changed() -> Iterator[None]:
    """Let Dynamo trace a step in this thread as the functions below say."""
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables import TensorVariable, builder
    from torch._dynamo.variables import torch as functions

    with (
        _replaced(SideEffects, "register_hook", _refuse_hook),
        _replaced(builder, "make_dupe_guard", _alias_guard),
        _replaced(TensorVariable, "_collect_backward_inputs", _reached_leaves),
        _replaced(functions, "_collect_tensors_with_sources", _with_distributed),
    ):
        yield


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let this thread call another function, whose first argument is the one that it replaces."""
    thread, before = threading.get_ident(), getattr(owner, name)

    def either(*args: Any, **kwargs: Any) -> Any:
        return function(before, *args, **kwargs) if threading.get_ident() == thread else before(*args, **kwargs)

    with mock.patch.object(owner, name, either):
        yield


def _refuse_hook(*_: Any) -> Any:
    """Refuse hooks that the function registers on parameters: Dynamo's ``backward()`` does not call them."""
    raise TraceError("it registers a hook on the gradient of a parameter")


def _alias_guard(make: Callable[..., Any], source: Any, other: Any) -> Any:
    """The guard that a local and a global are one object: Dynamo makes one for two locals, or two globals.

    A weight that is reached through a global is met as a parameter of the body first.
    """
    from torch._dynamo.guards import GuardBuilder

    guard = make(source, other)
    if guard is None and other is not None and source != other and not (is_argument(source) or is_argument(other)):
        return partial(GuardBuilder.DUPLICATE_INPUT, source_b=other)
    return guard


def _reached_leaves(collect: Callable[..., Any], loss: Any, variables: Any, error_on_non_leaf: bool = False) -> Any:
    """The leaves that a loss depends on, whose gradients alone autograd reads and writes in ``backward()``.

    Dynamo takes all leaves that it knows.
    """
    found = collect(loss, variables, error_on_non_leaf)
    if error_on_non_leaf or not found:
        return found
    leaves = _leaves_of(_example(loss))
    return [each for each in found if id(_example(each)) in leaves]


def _with_distributed(collect: Callable[..., Any], variable: Any) -> Any:
    """The tensors that ``autograd.grad`` is called with, and their sources; torch 2.11 refuses DTensors among them."""
    from torch._dynamo.variables import TensorVariable

    if not isinstance(variable, TensorVariable) or not is_distributed(_example(variable)):
        return collect(variable)
    return [(_example(variable), variable.source.name if variable.source else None)]


def _example(variable: Any) -> Any:
    return variable.as_proxy().node.meta["example_value"]


def _leaves_of(loss: Tensor) -> set[int]:
    """The ids of the leaves that get a gradient in the backward of a tensor."""
    if loss.grad_fn is None:
        return {id(loss)}
    return {id(node.variable) for node in backward_nodes(loss) if hasattr(node, "variable")}


def backward_nodes(loss: Tensor) -> Iterator[Any]:
    """The nodes of autograd's graph that the backward of a tensor runs, each once.

    Example:
        >>> [node.name() for node in backward_nodes(torch.ones(2, requires_grad=True).sum())]
        ['SumBackward0', 'torch::autograd::AccumulateGrad']
    """
    pending, seen = [loss.grad_fn], set[Any]()
    while pending:
        node: Any = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
            yield node


@contextmanager
def _unmarked(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let parameters be without the mark that makes them constants of Dynamo's graphs, and leave it as it was.

    Dynamo itself marks those that it meets in an optimizer.
    """
    marks = {parameter: vars(parameter).pop(_MARK, None) for parameter in parameters}
    try:
        yield
    finally:
        for parameter, mark in marks.items():
            vars(parameter).pop(_MARK, None)
            if mark is not None:
                vars(parameter)[_MARK] = mark


_MARK = "_dynamo_static_input_type"


def _step_of(body: Body, index: int) -> Callable[[], None]:
    def step() -> None:
        parameters = body.parameters[index]
        with torch.no_grad():
            torch.ops.autostream.optimizer_step(index, parameters, [parameter.grad for parameter in parameters])

    return step


def _scaled_of(body: Body, index: int) -> Callable[[str, Any], None]:
    return lambda method, scaler: call(method, scaler, index, body.parameters[index])


def _zero_grad_of(body: Body, index: int) -> Callable[..., None]:
    def zero_grad(set_to_none: bool = True) -> None:
        for parameter in body.parameters[index]:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    return zero_grad
