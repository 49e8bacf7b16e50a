"""A training step as one program: forward, loss, backward, clipping, the optimizer's update and a moving average.

    loss ──capture──▶ graph of torch ops ──▶ torch.autograd.grad ──▶ clip ──▶ optimizers.update ──▶ average
                      └──────────────────── traced by make_fx, below autograd ────────────────────────┘

The step runs on fake tensors, and the ops that it dispatches are recorded: those of an eager step, in the same order,
random and in-place ops included. A weight's update depends on its own gradient only, so a schedule may run it before
the backward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import get_current_meta, set_stack_trace
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from autostream.errors import AutostreamError, TraceError
from autostream.frontend.aten import GraphInput, as_program, traced_on_fakes
from autostream.frontend.averages import follow_tensors
from autostream.frontend.batches import split, summed
from autostream.frontend.capture import Capture
from autostream.frontend.decompositions import SPLIT_CONVOLUTIONS, split_lists
from autostream.frontend.eager_only import unusual
from autostream.frontend.inputs import names_of
from autostream.frontend.optimizers import Group, update
from autostream.frontend.parameters import clear_gradients, set_gradients
from autostream.frontend.saved_tensors import hooks_set_aside
from autostream.fusion.random_ops import is_random
from autostream.ir import Program, Role
from autostream.utils.storages import storage_of


@dataclass(frozen=True)
class Update:
    """What a step does with the gradients: clipping, the optimizer's update, the moving average.

    Attributes:
        optimizer: the optimizer.
        groups: its hyperparameters, with an ``Input`` for each that is one.
        sizes: the number of parameters in each group.
        state: for each tensor of the optimizer's state, the position of its parameter, and its name.
        max_norm: the norm to which gradients are clipped, if they are.
        averaged: the number of averaged parameters; the average's other tensors are buffers.
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
    """The tensors that a step reads and writes. One tensor may occur several times.

    Attributes:
        held: inputs of the captured loss that are not from the batch, such as weights.
        parameters: of the optimizer.
        state: of the optimizer.
        averages: the tensors of the moving average, each followed by the model's tensor that it averages.
        batch: the tensors of the batch.
        numbers: one tensor with the hyperparameters that are inputs, or none.
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
        """Other tensors, in the same order and number."""
        left = iter(flat)
        kinds = (self.held, self.parameters, self.state, self.averages, self.batch, self.numbers)
        return Tensors(*([next(left) for _ in kind] for kind in kinds))


@dataclass(frozen=True)
class Step:
    """The training step to trace.

    Attributes:
        captured: the loss of the first microbatch; the graph's first output is the loss.
        takes: for each input of the captured graph, the position of the batch's tensor that it is, or is a part of;
            ``None`` for ``held`` tensors.
        divided: which of the batch's tensors are split into microbatches.
        parts: the number of microbatches.
        trained: which of the optimizer's parameters require gradients.
        scaled: whether the loss is multiplied by a number, such as a gradient scaler's.
        update: what is done with the gradients; ``None`` to return them.
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
        program: returns the outputs of the captured graph, detached; then the gradients, if there is no update.
        sources: for each placeholder, the position of its tensor in :meth:`Tensors.flat`; or the tensor, if constant.
        returned: the number of outputs that are the captured graph's.
        reached: which of the trained parameters have a gradient.
    """

    program: Program
    sources: list[int | Tensor]
    returned: int
    reached: list[bool]

    def arguments(self, tensors: Tensors) -> list[Tensor]:
        """The program's arguments."""
        flat = tensors.flat()
        return [flat[at] if isinstance(at, int) else at for at in self.sources]


