"""Tracing with ``torch.export``.

Non-strict export runs the model's Python on fake tensors and records every ATen call: nothing is computed, in-place ops
stay in place, and values that alias have fake tensors that share a storage. What it cannot follow (control flow that
depends on data) it refuses, and so do we.
"""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autostream.errors import TraceError, first_line
from autostream.ir import Placeholder, Program, Role
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


def trace(model: nn.Module, tensors: Sequence[Tensor], structure: Structure) -> Traced:
    """Trace a model at these inputs, without computing anything or changing the model.

    Args:
        model: any module.
        tensors: the flat tensors of its arguments.
        structure: the structure of ``(args, kwargs)`` that they were taken from.

    Raises:
        TraceError: it cannot be traced; the message says why.

    Example:
        >>> tensors, structure = flatten(((torch.ones(2, 3),), {}))
        >>> traced = trace(nn.Linear(3, 4), tensors, structure)
        >>> [placeholder.target for placeholder in traced.program.placeholders]
        ['weight', 'bias', '0']
    """
    flat = _FlatModel(model, structure)
    exported = _export(flat, tensors)
    module = _pruned(exported)
    program = Program(
        module=module,
        placeholders=_placeholders(exported, model, tensors),
        outputs=tuple(node.name for node in module.graph.output_node().args[0]),  # type: ignore[union-attr, misc]
        level="aten",
        device=_device(module),
    )
    return Traced(program, flat.result.structure, dict(exported.constants))


class _Result:
    """Carries the outputs' structure out of a trace. Export restores attributes that are containers, but no others."""

    structure = TENSOR


class _FlatModel(nn.Module):
    """A model that takes and returns flat tensors, so that export never sees a container."""

    def __init__(self, model: nn.Module, structure: Structure) -> None:
        super().__init__()
        self.model = model
        self._structure = structure
        self.result = _Result()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = unflatten(self._structure, tensors)
        attributes = _attributes(self.model)
        result = self.model(*args, **kwargs)
        if changed := _changed(attributes, _attributes(self.model)):
            raise TraceError(f"the model's forward changes its own attribute {changed}: a graph would do so only once")
        after, structure = flatten((args, kwargs))
        if structure != self._structure or any(new is not old for new, old in zip(after, tensors, strict=True)):
            raise TraceError("the model changes a container (list, dict, …) that it is given")
        outputs, output_structure = flatten(result)
        self.result.structure = output_structure
        return tuple(outputs)


def _export(flat: _FlatModel, tensors: Sequence[Tensor]) -> ExportedProgram:
    from torch.export import export

    with ExitStack() as stack:
        stack.enter_context(_tracing)
        stack.enter_context(untouched(flat.model))
        stack.enter_context(_preserved_flags())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # export warns of attributes that it sets itself while it swaps parameters
        try:
            return export(flat, _ordinary(tensors), strict=False)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(f"torch.export cannot trace {type(flat.model).__name__}: {first_line(error)}") from error


_tracing = threading.Lock()
"""Tracing patches ``nn.Module`` for the whole process, so one model is traced at a time."""


@contextmanager
def _preserved_flags() -> Iterator[None]:
    """Put back the flags by which PyTorch knows that it is exporting; an export that fails on 2.11 leaves them set.

    Private to PyTorch; where a version has no such flags, there is nothing to put back.
    """
    names = ("_is_compiling_flag", "_is_exporting_flag")
    flags = {name: getattr(torch.compiler, name) for name in names if hasattr(torch.compiler, name)}
    try:
        yield
    finally:
        for name, flag in flags.items():
            setattr(torch.compiler, name, flag)


