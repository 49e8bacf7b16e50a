"""From a captured graph to a program of ATen ops, traced on fake tensors.

    graph of torch ops ──make_fx on fake tensors──▶ graph of ATen ops ──▶ Program

Nothing is computed. In-place ops stay in place, and values that share memory have fake tensors that share a storage.
Composite ops (``aten.linear``, ``aten.conv2d``) are not decomposed where no gradients are recorded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from autostream.analysis.source import user_line
from autostream.errors import AutostreamError, TraceError
from autostream.frontend.as_strided import check_as_strided
from autostream.frontend.dynamo import compile_lock, compile_session, lazy_modules
from autostream.frontend.reasons import reason_of_op
from autostream.ir import Placeholder, Program, Role
from autostream.utils import collector, operators
from autostream.utils.storages import storage_of

aten = torch.ops.aten

GraphInput = tuple[Role, str, Tensor]
"""An input of a graph: its role, its name, and the tensor itself."""


def mode_of(module: fx.GraphModule) -> Any:
    """The fake tensor mode of the values in a graph of Dynamo's, or ``None``."""
    values = (node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder"))
    return next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)


def drop_weak_references(mode: Any) -> None:
    """Let a fake tensor mode drop its weak references to real tensors: ``torch.utils.swap_tensors`` refuses those.

    Private to PyTorch; in a version that keeps them elsewhere, the references stay.
    """
    with suppress(AttributeError):
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


def program_of(
    module: fx.GraphModule,
    inputs: Sequence[GraphInput],
    *,
    device: str | None = None,
) -> tuple[Program, dict[str, Tensor]]:
    """Trace a graph of torch ops, or of ATen ops at other shapes.

    Args:
        module: takes flat tensors and returns a tuple of tensors.
        inputs: its inputs.
        device: the device that the program is for, to plan for one that this machine lacks.

    Returns:
        A program, whose placeholders are the weights and constants that it uses, then all inputs; and the constants
        that the graph itself makes, by name.

    Raises:
        TraceError: it cannot be traced; the message says why.

    Example:
        >>> class Twice(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (x + x,)
        >>> program, _ = program_of(fx.symbolic_trace(Twice()), [(Role.INPUT, "0", torch.ones(2))])
        >>> program.module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
        [add]
    """
    return as_program(_aten_graph(module, [tensor for *_, tensor in inputs]), inputs, device)


def as_program(
    traced: fx.GraphModule, inputs: Sequence[GraphInput], device: str | None = None
) -> tuple[Program, dict[str, Tensor]]:
    """The same as :func:`program_of`, from a graph of ATen ops that was traced with these inputs."""
    placeholders, constants = _normalized(traced, inputs)
    if device is not None and torch.device(device).type != torch.device(_devices_of(traced)[0]).type:
        _relocate(traced, torch.device(device))
    return _program(traced, placeholders), constants


def _aten_graph(module: fx.GraphModule, tensors: Sequence[Tensor]) -> fx.GraphModule:
    """A graph as ATen ops, each with a fake value (``meta["val"]``) and the user's stack (``meta["stack_trace"]``)."""
    if setters := [node for node in module.graph.nodes if node.target in _SETTERS]:
        raise TraceError(f"it sets {setters[0].name.removeprefix('set_')}, which its ATen ops would not")
    if not _casts(module) and not _transforms(module):
        with suppress(TraceError):  # below, after composite ops are decomposed, the graph may be traced after all
            return traced_on_fakes(fx.Interpreter(module).run, tensors, None, pre_dispatch=True)
    return traced_on_fakes(fx.Interpreter(module).run, tensors, {})


def traced_on_fakes(
    run: Callable[..., Any], tensors: Sequence[Tensor], table: Any, *, pre_dispatch: bool = False
) -> fx.GraphModule:
    """The graph of the ops that a function dispatches, called with fake tensors like these.

    Raises:
        TraceError: it cannot be traced; the message says why.
    """
    mode = FakeTensorMode(shape_env=_shape_env(), allow_non_fake_inputs=True)
    grad_enabled = torch.is_grad_enabled()
    try:
        with (
            compile_lock(),  # Dynamo in another thread would undo what this tracer patches
            compile_session(),
            lazy_modules(),
            collector.paused(),
            torch.inference_mode(False),
            torch.set_grad_enabled(grad_enabled),
            preserve_node_meta(),
            catch_warnings(),
        ):
            filterwarnings("ignore", "The .grad attribute of a Tensor")  # the tracer reads it of every tensor
            fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in tensors]
            tracer = make_fx(run, table, "fake", _allow_non_fake_inputs=True, pre_dispatch=pre_dispatch)
            traced: fx.GraphModule = tracer(*fakes)
    except AutostreamError:
        raise
    except Exception as error:
        raise TraceError(reason_of_op(error)) from error
    finally:
        drop_weak_references(mode)
    constants = (getattr(traced, str(node.target), None) for node in traced.graph.find_nodes(op="get_attr"))
    if any(isinstance(constant, FakeTensor) for constant in constants):
        raise TraceError("it has a constant whose value is not known when it is traced")
    return traced


def _casts(module: fx.GraphModule) -> bool:
    """Whether autocast is on, or the graph switches it: then the casts have to be recorded as ops."""
    graphs = (part.graph for part in module.modules() if isinstance(part, fx.GraphModule))
    switches = any(node.target in _SWITCHES for graph in graphs for node in graph.nodes)
    return switches or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def _transforms(module: fx.GraphModule) -> bool:
    """Whether a function transform, such as ``torch.vmap``, is a part of the graph: its ops compute with batches."""
    return any(getattr(node.target, "__module__", "") == _TRANSFORMS for node in module.graph.nodes)


