"""``train_step``: a whole training step, forward to ``zero_grad``, as one scheduled graph; ``step``: any other one.

    call ──▶ like a recent one? ──▶ replay
              │ no
              ├─▶ does the optimizer create state in this step? ──▶ eager step; the next one is captured
              └─▶ graphs of the whole step ──▶ graphs of forward and backward ──▶ eager step
                         refused ──┘                    refused ──┘

``train_step`` writes out the two steps that it captures (``frontend/training_steps.py``); a function that ``step``
decorates is captured whole, or runs as it is written (``dispatch/step_functions.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autostream.dispatch.captured_step import TracedStep, traced_step
from autostream.dispatch.dispatcher import Dispatcher
from autostream.dispatch.requirements import check_requirements
from autostream.dispatch.step_calls import Refusal
from autostream.dispatch.step_functions import StepFunction
from autostream.dispatch.step_graphs import Done, StepGraphs
from autostream.dispatch.steps import Step, graphs_of
from autostream.errors import TargetError, TraceError
from autostream.frontend.averages import differing_buffers
from autostream.frontend.data_parallel import DataParallel, data_parallel_of, replicas, share
from autostream.frontend.dynamo import graph_break
from autostream.frontend.losses import Loss
from autostream.frontend.model_proxy import proxy_of
from autostream.frontend.modules import name_of
from autostream.frontend.optimizers import TRACED, note_step, obstacle, takes_closure
from autostream.frontend.parameters import parameters_of, stateless
from autostream.frontend.tensor_parallel import is_distributed
from autostream.frontend.training_steps import Gradients
from autostream.frontend.tree import map_tensors
from autostream.ir import Decision, DeviceProfile
from autostream.options import Options, StepOptions, disabled
from autostream.pipeline import versions
from autostream.reporting.report import Report
from autostream.runtime.input_buffers import BufferTable
from autostream.tuning.agreement import agree
from autostream.utils.locks import lock_of
from autostream.utils.logs import Log
from autostream.utils.storages import storage_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = Log(__name__)


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., Any],
    **options: Any,
) -> TrainStep:
    """Make a function that runs a training step: forward, loss, backward, optimizer and ``zero_grad``.

    It computes the same as the following code, as one graph whose independent ops run concurrently. A weight is updated
    as soon as its gradient is computed::

        optimizer.zero_grad()
        loss = loss_fn(model, *batch)    # or, of PyTorch's own losses: loss_fn(model(*inputs), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)    # with max_norm: the optimizer's parameters
        optimizer.step()
        optimizer.zero_grad()

    Gradients are temporary: ``parameter.grad`` is ``None`` after a step, and its value before the step is ignored
    (except by optimizers that override ``zero_grad``). Everything else works as in eager training: weights, statistics
    and the optimizer's state are updated in place, and ``state_dict``, ``load_state_dict`` and learning-rate schedulers
    can be used between any two steps. A changed learning rate takes effect in the next step, and so does any other
    number of the optimizer, such as a momentum: its first change recompiles the step, with the number as an input. A
    number that becomes zero, or a changed switch, recompiles it each time.

    The Python code of the model and of ``loss_fn`` is captured and guarded by TorchDynamo, as by ``torch.compile``. The
    modules, tensors and numbers that it reads are constants of the graph: the step is recompiled if one is replaced.
    Pass what changes in every step with the batch, as a tensor. Side effects on Python objects happen after the graph.

    A step in which the optimizer may create state, such as the first, runs eagerly. Optimizers other than SGD, Adam,
    AdamW, RMSprop and Adagrad run eagerly after a graph of forward and backward; those that take a closure, such as
    LBFGS, run that graph as often as they call the closure. If the whole step cannot be captured, autostream tries
    forward and backward, then the model alone; otherwise the step runs eagerly. :func:`autostream.explain` tells what
    was done and why.

    Args:
        model: the model, in training or evaluation mode. Frozen parameters are not changed.
        optimizer: a ``torch.optim`` optimizer of parameters of the model, and of modules that ``loss_fn`` refers to.
        loss_fn: a loss of PyTorch, such as ``nn.CrossEntropyLoss()`` or ``F.mse_loss``, which compares the model's
            outputs with the last element of the batch; or a function ``loss_fn(model, *batch)`` that returns a scalar
            loss, or a tuple that begins with it, such as ``(loss, outputs)``.
        **options: ``microbatches``, ``max_norm``, ``average``, ``decay``, ``scaler`` and ``data_parallel``, see
            :class:`~autostream.options.StepOptions`, and those of :class:`~autostream.options.Options`. Signatures
            beyond ``max_signatures`` run eagerly.

    Returns:
        ``step(*batch)``, which takes the batch as positional arguments and returns what ``loss_fn`` returns, detached.

    Raises:
        OptionError: an option is unknown or has a value that is not allowed.
        TargetError: the model is not a module, the optimizer is not of ``torch.optim``, or it has parameters that
            belong to neither the model nor the loss. A step raises it if ``loss_fn`` does not take the batch, the loss
            is not a scalar, the batch cannot be divided into equal parts, or the model and the average have different
            parameters.

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
    check_requirements(chosen)
    if chosen.scaler is not None and not isinstance(chosen.scaler, torch.amp.GradScaler):
        raise TargetError(f"scaler has to be a torch.amp.GradScaler, not {chosen.scaler!r}")
    if chosen.data_parallel and takes_closure(optimizer):
        raise TargetError(_CLOSURES.format(type(optimizer).__name__))
    if chosen.scaler is not None and takes_closure(optimizer):
        raise TargetError(
            f"{type(optimizer).__name__} takes a closure, which no GradScaler allows: leave the scaler out"
        )
    if chosen.scaler is not None and not chosen.scaler.is_enabled():
        chosen = replace(chosen, scaler=None)
    return TrainStep(model, optimizer, loss_fn, chosen)