def _ordinary(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, with stand-ins for those made in inference mode, whose in-place ops autograd would refuse to trace.

    Stand-ins alias as the tensors do; their contents do not matter, for tracing computes nothing.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def ordinary(tensor: Tensor) -> Tensor:
        if not tensor.is_inference():
            return tensor
        original = tensor.untyped_storage()
        copy = torch.UntypedStorage(original.nbytes(), device=original.device)  # type: ignore[no-untyped-call]
        storage = storages.setdefault(original._cdata, copy)
        stand_in = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return stand_in.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    return tuple(map(ordinary, tensors))


def _attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    # PyTorch's own layers keep book of weights that export exchanges for fake ones; nothing else in them changes.
    return {
        name: dict(vars(module))
        for name, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn.")
    }


def _changed(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> str:
    """The path of an attribute that is not what it was, or ``""``."""
    for module, old in before.items():
        new = after[module]
        for name in {**old, **new}:
            if name not in old or name not in new or not _same(old[name], new[name]):
                return f"{module}.{name}".lstrip(".")
    return ""


def _same(old: object, new: object) -> bool:
    if type(old) is not type(new):
        return False
    if isinstance(old, (bool, int, float, str)):
        return old == new
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) == len(new) and all(map(_same, old, new))
    return old is new


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore a model's attributes and all random generators afterwards.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> with untouched(model):
        ...     model.bias = None
        >>> model.bias is None
        False
    """
    before = [
        (contents, dict(contents))
        for module in model.modules()
        for contents in (vars(module), module._parameters, module._buffers, module._modules)
    ]
    with _preserved_generators():
        try:
            yield
        finally:
            for contents, old in before:
                contents.clear()
                contents.update(old)


@contextmanager
def _preserved_generators() -> Iterator[None]:
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    with ExitStack() as stack:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        stack.enter_context(torch.random.fork_rng(devices))
        try:
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(numpy_state)


def _placeholders(exported: ExportedProgram, model: nn.Module, tensors: Sequence[Tensor]) -> tuple[Placeholder, ...]:
    """What each remaining placeholder is, and with which of them it shares its storage."""
    kept = {node.name for node in exported.graph.find_nodes(op="placeholder")}
    inputs = iter(enumerate(tensors))
    placeholders: list[Placeholder] = []
    owners: dict[int, str] = {}
    for spec in exported.graph_signature.input_specs:
        role = _ROLES.get(spec.kind.name)
        if role is None:
            raise TraceError(f"the model uses {spec.arg.name}, a {spec.kind.name.lower()}, which is no tensor")
        if spec.arg.name not in kept:
            continue
        target, tensor = next(inputs) if role is Role.INPUT else _state(spec.target or "", exported, model)
        owner = owners.setdefault(tensor.untyped_storage()._cdata, spec.arg.name)
        placeholders.append(Placeholder(spec.arg.name, role, str(target), owner))
    return tuple(placeholders)


_ROLES = {
    "USER_INPUT": Role.INPUT,
    "PARAMETER": Role.PARAMETER,
    "BUFFER": Role.BUFFER,
    "CONSTANT_TENSOR": Role.CONSTANT,
}


def _state(target: str, exported: ExportedProgram, model: nn.Module) -> tuple[str | int, Tensor]:
    """Where a model holds the tensor that export calls ``target``, and that tensor.

    A constant is looked for on the model, so that a changed attribute is seen; what is not there, tracing made.
    """
    path = target.removeprefix("model.")
    owner, _, name = path.rpartition(".")
    try:
        tensor = getattr(model.get_submodule(owner), name)
    except AttributeError:
        return target, _constant(exported, target)
    known = target not in exported.constants or exported.constants[target] is tensor
    return (path, tensor) if known else (target, _constant(exported, target))


def _constant(exported: ExportedProgram, target: str) -> Tensor:
    constant = exported.constants[target]
    if not isinstance(constant, Tensor):
        raise TraceError(f"the model uses {target}, a {type(constant).__name__}, which is no tensor")
    return constant


def _pruned(exported: ExportedProgram) -> torch.fx.GraphModule:
    """Export's graph without checks that the signature makes already, and without state that nobody reads."""
    module: torch.fx.GraphModule = exported.graph_module
    for node in reversed(list(module.graph.nodes)):
        checked = node.op == "call_function" and node.target is torch.ops.aten._assert_tensor_metadata.default
        if checked or (node.op == "placeholder" and not node.users and not _is_input(node, exported)):
            module.graph.erase_node(node)
    module.recompile()
    return module


def _is_input(node: torch.fx.Node, exported: ExportedProgram) -> bool:
    return node.name in exported.graph_signature.user_inputs


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
