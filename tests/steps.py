"""Training steps, traced and not scheduled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autostream.dispatch.captured_step import trace
from autostream.dispatch.step_calls import Call, call_of
from autostream.dispatch.steps import Step, graphs_of
from autostream.frontend.losses import Loss
from autostream.ir import Program
from autostream.options import StepOptions
from autostream.runtime.input_buffers import BufferTable

Batch = tuple[Any, ...]


def step_of(model: nn.Module, optimizer: Optimizer, loss_fn: Callable[..., Any], **options: Any) -> Step:
    """A training step."""
    return Step(Loss(loss_fn, model), optimizer, StepOptions.parse(options))


@torch.no_grad()
def run(step: Step, batch: Batch) -> Any:
    """Run an eager step; returns what its loss returns."""
    return step.complete(*step.differentiate(batch))


@torch.no_grad()
def traced(step: Step, batch: Batch, *, whole: bool = True) -> tuple[Program, list[Tensor]]:
    """The program of a step whose optimizer has its state, and the program's arguments."""
    written = graphs_of(step, BufferTable(), whole=whole).step
    call = call_of(written, batch, {})
    assert isinstance(call, Call), call
    captured, step_program = trace(written, call)
    return step_program.program, step_program.arguments(captured.tensors, call.updates)


def program_of(
    model: nn.Module, optimizer: Optimizer, loss_fn: Callable[..., Any], batch: Batch
) -> tuple[Program, list[Tensor]]:
    """The program of the second step, and its arguments."""
    step = step_of(model, optimizer, loss_fn)
    run(step, batch)
    return traced(step, batch)
