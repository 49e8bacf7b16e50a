"""Capture with Dynamo: from a callable and its arguments to one fx graph, with guards.

    model, args, kwargs ──▶ Capture ──┬─ module   an fx graph of torch ops: flat tensors in, flat tensors out
                                      ├─ inputs   where each of its inputs comes from
                                      ├─ guards   what has to hold for the graph to be reused (guards.py)
                                      └─ restore  Dynamo's bytecode: fetches inputs, runs the graph, builds the outputs
                                                  and applies side effects on Python objects

Where PyTorch lacks a private interface that this builds on (see ``frontend/__init__.py``), :func:`capture` raises a
:class:`~autostream.errors.TraceError` that names it.
"""

from __future__ import annotations

import builtins
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from dis import get_instructions
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx

from autostream.errors import FastPathError, TraceError, first_line
from autostream.frontend.attention_fast_path import use_attention_fast_path
from autostream.frontend.attention_masks import simplify_masks
from autostream.frontend.counters import apart, counters_in, dynamic, guarded_among
from autostream.frontend.distributions import arguments_not_checked, is_default_of_checks
from autostream.frontend.dropouts import drop_idle_dropouts
from autostream.frontend.dynamo import compiling, errors_not_logged, leaves_out_functions, timed
from autostream.frontend.guards import (
    Guards,
    Values,
    compare_identities,
    drop_guards,
    guard_empty_tables,
    guard_identities,
    guards_of,
    is_reached,
    source_name,
)
from autostream.frontend.reasons import PYTHONS_NUMBERS, reason_of
from autostream.frontend.static_tensors import attributes_as_inputs, with_attributes
from autostream.frontend.tensor_parallel import is_distributed, is_mesh, local_source, no_random_numbers
from autostream.utils import collector

Arguments = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A call: the callable, its positional arguments and its keyword arguments."""

Store = tuple[Any, str, Any]
"""A write to an attribute: the object, the attribute's name, and the constant that is assigned."""


