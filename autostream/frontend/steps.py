"""A training step as one program: forward, loss, backward, clipping, the optimizer's update and a moving average.

    loss ──capture──▶ graph of torch ops ──▶ torch.autograd.grad ──▶ clip ──▶ optimizers.update ──▶ average
                      └──────────────────── traced by make_fx, below autograd ────────────────────────┘

All of it runs on fake tensors, and every op that it dispatches is recorded, as an eager step has them, in that order.
So random numbers are drawn in that order, and what is written in place is written in place. Gradients are results in
between: an update depends on its own gradient alone, and a schedule may run it as soon as that is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import get_current_meta
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from autostream.errors import AutostreamError, TraceError
from autostream.frontend.aten import Given, as_program, traced_on_fakes
from autostream.frontend.averages import follow_tensors
from autostream.frontend.batches import split, summed
from autostream.frontend.capture import Capture
from autostream.frontend.convolutions import GRADIENTS_APART
from autostream.frontend.eager_only import unusual
from autostream.frontend.inputs import names_of
from autostream.frontend.optimizers import Group, lists_apart, update
from autostream.frontend.parameters import clear_gradients, set_gradients
from autostream.frontend.saved_tensors import hooks_set_aside
from autostream.frontend.source_lines import keep_lines
from autostream.fusion.random_ops import draws
from autostream.ir import Program, Role
from autostream.utils.storages import storage_of


@dataclass(frozen=True)
class Update:
    """What comes after the gradients, where that is part of the program.

    Attributes:
        optimizer: whose rule it is.
        groups: its hyperparameters, with an ``Input`` for each that is one.
        sizes: how many parameters each of these groups has.
        state: which of the optimizer's state each tensor is: the position of its parameter, and its name.
        max_norm: to which gradients are clipped, if they are.
        averaged: how many parameters a moving average follows; its other tensors are buffers.
        decay: of the average.
    """

    optimizer: Optimizer
    groups: Sequence[Group]
    sizes: Sequence[int]
    state: Sequence[tuple[int, str]]
    max_norm: float | None = None
    averaged: int = 0
    decay: float = 0.0


@dataclass(frozen=True)
class Tensors:
    """All that a step takes. A tensor may be there several times.

    Attributes:
        held: by the loss, beside its batch.
        parameters: of the optimizer.
        state: of the optimizer.
        averages: tensors of a moving average, and beside each the model's that it follows.
        batch: the tensors of a batch.
        numbers: a tensor of numbers that may be others in each step, where there are some.
    """

    held: Sequence[Tensor]
    parameters: Sequence[Tensor]
    state: Sequence[Tensor]
    averages: Sequence[Tensor]
    batch: Sequence[Tensor]
    numbers: Sequence[Tensor]

    def flat(self) -> list[Tensor]:
        """All of them, in order."""
        return [*self.held, *self.parameters, *self.state, *self.averages, *self.batch, *self.numbers]

    def like(self, flat: Sequence[Tensor]) -> Tensors:
        """As many others of each kind."""
        left = iter(flat)
        kinds = (self.held, self.parameters, self.state, self.averages, self.batch, self.numbers)
        return Tensors(*([next(left) for _ in kind] for kind in kinds))


@dataclass(frozen=True)
class Step:
    """What is traced.

    Attributes:
        captured: the loss of the first part of a batch, with what is returned behind it.
        takes: for each input of the captured graph, the position of the batch's tensor that it is, or that it is a part
            of; ``None`` for what is held.
        divided: of the batch's tensors, which ones are taken apart.
        parts: into how many.
        trained: which of the optimizer's parameters require gradients.
        scaled: whether losses are multiplied by a number.
        update: what comes after the gradients; where nothing does, they are returned.
    """

    captured: Capture
    takes: Sequence[int | None]
    divided: Sequence[bool]
    parts: int
    trained: Sequence[bool]
    scaled: bool = False
    update: Update | None = None


@dataclass(frozen=True)
class Traced:
    """A step's program.

    Attributes:
        program: returns what the captured graph does, detached; then gradients, where nothing is updated.
        places: for each placeholder, the position of the tensor that it takes, or that tensor, where it is a constant.
        returned: how many outputs are the loss's.
        reached: which of those trained have a gradient.
    """

    program: Program
    places: list[int | Tensor]
    returned: int
    reached: list[bool]

    def arguments(self, tensors: Tensors) -> list[Tensor]:
        """The program's arguments."""
        flat = tensors.flat()
        return [flat[at] if isinstance(at, int) else at for at in self.places]