def step(
    _function: None = None,
    /,
    *,
    optimizers: Sequence[Optimizer] = (),
    data_parallel: ProcessGroup | Literal[False] | None = False,
    **options: Any,
) -> Callable[[Callable[..., Any]], StepFunction]:
    """Make one scheduled graph of a training step that is written out: any number of losses and optimizers.

    Decorates a function that calls ``backward()`` or ``torch.autograd.grad``, ``optimizer.step()`` and
    ``zero_grad()`` as often as it likes, and may clip gradients, follow averages, and use random numbers. The graph
    computes the same; what is independent, such as the forward of one loss and the backward of another, runs
    concurrently, and each weight is updated as soon as its gradient is computed.

    The function's Python is captured and guarded by TorchDynamo, as by ``torch.compile``. Tensors that change in every
    step are arguments; modules, other tensors and numbers that it reads are constants of the graph, which is compiled
    again if one of them changes. Weights, targets and optimizer states are updated in place, so ``state_dict``,
    ``load_state_dict`` and learning-rate schedulers can be used between steps. Results are detached. Gradients are left
    as in the eager step, which costs copies: a function that clears them where it ends is faster. One whose gradients
    add up from one call to the next runs eagerly.

    A step in which an optimizer may create state, such as its first one, runs eagerly, and so does one that cannot be
    captured; :func:`autostream.explain` gives the reason and the line.

    Args:
        optimizers: those that the function steps: SGD, Adam, AdamW, RMSprop or Adagrad of ``torch.optim``.
        data_parallel: a process group of ``torch.distributed`` over which the gradients of each backward are averaged,
            as by ``DistributedDataParallel``; ``False`` averages nothing. All its processes call ``step`` and then the
            function in the same order, and begin with the parameters of the first.
        **options: those of :class:`~autostream.options.Options`.

    Raises:
        OptionError: an option is unknown or has a value that is not allowed.
        TargetError: there is no optimizer, one of another class, or one twice; or what is decorated is no function, a
            coroutine or a generator function, or a step already.

    Example:
        >>> def trained(weight):
        ...     sgd = torch.optim.SGD([weight], lr=0.125)
        ...
        ...     @step(optimizers=[sgd])
        ...     def update(x):
        ...         sgd.zero_grad()
        ...         loss = (weight * x).sum()
        ...         loss.backward()
        ...         sgd.step()
        ...         return loss
        ...
        ...     return update
        >>> update = trained(nn.Parameter(torch.ones(4)))
        >>> [update(torch.ones(4)).item() for _ in range(3)]
        [4.0, 3.5, 3.0]
    """
    if _function is not None:
        raise TargetError("step decorates with parentheses: write @autostream.step(optimizers=[optimizer])")
    if not isinstance(optimizers, list | tuple) or not optimizers:
        raise TargetError("step takes a list of optimizers: @autostream.step(optimizers=[optimizer])")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TargetError(f"step takes optimizers of torch.optim, not {optimizer!r}")
        if data_parallel and takes_closure(optimizer):
            raise TargetError(_CLOSURES.format(type(optimizer).__name__))
        if type(optimizer) not in TRACED:
            names = ", ".join(kind.__name__ for kind in TRACED)
            raise TargetError(
                f"step takes {names}, not {type(optimizer).__name__}, whose update cannot be part of a graph: use "
                "train_step, after whose graph it runs eagerly, or optimize the models that the function calls"
            )
    if len(set(map(id, optimizers))) < len(optimizers):
        raise TargetError("step takes each optimizer once, and one is in optimizers=[...] twice")
    chosen = Options.parse(options)
    check_requirements(chosen)

    parallel = _beginning_alike(data_parallel, [*chain.from_iterable(map(parameters_of, optimizers))])

    def decorate(function: Callable[..., Any]) -> StepFunction:
        if not callable(function):
            raise TargetError(f"step decorates a function, not {function!r}")
        if isinstance(function, StepFunction):
            raise TargetError(f"{function!r} is a step already: decorate the function once")
        if iscoroutinefunction(function) or isgeneratorfunction(function) or isasyncgenfunction(function):
            kind = "generator" if isgeneratorfunction(function) or isasyncgenfunction(function) else "coroutine"
            raise TargetError(f"step decorates no {kind} function, as {function.__qualname__} is: return the results")
        return StepFunction(function, optimizers, chosen, parallel)

    return decorate


