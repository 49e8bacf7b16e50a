"""Tracing with ``torch.export``.

Non-strict export runs the model's Python on fake tensors and records every ATen call: nothing is computed, in-place ops
stay in place, and values that alias have fake tensors that share a storage. What it cannot follow (control flow that
depends on data) it refuses, and so do we.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.traceback import preserve_node_meta

from autostream import collector
from autostream.errors import FastPathError, TraceError, first_line
from autostream.ir import Placeholder, Program, Role
from autostream.storages import storage_of
from autostream.tracing.attention import fused_attention
from autostream.tracing.attributes import Holder, holders, host_generators, untouched
from autostream.tracing.comparisons import ReflectedComparisons
from autostream.tracing.constants import Constants, tensors_held, unasked
from autostream.tracing.dropouts import IdleDropouts
from autostream.tracing.guards import unusual
from autostream.tracing.leaks import recalled
from autostream.tracing.replica import replica, with_ordinary_parameters
from autostream.tracing.tamed import patched_for_this_thread, tamed, unreferenced
from autostream.tracing.tree import TENSOR, Structure, flatten, unflatten

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


def trace(model: nn.Module, tensors: Sequence[Tensor], structure: Structure, *, device: str | None = None) -> Traced:
    """Trace a model at these inputs, without computing anything or changing the model.

    Args:
        model: any module.
        tensors: the flat tensors of its arguments.
        structure: the structure of ``(args, kwargs)`` that they were taken from.
        device: what to say that the ops run on, if that is another kind of device than the tensors are on: to plan for
            one that is not here.

    Raises:
        TraceError: it cannot be traced; the message says why.

    Example:
        >>> tensors, structure = flatten(((torch.ones(2, 3),), {}))
        >>> traced = trace(nn.Linear(3, 4), tensors, structure)
        >>> [placeholder.target for placeholder in traced.program.placeholders]
        ['weight', 'bias', '0']
    """
    _check(model)
    held = tensors_held(model)
    flat = _FlatModel(with_ordinary_parameters(_padding_refused(replica(model))), structure, held)
    exported = _export(flat, tensors)
    if _reached_originals(exported, model):
        flat = _FlatModel(model, structure, held)
        exported = _export(flat, tensors)
    module = _pruned(exported)
    if device is not None and torch.device(device).type != torch.device(_device(module)).type:
        _relocate(module, torch.device(device))
    placeholders, constants = _placeholders(exported, model, tensors)
    program = Program(
        module=module,
        placeholders=placeholders,
        outputs=tuple(node.name for node in module.graph.output_node().args[0]),  # type: ignore[union-attr, misc]
        level="aten",
        device=_device(module),
    )
    return Traced(program, flat.result.structure, constants)


def _check(model: nn.Module) -> None:
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise TraceError("TorchScript cannot be traced: use the module that it was made from")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if reason := unusual(tensor):
            raise TraceError(f"the model's {name} {reason}")


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


class _Result:
    """Carries what is learnt out of a trace. Export restores attributes that are containers, but no others."""

    structure = TENSOR
    """Of the outputs."""

    modes: frozenset[FakeTensorMode] = frozenset()
    """Of the fake tensors that the model ran on."""


class _FlatModel(nn.Module):
    """A model that takes and returns flat tensors, so that export never sees a container."""

    def __init__(self, model: nn.Module, structure: Structure, held: frozenset[int]) -> None:
        super().__init__()
        self.model = model
        self._structure = structure
        self._grad_mode = torch.is_grad_enabled()
        self.result = _Result()
        self.constants = Constants(held, _called.__code__)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = unflatten(self._structure, tensors)
        before = holders(self.model)
        self.constants.watch(tensors)
        given = [*tensors, *self.model.parameters(), *self.model.buffers()]
        self.result.modes = frozenset(tensor.fake_mode for tensor in given if isinstance(tensor, FakeTensor))
        layouts = list(map(_layout, given))
        torch.default_generator.manual_seed(_UNLIKELY_SEED)
        generators = host_generators()
        try:
            with (
                patched_for_this_thread(),
                preserve_node_meta(),
                IdleDropouts(),
                self.constants,
                self._unasked(),
                ReflectedComparisons(),
            ):
                result = _called(self.model, args, kwargs)
        except Exception as error:
            # Translated here, for export itself would print its graph to stderr, and PyTorch's frames hide the user's.
            raise _refusal(self.model, error) from error
        if changed := next(filter(None, map(Holder.changed, before)), ""):
            raise TraceError(f"the model's forward changes its own attribute {changed}: a graph would do so only once")
        if host_generators() != generators:
            raise TraceError(
                "the model draws random numbers from Python or NumPy, or sets a seed: a graph would do so once"
            )
        after, structure = flatten((args, kwargs))
        if structure != self._structure or any(new is not old for new, old in zip(after, tensors, strict=True)):
            raise TraceError("the model changes a container (list, dict, …) that it is given")
        if list(map(_layout, given)) != layouts:
            raise TraceError("the model changes the shape or the memory of a tensor in place (resize_, .data = …)")
        outputs, output_structure = flatten(result)
        self.result.structure = output_structure
        return tuple(outputs)

    @contextmanager
    def _unasked(self) -> Iterator[None]:
        """Refuse questions about modes of the call that export turns off."""
        grad_mode = unasked("is_grad_enabled") if self._grad_mode else nullcontext()
        with unasked("is_inference_mode_enabled"), grad_mode:
            yield


_UNLIKELY_SEED = 0x5EED_0F_A_7ACE
"""Tells whether a model sets the seed. The generators are put back when tracing is done."""


def _called(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a model; if it is a graph, such as a piece that Dynamo made, let each op keep the user's line."""
    if not isinstance(model, torch.fx.GraphModule) or kwargs:
        return model(*args, **kwargs)
    return torch.fx.Interpreter(model).run(*args)


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return storage_of(tensor), tensor.shape, tensor.stride(), tensor.storage_offset()


