"""Whole training steps as modules: forward, loss, backward, clipping, optimizer and ``zero_grad``.

The state of such a module are the model's parameters and buffers and the optimizer's state. Its ``forward`` is the step
as users write it. Its ``traced`` computes the same and changes nothing but tensors::

    batch ─▶ loss_fn(model, …) ─▶ autograd.grad ─▶ clip ─▶ optimizers.update ─▶ weights, optimizer's state (in place)
                     └─▶ running statistics (in place), random numbers

So whatever schedules, runs, compares and reports modules does so with steps.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from operator import attrgetter
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx.traceback import set_stack_trace
from torch.optim import Optimizer

from autostream.errors import TargetError, TraceError
from autostream.frontend.guards import anomalies_sought, unusual
from autostream.frontend.tree import Constant, Structure, flatten, unflatten
from autostream.options import StepOptions
from autostream.storages import share_bytes, storage_of
from autostream.tracing.averages import check_average, differing_buffers, follow
from autostream.tracing.batches import Batch, detached, loss_in, parts_of, summed, tensors_of
from autostream.tracing.functions import check_loss
from autostream.tracing.lines import keep_lines
from autostream.tracing.optimizers import (
    Input,
    Numbers,
    clears_itself,
    groups_of,
    inputs,
    is_number,
    is_positive,
    names,
    obstacle,
    unfit,
    update,
    values,
)
from autostream.tracing.parameters import (
    Holders,
    OptimizerState,
    clear_gradients,
    have_hooks,
    parameters_of,
    set_aside,
    set_gradients,
    take_gradients,
)
from autostream.tracing.saved_tensors import hooks_are_set
from autostream.tracing.state import name_of

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Setting(Constant):
    """What a step depends on besides tensors: one of its arguments, and so part of its signature.

    Attributes:
        names: of the optimizer's parameters, by group.
        trained: which of the optimizer's parameters require gradients, one byte each.
        refusal: why a graph would not do the same, or ``""``.
        groups: the structure of the optimizer's hyperparameters, with an ``Input`` for those that are, if they are part
            of the graph.
        stateless: names of the parameters that require gradients and for which the optimizer has no state, if that is
            part of the graph.
    """

    names: tuple[tuple[str, ...], ...]
    trained: bytes
    refusal: str = ""
    groups: Structure | None = None
    stateless: frozenset[str] = frozenset()

    def unlike(self, other: Setting) -> Iterator[str]:
        """What differs from another, such as hyperparameters, by name."""
        if self.names != other.names:
            yield "the optimizer's parameters"
        if self.trained != other.trained:
            yield "what requires gradients"
        if self.stateless != other.stateless:
            yield "the optimizer's state"
        if self.groups and other.groups:
            found = zip(self.groups.children or (), other.groups.children or (), strict=False)
            yield from dict.fromkeys(name for mine, its in found for name in _unlike(mine, its))


def _unlike(group: Structure, other: Structure) -> Iterator[str]:
    """The hyperparameters that differ in structures of two groups."""
    values = dict(zip(cast(Batch, other.context), other.children or (), strict=True))
    mine = zip(cast(Batch, group.context), group.children or (), strict=True)
    return (name for name, value in mine if values.get(name) != value)


class Backward(nn.Module):
    """Forward, loss and backward.

    Args:
        model: the model.
        loss_fn: takes the model and the batch; returns the loss, or a tuple that begins with it.
        optimizer: of the parameters whose gradients are asked for.
        options: what else to do.

    Raises:
        TargetError: the optimizer has a parameter that neither the model nor the loss has.
    """

    def __init__(
        self, model: nn.Module, loss_fn: nn.Module, optimizer: Optimizer, options: StepOptions | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.options = options or StepOptions()
        self.average = self.options.average
        # Objects that stay: an attribute that becomes another looks like a model that was configured otherwise.
        self._holders = Holders(self, optimizer)
        self._setting: _Memory[Setting] = _Memory()

    @property
    def parallel(self) -> bool:
        """Whether gradients are averaged over processes by hooks in the model."""
        return self._holders.parallel

    def _get_name(self) -> str:
        return f"{name_of(self.model)}, {super()._get_name()}"  # type: ignore[no-untyped-call]

    def forward(self, batch: Batch, setting: Setting, numbers: Sequence[Tensor]) -> Any:
        """What ``loss_fn`` returns, detached, and the gradients of the optimizer's parameters, or ``None``.

        Args:
            batch: the batch.
            setting: what else the step depends on.
            numbers: what losses are multiplied by, if there is a scaler; where the optimizer is part of the step, the
                hyperparameters that are inputs, such as learning rates, in one tensor.

        Raises:
            TargetError: the loss is not a scalar that depends on a parameter, the batch has no equal parts, or the
                average is of another model.
        """
        known = parameters_of(self.optimizer)
        self._check_average()
        with set_aside(chain(self.parameters(), known)):
            results = []
            for loss, result in self._losses(batch, numbers):
                if not loss.requires_grad:
                    raise TargetError("the loss of loss_fn depends on no parameter that requires gradients")
                loss.backward()  # type: ignore[no-untyped-call]
                results.append(result)
            parameters = parameters_of(self.optimizer)  # a forward may have given it more
            gradients = [parameter.grad for parameter in parameters]
        clear_gradients(set(parameters).difference(known))
        return summed(results), gradients

    def traced(self, batch: Batch, setting: Setting, numbers: Sequence[Tensor]) -> Any:
        """The same for a tracer: it changes nothing but tensors.

        Raises:
            TraceError: a graph would not do the same.
        """
        result, groups = self._with_gradients(batch, setting, numbers)
        return result, [parameter.grad for parameter in chain.from_iterable(groups)]

    def overlapping(self) -> str:
        """Why a graph would not do the same, as tensors lie in memory now, or ``""``; settings do not tell of all."""
        return ""

    def stateless(self) -> frozenset[str]:
        """Names of the parameters that require gradients and have no state now, if the optimizer is part of the step.

        Nothing is looked up or moved for it: before the next step, others may change the state.
        """
        return frozenset()

    def arguments(self, batch: Batch) -> tuple[Batch, Setting, list[Tensor]]:
        """What to call the step with, to do it with this batch, as everything else is now.

        Raises:
            TargetError: the optimizer has a parameter that neither the model nor the loss has any more.
        """
        parameters = parameters_of(self.optimizer)
        self._look(parameters)
        hyperparameters = self._hyperparameters()
        seen = self._seen(parameters, hyperparameters)
        setting = self._setting(seen, lambda: self._looked_up(parameters))
        if any(map(_REQUIRES_GRADIENTS, tensors_of(batch))):
            reason = "a tensor of the batch requires gradients, and a graph would compute none"
            setting = replace(setting, refusal=reason)
        return batch, setting, self._numbers(parameters, setting, hyperparameters)

    def zero_gradients(self) -> None:
        """Call the optimizer's ``zero_grad``, if that may do more than to leave no gradients."""
        if clears_itself(self.optimizer):
            self.optimizer.zero_grad()

    def complete(self, outputs: Any) -> Any:
        """Do what is left of a step after :meth:`forward`, or after a run of its program; returns the result."""
        result, gradients = outputs
        parameters = parameters_of(self.optimizer)
        self._check_average()
        self._take(parameters, gradients)
        self._step(parameters)
        self._end(parameters)
        return result

    def search(self, evaluate: Callable[[], Any]) -> Any:
        """A step of an optimizer that asks for losses itself; returns the first result.

        Args:
            evaluate: does what :meth:`forward` does, or a run of its program.
        """
        results: list[Any] = []

        def closure() -> Tensor:
            self.zero_gradients()
            with torch.no_grad():
                result, gradients = evaluate()
            self._take(parameters_of(self.optimizer), gradients)
            self._clip(parameters_of(self.optimizer))
            results.append(result)
            return loss_in(result)

        self.optimizer.step(closure)  # type: ignore[arg-type]
        self._end(parameters_of(self.optimizer))
        return results[0]

    def _take(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Give the parameters their gradients, on top of what a ``zero_grad`` of the optimizer's own has left."""
        if not clears_itself(self.optimizer):
            clear_gradients(parameters)
        take_gradients(parameters, gradients)

    def _end(self, parameters: Sequence[Tensor]) -> None:
        """Do what comes after the optimizer's step."""
        self.zero_gradients()
        if not clears_itself(self.optimizer):
            clear_gradients(parameters)
        if self.average is not None:
            follow(self.average, self.model, self.options.decay)

    def _check_average(self) -> None:
        """See that the average can follow the model, before a weight is changed.

        Raises:
            TargetError: it cannot.
        """
        if self.average is not None:
            check_average(self.average, self.model)

    def _step(self, parameters: Sequence[Tensor]) -> None:
        """Clip, and let the optimizer step, as its scaler has it."""
        scaler = self.options.scaler
        if scaler is not None and self.options.max_norm is not None:
            scaler.unscale_(self.optimizer)
        self._clip(parameters)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()

    def _hyperparameters(self) -> list[Any]:
        """Those of the optimizer's that the step depends on, as they are now."""
        return []

    def _numbers(self, parameters: Sequence[Tensor], setting: Setting, hyperparameters: list[Any]) -> list[Tensor]:
        """What the scaler multiplies losses by now, if there is one."""
        scaler = self.options.scaler
        if scaler is None:
            return []
        device = next((parameter.device for parameter in parameters), None)
        return [scaler.scale(torch.ones((), device=device))]

    def _with_gradients(
        self, batch: Batch, setting: Setting, numbers: Sequence[Tensor]
    ) -> tuple[Any, list[list[Tensor]]]:
        """The result, and all of the optimizer's parameters by group, those trained with their gradients."""
        if setting.refusal:
            raise TraceError(setting.refusal)
        self._check_average()
        groups: list[list[Tensor]] = [[self.get_parameter(name) for name in names] for names in setting.names]
        trained = list(compress(chain.from_iterable(groups), setting.trained))
        gradients: list[Tensor | None] = [None] * len(trained)
        results = []
        with torch.autograd.set_detect_anomaly(True, check_nan=False):  # it keeps lines of the user's with the graph
            for loss, result in self._losses(batch, numbers):
                keep_lines(loss)
                found = torch.autograd.grad(loss, trained, allow_unused=True)
                gradients = list(map(_sum, gradients, found))
                results.append(result)
        result = summed(results)
        used = chain(self.parameters(), flatten((batch, result))[0])
        set_gradients(trained, gradients, {storage_of(tensor) for tensor in used})
        return result, groups

    def _losses(self, batch: Batch, numbers: Sequence[Tensor]) -> Iterator[tuple[Tensor, Any]]:
        """Of each part of a batch its share of the loss, scaled to be differentiated, and the result to return."""
        check_loss(self.loss_fn, len(batch))
        with torch.enable_grad():
            parts = parts_of(batch, self.options.microbatches)
        for part in parts:
            with torch.enable_grad():
                result = self.loss_fn(self.model, *part)
                loss = loss_in(result)
                if self.options.microbatches > 1:
                    if result is not loss:
                        raise TargetError("with microbatches, loss_fn has to return the loss alone")
                    loss = result = loss / self.options.microbatches
                if self.options.scaler is not None:
                    loss = loss * numbers[0]
            yield loss, detached(result)

    def _clip(self, parameters: Sequence[Tensor]) -> None:
        if self.options.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.options.max_norm)

    def _look(self, parameters: Sequence[Tensor]) -> None:
        """Find where the parameters are now.

        Raises:
            TargetError: the optimizer has a parameter that neither the model nor the loss has any more.
        """
        if not self._holders.hold(self.optimizer, parameters):
            self._holders.look(self, self.optimizer)

    def _seen(self, parameters: Sequence[Tensor], hyperparameters: list[Any]) -> list[object]:
        """What a setting is made of: to compare it takes a tenth of the time."""
        names = self._holders.names
        return [names, *parameters, *map(_REQUIRES_GRADIENTS, parameters), self._refusal(parameters)]

    def _looked_up(self, parameters: Sequence[Tensor]) -> Setting:
        """The setting."""
        trained = bytes(map(_REQUIRES_GRADIENTS, parameters))
        return Setting(self._holders.names, trained, self._refusal(parameters))

    def _refusal(self, parameters: Sequence[Tensor]) -> str:
        if have_hooks(parameters):
            return "a parameter has hooks on its gradient, which a graph would not call"
        if not any(map(_REQUIRES_GRADIENTS, parameters)):
            return "the optimizer has no parameters that require gradients"
        if hooks_are_set():
            return "hooks of saved tensors are set, and a graph saves none"
        return self._holders.hooked() or anomalies_sought()