def trace_step(step: Step, tensors: Tensors, modules: nn.Module) -> Traced:
    """Trace a step, without computing anything or changing a tensor.

    Args:
        step: what is traced.
        tensors: what it takes.
        modules: have the parameters and buffers, by the names that they get.

    Raises:
        TraceError: it cannot be traced; the message says why.
    """
    flat, names = tensors.flat(), _names(step, tensors, modules)
    for tensor, (_, name) in zip(flat, names, strict=True):
        if reason := unusual(tensor):
            raise TraceError(f"the model's {name} {reason}")
    firsts: dict[int, int] = {}
    first = [firsts.setdefault(id(tensor), at) for at, tensor in enumerate(flat)]
    taken = sorted(firsts.values(), key=lambda at: (_ROLES.index(names[at][0]), at))
    seats = {at: seat for seat, at in enumerate(taken)}
    given: list[Given] = [(*names[at], flat[at]) for at in taken]
    run = _Run(step, tensors, [seats[at] for at in first], recomputes=True)
    try:
        graph = _graph(run, given)
    except _DrawsAgain:  # then all is kept that the backward needs
        run = _Run(step, tensors, [seats[at] for at in first], recomputes=False)
        graph = _graph(run, given)
    program, constants = as_program(graph, given)
    positions = {names[at]: at for at in taken}
    places = [positions.get((p.role, p.target)) for p in program.placeholders]
    found = [constants[p.target] if at is None else at for p, at in zip(program.placeholders, places, strict=True)]
    return Traced(program, found, run.returned, run.reached)


_ROLES = list(Role)


def _names(step: Step, tensors: Tensors, modules: nn.Module) -> list[tuple[Role, str]]:
    """For each tensor its role, and a name that no other has."""
    inputs = step.captured.inputs
    held = [own for own, item in zip(names_of(step.captured, modules), inputs, strict=True) if not item.is_argument]
    known = {id(own): (Role.BUFFER, name) for name, own in modules.named_buffers()}
    known |= {id(own): (Role.PARAMETER, name) for name, own in modules.named_parameters()}
    state = step.update.state if step.update else ()
    return [
        *held,
        *(known.get(id(own), (Role.PARAMETER, f"optimizer.{at}")) for at, own in enumerate(tensors.parameters)),
        *((Role.BUFFER, f"state.{name}_{at}") for at, name in state),
        *(known.get(id(own), (Role.BUFFER, f"averaged.{at}")) for at, own in enumerate(tensors.averages)),
        *((Role.INPUT, str(at)) for at in range(len(tensors.batch) + len(tensors.numbers))),
    ]


def _graph(run: _Run, given: Sequence[Given]) -> fx.GraphModule:
    # In one thread, for a trace records what is done in its own.
    with torch.no_grad(), hooks_set_aside(), torch.autograd.set_multithreading_enabled(False):
        graph = traced_on_fakes(run, [tensor for *_, tensor in given], {**GRADIENTS_APART, **lists_apart()})
    if graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mkldnn_rnn_layer_backward.default):
        raise TraceError(_RECURRENT)
    return graph


_RECURRENT = (
    "oneDNN's kernel, which computes LSTMs in float32 on a CPU, leaves its backward what that needs (a workspace) "
    "where autograd records it, and in a graph nobody does"
)


