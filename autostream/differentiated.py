"""A call that records gradients: forward and backward are scheduled each for itself, and autograd sees one node.

    call ──▶ forward: a schedule ──▶ outputs ┄┄▶ loss.backward() ──▶ backward: a schedule ──▶ gradients
                          └── saved: in the memory of the forward's graph, where there is one ──┘

Gradients arrive at parameters as ever: hooks, accumulation, and whatever else waits for them there, see no difference.
So they do at outputs that others are computed from (``links.py``).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from autostream.build import Scheduled, Stale, Unsuitable
from autostream.execution.cuda_graph import GraphPools
from autostream.execution.lending import Lending
from autostream.frontend.signature import Signature
from autostream.frontend.tree import Structure, flatten, unflatten
from autostream.links import linked, linked_in, shares, stand_in
from autostream.optimized import MakeSection as MakePiece
from autostream.options import Options
from autostream.pipeline import versions
from autostream.repetition import Before, Repetition
from autostream.reporting.report import Report
from autostream.tracing.export import Tracer
from autostream.tracing.gradients import trace_gradients
from autostream.tracing.saved_tensors import apply, keeps_graph
from autostream.tracing.state import LiveState, ModelWatch, name_of

Lock = AbstractContextManager[Any]


class Differentiated:
    """A model scheduled for one signature whose calls record gradients.

    Args:
        model: the live model.
        structure: of ``(args, kwargs)``.
        tensors: the flat example inputs.
        signature: what this is made for.
        bound_inputs: positions of inputs that stay where they are from call to call.
        options: how to schedule.
        make_piece: makes what runs the graph of the backward, some of whose inputs stay where they are.
        make_section: makes what runs a part of the forward, where a CUDA graph cannot hold the whole.
        repeating: held while the model computes a call once more.

    Attributes:
        repeatable: whether a call more than asked, or one that fails, changes nothing that anybody can see.
        linked: positions of the outputs that others are computed from, and of these.

    Raises:
        TraceError: the model cannot be traced.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        tensors: Sequence[Tensor],
        signature: Signature,
        bound_inputs: frozenset[int],
        options: Options,
        make_piece: MakePiece,
        make_section: MakePiece,
        repeating: Lock,
    ) -> None:
        halves = trace_gradients(model, tensors, structure, bound_inputs)
        tracer = Tracer(lambda *_: halves.forward, may_split=False, may_cut=True, may_try=False, may_renew=True)
        own = GraphPools()  # no other graph's turn may come between the two halves' in memory that is lent
        self._device = torch.device(halves.forward.program.device)
        with torch.no_grad(), _uncast(self._device):
            call = model, structure, tensors, signature
            self._forward = Scheduled(*call, bound_inputs, options, own, tracer, make_section=make_section)
        lent = self._forward.lend(frozenset(place for place in halves.saved if place >= len(halves.tangents)))
        self._lent = sorted(lent)
        self._copied = [place for place in halves.saved if place not in lent]
        self._lending, self._lock, self._repeating = Lending(self._device), threading.Lock(), repeating
        # State and inputs, what is copied, what is lent, tangents: the third stays where it is, and some of the first.
        staying = {*range(len(halves.state)), *(len(halves.state) + at for at in bound_inputs)}
        kept = [at for at, value in enumerate(halves.needed) if value in staying]
        first = len(halves.needed) + len(self._copied)
        self._backward = make_piece(
            halves.backward([*self._copied, *self._lent]), frozenset([*kept, *range(first, first + len(lent))])
        )
        self._state, self._watch = LiveState(model, halves.state, {}), ModelWatch(model)
        self._read = self._watch.read()
        self.linked = linked_in(halves.parents)
        self._seen_again = sorted(self.linked.union(at for at in halves.saved if at < len(halves.tangents)))
        self._given = [at for at in halves.needed if at >= len(halves.state)]
        self._model, self._structure, self._signature, self._halves = model, structure, signature, halves
        self._repetition = Repetition(model, halves.forward.program, [own.target for own in halves.state])
        self._autocast = _autocast(self._device)
        self._required = _required(self._state.tensors())
        self.repeatable = self._forward.repeatable

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Run the forward with these flat inputs, and return what the model would.

        Raises:
            Stale: the model's state has another shape or kind now; nothing that can be seen has been changed.
            Unsuitable: these inputs must go to the plain model.
        """
        state = self._state.tensors()
        present = [tensor for tensor in state if tensor is not None]
        if len(present) < len(state) or not self._state.tied(state) or _required(present) != self._required:
            raise Stale
        values = [*present, *tensors]
        if any(values[at].is_inference() for at in self._given):
            raise Unsuitable("its backward needs an input that was made in inference mode, which autograd cannot save")
        run = _Run(self, values)
        outputs = apply(_Node, run, *(values[at] for at in self._halves.trained))
        if self.linked:
            own, run.outputs = run.outputs, ()
            outputs = linked(own, outputs, self._halves.parents, run.derived)
        run.given = [weakref.ref(outputs[at]) for at in self._seen_again]
        return unflatten(self._halves.structure, outputs)

    def noticed(self) -> bool:
        """As of :class:`~autostream.build.Scheduled`."""
        return self._forward.noticed()

    def let_go(self) -> None:
        """As of :class:`~autostream.build.Scheduled`."""
        self._forward.let_go()
        self._backward.let_go()

    def renew_locks(self, repeating: Lock) -> None:
        """In a forked process, where no thread is left that could release the old ones."""
        self._lock, self._repeating = threading.Lock(), repeating

    @property
    def report(self) -> Report:
        """What is known now: the backward is scheduled when it first runs."""
        return Report(
            model=name_of(self._model),
            signature=str(self._signature),
            mode="forward and backward",
            versions=versions(),
            parts=(
                replace(self._forward.report, half="forward"),
                *(replace(report, half="backward") for report in self._backward.reports),
            ),
        )

    def forward(self, values: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor], Before]:
        """Compute the outputs.

        Returns:
            The outputs; what the backward takes besides tangents, the last of it lent; the memory that is lent; what
            the call found.
        """
        halves = self._halves
        with self._lock, _uncast(self._device):
            before = self._repetition.before(values)
            self._lending.recall()
            results = self._forward(values[len(halves.state) :])
            memory = [results[place] for place in self._lent]
            lent = self._lending.lend(memory)
        copied = (results[place] for place in self._copied)
        # Autograd would save parameters and inputs themselves, and find in them what ``.data = …`` gives them later.
        needed = (values[at].detach() for at in halves.needed)
        return results[: len(halves.tangents)], [*needed, *copied, *lent], memory, before

    def backward(
        self, taken: Sequence[Tensor], memory: Sequence[Tensor], tangents: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """The gradients of what is trained, from what the forward left and the gradients of all outputs.

        Outputs that nobody used have none, and what depends on these alone has none either.
        """
        first = len(taken) - len(memory)
        with self._lock:
            self._lending.put_back(taken[first:], memory)
            gradients = self._backward(*taken[:first], *memory, *self._laid_out(tangents))
        used = {at for at, tangent in enumerate(tangents) if tangent is not None}
        pairs = zip(gradients, self._halves.sources, strict=True)
        return [None if used.isdisjoint(sources) else gradient for gradient, sources in pairs]

    def marks(self, values: Sequence[Tensor]) -> list[tuple[int, int]]:
        """How often values that no call writes were written, and where they lie.

        For those made in inference mode nobody counts.
        """
        written = self._repetition.written
        others = (own for at, own in enumerate(values) if at not in written)
        return [(0 if own.is_inference() else own._version, own.data_ptr()) for own in others]

    def again(self, run: _Run) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs of a call, recorded by autograd, and what they lead to: the model computes all once more.

        Raises:
            RuntimeError: it would not compute the same.
        """
        if self.marks(run.values) != run.marks:
            raise RuntimeError(f"{_AGAIN} weights or inputs have changed since the call: {_ITSELF}")
        if torch.is_grad_enabled() and run.is_looked_at():
            raise RuntimeError(
                f"{_AGAIN} a hook of an output, or an output that retains its gradient, would miss what the gradients "
                f"of gradients bring it: {_ITSELF}"
            )
        with (
            self._repeating,
            torch.enable_grad(),
            self._autocast(),
            self._repetition.as_then(run.before),
            self._state.as_traced(),
        ):
            if not self._is_as_traced():
                raise RuntimeError(f"{_AGAIN} the model has changed since the call: {_ITSELF}")
            # Each stands for itself, for one may be computed from another: this call ends here.
            values = self._repetition.values(run.values, run.before, self._halves.trained)
            state = {own.target: value for own, value in zip(self._halves.state, values, strict=False)}
            args, kwargs = unflatten(self._structure, values[len(state) :])
            outputs, _ = flatten(functional_call(self._model, state, args, kwargs))
        return outputs, [values[at] for at in self._halves.trained]

    def _is_as_traced(self) -> bool:
        """Whether the model's modules, what they hold and what their functions read are as the trace found them."""
        watch = self._watch
        return watch.intact() and not watch.hooked() and watch.read() == self._read and self._state.configured()

    def _laid_out(self, tangents: Sequence[Tensor | None]) -> list[Tensor]:
        pairs = zip(tangents, self._halves.tangents, strict=True)
        return [like.laid_out(tangent) for tangent, like in pairs if like is not None]

    def constants(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs that have no gradients."""
        return [output for output, like in zip(outputs, self._halves.tangents, strict=True) if like is None]


_AGAIN = (
    "for gradients of gradients (create_graph=True), or of outputs that others are computed from, all is computed once "
    "more, and"
)
_ITSELF = "call the model itself, not the optimized one, where you need them"


class _Run:
    """A call, for as long as somebody may go back from it.

    Args:
        call: whose it is.
        values: what it takes.

    Attributes:
        outputs: as the forward returned them, until some of them get nodes of their own.
        marks: of the values, by which it is seen whether they have changed.
        before: what the call found.
        memory: what is lent of the forward's.
        given: of the outputs by way of which gradients of gradients come, what the caller got; it is not kept alive.
    """

    def __init__(self, call: Differentiated, values: Sequence[Tensor]) -> None:
        self.call, self.values = call, values
        self.outputs: Sequence[Tensor] = ()
        self.marks: Sequence[tuple[int, int]] = ()
        self.before = Before((), {})
        self.memory: Sequence[Tensor] = ()
        self.given: Sequence[weakref.ref[Tensor]] = ()

    def is_looked_at(self) -> bool:
        """Whether somebody waits for the gradient of an output that is still there."""
        given = [own for own in (reference() for reference in self.given) if own is not None]
        # What was written to in place is another op's by now.
        return any((own._backward_hooks or own.retains_grad) and type(own.grad_fn).__name__ in _OURS for own in given)

    def end(self) -> None:
        """Let go of all, as autograd does of what is saved: losses may be kept."""
        self.values = self.memory = ()
        self.before = Before((), {})

    def derived(self, at: int, parents: Sequence[int], gradient: Tensor) -> Sequence[Tensor | None]:
        """What outputs are due that another one is computed from (:data:`~autostream.links.Derive`)."""
        if not self.values:
            return [None] * len(parents)  # autograd will say that the graph is gone
        outputs, _ = self.call.again(self)
        return shares(outputs[at], [outputs[parent] for parent in parents], gradient)


_OURS = ("_NodeBackward", "_LinkBackward")


class _Node(torch.autograd.Function):
    """What autograd sees of a call."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *trained: Tensor) -> tuple[Tensor, ...]:
        call, ctx.run = run.call, run
        outputs, taken, run.memory, run.before = call.forward(run.values)
        run.marks = call.marks(run.values)
        if call.linked:  # what has another node is saved under another name, or it would hold itself
            own = {id(outputs[at]) for at in call.linked}
            taken = [tensor.detach() if id(tensor) in own else tensor for tensor in taken]
            run.outputs = outputs
            outputs = [stand_in(output) if at in call.linked else output for at, output in enumerate(outputs)]
        ctx.save_for_backward(*taken)  # it sees to it that nobody has written to them when they are used
        ctx.mark_non_differentiable(*call.constants(outputs))
        ctx.set_materialize_grads(False)  # an output that nobody used has no gradient, which is not zero
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        taken, run = ctx.saved_tensors, ctx.run
        if torch.is_grad_enabled():
            outputs, trained = run.call.again(run)
            used = [(output, tangent) for output, tangent in zip(outputs, tangents, strict=True) if tangent is not None]
            given = [output for output, _ in used], trained, [tangent for _, tangent in used]
            return None, *torch.autograd.grad(*given, create_graph=True, allow_unused=True)
        gradients = run.call.backward(taken, run.memory, tangents)
        if taken and not keeps_graph():
            run.end()
        return None, *gradients


def _required(tensors: Sequence[Tensor | None]) -> list[bool]:
    return [tensor is not None and tensor.requires_grad for tensor in tensors]


def _uncast(device: torch.device) -> AbstractContextManager[Any]:
    """No autocast inside: the graph of a forward has the casts that it asked for."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()


def _autocast(device: torch.device) -> Callable[[], torch.autocast]:
    """Autocast as it is now, for another time."""
    kind = device.type
    settings = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
    return partial(torch.autocast, kind, *settings)
