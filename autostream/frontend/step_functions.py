"""A training step as its user writes it: a function with any number of losses, backwards and optimizer steps, captured.

    function ──capture──▶ graph of torch ops, with ``autograd.grad`` for each backward, ``optimizer_step`` for each step
                              └──▶ runs on fake tensors, updates by torch.optim's code ──make_fx──▶ one program

Dynamo traces ``loss.backward()`` as ``torch.autograd.grad`` and writes to ``.grad``. It does not trace optimizers, so
while it traces, their ``step`` is one op that stands for the update, and ``zero_grad`` only sets gradients to ``None``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from autostream.errors import TraceError
from autostream.frontend.aten import GraphInput, as_program
from autostream.frontend.capture import Capture, capture
from autostream.frontend.eager_only import unusual
from autostream.frontend.inputs import names_of
from autostream.frontend.optimizers import Group, update, values
from autostream.frontend.parameters import (
    State,
    clear_gradients,
    have_hooks,
    have_no_gradients,
    parameters_of,
    set_aside,
)
from autostream.frontend.steps import Interpreter, RandomRecomputation, keep_lines, traced_below_autograd
from autostream.frontend.tree import map_tensors
from autostream.ir import Program, Role

_LIBRARY = torch.library.Library("autostream", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("optimizer_step(int index, Tensor[] parameters, Tensor?[] gradients) -> ()")  # type: ignore[no-untyped-call]
"""Stands for the update of the optimizer with this index in a captured graph; it is never run there."""


def _no_update(index: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None: ...


torch.library.register_fake("autostream::optimizer_step", _no_update)
_LIBRARY.impl("optimizer_step", _no_update, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]

OPTIMIZER_STEP = torch.ops.autostream.optimizer_step.default


class Body:
    """The function that Dynamo traces: the user's, and its results detached.

    Args:
        function: the user's.
        parameters: of each optimizer. To the graph they are parameters of this object, whichever way the function gets
            at them: Dynamo would take those that it meets in an optimizer first for constants.
    """

    def __init__(self, function: Callable[..., Any], parameters: Sequence[Sequence[Tensor]]) -> None:
        self.function, self.parameters = function, parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        for parameters in self.parameters:
            for parameter in parameters:
                parameter.dtype  # noqa: B018 - Dynamo meets each here first
        return _detached(self.function(*args, **kwargs))


def _detached(value: Any) -> Any:
    """A result without gradients; the usual containers are taken apart in a way that all versions of Dynamo trace."""
    if isinstance(value, Tensor):
        return value.detach()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (tuple, list):
        return type(value)([_detached(each) for each in value])
    if type(value) is dict:
        return {key: _detached(each) for key, each in value.items()}
    return map_tensors(Tensor.detach, value)


def capture_step(
    function: Callable[..., Any], optimizers: Sequence[Optimizer], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Capture, Body]:
    """Capture a call of a step function. Nothing is computed, and nothing changes.

    A graph takes no gradients from one call to the next. So the function has to clear those that it finds, or to leave
    none, in which case the capture is of calls that find none.

    Args:
        function: the step function.
        optimizers: those that it uses.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The capture, and what it is a capture of.

    Raises:
        FastPathError: a captured graph would not do what the function does.
        TraceError: it cannot be captured as one graph, changes an optimizer itself, or takes gradients from one call to
            the next.
    """
    parameters = [parameters_of(optimizer) for optimizer in optimizers]
    every = {id(parameter): parameter for parameter in chain.from_iterable(parameters)}
    body = Body(function, parameters)

    read: set[int] = set()

    def is_replaced(owner: object, name: str) -> bool:
        return name in _REPLACED and any(owner is optimizer for optimizer in optimizers)

    def is_replaced_or_gradient(owner: object, name: str) -> bool:
        if name == "grad" and id(owner) in every:
            read.add(id(owner))
            return True
        return is_replaced(owner, name)

    def captured(unguarded: Callable[[object, str], bool]) -> Capture:
        with _without_updates(body, optimizers), _without_hooks():
            found = capture(body, args, kwargs, unguarded=unguarded)
        if found is None:
            raise TraceError("it computes nothing with tensors")
        for owner, _ in found.changed:
            if any(owner is optimizer for optimizer in optimizers):
                raise TraceError(f"it changes {type(owner).__name__} other than by step(), such as its learning rate")
        numbers = {id(value) for each in optimizers for value in values(each) if isinstance(value, Tensor)}
        if any(id(tensor) in numbers for tensor in found.tensors):
            raise TraceError("it reads a hyperparameter of an optimizer that is a tensor")
        return found

    begins_without = have_no_gradients(every.values())
    with torch.enable_grad(), set_aside(every.values()):
        for parameter in every.values():
            parameter.grad = torch.zeros_like(parameter)
        with_gradients = captured(is_replaced_or_gradient)
        if not (adds := any(item.source.endswith(".grad") for item in with_gradients.inputs)) and not read:
            return with_gradients, body
        clear_gradients(every.values())
        if not adds and _same_graph(with_gradients, captured(is_replaced_or_gradient)):
            return with_gradients, body  # Dynamo's backward reads each gradient, also of what the loss does not reach
        if not begins_without:
            raise TraceError(_ADDS)
        without_gradients = captured(is_replaced)
    if without_gradients.leaves_gradients:
        raise TraceError(_ADDS)
    return without_gradients, body


def _same_graph(one: Capture, other: Capture) -> bool:
    inputs = [[item.source for item in captured.inputs] for captured in (one, other)]
    return inputs[0] == inputs[1] and one.module.code == other.module.code


_ADDS = "it adds to gradients that are there when it is called: call zero_grad() before each backward, or where it ends"


_REPLACED = ("step", "zero_grad")


@contextmanager
def _without_updates(body: Body, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Replace ``step`` and ``zero_grad`` of these optimizers by functions that Dynamo can trace."""
    before = [
        {name: vars(optimizer)[name] for name in _REPLACED if name in vars(optimizer)} for optimizer in optimizers
    ]
    groups = [[dict(group) for group in each.param_groups] for each in optimizers]
    try:
        for index, optimizer in enumerate(optimizers):
            vars(optimizer).update(step=_step_of(body, index), zero_grad=_zero_grad_of(body, index))
        yield
    finally:
        for optimizer, attributes in zip(optimizers, before, strict=True):
            for name in _REPLACED:
                vars(optimizer).pop(name, None)
            vars(optimizer).update(attributes)
        for optimizer, entries in zip(optimizers, groups, strict=True):
            for group, known in zip(optimizer.param_groups, entries, strict=True):
                group.update(known)  # Dynamo sets ``capturable`` in a group that it traces


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Refuse hooks that the function registers on parameters: Dynamo's ``backward()`` does not call them."""
    from torch._dynamo.side_effects import SideEffects

    thread, register = threading.get_ident(), SideEffects.register_hook

    def refuse(self: Any, *args: Any) -> Any:
        if threading.get_ident() == thread:
            raise TraceError("it registers a hook on the gradient of a parameter")
        return register(self, *args)

    SideEffects.register_hook = refuse  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        SideEffects.register_hook = register  # type: ignore[method-assign]


