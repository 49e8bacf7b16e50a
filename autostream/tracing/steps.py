"""Whole training steps as modules: forward, loss, backward, clipping, optimizer and ``zero_grad``.

The state of such a module are the model's parameters and buffers and the optimizer's state. Its ``forward`` is the step
as users write it. Its ``traced`` computes the same and changes nothing but tensors::

    batch ─▶ loss_fn(model, …) ─▶ autograd.grad ─▶ clip ─▶ optimizers.update ─▶ weights, optimizer's state (in place)
                     └─▶ running statistics (in place), random numbers

So whatever schedules, runs, compares and reports modules does so with steps.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, compress
from operator import attrgetter
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx.traceback import set_stack_trace
from torch.nn.modules import module as nn_module
from torch.optim import Optimizer

from autostream.errors import TargetError, TraceError
from autostream.options import StepOptions
from autostream.storages import storage_of
from autostream.tracing.functions import check_loss
from autostream.tracing.optimizers import (
    Input,
    Numbers,
    groups_of,
    inputs,
    is_number,
    is_positive,
    names,
    obstacle,
    update,
    values,
)
from autostream.tracing.state import Entries, name_of
from autostream.tracing.tree import Constant, Structure, flatten, map_tensors, unflatten

Batch = tuple[Any, ...]
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
        self._places = _Places(self, optimizer)
        self._setting: _Memory[Setting] = _Memory()

    @property
    def parallel(self) -> bool:
        """Whether gradients are averaged over processes by hooks in the model."""
        return self._places.parallel

    def _get_name(self) -> str:
        return f"{name_of(self.model)}, {super()._get_name()}"  # type: ignore[no-untyped-call]

    def forward(self, batch: Batch, setting: Setting, numbers: Sequence[Tensor]) -> Any:
        """What ``loss_fn`` returns, detached, and the gradients: ``None`` for what the loss does not depend on.

        Args:
            batch: the batch.
            setting: what else the step depends on.
            numbers: what losses are multiplied by, if there is a scaler; where the optimizer is part of the step, the
                hyperparameters that are inputs, such as learning rates, in one tensor.

        Raises:
            TargetError: the loss is not a scalar that depends on a parameter, or the batch has no equal parts.
        """
        parameters = _parameters(self.optimizer)
        with _set_aside(chain(self.parameters(), parameters)):
            results = []
            for loss, result in self._losses(batch, numbers):
                if not loss.requires_grad:
                    raise TargetError("the loss of loss_fn depends on no parameter that requires gradients")
                loss.backward()  # type: ignore[no-untyped-call]
                results.append(result)
            gradients = [parameter.grad for parameter in compress(parameters, setting.trained)]
        _clear_gradients(parameters)
        return _summed(results), gradients

    def traced(self, batch: Batch, setting: Setting, numbers: Sequence[Tensor]) -> Any:
        """The same for a tracer: it changes nothing but tensors.

        Raises:
            TraceError: a graph would not do the same.
        """
        result, groups = self._with_gradients(batch, setting, numbers)
        return result, [parameter.grad for parameter in compress(chain.from_iterable(groups), setting.trained)]

    def arguments(self, batch: Batch) -> tuple[Batch, Setting, list[Tensor]]:
        """What to call the step with, to do it with this batch, as everything else is now.

        Raises:
            TargetError: the optimizer has a parameter that neither the model nor the loss has any more.
        """
        parameters = _parameters(self.optimizer)
        if not self._places.hold(self.optimizer, parameters):
            self._places.look(self, self.optimizer)
        setting = self._setting(self._seen(parameters), lambda: self._looked_up(parameters))
        if any(map(_REQUIRES_GRADIENTS, _tensors_of(batch))):
            reason = "a tensor of the batch requires gradients, and a graph would compute none"
            setting = replace(setting, refusal=reason)
        return batch, setting, self._numbers(parameters)

    def complete(self, outputs: Any) -> Any:
        """Do what is left of a step after :meth:`forward`, or after a run of its program; returns the result."""
        result, gradients = outputs
        parameters = _parameters(self.optimizer)
        _take_gradients(parameters, gradients)
        self._step(parameters)
        _clear_gradients(parameters)
        self._follow()
        return result

    def search(self, evaluate: Callable[[], Any]) -> Any:
        """A step of an optimizer that asks for losses itself; returns the first result.

        Args:
            evaluate: does what :meth:`forward` does, or a run of its program.
        """
        parameters, results = _parameters(self.optimizer), []

        def closure() -> Tensor:
            with torch.no_grad():
                result, gradients = evaluate()
            _take_gradients(parameters, gradients)
            self._clip(parameters)
            results.append(result)
            return _loss_of(result)

        self.optimizer.step(closure)  # type: ignore[arg-type]
        _clear_gradients(parameters)
        self._follow()
        return results[0]

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

    def _numbers(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What the scaler multiplies losses by now, if there is one."""
        scaler = self.options.scaler
        return [] if scaler is None else [scaler.scale(torch.ones((), device=parameters[0].device))]

    def _with_gradients(
        self, batch: Batch, setting: Setting, numbers: Sequence[Tensor]
    ) -> tuple[Any, list[list[Tensor]]]:
        """The result, and all of the optimizer's parameters by group, those trained with their gradients."""
        if setting.refusal:
            raise TraceError(setting.refusal)
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
        summed = _summed(results)
        used = chain(self.parameters(), flatten((batch, summed))[0])
        _set_gradients(trained, gradients, {storage_of(tensor) for tensor in used})
        return summed, groups

    def _losses(self, batch: Batch, numbers: Sequence[Tensor]) -> Iterator[tuple[Tensor, Any]]:
        """Of each part of a batch its share of the loss, scaled to be differentiated, and the result to return."""
        check_loss(self.loss_fn, len(batch))
        for part in _parts(batch, self.options.microbatches):
            with torch.enable_grad():
                result = self.loss_fn(self.model, *part)
                loss = _loss_of(result)
                if self.options.microbatches > 1:
                    if result is not loss:
                        raise TargetError("with microbatches, loss_fn has to return the loss alone")
                    loss = result = loss / self.options.microbatches
                if self.options.scaler is not None:
                    loss = loss * numbers[0]
            yield loss, _detached(result)

    def _clip(self, parameters: Sequence[Tensor]) -> None:
        if self.options.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.options.max_norm)

    @torch.no_grad()
    def _follow(self) -> None:
        """Let the average follow the model."""
        if self.average is None:
            return
        for average, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
            average.lerp_(parameter, 1 - self.options.decay)
        for copy, buffer in zip(self.average.buffers(), self.model.buffers(), strict=True):
            copy.copy_(buffer)

    def _seen(self, parameters: Sequence[Tensor]) -> list[object]:
        """What a setting is made of: to compare it takes a tenth of the time."""
        names = self._places.names
        return [names, *parameters, *map(_REQUIRES_GRADIENTS, parameters), self._refusal(parameters)]

    def _looked_up(self, parameters: Sequence[Tensor]) -> Setting:
        """The setting."""
        trained = bytes(map(_REQUIRES_GRADIENTS, parameters))
        return Setting(self._places.names, trained, self._refusal(parameters))

    def _refusal(self, parameters: Sequence[Tensor]) -> str:
        if any(map(_HOOKS, parameters)) or any(map(_LATER_HOOKS, parameters)):
            return "a parameter has hooks on its gradient, which a graph would not call"
        return self._places.hooked()


