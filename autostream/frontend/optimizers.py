"""Optimizer updates in a graph: ``torch.optim``'s own code, run on the tensors of a trace.

    optimizer ──▶ shallow copy: the same groups, other tensors ──▶ step() ──▶ in-place ops on these tensors

Numbers that an eager step reads on the host, such as the count of steps, stay tensors: ``capturable=True``, and what
PyTorch does when it compiles. Learning rates are inputs of the graph, and so are hyperparameters that were seen to
change; all others are constants.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode

from autostream.errors import TraceError, a_type
from autostream.frontend.dynamo import compile_session
from autostream.frontend.tree import Constant, Structure, flatten

TRACED: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW, RMSprop, Adagrad)
"""Optimizers whose step can be part of a graph; not their subclasses, whose code may differ."""

Group = Mapping[str, Any]
"""The hyperparameters of a parameter group, by name."""


def obstacle(optimizer: Optimizer) -> str:
    """Why an optimizer's step cannot be part of a graph, or ``""``.

    Example:
        >>> obstacle(torch.optim.Adamax([torch.ones(1)]))
        'Adamax is none of SGD, Adam, AdamW, RMSprop, Adagrad'
    """
    name = type(optimizer).__name__
    if type(optimizer) not in TRACED:
        return f"{name} is none of {', '.join(kind.__name__ for kind in TRACED)}"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has hooks on its step, which a graph would not call"
    if not all(map(_is_autostreams, (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()))):
        return "there are hooks on the steps of all optimizers, which a graph would not call"
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return f"{name} has a step of its own"
    if not is_pytorchs(type(optimizer).step):
        return f"{name}.step is not PyTorch's own"
    if has_own_zero_grad(optimizer):
        return f"{name} has a zero_grad of its own"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return f"{name} is differentiable, which nothing that is written in place is"
        if group.get("capturable") and not _on_gpus(group["params"]):
            return f"{name} is capturable, which parameters on a CPU are not"
    return ""


def has_own_zero_grad(optimizer: Optimizer) -> bool:
    """Whether ``zero_grad`` is overridden: it may do more than to clear gradients.

    Example:
        >>> optimizer = torch.optim.SGD([torch.ones(1)])
        >>> before = has_own_zero_grad(optimizer)
        >>> optimizer.zero_grad = lambda: print("cleared")
        >>> before, has_own_zero_grad(optimizer)
        (False, True)
    """
    return (
        "zero_grad" in vars(optimizer)
        or type(optimizer).zero_grad is not Optimizer.zero_grad
        or not is_pytorchs(Optimizer.zero_grad)
    )


@lru_cache(maxsize=64)
def is_pytorchs(method: Callable[..., Any]) -> bool:
    """Whether a method and the function that it wraps are PyTorch's: user code may have replaced it in the class."""
    inner = getattr(method, "__wrapped__", None)
    module = str(getattr(method, "__globals__", {}).get("__name__"))
    return module.partition(".")[0] == "torch" and (inner is None or is_pytorchs(inner))


def _on_gpus(parameters: Sequence[Tensor]) -> bool:
    return all(parameter.device.type == "cuda" for parameter in parameters)


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step needs a closure that computes the loss, as LBFGS does.

    Example:
        >>> weights = [torch.ones(1)]
        >>> takes_closure(torch.optim.LBFGS(weights)), takes_closure(torch.optim.SGD(weights))
        (True, False)
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def note_step(optimizer: Optimizer) -> None:
    """Tell learning-rate schedulers, which would warn, that the optimizer has stepped.

    It is written once: what is written to an optimizer makes the guards on it slow.
    """
    if not getattr(optimizer, "_opt_called", False):
        optimizer._opt_called = True  # type: ignore[attr-defined]