class TrainingStep(Backward):
    """A whole step: what :class:`Backward` does, then clipping, the optimizer and ``zero_grad``.

    Its submodule ``state`` has the optimizer's state for its buffers, as of the last :meth:`arguments`.
    """

    def __init__(
        self, model: nn.Module, loss_fn: nn.Module, optimizer: Optimizer, options: StepOptions | None = None
    ) -> None:
        super().__init__(model, loss_fn, optimizer, options)
        self.state = OptimizerState()
        self._as_tensor = Numbers()
        self._known = _Hyperparameters()
        self.arguments(())

    def forward(self, batch: Batch, setting: Setting, numbers: Sequence[Tensor]) -> Any:
        """What ``loss_fn`` returns, detached."""
        return super().complete(super().forward(batch, setting, numbers))

    def traced(self, batch: Batch, setting: Setting, numbers: Sequence[Tensor]) -> Any:
        """The same for a tracer: it changes nothing but tensors."""
        result, by_group = self._with_gradients(batch, setting, numbers)
        parameters = list(chain.from_iterable(by_group))
        set_stack_trace([])  # what comes now is no line of the user's
        self._clip(parameters)
        assert setting.groups, "a setting of such a step has them unless it is refused"
        update(self.optimizer, unflatten(setting.groups, ()), numbers[0], by_group, self.state.of(parameters))
        clear_gradients(parameters)
        if self.average is not None:
            if names := differing_buffers(self.average, self.model):
                raise TraceError(f"the average has no buffer {names[0]} as the model has it, and a graph makes none")
            follow(self.average, self.model, self.options.decay)
        return result

    def complete(self, outputs: Any) -> Any:
        """Leave no gradient, whatever was there before the step; nothing else is left to do."""
        if not clears_itself(self.optimizer):
            clear_gradients(parameters_of(self.optimizer))
        return outputs

    def overlapping(self) -> str:
        """Why a graph would not update the same, as parameters and state lie in memory now, or ``""``."""
        state = chain.from_iterable(map(dict.values, self.optimizer.state.values()))
        written = (*parameters_of(self.optimizer), *(value for value in state if isinstance(value, Tensor)))
        ordinary = (tensor for tensor in written if not unusual(tensor))  # others are no part of a graph
        return _OVERLAPPING if share_bytes(ordinary) else ""

    def stateless(self) -> frozenset[str]:
        """Names of the parameters that require gradients and for which the optimizer has no state now."""
        parameters = parameters_of(self.optimizer)
        self._look(parameters)
        state, named = self.optimizer.state, zip(chain.from_iterable(self._holders.names), parameters, strict=True)
        return frozenset(name for name, own in named if own.requires_grad and not state.get(own))

    def _hyperparameters(self) -> list[Any]:
        return values(self.optimizer)

    def _numbers(self, parameters: Sequence[Tensor], setting: Setting, hyperparameters: list[Any]) -> list[Tensor]:
        """The hyperparameters that are inputs; none of a step that is in no graph, where they may be anything."""
        if setting.refusal:
            return []
        return [self._as_tensor([hyperparameters[at] for at in self._known.inputs], parameters[0].device)]

    def _seen(self, parameters: Sequence[Tensor], hyperparameters: list[Any]) -> list[object]:
        state, found = self.optimizer.state, hyperparameters.copy()
        if len(found) == len(self._known.values):  # of what varies, one thing matters: whether it is above zero
            for at, own in self._known.inputs.items():
                if is_positive(found[at]) or (is_number(found[at]) and not own.positive):
                    found[at] = own.positive
        return [
            *super()._seen(parameters, hyperparameters),
            *state,
            *state.values(),
            *chain.from_iterable(map(dict.values, state.values())),
            *found,
        ]

    def _looked_up(self, parameters: Sequence[Tensor]) -> Setting:
        self._known.varying |= self._changed()
        self._known.values, self._known.inputs = values(self.optimizer), inputs(self.optimizer, self._known.varying)
        setting = super()._looked_up(parameters)
        setting = replace(setting, stateless=self.stateless())
        refusal = setting.refusal or self.overlapping() or unfit(self.optimizer, self._known.inputs)
        refusal = refusal or self.state.renew(self.optimizer, parameters)
        try:
            _, groups = flatten(groups_of(self.optimizer, self._known.inputs))
        except TraceError as error:
            return replace(setting, refusal=f"a hyperparameter of {type(self.optimizer).__name__}: {error}")
        return replace(setting, refusal=refusal, groups=groups)

    def _changed(self) -> set[str]:
        """Numbers that are not what they were: as inputs, they need no other graph when they change again."""
        found = zip(names(self.optimizer), self._known.values, values(self.optimizer), strict=False)
        return {name for name, then, now in found if is_number(then) and is_number(now) and then != now}

    def _refusal(self, parameters: Sequence[Tensor]) -> str:
        return super()._refusal(parameters) or obstacle(self.optimizer)


