"""Tracing with ``torch.export``.

Non-strict export runs the model's Python on fake tensors and records every ATen call: nothing is computed, in-place ops
stay in place, and values that alias have fake tensors that share a storage. What it cannot follow (control flow that
depends on data) it refuses, and so do we.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from autostream.errors import BranchError, FastPathError, TraceError
from autostream.frontend.guards import unusual
from autostream.frontend.reach import check_reach
from autostream.frontend.tree import Structure
from autostream.ir import Placeholder, Program, Role
from autostream.storages import storage_of
from autostream.tracing.branches import Way
from autostream.tracing.constants import attributes_of, names_given, registered
from autostream.tracing.expecting import expect
from autostream.tracing.flat import FlatModel, check_graph, check_ordinary, tensors_in, watched
from autostream.tracing.replica import replica, traced_apart, with_ordinary_parameters

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@dataclass(frozen=True, slots=True)
class Traced:
    """A program with what its caller needs to run it on a live model.

    Attributes:
        program: the dataflow.
        structure: of the outputs, to put them together again.
        constants: tensors that the program uses and that no attribute of the model holds, by placeholder target.
    """

    program: Program
    structure: Structure
    constants: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Tracer:
    """How modules of a kind become programs, and what may be done with one beside that.

    Attributes:
        trace: makes a program of one, at flat tensors that were taken from arguments of this structure.
        may_split: whether Dynamo may split one that cannot be traced whole.
        may_cut: whether one whose program a CUDA graph cannot hold whole may run in parts.
        may_try: whether one may be called with copies of its tensors, to see whether it takes some arguments.
        may_renew: whether a new schedule takes the place of the least recently used one where there are too many.
        may_refuse: whether the caller of one has another way where no graph does the same, and is told so.
    """

    trace: Callable[[Any, Sequence[Tensor], Structure], Traced]
    may_split: bool
    may_cut: bool
    may_try: bool
    may_renew: bool
    may_refuse: bool = False


def trace(
    model: nn.Module,
    tensors: Sequence[Tensor],
    structure: Structure,
    *,
    device: str | None = None,
    way: Way | None = None,
) -> Traced:
    """Trace a model at these inputs, without computing anything or changing the model.

    Args:
        model: any module.
        tensors: the flat tensors of its arguments.
        structure: the structure of ``(args, kwargs)`` that they were taken from.
        device: what to say that the ops run on, if that is another kind of device than the tensors are on: to plan for
            one that is not here.
        way: where the model branches on values, those outcomes are expected; by default it is refused.

    Raises:
        BranchError: it branches on values, and not on those of the way.
        TraceError: it cannot be traced; the message says why.

    Example:
        >>> from autostream.frontend.tree import flatten
        >>> tensors, structure = flatten(((torch.ones(2, 3),), {}))
        >>> traced = trace(nn.Linear(3, 4), tensors, structure)
        >>> [placeholder.target for placeholder in traced.program.placeholders]
        ['weight', 'bias', '0']
    """
    check_ordinary(model)
    originals, attributes = registered(model), attributes_of(model)
    names = names_given([*model.parameters(), *model.buffers(), *tensors])

    def exported_from(own: nn.Module) -> tuple[FlatModel, ExportedProgram]:
        flat = FlatModel(own, structure, originals, "torch.export", attributes, way, names)
        return flat, _export(flat, tensors)

    twin = with_ordinary_parameters(_padding_refused(replica(model)))
    flat, exported = traced_apart(model, twin, exported_from, lambda found: _reached_originals(found[1], model))
    module = _pruned(exported)
    if device is not None and torch.device(device).type != torch.device(devices_of(module)[0]).type:
        _relocate(module, torch.device(device))
    placeholders, constants = _placeholders(exported, model, tensors)
    return Traced(program_of(module, placeholders), flat.result.structure, constants)


MODELS = Tracer(trace, may_split=True, may_cut=True, may_try=True, may_renew=True)
"""Of any module."""


def along(way: Way) -> Tracer:
    """A tracer of one way through models that branch on values."""
    return Tracer(partial(trace, way=way), may_split=False, may_cut=True, may_try=True, may_renew=True)


PIECES = Tracer(trace, may_split=False, may_cut=True, may_try=False, may_renew=False)
"""Of graphs that stand for parts of a model: numbers that they take may be others in each call, and so schedules."""

SECTIONS = Tracer(trace, may_split=False, may_cut=False, may_try=False, may_renew=False)
"""Of parts of programs: views that they take may begin elsewhere in each call, and so would be the schedules."""


def _padding_refused(twin: nn.Module) -> nn.Module:
    """A replica whose encoders refuse padding masks in eval mode.

    There an eager ``nn.TransformerEncoder`` packs its input and yields zeros at the padding. Tracers turn that way off.
    """

    def refuse(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
        if mask is not None and not encoder.training and torch.backends.mha.get_fastpath_enabled():
            raise FastPathError("nn.TransformerEncoder packs padded input in eval mode, which a graph would not")

    for module in twin.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.register_forward_pre_hook(refuse, with_kwargs=True)
    return twin


def _reached_originals(exported: ExportedProgram, model: nn.Module) -> bool:
    """Whether a replica led back to the model by a way that was not copied: its weights then look like constants."""
    state = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    constants = [constant for constant in exported.constants.values() if type(constant) in (Tensor, nn.Parameter)]
    with suppress(NotImplementedError):  # wrapped by a function transform, which is refused for what it is
        return any(storage_of(constant) in state for constant in constants)
    return False


def _export(flat: FlatModel, tensors: Sequence[Tensor]) -> ExportedProgram:
    from torch.export import export

    _acquaint_dynamo()
    exported = watched(lambda: export(flat, ordinary(tensors), strict=False), flat)
    check_graph(flat, exported.graph_module)
    return exported


def _acquaint_dynamo() -> None:
    """Let Dynamo look up PyTorch's functions now: it does so once, and would find what stands in for them in a trace.

    The branches of a ``torch.cond`` make it look. Private to PyTorch (seen in 2.11 and 2.13).
    """
    with suppress(ImportError, AttributeError):
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

        TorchInGraphFunctionVariable._get_handlers()


def ordinary(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, with stand-ins in the same memory for those made in inference mode, and for views.

    Autograd would refuse to trace in-place ops on the former. Of a view, export looks at the base as well, whose sizes
    it takes for unknown: also where the base is an input, too.
    """
    stand_ins: dict[int, Tensor] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        if not (tensor.is_inference() or tensor._is_view()):
            return tensor
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return stand_ins.setdefault(id(tensor), empty.set_(tensor.untyped_storage(), *place))

    return tuple(map(stand_in, tensors))


