"""Training steps that are written out, in several modes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autostream import training
from autostream.cli.modes import captured

Step = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class StepSubject:
    """A training step.

    Attributes:
        modules: all that it trains or writes, on the device that is timed.
        optimizers: that it uses.
        data: its batch.
        update: the step: takes a batch, and returns losses.
    """

    modules: nn.Module
    optimizers: tuple[Optimizer, ...]
    data: tuple[Tensor, ...]
    update: Step


def eager(subject: StepSubject) -> Step:
    """The step as it is written."""
    return subject.update


def compile_default(subject: StepSubject) -> Step:
    """``torch.compile`` of the step: a graph for each part between two backwards or updates."""
    return torch.compile(subject.update, dynamic=False)


def compile_reduce_overhead(subject: StepSubject) -> Step:
    """The same with ``torch.compile``'s CUDA graphs."""
    return torch.compile(subject.update, dynamic=False, mode="reduce-overhead")


def cuda_graph(subject: StepSubject) -> Step:
    """The step captured on one stream."""
    return captured(_capturable(subject).update, subject.data)


def compile_captured(subject: StepSubject) -> Step:
    """The compiled step captured on one stream."""
    return captured(compile_default(_capturable(subject)), subject.data)


def cuda_graph_module(subject: StepSubject) -> Step:
    """The compiled step in tensordict's ``CudaGraphModule``, as LeanRL runs it."""
    from tensordict.nn import CudaGraphModule  # type: ignore[import-not-found, unused-ignore]

    step: Step = CudaGraphModule(compile_default(_capturable(subject)))
    return step


def autostream(subject: StepSubject, **options: Any) -> Step:
    """``autostream.step`` with these options, after one step, which makes the state of the optimizers."""
    step = training.step(optimizers=subject.optimizers, **options)(subject.update)
    step(*subject.data)
    return step


def _capturable(subject: StepSubject) -> StepSubject:
    for optimizer in subject.optimizers:
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
    return subject


CPU: Mapping[str, Callable[[StepSubject], Step]] = {
    mode.__name__: mode for mode in (eager, compile_default, autostream)
}
_CAPTURED = (compile_reduce_overhead, cuda_graph, compile_captured, cuda_graph_module)
CUDA: Mapping[str, Callable[[StepSubject], Step]] = {
    **CPU,
    **{mode.__name__: mode for mode in _CAPTURED},
    "autostream_inputs": partial(autostream, guards="inputs"),
    "autostream_any_memory": partial(autostream, memory_budget=math.inf),
}


def step_modes_of(device: torch.device) -> Mapping[str, Callable[[StepSubject], Step]]:
    """All modes of a device, by name."""
    return CPU if device.type == "cpu" else CUDA
