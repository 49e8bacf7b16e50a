"""``train_step``: a whole training step, forward to ``zero_grad``, as one scheduled graph.

call ──▶ like the last one? ──▶ StepReplay
              │ no
              ├─▶ has the optimizer state to make? ──▶ the step as it is, which makes it; then a graph for such batches
              └─▶ Graphs of the whole step ──▶ Graphs of forward and backward ──▶ the step as it is
                         refused ──┘                   refused ──┘
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autostream.dispatch.dispatcher import Dispatcher
from autostream.dispatch.step_graphs import Full, Graphs, Refused
from autostream.dispatch.step_replay import StepReplay, replay_of
from autostream.dispatch.steps import Gradients, Step
from autostream.errors import TargetError
from autostream.frontend.losses import Loss
from autostream.frontend.model_proxy import stand_in
from autostream.frontend.modules import name_of
from autostream.frontend.optimizers import clears_itself, obstacle, takes_closure
from autostream.frontend.parameters import leave_no_gradients, parameters_of, stateless
from autostream.fusion.inductor import check_level, check_settings
from autostream.ir import Decision
from autostream.options import StepOptions, disabled
from autostream.pipeline import versions
from autostream.reporting.report import Report
from autostream.runtime.input_buffers import SlotTable
from autostream.runtime.restore import Restore
from autostream.utils.storages import storage_of

log = logging.getLogger(__name__)


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., Any],
    **options: Any,
) -> TrainStep:
    """Make a function that does a training step: forward, loss, backward, optimizer and ``zero_grad``.

    It computes what this does, as one graph whose independent ops run side by side; a weight is updated as soon as its
    gradient is there::

        optimizer.zero_grad()
        loss = loss_fn(model, *batch)    # or, of PyTorch's own losses: loss_fn(model(*inputs), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)    # if asked for: those of the optimizer
        optimizer.step()
        optimizer.zero_grad()

    Gradients are temporary: ``parameter.grad`` is ``None`` after a step, and what it was before does not matter (but
    for optimizers with a ``zero_grad`` of their own, which may leave some). All else is as ever: weights, statistics
    and the optimizer's state are written where they are, ``state_dict`` and ``load_state_dict`` work between any two
    steps, and so do learning-rate schedulers. A changed rate takes effect in the next step, and so does any other
    number of the optimizer's, such as a momentum: when it first changes, another graph is made, of which it is an
    input. One that becomes zero, or a switch, makes another graph each time.

    The Python of the model and of ``loss_fn`` is captured and guarded by TorchDynamo, as by ``torch.compile``: a
    module, a tensor or a number that it reads, wherever that is, is part of the graph, and another one makes another
    graph. Give what changes in every step with the batch, as a tensor. What it writes to Python's objects is written
    after the graph.

    A step in which the optimizer may have to make state, such as the first, runs as it is. Optimizers other than
    SGD, Adam, AdamW, RMSprop and Adagrad run as they are, after a graph of forward and backward; those that take a
    closure, such as LBFGS, run that graph as often as they like. Where the whole cannot be
    captured, a graph of forward and backward is tried, then the model alone, then the step runs as it is.
    :func:`autostream.explain` tells what was done and why.

    Args:
        model: the model, in training mode or not; frozen parameters stay as they are.
        optimizer: one of ``torch.optim`` of its parameters, all or some, and of those of modules that ``loss_fn`` has.
        loss_fn: a loss of PyTorch's, such as ``nn.CrossEntropyLoss()`` or ``F.mse_loss``, which compares the model's
            outputs with the last of the batch; or a function, ``loss_fn(model, *batch)``, that returns the loss, a
            scalar, or a tuple that begins with it, such as ``(loss, outputs)``.
        **options: ``microbatches``, ``max_norm``, ``average``, ``decay`` and ``scaler``, which
            :class:`~autostream.options.StepOptions` describes, and those of :class:`~autostream.options.Options`. More
            signatures than ``max_signatures`` run as they are.

    Returns:
        ``step(*batch)``, which takes the batch by position, and returns the loss, or whatever ``loss_fn`` does, without
        gradients.

    Raises:
        OptionError: an option is unknown or has a value that is not allowed.
        TargetError: the model is no module, the optimizer none of ``torch.optim``, or it has parameters of neither
            the model nor the loss. Steps raise it where ``loss_fn`` does not take the batch, the loss is no scalar, a
            batch has no equal parts, or the model's parameters are not those of the average any more.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = train_step(model, optimizer, nn.MSELoss())
        >>> x, y = torch.ones(8, 4), torch.ones(8, 1)
        >>> losses = [step(x, y).item() for _ in range(20)]
        >>> losses[-1] < 1e-3
        True
    """
    if isinstance(model, type) or not isinstance(model, nn.Module):
        raise TargetError(f"train_step takes a torch.nn.Module, not {model!r}")
    if not isinstance(optimizer, Optimizer):
        raise TargetError(f"train_step takes an optimizer of torch.optim, not {optimizer!r}")
    if isinstance(loss_fn, type) or not callable(loss_fn):
        hint = ": make one" if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module) else ""
        raise TargetError(f"train_step takes a function loss_fn(model, *batch), not {loss_fn!r}{hint}")
    chosen = StepOptions.parse(options)
    if chosen.average is not None and not _is_copy(chosen.average, model):
        raise TargetError("average has to be a copy of the model with tensors of its own: use copy.deepcopy(model)")
    check_settings(chosen.inductor_options)
    check_level(chosen.kernels)
    if chosen.scaler is not None and not isinstance(chosen.scaler, torch.amp.GradScaler):
        raise TargetError(f"scaler has to be a torch.amp.GradScaler, not {chosen.scaler!r}")
    if chosen.scaler is not None and takes_closure(optimizer):
        raise TargetError(
            f"{type(optimizer).__name__} takes a closure, which no GradScaler allows: leave the scaler out"
        )
    if chosen.scaler is not None and not chosen.scaler.is_enabled():
        chosen = replace(chosen, scaler=None)
    return TrainStep(model, optimizer, loss_fn, chosen)


def _apart(optimizer: Optimizer, options: StepOptions) -> str:
    """Why the optimizer's step cannot be part of a graph, or ``""``."""
    scaled = options.scaler is not None
    return "GradScaler asks the host whether gradients are finite" if scaled else obstacle(optimizer)