_TRANSFORMS = "torch._functorch.predispatch"

_SETTERS = {torch.set_default_dtype, torch.set_rng_state, torch.random.set_rng_state}
"""Setters of global state that Dynamo leaves in a graph."""

_SWITCHES = {torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast}


def _shape_env() -> Any:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)


def _normalized(
    module: fx.GraphModule, inputs: Sequence[GraphInput]
) -> tuple[tuple[Placeholder, ...], dict[str, Tensor]]:
    """Remove dead code, turn constants into placeholders, and name and sort the placeholders.

    Returns:
        The placeholders, and the constants by name.
    """
    graph = module.graph
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or not _is_removable(node))
    taken = {node.name for node in graph.nodes}
    placeholders: list[Placeholder] = []
    owners: dict[int, str] = {}

    def add(node: fx.Node, role: Role, target: str, tensor: Tensor) -> None:
        name = f"{role.value}_{target}".replace(".", "_")
        if name.isidentifier() and name not in taken:
            node.name = node.target = name
            taken.add(name)
        placeholders.append(Placeholder(node.name, role, target, owners.setdefault(storage_of(tensor), node.name)))

    constants: dict[str, Tensor] = {}
    for node in graph.find_nodes(op="get_attr"):
        constant = getattr(module, str(node.target), None)
        if isinstance(constant, Tensor):
            constants[str(node.target)] = constant
    nodes = graph.find_nodes(op="placeholder")
    static, copied = [], []
    for node, item in zip(nodes, inputs, strict=True):
        if item[0] is Role.INPUT:
            copied.append((node, item))
        elif node.users:
            static.append((node, item))
        else:
            graph.erase_node(node)
    static += [(_lift(graph, name), (Role.CONSTANT, name, constant)) for name, constant in constants.items()]
    for node, _ in reversed([*static, *copied]):
        graph._root.append(node)  # to the front of the graph
    for node, item in (*static, *copied):
        add(node, *item)
    module.recompile()
    return tuple(placeholders), constants


def _lift(graph: fx.Graph, name: str) -> fx.Node:
    """Replace a constant by a placeholder."""
    first, *others = [node for node in graph.find_nodes(op="get_attr") if node.target == name]
    with graph.inserting_before(next(iter(graph.nodes))):
        placeholder = graph.placeholder(name)
    placeholder.meta = first.meta
    for node in (first, *others):
        node.replace_all_uses_with(placeholder)
        graph.erase_node(node)
    return placeholder


def _is_removable(node: fx.Node) -> bool:
    """Whether a node is a view, an allocation, a query of a size, or a check that guards have made already."""
    target = node.target
    if target is operator.getitem or target is aten._assert_tensor_metadata.default or target in _NUMBERS:
        return True
    return isinstance(target, OpOverload) and (target.is_view or target.overloadpacket in _ALLOCATIONS)


_NUMBERS = {aten.sym_size.int, aten.sym_stride.int, aten.sym_storage_offset.default, aten.sym_numel.default}
_ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}


def _relocate(module: fx.GraphModule, device: torch.device) -> None:
    """Set the device of all fake values."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            for value in tensors_in(node.meta.get("val")):
                if isinstance(value, FakeTensor):
                    value.fake_device = device


def _check_shapes(graph: fx.Graph) -> None:
    """Refuse ops that give an argument another shape or other strides, as ``t_`` does: a replay does not.

    Raises:
        TraceError: the message has the user's line.
    """
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags:
            changed: fx.Node | None = node
            while changed is not None and isinstance(changed.target, OpOverload):
                changed = operators.written_and_returned(changed, changed.target)
            if changed is not None and changed.op == "placeholder":
                name, line = operators.base_name(node.target), user_line(node.stack_trace)
                raise TraceError(
                    f"{name} changes the shape of an argument, or of a tensor of the model, and a replay does not: use "
                    f"{name.removesuffix('_')}" + (line and f" ({line})")
                )


def _program(module: fx.GraphModule, placeholders: tuple[Placeholder, ...]) -> Program:
    """The program of a flat graph of ATen ops.

    Raises:
        TraceError: it reads memory of an argument beyond its elements, gives one another shape, or returns a value that
            is not a tensor.
    """
    check_as_strided(module.graph)
    _check_shapes(module.graph)
    device, *peers = _devices_of(module)
    results: Any = module.graph.output_node().args[0]
    if not all(isinstance(result, fx.Node) for result in results):
        raise TraceError("its graph returns what is no tensor")
    return Program(
        module=module,
        placeholders=placeholders,
        outputs=tuple(result.name for result in results),
        level="aten",
        device=device,
        peers=tuple(peers),
    )


def _devices_of(module: fx.GraphModule) -> tuple[str, ...]:
    """The devices that a program runs on, sorted by name; ``("cpu",)`` if there are none."""
    values = (value for node in module.graph.nodes for value in tensors_in(node.meta.get("val")))
    devices = {str(value.device) for value in values} - {"cpu", "meta"}
    return tuple(sorted(devices)) or ("cpu",)


def tensors_in(value: object) -> list[Tensor]:
    """The tensors of an fx node's value."""
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, list | tuple) else []


def is_random(node: fx.Node) -> bool:
    """Whether a node generates random numbers.

    Example:
        >>> graph = fx.Graph()
        >>> is_random(graph.call_function(aten.rand.default, ([2],)))
        True
        >>> is_random(graph.call_function(aten.native_dropout.default, (graph.placeholder("x"), 0.5, False)))
        False
    """
    target = node.target
    return isinstance(target, OpOverload) and operators.draws(target, operators.bound_arguments(node, target))
