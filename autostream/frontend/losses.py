"""Loss functions of training steps, as one callable of a batch that Dynamo captures.

loss_fn(model, *batch), or a loss of PyTorch's: loss_fn(model(*inputs), target) ──▶ (loss, result)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from autostream.errors import TargetError
from autostream.frontend.batches import loss_in
from autostream.frontend.modules import referred_to


class Loss:
    """The loss of a model for a batch.

    Args:
        loss_fn: a loss of PyTorch's, called with the model's outputs and the last item of the batch; or a function of
            the model and a batch that returns the loss, or a tuple that begins with it.
        model: the model.

    Example:
        >>> import torch
        >>> Loss(nn.MSELoss(), nn.Identity())(torch.ones(2), torch.zeros(2))
        (tensor(1.), tensor(1.))
    """

    def __init__(self, loss_fn: Callable[..., Any], model: nn.Module) -> None:
        self.loss_fn, self.model = loss_fn, model
        self.compares = _is_criterion(loss_fn)

    def __call__(self, *batch: Any) -> tuple[Tensor, Any]:
        """The loss, and what ``loss_fn`` returned.

        Raises:
            TargetError: the loss is not a scalar.
        """
        if self.compares:
            *inputs, target = batch
            result = self.loss_fn(self.model(*inputs), target)
        else:
            result = self.loss_fn(self.model, *batch)
        return loss_in(result), result

    def check(self, count: int) -> None:
        """Check that ``loss_fn`` takes a batch with so many items.

        Raises:
            TargetError: it does not, by its signature.

        Example:
            >>> Loss(lambda output, target: output - target, nn.Identity()).check(2)
            Traceback (most recent call last):
            ...
            autostream.errors.TargetError: loss_fn is called with the model and a batch of 2, and takes (output, \
target): where it takes the model's outputs, use lambda model, x, y: loss_fn(model(x), y)
        """
        if self.compares:
            if count < 2:
                name = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)
                raise TargetError(f"{name} compares outputs with a target: call the step with inputs and a target")
            return
        signature = _signature(self.loss_fn)
        if signature is None:
            return
        try:
            signature.bind(*range(1 + count))
        except TypeError:
            raise TargetError(
                f"loss_fn is called with the model and a batch of {count}, and takes {signature}: where it takes the "
                "model's outputs, use lambda model, x, y: loss_fn(model(x), y)"
            ) from None


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # Python cannot tell, such as for functions in C
        return None


def _is_criterion(function: Any) -> bool:
    """Whether a loss is PyTorch's: a loss module or a subclass, a function, or a ``partial`` of one."""
    if isinstance(function, partial):
        return _is_criterion(function.func)
    if isinstance(function, nn.Module):
        return any(kind.__module__ == "torch.nn.modules.loss" for kind in type(function).__mro__)
    return getattr(function, "__module__", None) == "torch.nn.functional"


def modules_in(function: object) -> list[nn.Module]:
    """The modules that a loss function refers to, as far as can be seen: an optimizer may have their parameters.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> modules_in(lambda model, x: layer(model(x)))
        [Linear(in_features=1, out_features=1, bias=True)]
    """
    modules: list[nn.Module] = []
    pending, seen = [function], dict[int, object]()
    while pending and len(seen) < _MOST_OBJECTS:
        value = pending.pop()
        if id(value) in seen or isinstance(value, (type, ModuleType, Tensor)):
            continue
        seen[id(value)] = value
        if isinstance(value, nn.Module):
            modules.append(value)
        else:
            pending += _referred_to(value)
    return modules


_MOST_OBJECTS = 10_000
_OURS = __name__.partition(".")[0] + "."


def _referred_to(value: Any) -> list[Any]:
    if isinstance(value, (FunctionType, MethodType, partial)):
        return [referred for _, referred in referred_to(value)]
    if isinstance(value, Mapping):
        return [*value.values()]
    if isinstance(value, (list, tuple, set)):
        return [*value]
    if type(value).__module__.startswith(_OURS):  # what it has captured belongs to no function
        return [getattr(value, "__wrapped__", None)]
    call = vars(type(value)).get("__call__")
    return [*getattr(value, "__dict__", {}).values(), *([call] if isinstance(call, FunctionType) else [])]
