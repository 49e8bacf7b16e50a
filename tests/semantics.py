"""Everything that a caller can observe of a call, and whether an optimized model does the same as the eager one."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.ir import Assignment, Costs, DeviceProfile, OpGraph
from autostream.options import Options
from autostream.scheduling.policies import POLICIES, Policy
from autostream.tuning import candidates
from autostream.tuning.pricing import Priced

Inputs = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of a call."""

GRAD_MODES = (torch.no_grad, torch.no_grad, torch.inference_mode)
"""Modes of successive calls: the first call captures, the second repeats it, the third is in another mode."""


def t(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1 + sum(shape) + seed))


class Viewed(nn.Module):
    """Views a buffer before a graph break, and writes to the buffer after it, which the view shows."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Buffer(torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.state[1:]
        y = x.t_()  # breaks the graph
        before = rows * 2
        self.state[1:] += 1
        return before + rows + y.sum()


class Model(nn.Module):
    """A function of a module and its arguments, with parameters, buffers, submodules and attributes by name."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Beside(nn.Module):
    """A model with independent ops beside it, so that a schedule over two streams exists whatever the model does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        beside = torch.arange(8.0).sin()
        result = self.model(*args, **kwargs)
        return result, beside.cos()


def scattered(graph: OpGraph, costs: Costs, profile: DeviceProfile, streams: int, pinned: frozenset[str]) -> Assignment:
    """A policy that changes the stream at every op: as many waits as there can be."""
    lanes = itertools.cycle(reversed(range(streams)))
    stream = {op: 0 if op in pinned else next(lanes) for op in graph.ops}
    return Assignment("scattered", 1 + max(stream.values(), default=0), tuple(graph.ops), stream)


def force_streams(monkeypatch: pytest.MonkeyPatch, policy: Policy = scattered) -> dict[str, Any]:
    """Let a schedule over two streams win, however long it takes; returns the options to optimize with."""
    monkeypatch.setattr("autostream.tuning.select.interleaved", lambda timers, *_: [1.0, 0.5][: len(timers)])
    let_policy_assign(monkeypatch, policy)
    return {"policy": "critical_path", "streams": 2, "memory_budget": math.inf}


def let_policy_assign(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    """Replace ``critical_path`` by another policy, which assigns single ops."""
    others = candidates._assigned

    def assigned(priced: Priced, options: Options, pinned: frozenset[str]) -> Iterator[Assignment]:
        if options.policy in ("auto", "critical_path"):
            for streams in candidates._stream_counts(priced, options):
                yield policy(priced.graph, priced.costs, priced.profile, streams, pinned)
        if options.policy != "critical_path":
            left = dataclasses.replace(options, policy="path_cover") if options.policy == "auto" else options
            yield from others(priced, left, pinned)

    monkeypatch.setattr(candidates, "_assigned", assigned)


CONFIGURATIONS: Mapping[str, Callable[[pytest.MonkeyPatch], dict[str, Any]]] = {
    "default": lambda monkeypatch: {},
    "critical path": lambda monkeypatch: force_streams(monkeypatch, POLICIES["critical_path"]),
    "scattered": force_streams,
}
"""How to optimize: each function patches what it needs and returns options."""


@dataclasses.dataclass(frozen=True)
class Observed:
    """What a caller can observe of a call."""

    result: Any
    world: Any
    """Arguments and the model's tensors, afterwards."""
    relations: Sequence[tuple[int, int]]
    gradients: Sequence[Tensor | None]
    generators: tuple[object, ...]


def observe(run: Callable[..., Any], model: Any, inputs: Inputs, seed: int = 7) -> Observed:
    """Call ``run``, which is ``model`` or its optimized module, and observe everything around the call."""
    torch.manual_seed(seed)
    random.seed(seed)
    args, kwargs = inputs
    try:
        result = run(*args, **kwargs)
        sums = [tensor.float().sum() for tensor in tensors_in(result) if tensor.requires_grad]
        if torch.is_grad_enabled() and sums:
            torch.stack(sums).sum().backward()
    except Exception as error:
        # A message has the tensor's version, and a fused kernel writes once what several ops write.
        result = (type(error), re.sub(r"version \d+", "version", str(error)))
    world = (inputs, dict(model.state_dict(keep_vars=True)) if isinstance(model, nn.Module) else {})
    gradients = [tensor.grad for tensor in tensors_in(world) if tensor.is_leaf]
    generators = (torch.get_rng_state(), random.getstate(), *map(torch.cuda.get_rng_state, range(_devices())))
    return Observed(result, world, relations([*tensors_in(result), *tensors_in(world)]), gradients, generators)


def _devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_initialized() else 0


def check_same(
    model: Any, inputs: Inputs, options: Mapping[str, Any], modes: Sequence[Callable[[], Any]] = GRAD_MODES
) -> autostream.OptimizedModule:
    """Call copies of the eager and of the optimized model side by side; all that can be observed must be the same."""
    (ours, our_inputs), (theirs, their_inputs) = (copy.deepcopy((model, inputs)) for _ in range(2))
    fast = autostream.optimize(ours, **options)
    for mode in modes:
        with mode():
            same(observe(fast, ours, our_inputs), observe(theirs, theirs, their_inputs))
    return fast


def same(ours: Any, theirs: Any, tolerance: float = 0.0) -> None:
    """Check that two values have the same structure, types, layouts, and numbers: within a tolerance, or exactly."""
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(ours, Tensor):
        _same_tensor(ours, theirs, tolerance)
    elif isinstance(ours, Mapping):
        same(list(ours.items()), list(theirs.items()), tolerance)
        same(getattr(ours, "__dict__", None), getattr(theirs, "__dict__", None), tolerance)
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), (ours, theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other, tolerance)
    elif dataclasses.is_dataclass(ours) and not isinstance(ours, type):
        same(vars(ours), vars(theirs), tolerance)
    elif isinstance(ours, float):
        assert ours.hex() == theirs.hex()
    else:
        assert ours == theirs


def _same_tensor(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    exact = not tolerance
    assert _layout(ours, exact) == _layout(theirs, exact), (_layout(ours, exact), _layout(theirs, exact))
    ours, theirs = ours.detach(), theirs.detach()
    if not exact and ours.is_floating_point():  # fused kernels may keep intermediate values unrounded
        tolerance = max(tolerance, 2 * torch.finfo(ours.dtype).eps)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
    if not tolerance and ours.is_floating_point() and ours.layout is torch.strided and not ours.is_meta:
        assert torch.equal(ours.signbit(), theirs.signbit())


def _layout(tensor: Tensor, exact: bool) -> tuple[object, ...]:
    place: tuple[object, ...] = ()
    if tensor.layout is torch.strided:
        # In outputs of fused kernels, dimensions of one element have any stride.
        strides = [step if exact or size > 1 else 0 for step, size in zip(tensor.stride(), tensor.shape, strict=True)]
        place = (strides, tensor.storage_offset())
    if tensor.is_cuda:  # outputs of a captured graph are copied, without the rest of their storage
        place = place[:1]
    flags = (tensor.requires_grad, tensor.is_inference(), tensor.is_conj(), tensor.is_neg())
    return type(tensor), tensor.dtype, tensor.shape, tensor.layout, place, flags


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a nested value, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(map(tensors_in, value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, each.name, None) for each in dataclasses.fields(value)])


def relations(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """For each tensor, the first that is the same object and the first that shares its storage."""
    strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
    objects = [id(tensor) for tensor in strided]
    storages = [tensor.untyped_storage()._cdata for tensor in strided]
    return [(objects.index(o), storages.index(s)) for o, s in zip(objects, storages, strict=True)]
