"""Tracing of training steps with ``make_fx``, below autograd.

A step runs on fake tensors, and every op that it dispatches is recorded: those of the model, then those of autograd,
then those of the optimizer, as an eager step has them and in that order. So random numbers are drawn in that order, and
what is written in place is written in place. Gradients are results in between: an update depends on its own gradient
alone, and a schedule may run it as soon as that is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.func import functional_call

from autostream.errors import TraceError
from autostream.frontend.tree import Structure
from autostream.tracing.batches import Batch
from autostream.tracing.below_autograd import graph_of, reached_originals, state_of, tidied
from autostream.tracing.constants import names_given, registered
from autostream.tracing.export import Traced, Tracer, check_one_device, ordinary, program_of
from autostream.tracing.flat import FlatModel, check_ordinary
from autostream.tracing.optimizers import lists_apart
from autostream.tracing.replica import replica, traced_apart
from autostream.tracing.state import name_of
from autostream.tracing.steps import Backward, Setting


def trace_step(step: Backward, tensors: Sequence[Tensor], structure: Structure) -> Traced:
    """Trace a step at these inputs, without computing anything or changing a tensor.

    Args:
        step: the step.
        tensors: the flat tensors of its arguments.
        structure: the structure of ``((batch, setting, numbers), {})`` that they were taken from.

    Raises:
        TraceError: it cannot be traced; the message says why.
    """
    check_ordinary(step)
    if reason := step.overlapping():
        raise TraceError(reason)
    flat, module = traced_apart(
        step,
        replica(step),
        lambda own: _made_fx(own, step, tensors, structure),
        lambda found: reached_originals(found[1], step),
    )
    program = program_of(module, tidied(module, step, tensors))
    check_one_device(program)
    return Traced(program, flat.result.structure, {})


STEPS = Tracer(trace_step, may_split=False, may_cut=True, may_try=False, may_renew=False, may_refuse=True)
"""Of training steps: their graphs are whole, and only so many, for each takes as long to make as a thousand steps."""


class _Functional(nn.Module):
    """A step whose ``forward`` is what is traced of it."""

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step: Any = step

    def _get_name(self) -> str:
        return name_of(self.step)

    def forward(self, batch: Batch, setting: Setting, numbers: Sequence[Tensor]) -> Any:
        return self.step.traced(batch, setting, numbers)


def _made_fx(
    twin: nn.Module, step: nn.Module, tensors: Sequence[Tensor], structure: Structure
) -> tuple[FlatModel, fx.GraphModule]:
    state = state_of(step)
    flat = FlatModel(
        _Functional(twin), structure, registered(step), "make_fx", names=names_given([*state.values(), *tensors])
    )
    names = [f"model.step.{name}" for name in state]

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        held, inputs = values[: len(names)], values[len(names) :]
        outputs: tuple[Tensor, ...] = functional_call(flat, dict(zip(names, held, strict=True)), inputs)
        return outputs

    return flat, graph_of(run, dict(lists_apart()), flat, [*state.values(), *ordinary(tensors)])