def _step_of(body: Body, index: int) -> Callable[[], None]:
    def step() -> None:
        parameters = body.parameters[index]
        with torch.no_grad():
            torch.ops.autostream.optimizer_step(index, parameters, [parameter.grad for parameter in parameters])

    return step


def _zero_grad_of(body: Body, index: int) -> Callable[..., None]:
    def zero_grad(set_to_none: bool = True) -> None:
        for parameter in body.parameters[index]:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    return zero_grad


@dataclass(frozen=True)
class Update:
    """What tracing has to know of an optimizer.

    Attributes:
        optimizer: the optimizer.
        groups: its hyperparameters, with an ``Input`` for each that is one.
        state: its tensors.
        numbers: the values of its inputs, in one tensor.
    """

    optimizer: Optimizer
    groups: Sequence[Group]
    state: State
    numbers: Tensor


@dataclass(frozen=True)
class TracedFunction:
    """A step function's program.

    Attributes:
        program: returns the outputs of the captured graph.
        sources: for each placeholder, the position of its tensor among the inputs of the captured graph, then all state
            and all numbers of the optimizers; or the tensor itself, if it is a constant.
    """

    program: Program
    sources: Sequence[int | Tensor]

    def arguments(self, inputs: Sequence[Tensor], updates: Sequence[Update]) -> list[Tensor]:
        """The program's arguments for a call whose captured graph has these inputs."""
        flat = _flat(inputs, updates)
        return [flat[at] if isinstance(at, int) else at for at in self.sources]


def _flat(inputs: Sequence[Tensor], updates: Sequence[Update]) -> list[Tensor]:
    states = [tensor for each in updates for tensor in each.state.tensors]
    return [*inputs, *states, *(each.numbers for each in updates)]