def _export(flat: _FlatModel, tensors: Sequence[Tensor]) -> ExportedProgram:
    from torch.export import export

    _acquaint_dynamo()
    with ExitStack() as stack:
        stack.callback(lambda: unreferenced(flat.result.modes | _modes_of(flat.model)))
        stack.enter_context(untouched(flat.model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(tamed())
        stack.enter_context(fused_attention())
        stack.enter_context(collector.paused())
        try:
            exported = export(flat, _ordinary(tensors), strict=False)
        except Exception as error:
            _let_go(error)
            recalled(flat.constants.seen)
            raise _refusal(flat.model, error) from error
    if recalled(flat.constants.seen):
        raise TraceError("the model keeps a tensor in a cache, list or dict: a graph would not put it there again")
    return exported


def _acquaint_dynamo() -> None:
    """Let Dynamo look up PyTorch's functions now: it does so once, and would find what stands in for them in a trace.

    The branches of a ``torch.cond`` make it look. Private to PyTorch (seen in 2.11 and 2.13).
    """
    with suppress(ImportError, AttributeError):
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

        TorchInGraphFunctionVariable._get_handlers()


def _modes_of(model: nn.Module) -> frozenset[FakeTensorMode]:
    """The modes of fake tensors in the notes of a graph, which is what a piece that Dynamo made is."""
    nodes = model.graph.nodes if isinstance(model, torch.fx.GraphModule) else ()
    values = (value for node in nodes for value in _tensors(node.meta.get("example_value")))
    return frozenset(value.fake_mode for value in values if isinstance(value, FakeTensor))


def _let_go(error: BaseException | None) -> None:
    """Drop what the frames of an error and of its causes hold: to look for who else holds a fake tensor takes long."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _refusal(model: nn.Module, error: Exception) -> TraceError:
    if isinstance(error, TraceError):
        refusal, _, _ = str(error).partition("\n")  # torch.fx adds pages to errors in graphs that it interprets
        return type(error)(f"{refusal}{_blamed(error)}")
    return TraceError(f"torch.export cannot trace {type(model).__name__}: {first_line(error)}{_blamed(error)}")


def _blamed(error: Exception) -> str:
    """The innermost line of an error's traceback that is neither PyTorch's nor ours, or ``""``."""
    libraries = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)), "<string>")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(libraries)]
    if not frames:
        return ""
    path = frames[-1].filename.removeprefix(os.getcwd() + os.sep)
    return f" (at {path}:{frames[-1].lineno}: {frames[-1].line})"


def _ordinary(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, with stand-ins in the same memory for those made in inference mode, and for views.

    Autograd would refuse to trace in-place ops on the former. Of a view, export looks at the base as well, whose sizes
    it takes for unknown: also where the base is an input, too.
    """
    stand_ins: dict[int, Tensor] = {}

    def ordinary(tensor: Tensor) -> Tensor:
        if not (tensor.is_inference() or tensor._is_view()):
            return tensor
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return stand_ins.setdefault(id(tensor), empty.set_(tensor.untyped_storage(), *place))

    return tuple(map(ordinary, tensors))


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
            for value in _tensors(node.meta.get("val")):
                if isinstance(value, FakeTensor):
                    value.fake_device = device


def _device(module: torch.fx.GraphModule) -> str:
    """The device that a program runs on.

    Raises:
        TraceError: it uses several accelerators.
    """
    values = (value for node in module.graph.nodes for value in _tensors(node.meta.get("val")))
    devices = {str(value.device) for value in values} - {"cpu", "meta"}
    if len(devices) > 1:
        raise TraceError(f"the model uses several devices ({', '.join(sorted(devices))}); one is scheduled at a time")
    return next(iter(devices), "cpu")


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, (list, tuple)) else []
