"""A call that records gradients: forward and backward are scheduled each for itself, and autograd sees one node.

    call ──▶ forward: a schedule ──▶ outputs ┄┄▶ loss.backward() ──▶ backward: a schedule ──▶ gradients
                          └── saved: in the memory of the forward's graph, where there is one ──┘

Gradients arrive at parameters as ever: hooks, accumulation, and whatever else waits for them there, see no difference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule

from autostream.build import OptimizedPiece, Scheduled, Stale
from autostream.execution.cuda_graph import GraphPools
from autostream.execution.lending import Lending
from autostream.options import Options
from autostream.pipeline import versions
from autostream.reporting.report import Report
from autostream.tracing.export import Tracer
from autostream.tracing.gradients import trace_gradients
from autostream.tracing.signature import Signature
from autostream.tracing.state import LiveState, name_of
from autostream.tracing.tree import Structure, flatten, unflatten


class Differentiated:
    """A model scheduled for one signature whose calls record gradients.

    Args:
        model: the live model.
        structure: of ``(args, kwargs)``.
        tensors: the flat example inputs.
        signature: what this is made for.
        options: how to schedule.
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
        make_piece: Callable[[GraphModule, frozenset[int]], OptimizedPiece],
    ) -> None:
        halves = trace_gradients(model, tensors, structure)
        tracer = Tracer(lambda *_: halves.forward, may_split=False, may_try=False, may_renew=True)
        own = GraphPools()  # no other graph's turn may come between the two halves' in memory that is lent
        with torch.no_grad():
            self._forward = Scheduled(model, structure, tensors, signature, frozenset(), options, own, tracer)
        lent = self._forward.lend(frozenset(place for place in halves.saved if place >= len(halves.strides)))
        self._lent = sorted(lent)
        self._copied = [place for place in halves.saved if place not in lent]
        self._lending, self._lock = Lending(torch.device(self._forward.device)), threading.Lock()
        # State, what is copied, what is lent, tangents: the first and the third stay where they are.
        kept = [at for at, value in enumerate(halves.needed) if value < len(halves.state)]
        first = len(halves.needed) + len(self._copied)
        self._backward = make_piece(
            halves.backward([*self._copied, *self._lent]), frozenset([*kept, *range(first, first + len(lent))])
        )
        self._state = LiveState(model, halves.state, {})
        self._model, self._structure, self._signature, self._halves = model, structure, signature, halves
        self._autocast = _autocast(self._forward.device)
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
            signature=str(self._signature),
            mode="forward and backward",
            versions=versions(),
            parts=(self._forward.report, *self._backward.reports),
        )

    def forward(self, values: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Compute the outputs.

        Returns:
            The outputs; what the backward takes besides tangents, the last of it lent; the memory that is lent.
        """
        halves = self._halves
        with self._lock:
            self._lending.recall()
            results = self._forward(values[len(halves.state) :])
            memory = [results[place] for place in self._lent]
            lent = self._lending.lend(memory)
        copied = (results[place] for place in self._copied)
        return results[: len(halves.strides)], [*(values[at] for at in halves.needed), *copied, *lent], memory

    def backward(
        self, taken: Sequence[Tensor], memory: Sequence[Tensor], tangents: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """The gradients of what is trained, from what the forward left and the gradients of all outputs."""
        first = len(taken) - len(memory)
        with self._lock:
            self._lending.put_back(taken[first:], memory)
            gradients: Sequence[Tensor] = self._backward(*taken[:first], *memory, *self._laid_out(tangents))
        return gradients

    def differentiable(
        self, values: Sequence[Tensor], versions_then: Sequence[int], tangents: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """The same gradients, recorded by autograd: the model computes all once more.

        Raises:
            RuntimeError: it would not compute the same.
        """
        halves = self._halves
        changed = [value._version for value in values] != versions_then or self._modes() != self._signature.training
        if reason := halves.once or ("weights, inputs or modes have changed since the call" if changed else ""):
            raise RuntimeError(
                f"for gradients of gradients (create_graph=True) all is computed once more, and {reason}: call the "
                "model itself, not the optimized one, where you need them"
            )
        state = {own.target: value for own, value in zip(halves.state, values, strict=False)}
        args, kwargs = unflatten(self._structure, values[len(state) :])
        with self._autocast():
            outputs, _ = flatten(functional_call(self._model, state, args, kwargs))
        results = compress(outputs, (strides is not None for strides in halves.strides))
        trained = [values[at] for at in halves.trained]
        return torch.autograd.grad(list(results), trained, self._laid_out(tangents), create_graph=True)

    def _modes(self) -> bytes:
        return bytes([module.training for module in self._model.modules()])

    def _laid_out(self, tangents: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(tangents, self._halves.strides, strict=True)
        return [_laid_out(tangent, strides) for tangent, strides in pairs if strides is not None]

    def constants(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs that have no gradients."""
        return [output for output, strides in zip(outputs, self._halves.strides, strict=True) if strides is None]


class _Node(torch.autograd.Function):
    """What autograd sees of a call."""

    @staticmethod
    def forward(ctx: Any, call: Differentiated, values: Sequence[Tensor], *trained: Tensor) -> tuple[Tensor, ...]:
        outputs, taken, ctx.memory = call.forward(values)
        ctx.call, ctx.values, ctx.versions = call, values, [value._version for value in values]
        ctx.save_for_backward(*taken)  # it sees to it that nobody has written to them when they are used
        ctx.mark_non_differentiable(*call.constants(outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return None, None, *ctx.call.differentiable(ctx.values, ctx.versions, tangents)
        return None, None, *ctx.call.backward(ctx.saved_tensors, ctx.memory, tangents)


def _autocast(device: str) -> Callable[[], torch.autocast]:
    """Autocast as it is now, for another time."""
    kind = torch.device(device).type
    settings = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
    return partial(torch.autocast, kind, *settings)


def _laid_out(tangent: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A gradient as the graph of the backward expects it; what is expanded, such as that of a sum, is written out."""
    if tangent.stride() == strides:
        return tangent
    return torch.empty_strided(tangent.shape, strides, dtype=tangent.dtype, device=tangent.device).copy_(tangent)