class TrainingStep(Backward):
    """A whole step: what :class:`Backward` does, then clipping, the optimizer and ``zero_grad``.

    Its submodule ``state`` has the optimizer's state for its buffers, as of the last :meth:`arguments`.
    """

    def __init__(
        self, model: nn.Module, loss_fn: nn.Module, optimizer: Optimizer, options: StepOptions | None = None
    ) -> None:
        super().__init__(model, loss_fn, optimizer, options)
        self.state = _State()
        self._as_tensor = Numbers()
        self._values: list[Any] = []
        self._varying: set[str] = set()
        """Hyperparameters that were seen to change."""
        self._inputs: dict[int, Input] = {}
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
        _clear_gradients(parameters)
        self._follow()
        return result

    def complete(self, outputs: Any) -> Any:
        """Nothing is left to do."""
        return outputs

    def _numbers(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The hyperparameters that are inputs."""
        found = values(self.optimizer)
        return [self._as_tensor([found[at] for at in self._inputs], parameters[0].device)]

    def _seen(self, parameters: Sequence[Tensor]) -> list[object]:
        state, found = self.optimizer.state, values(self.optimizer)
        if len(found) == len(self._values):  # of what varies, the one thing that matters is whether it is above zero
            for at, own in self._inputs.items():
                if is_positive(found[at]) or (is_number(found[at]) and not own.positive):
                    found[at] = own.positive
        return [
            *super()._seen(parameters),
            *state,
            *state.values(),
            *chain.from_iterable(map(dict.values, state.values())),
            *found,
        ]

    def _looked_up(self, parameters: Sequence[Tensor]) -> Setting:
        self._varying |= self._changed()
        self._values, self._inputs = values(self.optimizer), inputs(self.optimizer, self._varying)
        setting = super()._looked_up(parameters)
        setting = replace(setting, stateless=frozenset(self._stateless(setting, parameters)))
        refusal = setting.refusal or self.state.renew(self.optimizer, parameters)
        try:
            _, groups = flatten(groups_of(self.optimizer, self._inputs))
        except TraceError as error:
            return replace(setting, refusal=f"a hyperparameter of {type(self.optimizer).__name__}: {error}")
        return replace(setting, refusal=refusal, groups=groups)

    def _changed(self) -> set[str]:
        """Numbers that are not what they were: as inputs, they need no other graph when they change again."""
        found = zip(names(self.optimizer), self._values, values(self.optimizer), strict=False)
        return {name for name, then, now in found if is_number(then) and is_number(now) and then != now}

    def _stateless(self, setting: Setting, parameters: Sequence[Tensor]) -> Iterator[str]:
        trained = compress(zip(chain.from_iterable(setting.names), parameters, strict=True), setting.trained)
        return (name for name, parameter in trained if not self.optimizer.state.get(parameter))

    def _refusal(self, parameters: Sequence[Tensor]) -> str:
        return super()._refusal(parameters) or obstacle(self.optimizer)


class _State(nn.Module):
    """An optimizer's state as buffers: ``exp_avg_3`` is ``exp_avg`` of its fourth parameter."""

    def renew(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> str:
        """Look the state up; returns why it cannot be part of a graph, or ``""``.

        Counters that the optimizer keeps on the host go to the device, where a graph needs them.
        """
        found: dict[str, Tensor] = {}
        for at, parameter in enumerate(parameters):
            values = optimizer.state.get(parameter, {})
            for name, value in values.items():
                if isinstance(value, Tensor):
                    if value.device != parameter.device:
                        value = values[name] = value.to(parameter.device)
                    found[f"{name}_{at}"] = value
                elif value is not None:
                    return f"the optimizer's state has a {type(value).__name__} ({name}), and a graph takes tensors"
        self._buffers.clear()
        self._buffers.update(found)
        return ""

    def of(self, parameters: Sequence[Tensor]) -> dict[Tensor, dict[str, Tensor]]:
        """The buffers by parameter and name."""
        state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        for key, value in self._buffers.items():
            name, _, at = key.rpartition("_")
            assert value is not None
            state[parameters[int(at)]][name] = value
        return state


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


class _Places:
    """Where the modules of a step hold the parameters of its optimizer.

    Args:
        step: the step.
        optimizer: its optimizer.

    Attributes:
        names: of the parameters in the step, by group.

    Raises:
        TargetError: they do not hold one of them.
    """

    def __init__(self, step: nn.Module, optimizer: Optimizer) -> None:
        self.look(step, optimizer)

    def look(self, step: nn.Module, optimizer: Optimizer) -> None:
        """Find them where they are now."""
        names = {id(parameter): name for name, parameter in step.named_parameters()}
        parameters = _parameters(optimizer)
        if strangers := [parameter for parameter in parameters if id(parameter) not in names]:
            shapes = ", ".join("x".join(map(str, stranger.shape)) or "scalar" for stranger in strangers[:3])
            raise TargetError(
                f"{len(strangers)} of the optimizer's {len(parameters)} parameters (of shape {shapes}) are not the "
                "model's: make the optimizer of model.parameters()"
            )
        self.names = tuple(tuple(names[id(each)] for each in group["params"]) for group in optimizer.param_groups)
        self._sizes = list(map(len, self.names))
        paths = [name.rpartition(".") for name in chain.from_iterable(self.names)]
        holders = [step.get_submodule(path)._parameters for path, _, _ in paths]
        # TorchScript modules have something else there, which never changes.
        self._dicts = [holder if isinstance(holder, dict) else dict(holder.items()) for holder in holders]
        self._keys = [key for _, _, key in paths]
        modules = list(step.modules())
        # Names lead to other parameters as soon as a submodule takes the place of another.
        children = [module._modules for module in modules if isinstance(module._modules, dict)]
        self._modules = Entries(
            (names for names in children for _ in names),
            chain.from_iterable(children),
            chain.from_iterable(map(dict.values, children)),
        )
        self._hooks = [hooks for module in modules for hooks in (module._backward_hooks, module._backward_pre_hooks)]
        self.parallel = any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules)

    def hold(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the optimizer's parameters, in the groups and the places where they were."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        return (
            sizes == self._sizes
            and all(map(operator.is_, map(dict.get, self._dicts, self._keys), parameters))
            and self._modules.unchanged()
        )

    def hooked(self) -> str:
        """Why the modules do more in a backward than a graph of it would, or ``""``."""
        if self.parallel:
            return "DistributedDataParallel averages gradients by hooks, which a graph would not call"
        if any(self._hooks) or nn_module._global_backward_hooks or nn_module._global_backward_pre_hooks:
            return "a submodule has backward hooks, which a graph would not call"
        return ""


_REQUIRES_GRADIENTS = attrgetter("requires_grad")
_HOOKS = attrgetter("_backward_hooks")
_LATER_HOOKS = attrgetter("_post_accumulate_grad_hooks")


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def _set_aside(parameters: Iterable[Tensor]) -> Iterator[None]:
    """No parameter has a gradient inside at first; afterwards each has what it had before."""
    before = {parameter: parameter.grad for parameter in parameters}
    _clear_gradients(before)
    try:
        yield
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient


def _take_gradients(parameters: Iterable[Tensor], gradients: Sequence[Tensor | None]) -> None:
    trained = (parameter for parameter in parameters if parameter.requires_grad)
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient


def _clear_gradients(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _set_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], taken: set[int]) -> None:
    """Give parameters their gradients, each in memory of its own that lies as the parameter's, as autograd does.

    What comes after writes to them: two may be one tensor, or a number that is seen as many.
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise TraceError(f"the gradient of a parameter has the layout {gradient.layout}")
        if gradient is not None and (storage_of(gradient) in taken or _strides(gradient) != _strides(parameter)):
            gradient = torch.empty_like(parameter).copy_(gradient)
        if gradient is not None:
            taken.add(storage_of(gradient))
        parameter.grad = gradient


def keep_lines(loss: Tensor) -> None:
    """Let what a backward computes have the user's lines of what was computed forward."""
    pending, seen = [loss.grad_fn], set()
    while pending:
        node: Any = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
            if lines := node.metadata.get("traceback_"):
                node.register_prehook(lambda gradients, lines=lines: set_stack_trace(lines))


