"""``torch.optim``'s own update rules as parts of a graph.

An optimizer steps on a twin of itself, whose parameters, gradients and state are those of a trace::

    optimizer ──▶ twin: the same groups, other tensors ──▶ step() ──▶ in-place ops on these tensors

What it would ask the host for, such as the number of steps so far, stays a tensor there: that is what ``capturable``
means, and what PyTorch does when it compiles. Ops on lists of tensors are taken apart, so that the update of a weight
depends on its own gradient alone.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from autostream.errors import TraceError

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
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} is differentiable, which nothing that is written in place is"
    return ""


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


def hyperparameters(optimizer: Optimizer) -> tuple[Group, ...]:
    """What each group is updated with but for its learning rate; what schedulers keep there for themselves is not.

    Example:
        >>> optimizer = SGD([{"params": [torch.ones(2)], "momentum": 0.9}], lr=0.1)
        >>> hyperparameters(optimizer)[0]["momentum"], "lr" in hyperparameters(optimizer)[0]
        (0.9, False)
    """
    names = [name for name in optimizer.defaults if name != "lr"]
    return tuple({name: group[name] for name in names if name in group} for group in optimizer.param_groups)


class Rates:
    """The learning rates of all groups in one tensor, float64 as Python's numbers are, where the parameters are.

    Example:
        >>> optimizer = SGD([torch.ones(2)], lr=0.1)
        >>> rates = Rates()
        >>> first = rates(optimizer)
        >>> rates(optimizer) is first
        True
        >>> optimizer.param_groups[0]["lr"] = 0.2
        >>> rates(optimizer)
        tensor([0.2000], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self._known: tuple[list[float], Tensor] | None = None

    def __call__(self, optimizer: Optimizer) -> Tensor:
        """The rates as they are now, by group."""
        rates = [group["lr"] for group in optimizer.param_groups]
        device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
        if any(isinstance(rate, Tensor) for rate in rates):  # the user's own, who may write to it
            return torch.stack([_scalar(rate, device) for rate in rates])
        if self._known is None or self._known[0] != rates or self._known[1].device != device:
            # A new tensor each time: the last one may still be on its way to the device.
            self._known = rates, torch.stack([_scalar(rate, device) for rate in rates])
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
    rates: Tensor,
    parameters: Sequence[Sequence[Tensor]],
    state: State,
) -> None:
    """Let an optimizer step on other tensors than its own, in ops that ask no number of the host.

    Args:
        optimizer: the optimizer; it stays as it is.
        groups: the hyperparameters to use.
        rates: the learning rates, by group.
        parameters: by group, in the order of the optimizer's own; those with a ``grad`` are written in place.
        state: of these parameters; written in place.

    Raises:
        TraceError: a parameter with a ``grad`` lacks state, which its first step makes.

    Example:
        >>> optimizer = SGD([torch.ones(2)], lr=0.1)
        >>> weight = torch.ones(2)
        >>> weight.grad = torch.ones(2)
        >>> update(optimizer, hyperparameters(optimizer), Rates()(optimizer), [[weight]], {})
        >>> weight
        tensor([0.9000, 0.9000])
    """
    widened = {parameter: _widened(values) for parameter, values in state.items()}
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    twin.state = defaultdict(dict, {parameter: dict(values) for parameter, values in widened.items()})
    twin.param_groups = [
        {**group, **{name: value for name, value in _MODE.items() if name in group}, "lr": rates[at], "params": [*its]}
        for at, (group, its) in enumerate(zip(groups, parameters, strict=True))
    ]
    with torch.no_grad(), _compiling():
        inspect.unwrap(type(optimizer).step)(twin)
        for parameter, values in twin.state.items():
            if any(value is not widened.get(parameter, {}).get(name) for name, value in values.items()):
                raise TraceError("the optimizer makes its state in the first step of each parameter")
        for parameter, values in state.items():
            if "step" in values and values["step"] is not widened[parameter]["step"]:
                values["step"].copy_(widened[parameter]["step"])


_MODE = {"foreach": True, "fused": False, "capturable": True}
"""The ways of ``torch.optim`` that take tensors for numbers."""


def _widened(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State whose counter of steps is float64, as Python computes with it.

    In float32, the small numbers that are left of ``1 - beta ** step`` at first would be off by up to 1e-4 of them.
    """
    return {name: value.double() if name == "step" else value for name, value in values.items()}


@contextmanager
def _compiling() -> Iterator[None]:
    """Let this thread's optimizers take numbers for what only a device knows, as they do for compilers."""
    tracing: int | None = threading.get_ident()
    answer = torch.compiler.is_compiling

    def is_compiling() -> bool:
        return threading.get_ident() == tracing or answer()

    try:
        with mock.patch.object(torch.compiler, "is_compiling", is_compiling):
            yield
    finally:
        tracing = None  # a module that is first imported in between keeps what it imports


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
