"""Tensor parallelism: models whose parameters are DTensors, which ``parallelize_module`` makes.

    graph(x, DTensor) ──make_fx on fake tensors──▶ graph(x, local tensor), whose collectives are ops

Dynamo captures a call with DTensors. Where gradients are recorded, or DTensors are returned, AOTAutograd takes them
apart, and puts them together; where not, this does, and a call takes the host less time.
A step is traced on DTensors made of the local tensors that its program takes (``steps.py``), so that their own rules
say what is communicated. Which tensor a DTensor holds is guarded by its identity, as the DTensor is (``capture.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from autostream.errors import TraceError
from autostream.frontend.aten import traced_on_fakes

if TYPE_CHECKING:
    from autostream.frontend.capture import Capture

LOCAL = "_local_tensor"
"""The attribute of a DTensor that is its local tensor, as its ``__tensor_flatten__`` says."""


def is_distributed(value: object) -> bool:
    """Whether a value is a DTensor. Where nothing has imported its module, there are none."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def is_mesh(value: object) -> bool:
    """Whether a value is a mesh of devices, which torch 2.13 passes to a graph."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", ()))


def local_of(value: Any) -> Any:
    """What a DTensor holds in this process, the same object each time; of any other value, the value."""
    return getattr(value, LOCAL) if is_distributed(value) else value


def placement_of(value: Any) -> Any:
    """The mesh of a DTensor, and how it lies there; ``None`` for any other tensor."""
    return (value.device_mesh, value.placements) if is_distributed(value) else None


def shard_like(gradient: Any, parameter: Any) -> Any:
    """What a process has of a DTensor that is placed as another one; of any other tensor, the tensor itself."""
    if not is_distributed(gradient):
        return gradient
    if gradient.placements != parameter.placements:  # such as a sum that is still to be made
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


def local_source(source: Any) -> Any:
    """Where Dynamo finds the local tensor of a DTensor that it finds at this source."""
    from torch._dynamo.source import AttrSource

    return AttrSource(source, LOCAL)


def groups_of(tensors: Iterable[Tensor]) -> list[str]:
    """The names of the process groups that the DTensors among some tensors communicate in, by mesh and dimension.

    Example:
        >>> groups_of([torch.ones(2)])
        []
    """
    distributed: list[Any] = [each for each in tensors if is_distributed(each)]
    meshes = dict.fromkeys(each.device_mesh for each in distributed)
    return list(dict.fromkeys(group.group_name for mesh in meshes for group in mesh.get_all_groups()))


def returns_distributed(module: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's returns a DTensor."""
    return any(is_distributed(node.meta.get("example_value")) for node in module.graph.output_node().all_input_nodes)


def in_local_tensors(captured: Capture) -> Capture:
    """The same capture, with the local tensors of DTensors as inputs of its graph. Its gradients are not recorded.

    Raises:
        TraceError: an argument holds a DTensor, or it cannot be traced.
    """
    found = [item for item, tensor in zip(captured.inputs, captured.tensors, strict=True) if is_distributed(tensor)]
    if not found:
        return captured
    if any(item.is_argument for item in found):
        raise TraceError("an argument holds a DTensor: pass its local tensor, and make the DTensor in the call")
    whole = captured.restored  # which does not keep the tensors of the captured call

    def run(*values: Tensor) -> Sequence[Any]:
        inputs = map(with_local, captured.tensors, values)
        return fx.Interpreter(captured.module).run(*inputs)  # type: ignore[no-any-return]

    def restored(run: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
        return whole(lambda *values: run(*map(local_of, values)))

    tensors = tuple(map(local_of, captured.tensors))
    return replace(captured, module=traced_on_fakes(run, tensors, None), tensors=tensors, restored=restored)


def whole_of(tensor: Any) -> Callable[[Tensor], Tensor]:
    """Makes DTensors like this one of their local tensors, without keeping it; of any other tensor, does nothing.

    Example:
        >>> import torch
        >>> whole_of(torch.ones(2))(torch.zeros(3))
        tensor([0., 0., 0.])
    """
    if not is_distributed(tensor):
        return lambda local: local
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names if name != LOCAL}
    made, size, stride = type(tensor).__tensor_unflatten__, tensor.size(), tensor.stride()
    return lambda local: made({LOCAL: local, **parts}, context, size, stride)


def with_local(tensor: Any, local: Tensor) -> Tensor:
    """A DTensor like this one, with another local tensor; in place of any other tensor, the local one itself."""
    return whole_of(tensor)(local)


@cache
def stand_in(*ops: str) -> None:
    """Let Dynamo trace these ops with DTensors. They stand for something else, and do nothing."""
    from torch.distributed.tensor import DTensor

    for op in ops:
        torch.library.register_torch_dispatch(op, DTensor, lambda *_: None)


@contextmanager
def no_random_numbers() -> Iterator[None]:
    """Refuse to trace random numbers of DTensors: which part of the numbers is whose, is a state of Python's.

    Private to PyTorch: in a version that keeps this state elsewhere, nothing is refused.
    """
    random: Any = sys.modules.get("torch.distributed.tensor._random")
    if random is None:
        yield
        return
    kept, random._rng_tracker = random._rng_tracker, _Refuses()
    try:
        yield
    finally:
        random._rng_tracker = kept


class _Refuses:
    """In place of the object that keeps the state of random numbers of DTensors."""

    def __getattr__(self, name: str) -> Any:
        raise TraceError("it draws random numbers for a DTensor, by a state that no graph has")