def _strides(tensor: Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _sum(earlier: Tensor | None, later: Tensor | None) -> Tensor | None:
    if earlier is None or later is None:
        return later if earlier is None else earlier
    return earlier + later


def _summed(results: Sequence[Any]) -> Any:
    """The result of a step from those of its microbatches: their losses, or what a single one returned."""
    return results[0] if len(results) == 1 else sum(results[1:], results[0])


def _loss_of(result: Any) -> Tensor:
    loss = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(loss, Tensor):
        kind = type(loss).__name__
        raise TargetError(
            f"loss_fn returned a {kind}: let it return the loss, a scalar tensor, or a tuple that begins with it"
        )
    if loss.numel() != 1:
        shape = "x".join(map(str, loss.shape))
        raise TargetError(f"loss_fn returned a loss of shape {shape}: let it return a scalar, such as loss.mean()")
    return loss


def _tensors_of(batch: Batch) -> list[Tensor]:
    """The tensors of a batch; none of one that cannot be opened, whose step runs as it is."""
    try:
        return flatten(batch)[0]
    except TraceError:
        return []


def _parts(batch: Batch, count: int) -> list[Batch]:
    """A batch in equal parts along the first dimension of its tensors; what has not as many rows is part of all.

    Raises:
        TargetError: there are no equal parts, or the batch has an object that cannot be opened.

    Example:
        >>> _parts((torch.arange(4), torch.ones(2), 0.5), 2)
        [(tensor([0, 1]), tensor([1., 1.]), 0.5), (tensor([2, 3]), tensor([1., 1.]), 0.5)]
    """
    if count == 1:
        return [batch]
    try:
        tensors, structure = flatten(batch)
    except TraceError as error:
        raise TargetError(f"a batch has no {count} equal parts: {error}") from error
    rows = next((len(tensor) for tensor in tensors if tensor.dim()), 0)
    if rows % count:
        raise TargetError(f"a batch of {rows} has no {count} equal parts: choose another number of microbatches")
    split = [tensor.chunk(count) if tensor.dim() and len(tensor) == rows else [tensor] * count for tensor in tensors]
    return [unflatten(structure, [parts[at] for parts in split]) for at in range(count)]


def _detached(result: Any) -> Any:
    try:
        return map_tensors(Tensor.detach, result)
    except TraceError:  # it contains itself, and stays as it is
        return result