def _beginning_alike(group: ProcessGroup | Literal[False] | None, tensors: Sequence[Tensor]) -> DataParallel | None:
    """Data parallelism over a process group, if there is one, all of whose processes get the tensors of the first.

    Raises:
        GroupError: another process has other tensors or trains others, or has not come here in time.
        TargetError: it is no process group of this process, or one of the tensors is a DTensor.
    """
    parallel = data_parallel_of(group)
    if parallel and group:
        if any(map(is_distributed, tensors)):
            raise TargetError(
                "data_parallel averages no gradients of DTensors: leave it out; fully_shard averages them itself, and "
                "else average those of their local tensors after the backward, over the processes with the same shards"
            )
        agree(parallel.group, list(map(_in_words, tensors)))
        share(group, tensors)
    return parallel


_CLOSURES = (
    "{} takes a closure, which it may call more often in one process than in another: train in one process, without "
    "data_parallel, or with another optimizer"
)


def _in_words(tensor: Tensor) -> str:
    trained = "trained" if tensor.requires_grad else "not trained"
    return f"a tensor of {tuple(tensor.shape)} and {tensor.dtype}, {trained}, with strides {tensor.stride()}"


_EAGER_OPTIMIZER = "the optimizer runs as it is"
_EAGER_LOSS = "loss and optimizer run as they are"


def _is_copy(average: object, model: nn.Module) -> bool:
    if not isinstance(average, nn.Module):
        return False
    tensors, others = ([*module.parameters(), *module.buffers()] for module in (average, model))
    alike = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors] == [
        (tensor.shape, tensor.dtype, tensor.device) for tensor in others
    ]
    return alike and set(map(storage_of, tensors)).isdisjoint(map(storage_of, others))