def _placeholders(
    exported: ExportedProgram, model: nn.Module, tensors: Sequence[Tensor]
) -> tuple[tuple[Placeholder, ...], dict[str, Tensor]]:
    """What each remaining placeholder is, with which of them it shares its storage; and constants that tracing made."""
    kept = {node.name for node in exported.graph.find_nodes(op="placeholder")}
    inputs = iter(enumerate(tensors))
    placeholders: list[Placeholder] = []
    constants: dict[str, Tensor] = {}
    owners: dict[int, str] = {}
    for spec in exported.graph_signature.input_specs:
        role = _ROLES.get(spec.kind.name)
        if role is None:
            raise TraceError(f"the model uses {spec.arg.name}, a {spec.kind.name.lower()}, which is no tensor")
        if spec.arg.name not in kept:
            continue
        target, tensor = next(inputs) if role is Role.INPUT else _state(spec.target or "", exported, model, constants)
        if reason := unusual(tensor):
            raise TraceError(f"the model's {target} {reason}")
        owner = owners.setdefault(storage_of(tensor), spec.arg.name)
        placeholders.append(Placeholder(spec.arg.name, role, str(target), owner))
    return tuple(placeholders), constants


_ROLES = {
    "USER_INPUT": Role.INPUT,
    "PARAMETER": Role.PARAMETER,
    "BUFFER": Role.BUFFER,
    "CONSTANT_TENSOR": Role.CONSTANT,
}