def trace_step(step: Step, tensors: Tensors, modules: nn.Module) -> Traced:
    """Trace a step. Nothing is computed, and no tensor changes.

    Args:
        step: the step.
        tensors: the tensors that it reads and writes.
        modules: the owner of parameters and buffers, which gives them their names.

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
    indices = {at: index for index, at in enumerate(taken)}
    inputs: list[GraphInput] = [(*names[at], flat[at]) for at in taken]
    run = _Run(step, tensors, [indices[at] for at in first], recomputes=True)
    try:
        graph = traced_below_autograd(run, inputs)
    except RandomRecomputation:
        run = _Run(step, tensors, [indices[at] for at in first], recomputes=False)
        graph = traced_below_autograd(run, inputs)
    program, constants = as_program(graph, inputs)
    positions = {names[at]: at for at in taken}
    sources: list[int | Tensor] = []
    for placeholder in program.placeholders:
        at = positions.get((placeholder.role, placeholder.target))
        sources.append(constants[placeholder.target] if at is None else at)
    return Traced(program, sources, run.returned, run.reached)


_ROLES = list(Role)


def _names(step: Step, tensors: Tensors, modules: nn.Module) -> list[tuple[Role, str]]:
    """For each tensor its role and a unique name."""
    inputs = zip(names_of(step.captured, modules), step.captured.inputs, strict=True)
    held = [name for name, item in inputs if not item.is_argument]
    known = {id(buffer): (Role.BUFFER, name) for name, buffer in modules.named_buffers()}
    known |= {id(parameter): (Role.PARAMETER, name) for name, parameter in modules.named_parameters()}
    state = step.update.state if step.update else ()
    return [
        *held,
        *(known.get(id(each), (Role.PARAMETER, f"optimizer.{at}")) for at, each in enumerate(tensors.parameters)),
        *((Role.BUFFER, f"state.{name}_{at}") for at, name in state),
        *(known.get(id(each), (Role.BUFFER, f"averaged.{at}")) for at, each in enumerate(tensors.averages)),
        *((Role.INPUT, str(at)) for at in range(len(tensors.batch) + len(tensors.numbers))),
    ]


def traced_below_autograd(run: Callable[..., list[Tensor]], inputs: Sequence[GraphInput]) -> fx.GraphModule:
    """The graph of the ops that a function with backwards in it dispatches, called with fake tensors like these."""
    # A tracer records the ops of its own thread only, so the backward has to run in it.
    with torch.no_grad(), hooks_set_aside(), torch.autograd.set_multithreading_enabled(False):
        graph = traced_on_fakes(run, [tensor for *_, tensor in inputs], {**SPLIT_CONVOLUTIONS, **split_lists()})
    if graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mkldnn_rnn_layer_backward.default):
        raise TraceError(_RECURRENT)
    return graph


_RECURRENT = (
    "oneDNN's kernel, which computes LSTMs in float32 on a CPU, leaves its backward what that needs (a workspace) "
    "where autograd records it, and in a graph nobody does"
)


class _Run:
    """The function to trace: a step on fake tensors.

    Args:
        step: the step.
        tensors: the real tensors.
        indices: for each of these, the index of its fake tensor among the arguments of a call.
        recomputes: whether checkpointed parts are recomputed in the backward.

    Attributes:
        returned: the number of outputs of the captured graph.
        reached: which of the trained parameters have a gradient.
    """

    def __init__(self, step: Step, tensors: Tensors, indices: Sequence[int], *, recomputes: bool) -> None:
        self._step, self._tensors, self._indices, self._recomputes = step, tensors, indices, recomputes
        self.returned, self.reached = 0, list[bool]()

    def __call__(self, *values: Tensor) -> list[Tensor]:
        """The outputs of the program."""
        step = self._step
        clear_gradients(values)  # a fake tensor has a gradient if the real one has
        fakes = self._tensors.like([values[index] for index in self._indices])
        trained = list(compress(fakes.parameters, step.trained))
        results, gradients = self._loss_and_gradients(fakes, trained)
        self.returned, self.reached = len(results), [gradient is not None for gradient in gradients]
        set_gradients(trained, gradients, {storage_of(tensor) for tensor in (*values, *results)})
        if step.update is None:
            return [*results, *(parameter.grad for parameter in trained if parameter.grad is not None)]
        get_current_meta().pop("stack_trace", None)  # the update has no line of the user's
        self._update(step.update, fakes)
        return results

    def _loss_and_gradients(self, fakes: Tensors, trained: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """The outputs of the captured graph, detached, and the gradients of the trained parameters."""
        step = self._step
        gradients: list[Tensor | None] = [None] * len(trained)
        losses = []
        interpreter = Interpreter(step.captured.module, self._recomputes)
        with torch.autograd.set_detect_anomaly(True, check_nan=False):  # records the user's lines
            for part in split(fakes.batch, step.divided, step.parts):
                held = iter(fakes.held)
                with torch.enable_grad():
                    outputs = interpreter.run(*(next(held) if at is None else part[at] for at in step.takes))
                    if not all(isinstance(output, Tensor) for output in outputs):
                        raise TraceError("the number of a tensor goes to Python: return the tensor instead")
                    loss = outputs[0] / step.parts if step.parts > 1 else outputs[0]
                    scaled = loss * fakes.numbers[0] if step.scaled else loss
                losses.append(loss.detach())
                if not scaled.requires_grad:
                    raise TraceError("the loss of loss_fn depends on no parameter that requires gradients")
                keep_lines(scaled)
                gradients = list(map(_sum, gradients, torch.autograd.grad(scaled, trained, allow_unused=True)))
                if interpreter.recomputes_random:
                    raise RandomRecomputation
        return [summed(losses), *(output.detach() for output in outputs[1:])], gradients

    def _update(self, rule: Update, fakes: Tensors) -> None:
        if rule.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(fakes.parameters, rule.max_norm)
        state: dict[Tensor, dict[str, Tensor]] = {}
        for (at, name), value in zip(rule.state, fakes.state, strict=True):
            state.setdefault(fakes.parameters[at], {})[name] = value
        left = iter(fakes.parameters)
        by_group = [[next(left) for _ in range(size)] for size in rule.sizes]
        update(rule.optimizer, rule.groups, fakes.numbers[0], by_group, state)
        clear_gradients(fakes.parameters)
        pairs = [*zip(fakes.averages[::2], fakes.averages[1::2], strict=True)]
        follow_tensors(pairs[: rule.averaged], pairs[rule.averaged :], rule.decay)


def _sum(earlier: Tensor | None, later: Tensor | None) -> Tensor | None:
    if earlier is None or later is None:
        return later if earlier is None else earlier
    return earlier + later


def keep_lines(loss: Tensor) -> None:
    """Let the ops of a backward have the user's source lines of the forward ops that they belong to.

    Args:
        loss: computed in anomaly mode, in which autograd records the lines of forward ops.
    """
    pending, seen = [loss.grad_fn], set()
    while pending:
        node: Any = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
            if lines := node.metadata.get("traceback_"):
                node.register_prehook(lambda gradients, lines=lines: set_stack_trace(lines))


class RandomRecomputation(AutostreamError):  # noqa: N818 - control flow within this file, not an error
    """A checkpointed part has random ops, which would give other numbers when they are recomputed."""


class Interpreter(fx.Interpreter):
    """Runs a captured graph; its activation checkpoints are run as checkpoints, and so recomputed in the backward.

    Attributes:
        recomputes_random: whether random ops were recomputed.
    """

    def __init__(self, module: fx.GraphModule, recomputes: bool) -> None:
        super().__init__(module)
        self._recomputes, self.recomputes_random = recomputes, False

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a ``call_function`` node."""
        if target is not torch.ops.higher_order.tag_activation_checkpoint:
            return super().call_function(target, args, kwargs)
        body, *inputs = args
        if not self._recomputes or len(kwargs) > 1:
            return fx.Interpreter(body).run(*inputs)
        runs = 0

        def run(*values: Any) -> Any:
            nonlocal runs
            runs += 1
            before = _random_ops()
            try:  # a recomputation ends with an exception as soon as it has all tensors that are needed
                return fx.Interpreter(body).run(*values)
            finally:
                self.recomputes_random |= runs > 1 and _random_ops() != before

        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)


def _random_ops() -> int:
    """The number of random ops traced so far."""
    mode: Any = get_proxy_mode()
    return sum(is_random(node) for node in mode.tracer.graph.nodes)