_APART = "the optimizer runs as it is"
_EAGER = "loss and optimizer run as they are"


def _is_copy(average: object, model: nn.Module) -> bool:
    if not isinstance(average, nn.Module):
        return False
    mine, its = ([*module.parameters(), *module.buffers()] for module in (average, model))
    alike = [(tensor.shape, tensor.dtype, tensor.device) for tensor in mine] == [
        (tensor.shape, tensor.dtype, tensor.device) for tensor in its
    ]
    return alike and set(map(storage_of, mine)).isdisjoint(map(storage_of, its))


class TrainStep:
    """A training step and its schedules, one for each kind of batch that it was called with.

    Args:
        model: the model.
        optimizer: of its parameters.
        loss_fn: takes the model and a batch.
        options: what else to do, and how to schedule.

    Attributes:
        slots: where batches may come in turn: captured graphs read them there.
        disabled: whether every step runs as it is: ``AUTOSTREAM_DISABLE`` was set when this was made.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, loss_fn: Callable[..., Any], options: StepOptions
    ) -> None:
        self._parts = model, optimizer, loss_fn, options
        self._step = Step(Loss(loss_fn, model), optimizer, options)
        self.slots, self.disabled = SlotTable(), disabled()
        reason = _apart(optimizer, options)
        self._graphs = [
            Graphs(self._step, self.slots, whole=whole) for whole in (True, False) if not (whole and reason)
        ]
        self._apart = {reason: Decision("", _APART, reason)} if reason else {}
        self._eager: dict[str, Decision] = {}
        self._searches = takes_closure(optimizer)
        self._stateless: frozenset[int] = frozenset()
        """Parameters for which the last step that might have made state made none: all of plain SGD, or unused ones."""
        self._replay: StepReplay | None = None
        self._has_run = False

    def __call__(self, *batch: Any) -> Any:
        """Do a step; returns what ``loss_fn`` returns, detached.

        Raises:
            TargetError: the loss is not a scalar that depends on a parameter, the batch has no equal parts, or the
                optimizer or the average has parameters that are not the model's any more.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self(*batch)
        with torch.set_grad_enabled(False):  # as no_grad, in half the time
            result = self._done(batch)
        self._step.optimizer._opt_called = True  # type: ignore[attr-defined]  # learning-rate schedulers would warn
        return result

    def _done(self, batch: tuple[Any, ...]) -> Any:
        step, replay = self._step, self._replay
        if replay is not None and replay.whole and (tensors := replay.fits(batch)) is not None:
            result, _ = replay(tensors, batch)
            leave_no_gradients(replay.parameters)
            return result
        if self._searches:
            return step.search(lambda: self._differentiated(batch))  # type: ignore[arg-type, return-value]
        step.zero_gradients()
        if self._graphs[0].whole and not self.disabled and not self._stateful():
            result = step.complete(*step.differentiate(batch))
            self._stateless = stateless(step.optimizer)
            return result
        result, gradients = self._differentiated(batch)
        if gradients is not None:
            return step.complete(result, gradients)
        if not clears_itself(step.optimizer):
            leave_no_gradients(parameters_of(step.optimizer))
        return result

    def _stateful(self) -> bool:
        """Whether the optimizer has all the state that it makes in a parameter's first step."""
        return stateless(self._step.optimizer) <= self._stateless

    def _differentiated(self, batch: tuple[Any, ...]) -> tuple[Any, Gradients | None]:
        """The result of a step, and the gradients, unless they are used already."""
        replay = self._replay
        if replay is not None and not replay.whole and (tensors := replay.fits(batch)) is not None:
            return replay(tensors, batch)
        if replay is not None:
            replay.end()
            self._replay = None
        if self.disabled:
            return self._step.differentiate(batch)
        refused: list[str] = []
        for graphs in self._graphs:
            try:
                done = graphs(batch)
            except Full as reason:
                self._note(self._eager, [*refused, str(reason)], "plain")
                return self._step.differentiate(batch)
            except Refused as reason:
                refused.append(str(reason))
            else:
                self._note(self._apart, refused, _APART)
                self._replay = replay_of(graphs, done)
                return done.result, done.gradients
        try:
            result, instead = self._as_it_is(batch)
        except Exception:  # then a graph would have failed too, and the next batch may be another matter
            for graphs in self._graphs:
                graphs.forget_refusals()
            raise
        self._note(self._eager, refused, instead)
        return result

    def _as_it_is(self, batch: tuple[Any, ...]) -> tuple[tuple[Any, Gradients], str]:
        """The result and gradients of the step as it is, and what to say of it."""
        step, instead = self._as_written
        if step is self._step or self._has_run:
            return step.differentiate(batch), instead
        with undone_if(_TWICE, [*step.modules.buffers()]) as refused:
            result = step.differentiate(batch)
        if refused:
            self.__dict__["_as_written"] = self._step, "plain"
            return self._step.differentiate(batch), "plain"
        self._has_run = True
        return result, instead

    def _note(self, known: dict[str, Decision], reasons: Sequence[str], instead: str) -> None:
        """Remember, and say once, why steps could not be done in some ways."""
        for reason in dict.fromkeys(reasons):
            if reason not in known and len(known) < _MOST_REASONS:
                what = "it runs as it is" if instead == "plain" else instead
                log.warning("a training step of %s: %s: %s", name_of(self._step.model), what, reason)
                known[reason] = Decision("", instead, reason)

    @cached_property
    def _model(self) -> Dispatcher:
        """Runs the model's calls in steps that are done as they are."""
        return Dispatcher(self._step.model, self._step.options)

    @cached_property
    def _as_written(self) -> tuple[Step, str]:
        """The step as it is, over a model whose calls are scheduled where that is of use, and what to say of it."""
        model, optimizer, loss_fn, options = self._parts
        asked = options.policy != "auto" or any(own.is_cuda for own in model.parameters())
        parallel = any(isinstance(own, nn.parallel.DistributedDataParallel) for own in model.modules())
        scheduled = stand_in(model, self._model) if asked and not parallel else None
        if scheduled is None:
            return self._step, "plain"
        return Step(Loss(loss_fn, scheduled), optimizer, options), _EAGER

    @property
    def reports(self) -> tuple[Report, ...]:
        """What is known of each signature, the most recently used first, then of steps with less in a graph.

        Those have among their refusals why they are not done in the ways before.
        """
        found = list[Report]()
        for graphs in self._graphs:
            apart = () if graphs.whole else tuple(self._apart.values())
            found += (replace(report, refusals=(*apart, *report.refusals)) for report in graphs.reports)
        scheduled = tuple(own for own in self._eager.values() if own.choice == _EAGER)
        found += (
            replace(report, refusals=(*scheduled, *report.refusals)) for report in self._model.reports if scheduled
        )
        if refusals := tuple(own for own in self._eager.values() if own not in scheduled or not self._model.reports):
            name = f"{name_of(self._step.model)}, TrainingStep"
            found.append(Report(name, "some steps", "plain", refusals=refusals, versions=versions()))
        return tuple(found)

    def __repr__(self) -> str:
        """What it is made of."""
        return f"{type(self).__name__}({self._step.model!r}, {self._step.optimizer!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the model, the optimizer, the loss and the options; schedules are made anew."""
        return TrainStep, self._parts


@contextmanager
def undone_if(message: str, tensors: Sequence[Tensor]) -> Iterator[list[str]]:
    """Catch an error that says so, and put back the tensors and the generators of random numbers; yields the error."""
    restore, state = Restore(tensors), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    caught: list[str] = []
    try:
        yield caught
    except RuntimeError as error:
        if message not in str(error):
            raise
        caught.append(str(error))
        restore()
        torch.set_rng_state(state)
        if devices:
            torch.cuda.set_rng_state_all(devices)


_MOST_REASONS = 100

_TWICE = "does not currently support double backward"
"""What AOTAutograd says of a loss that goes through a gradient: then the model runs as it is."""
