"""``torch.optim``'s own update rules as parts of a graph.

An optimizer steps on a twin of itself, whose parameters, gradients and state are those of a trace::

    optimizer ──▶ twin: the same groups, other tensors ──▶ step() ──▶ in-place ops on these tensors

What it would ask the host for, such as the number of steps so far, stays a tensor there: that is what ``capturable``
means, and what PyTorch does when it compiles. Ops on lists of tensors are taken apart, so that the update of a weight
depends on its own gradient alone.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode

from autostream.errors import TraceError
from autostream.frontend.tree import Constant, Structure, flatten

TRACED: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW, RMSprop, Adagrad)
"""Optimizers whose step can be part of a graph; not their subclasses, which may do anything."""

Group = Mapping[str, Any]
"""The hyperparameters of a group of parameters, by name."""


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
    if not all(map(_is_our_own, (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()))):
        return "there are hooks on the steps of all optimizers, which a graph would not call"
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return f"{name} has a step of its own"
    if not _is_pytorchs(type(optimizer).step):
        return f"{name}.step is not PyTorch's own"
    if clears_itself(optimizer):
        return f"{name} has a zero_grad of its own"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return f"{name} is differentiable, which nothing that is written in place is"
        if group.get("capturable") and not _on_gpus(group["params"]):
            return f"{name} is capturable, which parameters on a CPU are not"
    return ""


def clears_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer has a ``zero_grad`` of its own, which may do more than to leave no gradients.

    Example:
        >>> optimizer = torch.optim.SGD([torch.ones(1)])
        >>> before = clears_itself(optimizer)
        >>> optimizer.zero_grad = lambda: print("cleared")
        >>> before, clears_itself(optimizer)
        (False, True)
    """
    return (
        "zero_grad" in vars(optimizer)
        or type(optimizer).zero_grad is not Optimizer.zero_grad
        or not _is_pytorchs(Optimizer.zero_grad)
    )


@lru_cache(maxsize=64)
def _is_pytorchs(method: Callable[..., Any]) -> bool:
    """Whether a method is as PyTorch wrote it, and wrapped it: somebody may have put another into the class."""
    inner = getattr(method, "__wrapped__", None)
    module = str(getattr(method, "__globals__", {}).get("__name__"))
    return module.partition(".")[0] == "torch" and (inner is None or _is_pytorchs(inner))


def _on_gpus(parameters: Sequence[Tensor]) -> bool:
    return all(parameter.device.type == "cuda" for parameter in parameters)


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer asks for the loss itself, as often as it likes.

    Example:
        >>> weights = [torch.ones(1)]
        >>> takes_closure(torch.optim.LBFGS(weights)), takes_closure(torch.optim.SGD(weights))
        (True, False)
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _is_our_own(hook: object) -> bool:
    """Whether a hook is one of autostream's, which notes what optimizers write outside of graphs."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Input(Constant):
    """Stands for a number that is an input of an update, and may be another in each step.

    Attributes:
        positive: whether it is one above zero in all of them: rules ask.
    """

    positive: bool


def values(optimizer: Optimizer) -> list[Any]:
    """What each group is updated with, one number at a time; what schedulers keep there for themselves is not.

    Example:
        >>> values(SGD([torch.ones(2)], lr=0.1, momentum=0.9))[:2], values(Adam([torch.ones(2)], lr=0.1))[:3]
        ([0.1, 0.9], [0.1, 0.9, 0.999])
    """
    names = tuple(optimizer.defaults)
    found: list[Any] = []
    for group in optimizer.param_groups:
        for name in names:
            value = group.get(name)
            if isinstance(value, (tuple, list)):
                found += value
            else:
                found.append(value)
    return found


def names(optimizer: Optimizer) -> list[str]:
    """What each of the :func:`values` is called.

    Example:
        >>> names(Adam([torch.ones(2)]))[:4]
        ['lr', 'betas[0]', 'betas[1]', 'eps']
    """
    return [own for group in optimizer.param_groups for name in optimizer.defaults for own in _names(name, group)]


def _names(name: str, group: Group) -> list[str]:
    value = group.get(name)
    return [f"{name}[{at}]" for at in range(len(value))] if isinstance(value, (tuple, list)) else [name]


def inputs(optimizer: Optimizer, varying: Set[str] = frozenset()) -> dict[int, Input]:
    """Which of the :func:`values` are inputs of an update: learning rates, tensors, and what varies and is above zero.

    Update rules leave out what belongs to a number that is zero, so one that becomes zero is another rule's; not so a
    learning rate, which schedules begin and end with.

    Args:
        optimizer: the optimizer.
        varying: the :func:`names` of those that vary.

    Example:
        >>> optimizer = SGD([{"params": [torch.ones(2)], "momentum": 0.9}], lr=0.1)
        >>> inputs(optimizer, {"lr", "momentum", "dampening"})
        {0: Input(positive=False), 1: Input(positive=True)}
    """
    found = {}
    for at, (name, value) in enumerate(zip(names(optimizer), values(optimizer), strict=True)):
        varies = name != "lr" and name in varying and is_positive(value)
        if varies or name == "lr" or isinstance(value, Tensor):
            found[at] = Input(positive=varies)
    return found


def unfit(optimizer: Optimizer, inputs: Mapping[int, Input]) -> str:
    """Why one of the :func:`values` cannot be an input of an update, or ``""``.

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
                kind = type(value).__name__
                return f"{name} of {type(optimizer).__name__} is a {kind}, and a graph takes numbers and tensors"
    return ""