class TrainStep:
    """A training step, with one schedule for each signature of batches.

    Args:
        model: the model.
        optimizer: of its parameters.
        loss_fn: takes the model and a batch.
        options: what the step does, and how to schedule it.

    Attributes:
        input_buffers: buffers that captured graphs read in place, filled by :func:`autostream.prefetch`.
        disabled: whether every step runs eagerly: ``AUTOSTREAM_DISABLE`` was set when this was made.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, loss_fn: Callable[..., Any], options: StepOptions
    ) -> None:
        self._parts = model, optimizer, loss_fn, options
        modules = [module for module in (model, options.average) if module is not None]
        state = chain.from_iterable((*module.parameters(), *module.buffers()) for module in modules)
        parallel = _beginning_alike(options.data_parallel, [*dict.fromkeys([*state, *parameters_of(optimizer)])])
        self._step = step = Step(Loss(loss_fn, model), optimizer, options, parallel)
        self.input_buffers, self.disabled = BufferTable(), disabled()
        reason = obstacle(optimizer)
        self._whole = None if reason else graphs_of(step, self.input_buffers, whole=True)
        self._backward = graphs_of(step, self.input_buffers, whole=False)
        self._eager_optimizer = {reason: Decision("", _EAGER_OPTIMIZER, reason)} if reason else {}
        self._eager: dict[str, Decision] = {}
        self._takes_closure = takes_closure(optimizer)
        self._stateless: frozenset[int] = frozenset()
        """Parameters that have no state after an eager step: those of plain SGD, and unused ones."""
        self._has_run = False
        self._lock = lock_of(self)
        """Steps write the same tensors, so those of several threads run one after the other."""
        self._latest: StepGraphs | None = None
        """What ran the latest step. If it was forward and backward, their fast path is tried before the whole step."""

    @graph_break
    def __call__(self, *batch: Any) -> Any:
        """Run a step; returns what ``loss_fn`` returns, detached. It is a graph break of ``torch.compile``.

        Raises:
            TargetError: the loss is not a scalar that depends on a parameter, the batch cannot be divided into equal
                parts, or the optimizer or the average has other parameters than the model.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self(*batch)
        with self._lock, torch.set_grad_enabled(False):  # takes half the time of no_grad
            result = self._run(batch)
        note_step(self._step.optimizer)
        return result

    def _run(self, batch: tuple[Any, ...]) -> Any:
        step, whole = self._step, self._whole
        if whole is not None and (done := whole.replayed(batch, {})) is not None:
            return done.result
        if self._takes_closure:
            return step.minimize(lambda: self._differentiated(batch, []))
        step.zero_gradients()
        if self._latest is self._backward and (done := self._backward.replayed(batch, {})) is not None:
            return step.complete(*done.result)
        if whole is None or self.disabled:
            return step.complete(*self._differentiated(batch, []))
        if not stateless(step.optimizer) <= self._stateless:
            return self._first(batch)
        step.check(batch)
        differing = self._average_obstacle()
        tried = whole.refused(differing) if differing else whole(batch, {})
        if isinstance(tried, Refusal):
            return self._first(batch) if tried.first else step.complete(*self._differentiated(batch, [tried]))
        self._latest = whole
        return tried.result

    def _first(self, batch: tuple[Any, ...]) -> Any:
        """The result of an eager step, in which the optimizer makes its state."""
        result = self._step.complete(*self._step.differentiate(batch))
        self._stateless = stateless(self._step.optimizer)
        return result

    def _average_obstacle(self) -> Refusal | None:
        average, model = self._step.average, self._step.model
        if average is None or not (names := differing_buffers(average, model)):
            return None
        return Refusal(f"the average has no buffer {names[0]} as the model has it, and a graph makes none")

    def _differentiated(self, batch: tuple[Any, ...], refused: list[Refusal]) -> tuple[Any, Gradients]:
        """The result of a step, and the gradients.

        Args:
            batch: of the step.
            refused: why no graph computes the whole step.
        """
        step = self._step
        if self.disabled:
            return step.differentiate(batch)
        step.check(batch)
        if not any(refusal.full for refusal in refused):
            tried = self._backward(batch, {})
            if isinstance(tried, Done):
                self._report(self._eager_optimizer, [refusal.reason for refusal in refused], _EAGER_OPTIMIZER)
                self._latest = self._backward
                result, gradients = tried.result
                return result, gradients
            refused = [*refused, tried]
        reasons = [refusal.reason for refusal in refused]
        if any(refusal.full for refusal in refused):
            self._report(self._eager, reasons, "plain")
            return step.differentiate(batch)
        try:
            result, mode = self._run_eagerly(batch)
        except Exception:  # capturing has failed for the same reason, which may not hold for the next batch
            for graphs in filter(None, (self._whole, self._backward)):
                graphs.forget_refusals()
            raise
        self._report(self._eager, reasons, mode)
        return result

    def _run_eagerly(self, batch: tuple[Any, ...]) -> tuple[tuple[Any, Gradients], str]:
        """The result and gradients of an eager step, and the mode for reports.

        The first one shows whether a gradient of the model's outputs is differentiated, which graphs of the model do
        not allow: its calls are scheduled in later steps, if not.
        """
        step, mode = self._eager_step
        if step is self._step or self._has_run:
            return step.differentiate(batch), mode
        model, optimizer, loss_fn, options = self._parts
        modes = set[bool]()

        def run(*args: Any, **kwargs: Any) -> Any:
            outputs = model(*args, **kwargs)
            map_tensors(lambda tensor: _note_backwards(tensor, modes), outputs)
            return outputs

        watched = proxy_of(model, run)
        assert watched is not None, "there is another proxy"
        result = Step(Loss(loss_fn, watched), optimizer, options, self._step.data_parallel).differentiate(batch)
        self._has_run = True
        if modes != {False}:
            self.__dict__["_eager_step"] = self._step, "plain"
        return result, self._eager_step[1]

    def _report(self, decisions: dict[str, Decision], reasons: Sequence[str], mode: str) -> None:
        """Add reasons to the decisions for reports, and log those that are new."""
        for reason in dict.fromkeys(reasons):
            if reason not in decisions and len(decisions) < _MOST_REASONS:
                what = "it runs as it is" if mode == "plain" else mode
                log.warning("a training step of %s: %s: %s", name_of(self._step.model), what, reason)
                decisions[reason] = Decision("", mode, reason)

    @cached_property
    def _model(self) -> Dispatcher:
        """Schedules the model's calls in eager steps."""
        return Dispatcher(self._step.model, self._step.options)

    @cached_property
    def _eager_step(self) -> tuple[Step, str]:
        """The eager step, and the mode for reports. The model's calls in it are scheduled where that helps."""
        model, optimizer, loss_fn, options = self._parts
        helps = options.policy != "auto" or any(parameter.is_cuda for parameter in model.parameters())
        scheduled = proxy_of(model, self._model) if helps and not replicas(model) else None
        if scheduled is None:
            return self._step, "plain"
        return Step(Loss(loss_fn, scheduled), optimizer, options, self._step.data_parallel), _EAGER_LOSS

    def eager(self, *batch: Any) -> Any:
        """Run a step as it is written, with nothing scheduled."""
        with torch.set_grad_enabled(False):
            self._step.zero_gradients()
            return self._step.complete(*self._step.differentiate(batch))

    @property
    def has_shards(self) -> bool:
        """Whether it trains DTensors, of which each process has a part."""
        return any(map(is_distributed, parameters_of(self._step.optimizer)))

    def over(self, group: ProcessGroup | Literal[False]) -> TrainStep:
        """The same step, whose gradients are averaged over this group, or over none."""
        model, optimizer, loss_fn, options = self._parts
        return TrainStep(model, optimizer, loss_fn, replace(options, data_parallel=group))

    def traced(self, args: tuple[Any, ...], options: Options, profile: DeviceProfile | None = None) -> TracedStep:
        """The step, traced for dry runs, after one eager step, which makes the optimizer's state.

        Raises:
            OptionError: see :func:`autostream.pipeline.plan`.
            TargetError: the step itself fails.
            TraceError: no graph computes the whole step.
        """
        if self._whole is None:
            raise TraceError(f"{self._backward.step.name} is no one graph: {next(iter(self._eager_optimizer))}")
        with torch.set_grad_enabled(False):
            return traced_step(self._whole.step, self.eager, args, options, profile)

    @property
    def reports(self) -> tuple[Report, ...]:
        """A report for each signature, the most recently used first: whole steps, then parts of steps, then eager ones.

        The refusals of the latter two say why no more of the step is in a graph.
        """
        reports = list[Report]()
        if self._whole is not None:
            reports += self._whole.reports
        refusals = tuple(self._eager_optimizer.values())
        reports += (replace(report, refusals=(*refusals, *report.refusals)) for report in self._backward.reports)
        scheduled = tuple(decision for decision in self._eager.values() if decision.choice == _EAGER_LOSS)
        reports += (
            replace(report, refusals=(*scheduled, *report.refusals)) for report in self._model.reports if scheduled
        )
        eager = self._eager.values()
        if refusals := tuple(decision for decision in eager if decision not in scheduled or not self._model.reports):
            name = f"{name_of(self._step.model)}, TrainingStep"
            reports.append(Report(name, "some steps", "plain", refusals=refusals, versions=versions()))
        return tuple(reports)

    def __repr__(self) -> str:
        """The class with the model and the optimizer."""
        return f"{type(self).__name__}({self._step.model!r}, {self._step.optimizer!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the model, the optimizer, the loss and the options; the copy compiles its own schedules."""
        return TrainStep, self._parts


def _note_backwards(output: Tensor, modes: set[bool]) -> None:
    """Add whether a backward through this tensor makes a graph, which differentiates the gradient, to the modes."""
    if output.requires_grad:
        output.register_hook(lambda _: modes.add(torch.is_grad_enabled()))  # type: ignore[no-untyped-call]


_MOST_REASONS = 100