def trace_function(captured: Capture, updates: Sequence[Update], modules: nn.Module) -> TracedFunction:
    """Trace a captured step function. Nothing is computed, and no tensor changes.

    Args:
        captured: by :func:`capture_step`.
        updates: the optimizers, in the order in which they were given there.
        modules: the owner of parameters and buffers, which gives them their names.

    Raises:
        TraceError: it cannot be traced; the message says why.
    """
    flat = _flat(captured.tensors, updates)
    names: list[tuple[Role, str]] = [
        *names_of(captured, modules),
        *((Role.BUFFER, f"optimizer_{k}.{n}_{at}") for k, each in enumerate(updates) for at, n in each.state.names),
        *((Role.INPUT, f"numbers_{k}") for k in range(len(updates))),
    ]
    for tensor, (_, name) in zip(flat, names, strict=True):
        if reason := unusual(tensor):
            raise TraceError(f"{name} {reason}")
    if len({id(tensor) for tensor in flat}) < len(flat):
        raise TraceError("a tensor is given to it twice")
    roles = list(Role)
    order = sorted(range(len(flat)), key=lambda at: (roles.index(names[at][0]), at))
    inputs: list[GraphInput] = [(*names[at], flat[at]) for at in order]
    if have_hooks([tensor for tensor in captured.tensors if tensor.requires_grad]):
        raise TraceError("a parameter has hooks on its gradient, which a graph would not call")
    indices = [order.index(at) for at in range(len(flat))]
    try:
        graph = traced_below_autograd(_Run(captured, updates, indices, recomputes=True), inputs)
    except RandomRecomputation:
        graph = traced_below_autograd(_Run(captured, updates, indices, recomputes=False), inputs)
    program, constants = as_program(graph, inputs)
    positions = {names[at]: at for at in order}
    sources: list[int | Tensor] = []
    for placeholder in program.placeholders:
        at = positions.get((placeholder.role, placeholder.target))
        sources.append(constants[placeholder.target] if at is None else at)
    return TracedFunction(program, sources)


class _Run:
    """The function to trace: the captured graph on fake tensors, with the optimizers' updates in it."""

    def __init__(
        self, captured: Capture, updates: Sequence[Update], indices: Sequence[int], *, recomputes: bool
    ) -> None:
        self._captured, self._updates, self._indices, self._recomputes = captured, updates, indices, recomputes

    def __call__(self, *values: Tensor) -> list[Tensor]:
        """The outputs of the captured graph."""
        clear_gradients(values)  # a fake tensor has a gradient if the real one has
        fakes = iter([values[index] for index in self._indices])
        inputs = [next(fakes) for _ in self._captured.tensors]
        states = [[next(fakes) for _ in each.state.tensors] for each in self._updates]
        numbers = [*fakes]
        interpreter = _StepInterpreter(self._captured.module, self._recomputes, self._updates, states, numbers)
        with torch.enable_grad(), torch.autograd.set_detect_anomaly(True, check_nan=False):  # records the user's lines
            outputs = interpreter.run(*inputs)
        if interpreter.recomputes_random:
            raise RandomRecomputation
        if not all(isinstance(output, Tensor) for output in outputs):
            raise TraceError("the number of a tensor goes to Python: return the tensor instead")
        return [output.detach() for output in outputs]


class _StepInterpreter(Interpreter):
    """Runs a captured step function, with updates for the ops that stand for them."""

    def __init__(
        self,
        module: fx.GraphModule,
        recomputes: bool,
        updates: Sequence[Update],
        states: Sequence[Sequence[Tensor]],
        numbers: Sequence[Tensor],
    ) -> None:
        super().__init__(module, recomputes)
        self._updates, self._states, self._numbers = updates, states, numbers

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a ``call_function`` node."""
        if target is OPTIMIZER_STEP or target is torch.ops.autostream.optimizer_step:
            return self._update(*args)
        if target is torch.autograd.grad:
            keep_lines(args[0])
        return super().call_function(target, args, kwargs)

    def _update(self, index: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        known = self._updates[index]
        state: dict[Tensor, dict[str, Tensor]] = {}
        for (at, name), value in zip(known.state.names, self._states[index], strict=True):
            state.setdefault(parameters[at], {})[name] = value
        left = iter(parameters)
        by_group = [[next(left) for _ in group["params"]] for group in known.optimizer.param_groups]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        update(known.optimizer, known.groups, self._numbers[index], by_group, state)
        clear_gradients(parameters)