def groups_of(optimizer: Optimizer, inputs: Mapping[int, Input]) -> tuple[Group, ...]:
    """The groups of an optimizer's hyperparameters, with inputs in the place of some.

    Example:
        >>> optimizer = SGD([{"params": [torch.ones(2)], "momentum": 0.9}], lr=0.1)
        >>> (group,) = groups_of(optimizer, inputs(optimizer))
        >>> group["lr"], group["momentum"]
        (Input(positive=False), 0.9)
    """
    left = (inputs.get(at, value) for at, value in enumerate(values(optimizer)))

    def taken(value: Any) -> Any:
        return type(value)([next(left) for _ in value]) if isinstance(value, (tuple, list)) else next(left)

    return tuple({name: taken(group.get(name)) for name in optimizer.defaults} for group in optimizer.param_groups)


def is_number(value: object) -> bool:
    """Whether a hyperparameter is a number of Python's; switches are none.

    Example:
        >>> is_number(0.9), is_number(True)
        (True, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_positive(value: Any) -> bool:
    """Whether a hyperparameter is a number of Python's above zero.

    Example:
        >>> is_positive(0.9), is_positive(0.0), is_positive(torch.ones(()))
        (True, False, False)
    """
    return is_number(value) and value > 0


class Hyperparameters:
    """An optimizer's, from step to step: most of them are constants of a graph, some are its inputs.

    Args:
        optimizer: the optimizer.

    Attributes:
        inputs: those that are inputs, by place among the :func:`values`.

    Example:
        >>> optimizer = SGD([torch.ones(2)], lr=0.1, momentum=0.9)
        >>> hyperparameters = Hyperparameters(optimizer)
        >>> _, refusal = hyperparameters.look()
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
        self._settled = False
        self._as_tensor = Numbers()

    def look(self) -> tuple[Structure | None, str]:
        """The hyperparameters now, with an :class:`Input` for each that is one, and why no graph can use them.

        Numbers that are not what they were at the last look are inputs from now on: when they change again, that needs
        no other graph.
        """
        optimizer, now = self._optimizer, values(self._optimizer)
        found = zip(names(optimizer), self._values, now, strict=False)
        self._varying |= {name for name, then, own in found if is_number(then) and is_number(own) and then != own}
        self.inputs = inputs(optimizer, self._varying)
        self._note(now, _entries(optimizer))
        if refusal := unfit(optimizer, self.inputs):
            return None, refusal
        try:
            return flatten(groups_of(optimizer, self.inputs))[1], ""
        except TraceError as error:
            return None, f"a hyperparameter of {type(optimizer).__name__}: {error}"

    def same(self) -> bool:
        """Whether they are what they were at the last look, but for the values of inputs."""
        entries = _entries(self._optimizer)
        if self._settled and len(entries) == len(self._entries) and all(map(is_, entries, self._entries)):
            return True
        now = values(self._optimizer)
        if len(now) != len(self._values):
            return False
        for at, (value, before) in enumerate(zip(now, self._values, strict=True)):
            own = self.inputs.get(at)
            if own is None:
                if value is not before and (type(value) is not type(before) or value != before):
                    return False
            elif isinstance(value, Tensor) or isinstance(before, Tensor):
                if type(value) is not type(before):
                    return False
            elif not (is_positive(value) if own.positive else is_number(value)):
                return False
        self._note(now, entries)
        return True

    def _note(self, now: list[Any], entries: list[Any]) -> None:
        self._values, self._entries = now, entries
        # Lists may be written to, and so may tensors: then each step looks.
        self._settled = not any(isinstance(entry, (list, Tensor)) for entry in _plain(self._optimizer))

    def numbers(self, device: torch.device) -> Tensor:
        """The inputs as they were when they were last found to be the same, in one tensor."""
        return self._as_tensor([self._values[at] for at in self.inputs], device)