@dataclass(slots=True)
class _Hyperparameters:
    """What is known of an optimizer's: an object that stays, as those that a setting is found by.

    Attributes:
        values: as they were when they were last looked up.
        inputs: those of them that are inputs, by place.
        varying: names of those that were seen to change.
    """

    values: list[Any] = field(default_factory=list)
    inputs: dict[int, Input] = field(default_factory=dict)
    varying: set[str] = field(default_factory=set)


_OVERLAPPING = (
    "parameters, or tensors of the optimizer's state, share memory, which the optimizer writes for one parameter after "
    "the other, and a graph for all at once"
)


class _Memory(Generic[Found]):
    """What was found by looking at objects, for as long as they are the same ones."""

    def __init__(self) -> None:
        self._known: tuple[list[object], Found] | None = None

    def __call__(self, objects: list[object], find: Callable[[], Found]) -> Found:
        """What is found, by ``find`` if these are others than the last time."""
        known = self._known
        if known is None or len(known[0]) != len(objects) or not all(map(operator.is_, known[0], objects)):
            known = self._known = objects, find()
        return known[1]


_REQUIRES_GRADIENTS = attrgetter("requires_grad")


def _sum(earlier: Tensor | None, later: Tensor | None) -> Tensor | None:
    if earlier is None or later is None:
        return later if earlier is None else earlier
    return earlier + later