def _is_autostreams(hook: object) -> bool:
    """Whether a hook is autostream's: it records that an optimizer has stepped outside of graphs."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Input(Constant):
    """Placeholder of a hyperparameter that is an input of the graph, and may change with each step.

    Attributes:
        positive: whether it is above zero in every step: update rules branch on that.
    """

    positive: bool


def values(optimizer: Optimizer) -> list[Any]:
    """The hyperparameters of all groups as a flat list, without the entries that schedulers add.

    Example:
        >>> values(SGD([torch.ones(2)], lr=0.1, momentum=0.9))[:2], values(Adam([torch.ones(2)], lr=0.1))[:3]
        ([0.1, 0.9], [0.1, 0.9, 0.999])
    """
    names = tuple(optimizer.defaults)
    flat: list[Any] = []
    for group in optimizer.param_groups:
        for name in names:
            value = group.get(name)
            if isinstance(value, (tuple, list)):
                flat += value
            else:
                flat.append(value)
    return flat


def names(optimizer: Optimizer) -> list[str]:
    """The names of the :func:`values`.

    Example:
        >>> names(Adam([torch.ones(2)]))[:4]
        ['lr', 'betas[0]', 'betas[1]', 'eps']
    """
    return [each for group in optimizer.param_groups for name in optimizer.defaults for each in _names(name, group)]


def _names(name: str, group: Group) -> list[str]:
    value = group.get(name)
    return [f"{name}[{at}]" for at in range(len(value))] if isinstance(value, (tuple, list)) else [name]


def inputs(optimizer: Optimizer, varying: Set[str] = frozenset()) -> dict[int, Input]:
    """Which of the :func:`values` are inputs of the graph: learning rates, tensors, and those that vary above zero.

    Update rules skip the ops of a hyperparameter that is zero, so one that becomes zero needs another graph. A learning
    rate is different: rules do not branch on it, and schedules start and end at zero.

    Args:
        optimizer: the optimizer.
        varying: the :func:`names` of those that were seen to change.

    Example:
        >>> optimizer = SGD([{"params": [torch.ones(2)], "momentum": 0.9}], lr=0.1)
        >>> inputs(optimizer, {"lr", "momentum", "dampening"})
        {0: Input(positive=False), 1: Input(positive=True)}
    """
    inputs = {}
    for at, (name, value) in enumerate(zip(names(optimizer), values(optimizer), strict=True)):
        varies = name != "lr" and name in varying and is_positive(value)
        if varies or name == "lr" or isinstance(value, Tensor):
            inputs[at] = Input(positive=varies)
    return inputs


def unfit(optimizer: Optimizer, inputs: Mapping[int, Input]) -> str:
    """Why one of the :func:`values` cannot be an input of a graph, or ``""``.

    Example:
        >>> from fractions import Fraction
        >>> optimizer = SGD([torch.ones(2)], lr=Fraction(1, 10))
        >>> unfit(optimizer, inputs(optimizer))
        'lr of SGD is a Fraction, and a graph takes numbers and tensors'
    """
    for at, (name, value) in enumerate(zip(names(optimizer), values(optimizer), strict=True)):
        if at in inputs and not isinstance(value, Tensor):
            try:
                _scalar(value, torch.device("cpu"))
            except TypeError:
                kind = a_type(value)
                return f"{name} of {type(optimizer).__name__} is {kind}, and a graph takes numbers and tensors"
    return ""


def groups_of(optimizer: Optimizer, inputs: Mapping[int, Input]) -> tuple[Group, ...]:
    """The hyperparameters of each group, with an :class:`Input` in place of each that is one.

    Example:
        >>> optimizer = SGD([{"params": [torch.ones(2)], "momentum": 0.9}], lr=0.1)
        >>> (group,) = groups_of(optimizer, inputs(optimizer))
        >>> group["lr"], group["momentum"]
        (Input(positive=False), 0.9)
    """
    flat = (inputs.get(at, value) for at, value in enumerate(values(optimizer)))

    def replaced(value: Any) -> Any:
        return type(value)([next(flat) for _ in value]) if isinstance(value, (tuple, list)) else next(flat)

    return tuple({name: replaced(group.get(name)) for name in optimizer.defaults} for group in optimizer.param_groups)


def is_number(value: object) -> bool:
    """Whether a hyperparameter is a Python number; a ``bool`` is not.

    Example:
        >>> is_number(0.9), is_number(True)
        (True, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_positive(value: Any) -> bool:
    """Whether a hyperparameter is a Python number above zero.

    Example:
        >>> is_positive(0.9), is_positive(0.0), is_positive(torch.ones(()))
        (True, False, False)
    """
    return is_number(value) and value > 0


class Hyperparameters:
    """The hyperparameters of an optimizer from step to step: which are inputs of a graph, and whether others changed.

    Args:
        optimizer: the optimizer.

    Attributes:
        inputs: those that are inputs, by position in :func:`values`.

    Example:
        >>> optimizer = SGD([torch.ones(2)], lr=0.1, momentum=0.9)
        >>> hyperparameters = Hyperparameters(optimizer)
        >>> _, refusal = hyperparameters.refresh()
        >>> hyperparameters.numbers(torch.device("cpu"))
        tensor([0.1000], dtype=torch.float64)
        >>> optimizer.param_groups[0]["lr"] = 0.2
        >>> hyperparameters.same(), hyperparameters.numbers(torch.device("cpu"))
        (True, tensor([0.2000], dtype=torch.float64))
        >>> optimizer.param_groups[0]["momentum"] = 0.8
        >>> hyperparameters.same()
        False
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.inputs: dict[int, Input] = {}
        self._varying: set[str] = set()
        self._values = values(optimizer)
        self._entries: list[Any] = []
        self._immutable = False
        self._as_tensor, self._memory = Numbers(), torch.empty(0)
        self._written: list[Any] | None = None
        """The entries whose numbers are in the tensor."""

    def refresh(self) -> tuple[Structure | None, str]:
        """Read the hyperparameters. Numbers that changed since the last call become inputs, from now on.

        Returns:
            Their structure, with an :class:`Input` for each that is one; or ``None``, and why no graph can use them.
        """
        optimizer, now = self._optimizer, values(self._optimizer)
        pairs = zip(names(optimizer), self._values, now, strict=False)
        self._varying |= {name for name, old, new in pairs if is_number(old) and is_number(new) and old != new}
        self.inputs = inputs(optimizer, self._varying)
        self._note(now, _entries(optimizer))
        if refusal := unfit(optimizer, self.inputs):
            return None, refusal
        try:
            return flatten(groups_of(optimizer, self.inputs))[1], ""
        except TraceError as error:
            return None, f"a hyperparameter of {type(optimizer).__name__}: {error}"

    def same(self) -> bool:
        """Whether all but the values of inputs are what they were at the last call of :meth:`refresh`."""
        entries = _entries(self._optimizer)
        if self._immutable and len(entries) == len(self._entries) and all(map(is_, entries, self._entries)):
            return True
        now = values(self._optimizer)
        if len(now) != len(self._values):
            return False
        for at, (value, before) in enumerate(zip(now, self._values, strict=True)):
            item = self.inputs.get(at)
            if item is None:
                if value is not before and (type(value) is not type(before) or value != before):
                    return False
            elif isinstance(value, Tensor) or isinstance(before, Tensor):
                if type(value) is not type(before):
                    return False
            elif not (is_positive(value) if item.positive else is_number(value)):
                return False
        self._note(now, entries)
        return True

    def _note(self, now: list[Any], entries: list[Any]) -> None:
        self._values, self._entries = now, entries
        # A list or a tensor may change in place.
        self._immutable = not any(
            isinstance(value, (list, Tensor))
            for group in self._optimizer.param_groups
            for name, value in group.items()
            if name != "params"
        )

    def numbers(self, device: torch.device) -> Tensor:
        """The inputs as :meth:`refresh` or :meth:`same` last read them, in one tensor."""
        if self._written is not self._entries:
            self._memory = self._as_tensor([self._values[at] for at in self.inputs], device)
            self._written = self._entries
        return self._memory


def _entries(optimizer: Optimizer) -> list[Any]:
    """The values of all groups."""
    return list(chain.from_iterable(map(dict.values, optimizer.param_groups)))


class Numbers:
    """Keeps the inputs of an update in one float64 tensor on the parameters' device, where graphs read them in place.

    Example:
        >>> numbers = Numbers()
        >>> first = numbers([0.1, 0.9], torch.device("cpu"))
        >>> numbers([0.2, 0.9], torch.device("cpu")) is first
        True
        >>> first
        tensor([0.2000, 0.9000], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self._last = list[float | Tensor]()
        self._memory = torch.empty(0)

    def __call__(self, numbers: list[float | Tensor], device: torch.device) -> Tensor:
        """The tensor, written if the numbers have changed; a new one for another device, or other inputs."""
        changed = any(isinstance(number, Tensor) for number in numbers)  # the user's tensor may have changed in place
        if len(self._memory) != len(numbers) or self._memory.device != device:
            self._memory = torch.stack([_scalar(number, device) for number in numbers])
        elif changed or self._last != numbers:
            self._memory.copy_(torch.stack([_scalar(number, device) for number in numbers]))
        self._last = numbers
        return self._memory


def _scalar(number: float | Tensor, device: torch.device) -> Tensor:
    """A number as a tensor, made by a kernel on the device instead of a copy from the host."""
    if isinstance(number, Tensor):
        return number.detach().reshape(()).to(device, torch.float64)
    return torch.full((), number, dtype=torch.float64, device=device)


class FirstUpdateError(TraceError):
    """An optimizer makes state in this update, which a graph cannot do."""


State = Mapping[Tensor, Mapping[str, Tensor]]
"""By parameter, the tensors of the optimizer's state by name."""


def update(
    optimizer: Optimizer,
    groups: Sequence[Group],
    numbers: Tensor,
    parameters: Sequence[Sequence[Tensor]],
    state: State,
    skipped: Tensor | None = None,
) -> None:
    """Run an optimizer's step on other tensors than its own, without reading a tensor's value on the host.

    The parameters of each device are updated for themselves, with a copy of the numbers.

    Args:
        optimizer: the optimizer; it does not change.
        groups: the hyperparameters, with an :class:`Input` for each that is one.
        numbers: the values of these inputs, in order.
        parameters: by group, in the optimizer's order; those with a ``grad`` are written in place.
        state: of these parameters; written in place.
        skipped: a tensor of one element that is not zero if nothing is to change.

    Raises:
        FirstUpdateError: a parameter with a ``grad`` has no state yet.

    Example:
        >>> optimizer = SGD([torch.ones(2)], lr=0.1)
        >>> weight = torch.ones(2)
        >>> weight.grad = torch.ones(2)
        >>> update(optimizer, groups_of(optimizer, inputs(optimizer)), torch.tensor([0.1]), [[weight]], {})
        >>> weight
        tensor([0.9000, 0.9000])
    """
    for device in dict.fromkeys(parameter.device for parameter in chain.from_iterable(parameters)):
        own = [[parameter for parameter in group if parameter.device == device] for group in parameters]
        here = {parameter: values for parameter, values in state.items() if parameter.device == device}
        _update(optimizer, groups, numbers.to(device), own, here, None if skipped is None else skipped.to(device))


def _update(
    optimizer: Optimizer,
    groups: Sequence[Group],
    numbers: Tensor,
    parameters: Sequence[Sequence[Tensor]],
    state: State,
    skipped: Tensor | None,
) -> None:
    """The same for the parameters of one device."""
    updated = [parameter for parameter in chain.from_iterable(parameters) if parameter.grad is not None]
    written = [] if skipped is None else [t for each in updated for t in (each, *state.get(each, {}).values())]
    before = [tensor.detach().clone() for tensor in written]
    widened = {parameter: _widened(values) for parameter, values in state.items()}
    copied = object.__new__(type(optimizer))
    vars(copied).update(vars(optimizer))
    copied.state = defaultdict(dict, {parameter: dict(values) for parameter, values in widened.items()})
    inputs = _Inputs(numbers)
    copied.param_groups = [
        {**inputs.filled(group), **{name: value for name, value in _MODE.items() if name in group}, "params": [*params]}
        for group, params in zip(groups, parameters, strict=True)
    ]
    with torch.no_grad(), compile_session(), inputs:  # so that update rules keep numbers as tensors, on a CPU too
        inspect.unwrap(type(optimizer).step)(copied)
    with torch.no_grad():
        for parameter, values in copied.state.items():
            if any(value is not widened.get(parameter, {}).get(name) for name, value in values.items()):
                raise FirstUpdateError("the optimizer makes its state in the first step of each parameter")
        for parameter, values in state.items():
            if "step" in values and values["step"] is not widened[parameter]["step"]:
                values["step"].copy_(widened[parameter]["step"])
        if skipped is not None:
            for tensor, old in zip(written, before, strict=True):
                tensor.copy_(torch.where(skipped != 0, old, tensor))


class _Inputs(TorchFunctionMode):
    """Lets ``torch.optim`` use tensors where its code expects Python numbers.

    Comparisons with zero are true for inputs that are always positive. Most ops on lists of tensors accept a tensor for
    a number; calls of the others are rewritten, so that they round as they do with numbers.

    Args:
        numbers: the inputs, in one tensor.
    """

    def __init__(self, numbers: Tensor) -> None:
        super().__init__()
        self._numbers = (numbers[at] for at in range(len(numbers)))
        self._positive: list[Tensor] = []

    def filled(self, group: Group) -> dict[str, Any]:
        """A group with the next numbers in place of its inputs."""
        return {name: self._filled(value) for name, value in group.items()}

    def _filled(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._filled, value))
        if not isinstance(value, Input):
            return value
        number = next(self._numbers)
        if value.positive:
            self._positive.append(number)
        return number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch's."""
        kwargs = kwargs or {}
        if func in _COMPARISONS and any(args[0] is number for number in self._positive) and args[1] == 0:
            return True
        if func in _WITH_TENSORS and (rewritten := _WITH_TENSORS[func](*args, **kwargs)) is not None:
            args, kwargs = rewritten
        if func is torch._foreach_pow and isinstance(args[0], Tensor):
            return [torch.pow(args[0], exponent) for exponent in args[1]]
        return func(*args, **kwargs)


_COMPARISONS = {Tensor.ne, Tensor.gt, Tensor.__ne__, Tensor.__gt__}


def _add(tensors: Sequence[Tensor], others: Any, *, alpha: Any = 1) -> Any:
    """Arguments of ``_foreach_add``, with a tensor for the number that is added, or for ``alpha``."""
    if isinstance(others, Tensor):
        return (tensors, [others] * len(tensors)), {"alpha": alpha}
    return ((tensors, torch._foreach_mul(others, alpha)), {}) if isinstance(alpha, Tensor) else None


def _addcmul(tensors: Sequence[Tensor], one: Any, other: Any, value: Any = 1) -> Any:
    """Arguments of ``_foreach_addcmul``, with a tensor for ``value``."""
    return ((tensors, torch._foreach_mul(one, value), other), {}) if isinstance(value, Tensor) else None


def _lerp(tensors: Sequence[Tensor], ends: Any, weight: Any) -> Any:
    """Arguments of ``_foreach_lerp``, with a tensor for ``weight``, which needs the dtype of each tensor."""
    weights = [weight.to(tensor.dtype) for tensor in tensors] if isinstance(weight, Tensor) else None
    return weights and ((tensors, ends, weights), {})


_WITH_TENSORS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch._foreach_add, torch._foreach_add_), _add),
    **dict.fromkeys((torch._foreach_addcmul, torch._foreach_addcmul_), _addcmul),
    **dict.fromkeys((torch._foreach_lerp, torch._foreach_lerp_), _lerp),
}
"""For functions that take a Python number only: the arguments of an equivalent call with a tensor."""


_MODE = {"foreach": True, "fused": False, "capturable": True}
"""The implementations of ``torch.optim`` that accept tensors for numbers."""


def _widened(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State with a float64 step counter, because an eager step computes with Python's float64.

    In float32, ``1 - beta ** step`` has a relative error of up to 1e-4 in the first steps.
    """
    return {name: value.double() if name == "step" else value for name, value in values.items()}