def _entries(optimizer: Optimizer) -> list[Any]:
    """All that groups hold, one look at which is the quickest."""
    return list(chain.from_iterable(map(dict.values, optimizer.param_groups)))


def _plain(optimizer: Optimizer) -> list[Any]:
    """What groups hold besides parameters."""
    return [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]


class Numbers:
    """The inputs of an update in one tensor, float64 as Python's numbers are, where the parameters are.

    Example:
        >>> numbers = Numbers()
        >>> first = numbers([0.1, 0.9], torch.device("cpu"))
        >>> numbers([0.1, 0.9], torch.device("cpu")) is first
        True
        >>> numbers([0.2, 0.9], torch.device("cpu"))
        tensor([0.2000, 0.9000], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self._known: tuple[list[float | Tensor], Tensor] | None = None

    def __call__(self, numbers: list[float | Tensor], device: torch.device) -> Tensor:
        """These numbers as they are now."""
        if any(isinstance(number, Tensor) for number in numbers):  # the user's own, who may write to it
            return torch.stack([_scalar(number, device) for number in numbers])
        if self._known is None or self._known[0] != numbers or self._known[1].device != device:
            # A new tensor each time: the last one may still be on its way to the device.
            self._known = numbers, torch.stack([_scalar(number, device) for number in numbers])
        return self._known[1]


def _scalar(number: float | Tensor, device: torch.device) -> Tensor:
    """A number as a tensor, made where it is needed: nothing is copied there from the host."""
    if isinstance(number, Tensor):
        return number.detach().reshape(()).to(device, torch.float64)
    return torch.full((), number, dtype=torch.float64, device=device)


State = Mapping[Tensor, Mapping[str, Tensor]]
"""Of each parameter that has some, the optimizer's tensors by name."""


def update(
    optimizer: Optimizer,
    groups: Sequence[Group],
    numbers: Tensor,
    parameters: Sequence[Sequence[Tensor]],
    state: State,
) -> None:
    """Let an optimizer step on other tensors than its own, in ops that ask no number of the host.

    Args:
        optimizer: the optimizer; it stays as it is.
        groups: the hyperparameters to use, with an :class:`Input` for each of these numbers.
        numbers: the inputs, in the order of these.
        parameters: by group, in the order of the optimizer's own; those with a ``grad`` are written in place.
        state: of these parameters; written in place.

    Raises:
        TraceError: a parameter with a ``grad`` lacks state, which its first step makes.

    Example:
        >>> optimizer = SGD([torch.ones(2)], lr=0.1)
        >>> weight = torch.ones(2)
        >>> weight.grad = torch.ones(2)
        >>> update(optimizer, groups_of(optimizer, inputs(optimizer)), torch.tensor([0.1]), [[weight]], {})
        >>> weight
        tensor([0.9000, 0.9000])
    """
    widened = {parameter: _widened(values) for parameter, values in state.items()}
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    twin.state = defaultdict(dict, {parameter: dict(values) for parameter, values in widened.items()})
    inputs = _Inputs(numbers)
    twin.param_groups = [
        {**inputs.filled(group), **{name: value for name, value in _MODE.items() if name in group}, "params": [*its]}
        for group, its in zip(groups, parameters, strict=True)
    ]
    with torch.no_grad(), _compiling(), inputs:  # takes numbers for what only a device knows, as for a compiler
        inspect.unwrap(type(optimizer).step)(twin)
    with torch.no_grad():
        for parameter, values in twin.state.items():
            if any(value is not widened.get(parameter, {}).get(name) for name, value in values.items()):
                raise TraceError("the optimizer makes its state in the first step of each parameter")
        for parameter, values in state.items():
            if "step" in values and values["step"] is not widened[parameter]["step"]:
                values["step"].copy_(widened[parameter]["step"])