def call(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What Dynamo traces: it inlines the model's ``__call__``, so hooks and wrappers are guarded too."""
    return model(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Input:
    """Where an input of a captured graph comes from.

    Attributes:
        name: of the placeholder.
        source: as Dynamo writes it, such as ``L['model']._modules['fc']._parameters['weight']``.
        is_argument: whether it is an argument of the call or lies in one. All others belong to the model, or are
            globals.
        steps: by which it is reached from the locals of the call: whether each reads an attribute, and its name, or the
            key of an item. Empty where Dynamo reaches it otherwise.
    """

    name: str
    source: str
    is_argument: bool
    steps: tuple[tuple[bool, Any], ...] = ()

    def fetch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Its value in a call, by its steps.

        Raises:
            Exception: a step leads nowhere.
        """
        value: Any = {"args": args, "kwargs": kwargs}
        for is_attribute, key in self.steps:
            value = getattr(value, key) if is_attribute else value[key]
        return value


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured call.

    Attributes:
        module: takes the tensors of ``inputs`` and returns a tuple of tensors.
        inputs: of ``module``, in order.
        tensors: the values of these inputs in the captured call.
        guards: whether the graph may be reused for another call.
        restored: makes a function of ``(model, args, kwargs)`` that does what the model does, with another function in
            place of ``module``, which takes the flat tensors and returns as many.
        bytecode: Dynamo's, which it runs: instructions and what they load, without the name of the graph.
        stores: the constants that a call assigns to attributes of Python objects.
        effects: whether a call has side effects on Python objects beyond ``stores``.
        leaves_gradients: whether it sets the ``.grad`` of a tensor to a tensor.
        kept: the outputs of ``module`` that it leaves in attributes of its arguments, by index, such as the tensors
            that a cache is made of in its first use.
        does_more: whether the model itself may do more than what was traced: it asks whether it is compiled, or calls a
            function that Dynamo has been told to leave out or to move.
        changed: with ``unguarded``, each object that the call changes, and the steps by which it reaches it
            (``guards.Values.steps_to``).
    """

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    tensors: tuple[Tensor, ...]
    guards: Guards
    restored: Callable[[Callable[..., Sequence[Any]]], Callable[..., Any]]
    bytecode: tuple[tuple[str, Any], ...]
    stores: tuple[Store, ...] = ()
    effects: bool = False
    leaves_gradients: bool = False
    kept: tuple[int, ...] = ()
    does_more: bool = False
    changed: tuple[tuple[object, str], ...] = ()

    def graph_inputs(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The tensors that Dynamo's bytecode passes to the graph in a call. The graph does not run."""
        try:
            self.restored(_raise_inputs)(model, args, kwargs)
        except _GraphInputs as inputs:
            return inputs.values
        raise AssertionError("a captured call runs its graph")


class _GraphInputs(Exception):  # noqa: N818 - control flow within this file, not an error
    """Carries the inputs of a graph out of Dynamo's bytecode."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        super().__init__()
        self.values = values


def _raise_inputs(*values: Any) -> Sequence[Any]:
    raise _GraphInputs(values)


def capture(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    unguarded: Callable[[object, str], bool] | None = None,
    *,
    differentiates: bool = True,
    counters: Sequence[str] = (),
) -> Capture | None:
    """Trace a call, in the modes that are set now. Nothing is computed, and Python's state does not change.

    Args:
        model: any callable.
        args: its positional arguments.
        kwargs: its keyword arguments.
        unguarded: of an object and the name of an attribute of it, whether what Dynamo guards there does not count: the
            caller has put it there for the time of the capture.
        differentiates: whether a backward in the call may be a part of the graph.
        counters: sources of integers that are not guarded by value. Those that the call writes are found by itself.

    Returns:
        ``None`` for a call that computes nothing with tensors.

    Raises:
        FastPathError: a captured graph would not do what the model does.
        TraceError: Dynamo cannot capture the call as one graph, or PyTorch lacks a private interface; the message is
            Dynamo's.

    Example:
        >>> captured = capture(torch.nn.Linear(2, 3), (torch.ones(1, 2),), {})
        >>> [item.is_argument for item in captured.inputs]
        [False, False, True]
        >>> captured.guards(torch.nn.Linear(2, 3), (torch.ones(1, 2),), {})
        False
    """
    graphs: list[tuple[fx.GraphModule, Sequence[Any], _Effects]] = []

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append((module, example_inputs, _side_effects()))
        return lambda *values: module(*values)  # the code of a graph that is returned itself is written at once

    # Dynamo adds what it imports to the globals of the code that it traces, so each capture has globals of its own.
    globals_: dict[str, Any] = {"__name__": __name__, "__builtins__": builtins}
    function, scope = FunctionType(call.__code__, globals_), {"model": model, "args": args, "kwargs": kwargs}
    try:
        with (
            compiling(trace_autograd_ops=differentiates),
            collector.paused(),  # Dynamo makes millions of objects, few of them in cycles
            timed(),
            errors_not_logged(lambda reason: None),
            arguments_not_checked(),
            no_random_numbers(),
            dynamic(counters),
        ):
            random_state = random.getstate()  # Dynamo runs the model's calls of ``random`` while it traces
            try:
                output = _compile_frame(function, scope, backend)
            except Exception as error:
                raise TraceError(reason_of(error)) from error
            finally:
                random.setstate(random_state)
            if output.tracer_output.output_graph.random_calls:  # the graph would use the same numbers in each call
                raise FastPathError(PYTHONS_NUMBERS)
            if not graphs:
                return None
            ((module, example_inputs, effects),) = graphs
            module, attributes = attributes_as_inputs(module)
            if differentiates and torch.is_grad_enabled() and not any(map(_is_leaf, (*example_inputs, *attributes))):
                # Dynamo traces no backward then, though one of a loss that was computed before reaches leaves.
                return capture(model, args, kwargs, unguarded, differentiates=False, counters=counters)
            if not counters and (found := guarded_among(effects.counters, output)):
                with suppress(TraceError):  # a tensor depends on one of them
                    return capture(model, args, kwargs, unguarded, differentiates=differentiates, counters=found)
            values = Values(scope, output.graph_capture_output().f_globals)
            code = function.__code__
            captured = _capture_of(output, code, scope, values, module, example_inputs, attributes, unguarded)
        changed: tuple[tuple[object, str], ...] = ()
        if unguarded is not None:
            changed = tuple(
                step for source in effects.sources for step in ((values.at(source), ""), *values.steps_to(source))
            )
        results: Any = module.graph.output_node().args[0]
        return replace(
            captured,
            stores=tuple((values.at(source), name, value) for source, name, value in effects.stores),
            effects=effects.others,
            leaves_gradients=effects.leaves_gradients,
            kept=tuple(at for at, result in enumerate(results) if getattr(result, "name", "") in effects.kept),
            does_more=effects.does_more,
            changed=changed,
        )
    except (ImportError, AttributeError) as error:  # PyTorch lacks a private interface
        raise TraceError(first_line(error)) from error


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.is_leaf


def _compile_frame(function: FunctionType, scope: dict[str, Any], backend: Callable[..., Any]) -> Any:
    from torch._dynamo.convert_frame import compile_frame, get_compile_id
    from torch._guards import CompileContext, compile_context

    with compile_context(CompileContext(get_compile_id({}))):
        return compile_frame(
            function.__code__,
            function.__globals__,
            scope,
            builtins.__dict__,
            (),  # type: ignore[arg-type]  # it has no closure
            compiler_fn=backend,
            one_graph=True,
            restart_reasons=set(),
        )


def _capture_of(
    output: Any,
    code: CodeType,
    scope: dict[str, Any],
    values: Values,
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    attributes: Sequence[Tensor],
    unguarded: Callable[[object, str], bool] | None,
) -> Capture:
    graph_output = output.graph_capture_output()
    compare_identities(graph_output, values, is_argument)
    guard_empty_tables(graph_output, values)
    drop_guards(graph_output, values, is_default_of_checks)
    if unguarded is not None:
        drop_guards(graph_output, values, unguarded)
    given = zip(module.graph.find_nodes(op="placeholder"), example_inputs, strict=False)
    inside = [getattr(node, "_dynamo_source", None) for node, value in given if is_mesh(value)]
    numbers = apart(module, example_inputs)
    tensors = *(value for value in example_inputs if isinstance(value, Tensor)), *attributes
    placeholders = module.graph.find_nodes(op="placeholder")
    sources = [getattr(node, "_dynamo_source", None) for node in placeholders]
    if None in sources:
        raise TraceError(f"torch {torch.__version__} does not say where inputs of a captured graph come from")
    for source in sources:
        if not is_argument(source) and (made := re.fullmatch(r"___from_numpy\(.*?(\w+)\W*\)", source_name(source))):
            raise TraceError(f"it reads {made[1]}, a value of NumPy's: make it a number or a tensor, as by float()")
    inputs = tuple(
        Input(node.name, source_name(source), is_argument(source), _steps(source))
        for node, source in zip(placeholders, sources, strict=True)
    )
    held = [source for source, item in zip(sources, inputs, strict=True) if not item.is_argument]
    if unguarded is not None:
        held = [source for source in held if not is_reached(source, values, unguarded)]
    inside += [
        local_source(source)
        for source, item, value in zip(sources, inputs, tensors, strict=True)
        if not item.is_argument and is_distributed(value)
    ]
    guard_identities(graph_output, [*held, *inside])
    drop_idle_dropouts(module)
    simplify_masks(module)
    use_attention_fast_path(module)
    environment = graph_output.get_runtime_env()
    known = {**vars(builtins), **graph_output.f_globals}
    used_globals = {name: known[name] for name in environment.external_refs if name in known}
    backend_id = module.meta.get("backend_id") or module._backend_id

    def restored(run: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
        whole = with_attributes(run, attributes)
        call: Callable[..., Any] = environment.forward_callable(
            backend_id, numbers.beside(whole) if numbers else whole, extra_globals=used_globals
        )
        return call

    guarded = guards_of(graph_output, code, scope)
    bytecode = tuple((step.opname, step.argval) for step in get_instructions(output.bytecode))
    bytecode = tuple((name, value) for name, value in bytecode if value != backend_id)
    return Capture(module, inputs, tensors, guarded, restored, bytecode)


def is_argument(source: Any) -> bool:
    """Whether a value is an argument of the call, or lies in one."""
    while (base := getattr(source, "base", None)) is not None:
        source = base
    return getattr(source, "local_name", "") in ("args", "kwargs")


def _steps(source: Any) -> tuple[tuple[bool, Any], ...]:
    """The steps to a value (see :class:`Input`): attributes and items alone."""
    base = getattr(source, "base", None)
    if base is None:
        name = getattr(source, "local_name", "")
        return ((False, name),) if name else ()
    before, member, index = _steps(base), getattr(source, "member", None), getattr(source, "index", None)
    if not before or (not isinstance(member, str) and not isinstance(index, int | str)):
        return ()
    return (*before, (True, member) if isinstance(member, str) else (False, index))


@dataclass(frozen=True, slots=True)
class _Effects:
    """The side effects of a trace on Python objects that existed before it.

    Attributes:
        stores: the constants that it assigns to attributes.
        others: whether there are other side effects.
        leaves_gradients: whether it sets a gradient.
        kept: names of the graph's nodes that it assigns to attributes of arguments.
        sources: of the objects that it changes.
        counters: sources of the attributes that it assigns integers to.
        does_more: whether the model itself may have more of them.
    """

    stores: tuple[tuple[Any, str, Any], ...]
    others: bool
    leaves_gradients: bool
    kept: tuple[str, ...]
    sources: tuple[Any, ...]
    counters: tuple[str, ...]
    does_more: bool


def _side_effects() -> _Effects:
    """The side effects of the current trace."""
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    translator: Any = InstructionTranslator.current_tx()
    output_graph = translator.output
    effects = output_graph.side_effects
    changed = [
        item
        for item in effects.id_to_variable.values()
        if effects.is_modified(item) and not isinstance(item.mutation_type, AttributeMutationNew | ValueMutationNew)
    ]
    stores: list[tuple[Any, str, Any]] = []
    sources = tuple(item.source for item in changed if item.source is not None)
    gradients = [effects.store_attr_mutations.get(item, {}).get("grad") for item in changed]
    leaves_gradients = any(value is not None and _constants({"grad": value}) is None for value in gradients)
    kept = tuple(
        value.as_proxy().node.name
        for item in changed
        if item.source is not None and is_argument(item.source)
        for value in effects.store_attr_mutations.get(item, {}).values()
        if isinstance(value, TensorVariable)
    )
    counters = counters_in({item: effects.store_attr_mutations.get(item, {}) for item in changed})
    does_more = getattr(translator, "inconsistent_side_effects", True) or leaves_out_functions()
    for item in changed:
        attributes = effects.store_attr_mutations.get(item)
        constants = None if attributes is None else _constants(attributes)
        is_container = isinstance(vars(item).get("value"), list | dict | set | tuple)
        if constants is None or item.source is None or is_container or is_argument(item.source):
            return _Effects((), True, leaves_gradients, kept, sources, counters, does_more)
        stores += [(item.source, name, value) for name, value in constants.items()]
    others = bool(effects.tensor_hooks or effects.save_for_backward)
    return _Effects(tuple(stores), others, leaves_gradients, kept, sources, counters, does_more)


def _constants(attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """The values of attributes, if all of them are constants."""
    try:
        constants = {name: value.as_python_constant() for name, value in attributes.items()}
    except Exception:  # each version of PyTorch raises another error for what is not a constant
        return None
    mutable = any(isinstance(value, list | dict | set | Tensor) for value in constants.values())
    return None if mutable else constants
