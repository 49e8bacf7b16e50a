"""A call that records gradients: forward and backward are scheduled each for itself, and autograd sees one node.

    call ──▶ forward: a schedule ──▶ outputs ┄┄▶ loss.backward() ──▶ backward: a schedule ──▶ gradients
                          └── saved: copies, for other calls may come before the backward ──┘

Gradients arrive at parameters as ever: hooks, accumulation, and whatever else waits for them there, see no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autostream.build import OptimizedPiece, Scheduled, Stale
from autostream.execution.cuda_graph import GraphPools
from autostream.options import Options
from autostream.pipeline import versions
from autostream.reporting.report import Report
from autostream.tracing.export import Tracer
from autostream.tracing.gradients import trace_gradients
from autostream.tracing.signature import Signature
from autostream.tracing.state import LiveState, name_of
from autostream.tracing.tree import Structure, unflatten


class Differentiated:
    """A model scheduled for one signature whose calls record gradients.

    Args:
        model: the live model.
        structure: of ``(args, kwargs)``.
        tensors: the flat example inputs.
        signature: what this is made for.
        options: how to schedule.
        pools: of the model's captured graphs.
        make_piece: makes what runs the graph of the backward, some of whose inputs stay where they are.

    Attributes:
        repeatable: whether a call more than asked, or one that fails, changes nothing that anybody can see.

    Raises:
        TraceError: the model cannot be traced.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        tensors: Sequence[Tensor],
        signature: Signature,
        options: Options,
        pools: GraphPools,
        make_piece: Callable[[GraphModule, frozenset[int]], OptimizedPiece],
    ) -> None:
        halves = trace_gradients(model, tensors, structure)
        tracer = Tracer(lambda *_: halves.forward, may_split=False, may_try=False, may_renew=True)
        with torch.no_grad():
            self._forward = Scheduled(model, structure, tensors, signature, frozenset(), options, pools, tracer)
        bound = (at for at, value in enumerate(halves.needed) if value < len(halves.state))
        self._backward = make_piece(halves.backward, frozenset(bound))
        self._state = LiveState(model, halves.state, {})
        self._model, self._signature, self._halves = model, str(signature), halves
        self.repeatable = self._forward.repeatable

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Run the forward with these flat inputs, and return what the model would.

        Raises:
            Stale: the model's state has another shape or kind now; nothing that can be seen has been changed.
            Unsuitable: these inputs must go to the plain model.
        """
        state = self._state.tensors()
        present = [tensor for tensor in state if tensor is not None]
        if len(present) < len(state) or not self._state.tied(state):
            raise Stale
        values = [*present, *tensors]
        trained = (values[at] for at in self._halves.trained)
        outputs = _Node.apply(self, values, *trained)  # type: ignore[no-untyped-call]
        return unflatten(self._halves.structure, outputs)

    @property
    def report(self) -> Report:
        """What is known now: the backward is scheduled when it first runs."""
        return Report(
            model=name_of(self._model),
            signature=self._signature,
            mode="forward and backward",
            versions=versions(),
            parts=(self._forward.report, *self._backward.reports),
        )

    def forward(self, values: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs for the model's state and inputs, and what the backward takes besides tangents."""
        halves = self._halves
        results = self._forward(values[len(halves.state) :])
        count = len(halves.strides)
        return results[:count], [*(values[at] for at in halves.needed), *results[count:]]

    def backward(self, taken: Sequence[Tensor], tangents: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradients of what is trained, from what the forward left and the gradients of all outputs."""
        pairs = zip(tangents, self._halves.strides, strict=True)
        gradients: Sequence[Tensor] = self._backward(
            *taken, *(_laid_out(tangent, strides) for tangent, strides in pairs if strides is not None)
        )
        return gradients

    def constants(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs that have no gradients."""
        return [output for output, strides in zip(outputs, self._halves.strides, strict=True) if strides is None]


class _Node(torch.autograd.Function):
    """What autograd sees of a call."""

    @staticmethod
    def forward(ctx: Any, call: Differentiated, values: Sequence[Tensor], *trained: Tensor) -> tuple[Tensor, ...]:
        outputs, taken = call.forward(values)
        ctx.call = call
        ctx.save_for_backward(*taken)  # it sees to it that nobody has written to them when they are used
        ctx.mark_non_differentiable(*call.constants(outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of gradients (create_graph=True) are no part of autostream's graphs: call the model itself, "
                "not the optimized one, where you need them"
            )
        return None, None, *ctx.call.backward(ctx.saved_tensors, tangents)


def _laid_out(tangent: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A gradient as the graph of the backward expects it; what is expanded, such as that of a sum, is written out."""
    if tangent.stride() == strides:
        return tangent
    return torch.empty_strided(tangent.shape, strides, dtype=tangent.dtype, device=tangent.device).copy_(tangent)