@contextmanager
def _compiling() -> Iterator[None]:
    """Let update rules be told that they are compiled: then they leave to the device what it knows.

    Private to PyTorch (seen in 2.11 and 2.13), whose own exporter sets this flag.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


class _Inputs(TorchFunctionMode):
    """Lets ``torch.optim`` take tensors where it is written for numbers of the host's.

    A rule asks whether one is above zero: what is known to be is. Ops on lists of tensors take most numbers as tensors
    too; the others are put otherwise here, so that they round as they do with numbers.

    Args:
        numbers: the inputs, in one tensor.
    """

    def __init__(self, numbers: Tensor) -> None:
        super().__init__()
        self._numbers = (numbers[at] for at in range(len(numbers)))
        self._positive: list[Tensor] = []

    def filled(self, group: Group) -> dict[str, Any]:
        """A group with the next numbers in the place of its inputs."""
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
        """Call the function."""
        kwargs = kwargs or {}
        if func in _COMPARISONS and any(args[0] is number for number in self._positive) and args[1] == 0:
            return True
        if func in _WITH_TENSORS and (put := _WITH_TENSORS[func](*args, **kwargs)) is not None:
            args, kwargs = put
        if func is torch._foreach_pow and isinstance(args[0], Tensor):
            return [torch.pow(args[0], exponent) for exponent in args[1]]
        return func(*args, **kwargs)


_COMPARISONS = {Tensor.ne, Tensor.gt, Tensor.__ne__, Tensor.__gt__}


def _added(tensors: Sequence[Tensor], others: Any, *, alpha: Any = 1) -> Any:
    """Arguments of an addition of a number, or of others that are multiplied by one."""
    if isinstance(others, Tensor):
        return (tensors, [others] * len(tensors)), {"alpha": alpha}
    return ((tensors, torch._foreach_mul(others, alpha)), {}) if isinstance(alpha, Tensor) else None


def _valued(tensors: Sequence[Tensor], one: Any, other: Any, value: Any = 1) -> Any:
    """Arguments of an addition of products that are multiplied by a number."""
    return ((tensors, torch._foreach_mul(one, value), other), {}) if isinstance(value, Tensor) else None


def _weighted(tensors: Sequence[Tensor], ends: Any, weight: Any) -> Any:
    """Arguments of an interpolation, whose weights have to have the dtype of what they weigh."""
    weights = [weight.to(tensor.dtype) for tensor in tensors] if isinstance(weight, Tensor) else None
    return weights and ((tensors, ends, weights), {})


_WITH_TENSORS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch._foreach_add, torch._foreach_add_), _added),
    **dict.fromkeys((torch._foreach_addcmul, torch._foreach_addcmul_), _valued),
    **dict.fromkeys((torch._foreach_lerp, torch._foreach_lerp_), _weighted),
}
"""For functions that take a number of the host's alone: the same call, with a tensor for it."""


_MODE = {"foreach": True, "fused": False, "capturable": True}
"""The ways of ``torch.optim`` that take tensors for numbers."""


def _widened(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State whose counter of steps is float64, as Python computes with it.

    In float32, the small numbers that are left of ``1 - beta ** step`` at first would be off by up to 1e-4 of them.
    """
    return {name: value.double() if name == "step" else value for name, value in values.items()}


@cache
def lists_apart() -> Mapping[OpOverload, Callable[..., Any]]:
    """Decompositions of ops on lists of tensors into ops on one, by the kernels that PyTorch has for other devices.

    Private to PyTorch (seen in 2.11 and 2.13): how a kernel is called by its dispatch key.

    Example:
        >>> torch.ops.aten._foreach_add.List in lists_apart()
        True
    """
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::_foreach_"))
    ops = (_overload(name) for name in names)
    return {op: partial(op._op_dk, key) for op in ops if op.has_kernel_for_dispatch_key(key)}


def _overload(name: str) -> OpOverload:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    found: OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found
