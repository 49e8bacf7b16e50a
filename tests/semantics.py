"""All that a caller can see of a call, and whether an optimized model shows the same as the plain one."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.ir import Assignment, Costs, DeviceProfile, OpGraph
from autostream.scheduling import POLICIES

GRAD_MODES = (torch.no_grad, torch.no_grad, torch.inference_mode)
"""Calls that a model must get right one after another: the one that prepares, a repeated one, and in other modes."""


def scattered(
    graph: OpGraph, costs: Costs, profile: DeviceProfile, streams: int, pinned: frozenset[str]
) -> Assignment:
    """A policy that changes the stream at every op, whatever that costs: the most waits that there can be."""
    lanes = itertools.cycle(reversed(range(streams)))
    stream = {op: 0 if op in pinned else next(lanes) for op in graph.ops}
    return Assignment("scattered", 1 + max(stream.values(), default=0), tuple(graph.ops), stream)


def force_streams(monkeypatch: pytest.MonkeyPatch, policy: Any = scattered) -> dict[str, Any]:
    """Let the schedule over two streams win however long it takes; returns the options to optimize with."""
    monkeypatch.setattr("autostream.select.interleaved", lambda timers: [1.0, 0.5][: len(timers)])
    monkeypatch.setattr("autostream.pipeline.POLICIES", {**POLICIES, "critical_path": policy})
    return {"policy": "critical_path", "streams": 2}


CONFIGURATIONS: Mapping[str, Callable[[pytest.MonkeyPatch], dict[str, Any]]] = {
    "default": lambda monkeypatch: {},
    "critical_path": lambda monkeypatch: force_streams(monkeypatch, POLICIES["critical_path"]),
    "scattered": force_streams,
}


@dataclasses.dataclass(frozen=True)
class Observed:
    """What a caller can see of a call.

    Attributes:
        result: what was returned, or the exception.
        world: the arguments and the model's tensors afterwards.
        relations: which of all these tensors are the same object, and which share memory.
        generators: states of the random generators afterwards.
    """

    result: Any
    world: Any
    relations: Sequence[tuple[int, int]]
    generators: Any


def observe(run: Callable[..., Any], model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Observed:
    """Call ``run``, which is ``model`` or made from it, and look at everything around it."""
    torch.manual_seed(7)
    random.seed(7)
    try:
        result = run(*args, **kwargs)
    except Exception as error:
        result = (type(error), str(error))
    state = dict(model.state_dict(keep_vars=True)) if isinstance(model, nn.Module) else {}
    world = (args, kwargs, state)
    return Observed(result, world, relations(list(tensors_of((result, world)))), (torch.get_rng_state(), random.getstate()))


def check_same(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> autostream.OptimizedModule:
    """Call the plain and the optimized model several times with the same; whatever can be seen must be equal."""
    ours, theirs = (copy.deepcopy((model, args, kwargs)) for _ in range(2))
    fast = autostream.optimize(ours[0], **options)
    for grad_mode in GRAD_MODES:
        with grad_mode():
            same_value(observe(fast, *ours), observe(theirs[0], *theirs))
    return fast


def same_value(ours: Any, theirs: Any) -> None:
    """Check that two values have the same structure, types, numbers to the bit, and layouts."""
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(ours, Tensor):
        _same_tensor(ours, theirs)
    elif isinstance(ours, Mapping):
        assert list(ours) == list(theirs)
        for key in ours:
            same_value(ours[key], theirs[key])
        same_value(getattr(ours, "__dict__", None), getattr(theirs, "__dict__", None))
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), (ours, theirs)
        for one, other in zip(ours, theirs, strict=True):
            same_value(one, other)
    elif dataclasses.is_dataclass(ours) and not isinstance(ours, type):
        same_value(vars(ours), vars(theirs))
    elif isinstance(ours, float):
        assert ours.hex() == theirs.hex()
    else:
        assert ours == theirs or repr(ours) == repr(theirs), (ours, theirs)


def _same_tensor(ours: Tensor, theirs: Tensor) -> None:
    assert _layout(ours) == _layout(theirs)
    ours, theirs = (tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach() for tensor in (ours, theirs))
    ours, theirs = (t.resolve_conj().resolve_neg() for t in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    if ours.is_floating_point():
        assert torch.equal(ours.signbit(), theirs.signbit())


def _layout(tensor: Tensor) -> tuple[object, ...]:
    place = (tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else ()
    return tensor.dtype, tensor.shape, tensor.layout, place, tensor.requires_grad, tensor.is_inference()


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in a nested value, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_of(vars(value))


def relations(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """For each tensor the first that is the same object, and the first that shares its storage."""
    strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
    objects = [id(tensor) for tensor in strided]
    storages = [tensor.untyped_storage()._cdata for tensor in strided]
    return [(objects.index(o), storages.index(s)) for o, s in zip(objects, storages, strict=True)]