class _Run:
    """A step on fake tensors.

    Args:
        step: what is traced.
        tensors: what it takes, of which there are as many fake ones.
        seats: where each of those is among the tensors of a run.
        recomputes: whether what is checkpointed is computed once more in the backward.

    Attributes:
        returned: how many tensors the loss has returned.
        reached: which of those trained have got a gradient.
    """

    def __init__(self, step: Step, tensors: Tensors, seats: Sequence[int], *, recomputes: bool) -> None:
        self._step, self._tensors, self._seats, self._recomputes = step, tensors, seats, recomputes
        self.returned, self.reached = 0, list[bool]()

    def __call__(self, *values: Tensor) -> list[Tensor]:
        """What the program returns."""
        step = self._step
        clear_gradients(values)  # those of the real ones have come with them
        own = self._tensors.like([values[seat] for seat in self._seats])
        trained = list(compress(own.parameters, step.trained))
        results, gradients = self._differentiated(own, trained)
        self.returned, self.reached = len(results), [gradient is not None for gradient in gradients]
        set_gradients(trained, gradients, {storage_of(tensor) for tensor in (*values, *results)})
        if step.update is None:
            return [*results, *(parameter.grad for parameter in trained if parameter.grad is not None)]
        get_current_meta().pop("stack_trace", None)  # what comes now is no line of the user's
        self._updated(step.update, own)
        return results

    def _differentiated(self, own: Tensors, trained: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """What the loss returns, detached, and the gradients of those trained."""
        step = self._step
        gradients: list[Tensor | None] = [None] * len(trained)
        losses = []
        interpreter = _Interpreter(step.captured.module, self._recomputes)
        with torch.autograd.set_detect_anomaly(True, check_nan=False):  # it keeps lines of the user's with the graph
            for part in split(own.batch, step.divided, step.parts):
                held = iter(own.held)
                with torch.enable_grad():
                    outputs = interpreter.run(*(next(held) if at is None else part[at] for at in step.takes))
                    if not all(isinstance(output, Tensor) for output in outputs):
                        raise TraceError("the number of a tensor goes to Python: return the tensor instead")
                    loss = outputs[0] / step.parts if step.parts > 1 else outputs[0]
                    scaled = loss * own.numbers[0] if step.scaled else loss
                losses.append(loss.detach())
                if not scaled.requires_grad:
                    raise TraceError("the loss of loss_fn depends on no parameter that requires gradients")
                keep_lines(scaled)
                gradients = list(map(_sum, gradients, torch.autograd.grad(scaled, trained, allow_unused=True)))
                if interpreter.redrawn:
                    raise _DrawsAgain
        return [summed(losses), *(output.detach() for output in outputs[1:])], gradients

    def _updated(self, rule: Update, own: Tensors) -> None:
        if rule.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(own.parameters, rule.max_norm)
        state: dict[Tensor, dict[str, Tensor]] = {}
        for (at, name), value in zip(rule.state, own.state, strict=True):
            state.setdefault(own.parameters[at], {})[name] = value
        left = iter(own.parameters)
        by_group = [[next(left) for _ in range(size)] for size in rule.sizes]
        update(rule.optimizer, rule.groups, own.numbers[0], by_group, state)
        clear_gradients(own.parameters)
        pairs = [*zip(own.averages[::2], own.averages[1::2], strict=True)]
        follow_tensors(pairs[: rule.averaged], pairs[rule.averaged :], rule.decay)


def _sum(earlier: Tensor | None, later: Tensor | None) -> Tensor | None:
    if earlier is None or later is None:
        return later if earlier is None else earlier
    return earlier + later


class _DrawsAgain(AutostreamError):  # noqa: N818 - a notice within this file, not an error
    """What is checkpointed draws random numbers, and would draw others when it is computed once more."""


class _Interpreter(fx.Interpreter):
    """Runs a captured graph, and what is checkpointed in it as a checkpoint, which saves memory.

    Attributes:
        redrawn: whether random numbers were drawn when something was computed once more.
    """

    def __init__(self, module: fx.GraphModule, recomputes: bool) -> None:
        super().__init__(module)
        self._recomputes, self.redrawn = recomputes, False

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of the graph's."""
        if target is not torch.ops.higher_order.tag_activation_checkpoint:
            return super().call_function(target, args, kwargs)
        body, *given = args
        if not self._recomputes or len(kwargs) > 1:
            return fx.Interpreter(body).run(*given)
        runs = 0

        def run(*values: Any) -> Any:
            nonlocal runs
            runs += 1
            before = _drawing()
            try:  # to compute once more ends by an exception as soon as all is there
                return fx.Interpreter(body).run(*values)
            finally:
                self.redrawn |= runs > 1 and _drawing() != before

        return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False)


def _drawing() -> int:
    """How many nodes that draw random numbers have been traced so far."""
    mode: Any = get_proxy_mode()
    return sum(draws(node) for node in mode.tracer.graph.nodes)