def _state(
    target: str, exported: ExportedProgram, model: nn.Module, constants: dict[str, Tensor]
) -> tuple[str | int, Tensor]:
    """Where a model holds the tensor that export calls ``target``, and that tensor.

    A constant is looked for on the model, so that a changed attribute is seen; what is not there, tracing made: it is
    put into ``constants``.
    """
    path = target.removeprefix("model.")
    owner, _, name = path.rpartition(".")
    with suppress(AttributeError):
        tensor = getattr(model.get_submodule(owner), name)
        if target not in exported.constants or exported.constants[target] is tensor:
            return path, tensor
    constant = exported.constants[target]
    if not isinstance(constant, Tensor):
        raise TraceError(f"the model uses {target}, a {type(constant).__name__}, which is no tensor")
    constants[target] = constant
    return target, constant


def _pruned(exported: ExportedProgram) -> torch.fx.GraphModule:
    """Export's graph without checks that the signature makes already, and without state that nobody reads."""
    module: torch.fx.GraphModule = exported.graph_module
    nodes = list(module.graph.nodes)
    for node in reversed(nodes):
        checked = node.op == "call_function" and node.target is torch.ops.aten._assert_tensor_metadata.default
        if checked or (node.op == "placeholder" and not node.users and not _is_input(node, exported)):
            module.graph.erase_node(node)
    if len(module.graph.nodes) < len(nodes):
        module.recompile()
    return module


def _is_input(node: torch.fx.Node, exported: ExportedProgram) -> bool:
    return node.name in exported.graph_signature.user_inputs


def _relocate(module: torch.fx.GraphModule, device: torch.device) -> None:
    """Say of all values that they are on another device."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            for value in tensors_in(node.meta.get("val")):
                if isinstance(value, FakeTensor):
                    value.fake_device = device


def program_of(module: torch.fx.GraphModule, placeholders: tuple[Placeholder, ...]) -> Program:
    """The program that a flat graph of ATen ops is.

    Raises:
        TraceError: it uses memory that is no argument's and that it does not take itself.
    """
    check_reach(module.graph)
    device, *peers = devices_of(module)
    return Program(
        module=module,
        placeholders=placeholders,
        outputs=tuple(node.name for node in module.graph.output_node().args[0]),  # type: ignore[union-attr, misc]
        level="aten",
        device=device,
        peers=tuple(peers),
    )


def devices_of(module: torch.fx.GraphModule) -> tuple[str, ...]:
    """The devices that a program runs on, sorted by name; the host, if there is none."""
    values = (value for node in module.graph.nodes for value in tensors_in(node.meta.get("val")))
    devices = {str(value.device) for value in values} - {"cpu", "meta"}
    return tuple(sorted(devices)) or ("cpu",)


def check_one_device(program: Program) -> None:
    """Refuse a program that has to be scheduled as a whole, and runs on several devices.

    Raises:
        TraceError: it does.
    """
    if program.peers:
        raise TraceError(f"the model uses several devices ({', '.join(program.devices)}); one is scheduled at a time")


def check_straight(program: Program) -> None:
    """Refuse a program that has to be scheduled as a whole, and expects values of tensors.

    Raises:
        BranchError: it does.
    """
    parts = (part.graph for part in program.module.modules() if isinstance(part, torch.fx.GraphModule))
    if any(graph.find_nodes(op="call_function", target=expect) for graph in parts):
        raise BranchError("nothing between its branches on values of tensors is worth a CUDA graph of its own")
