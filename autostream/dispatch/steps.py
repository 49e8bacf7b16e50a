"""A training step as users write it, and what a graph of it leaves to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autostream.errors import TargetError
from autostream.frontend.averages import check_average, follow
from autostream.frontend.batches import Batch, detached, loss_in, parts_of, summed
from autostream.frontend.losses import Loss, modules_in
from autostream.frontend.optimizers import clears_itself
from autostream.frontend.parameters import (
    clear_gradients,
    parameters_of,
    set_aside,
    strangers,
    take_gradients,
)
from autostream.options import StepOptions

Gradients = Sequence[Tensor | None]


class Step:
    """Forward, loss, backward, clipping, optimizer and ``zero_grad``.

    Args:
        loss: of the model.
        optimizer: of the parameters that are trained.
        options: what else to do.

    Raises:
        TargetError: the optimizer has a parameter that neither the model nor the loss can have.
    """

    def __init__(self, loss: Loss, optimizer: Optimizer, options: StepOptions) -> None:
        self.loss, self.optimizer, self.options = loss, optimizer, options
        self.model, self.average, self.scaler = loss.model, options.average, options.scaler
        self.check_parameters()

    @property
    def modules(self) -> nn.Module:
        """All modules that are known to take part, by name."""
        parts = nn.Module()
        parts.add_module("model", self.model)
        if isinstance(self.loss.loss_fn, nn.Module):
            parts.add_module("loss_fn", self.loss.loss_fn)
        if self.average is not None:
            parts.add_module("average", self.average)
        return parts

    def check_parameters(self) -> None:
        """See that all of the optimizer's parameters are the model's, or of modules that the loss refers to.

        Raises:
            TargetError: one is not.
        """
        if strangers(self.optimizer, self.modules.parameters()):
            modules = (self.modules, *modules_in(self.loss.loss_fn))
            if reason := strangers(self.optimizer, chain.from_iterable(own.parameters() for own in modules)):
                raise TargetError(reason)

    def check_average(self) -> None:
        """See that the average can follow the model, before a weight is changed.

        Raises:
            TargetError: it cannot.
        """
        if self.average is not None:
            check_average(self.average, self.model)

    def numbers(self) -> list[Tensor]:
        """What the scaler multiplies losses by now, if there is one."""
        if self.scaler is None:
            return []
        device = next((parameter.device for parameter in parameters_of(self.optimizer)), None)
        return [self.scaler.scale(torch.ones((), device=device))]

    def differentiate(self, batch: Batch) -> tuple[Any, Gradients]:
        """What ``loss_fn`` returns, detached, and the gradients of the optimizer's parameters.

        Raises:
            TargetError: the loss is not a scalar that depends on a parameter, the batch has no equal parts, or the
                average or the optimizer is of another model.
        """
        known = parameters_of(self.optimizer)
        self.check_average()
        self.loss.check(len(batch))
        with set_aside(chain(self.modules.parameters(), known)), torch.enable_grad():
            results = []
            for part in parts_of(batch, self.options.microbatches):
                loss, result = self.loss(*part)
                if self.options.microbatches > 1:
                    if result is not loss:
                        raise TargetError("with microbatches, loss_fn has to return the loss alone")
                    loss = result = loss / self.options.microbatches
                if self.scaler is not None:
                    loss = self.scaler.scale(loss)
                if not loss.requires_grad:
                    raise TargetError("the loss of loss_fn depends on no parameter that requires gradients")
                loss.backward()  # type: ignore[no-untyped-call]
                results.append(detached(result))
            parameters = parameters_of(self.optimizer)  # a forward may have given it more
            gradients = [parameter.grad for parameter in parameters]
        clear_gradients(set(parameters).difference(known))
        if any(gradient is None for gradient in gradients):
            self.check_parameters()
        return summed(results), gradients

    def zero_gradients(self) -> None:
        """Call the optimizer's ``zero_grad``, if that may do more than to leave no gradients."""
        if clears_itself(self.optimizer):
            self.optimizer.zero_grad()

    def complete(self, result: Any, gradients: Gradients) -> Any:
        """Do what is left of a step that has its gradients; returns the result."""
        parameters = parameters_of(self.optimizer)
        self.check_average()
        self._take(parameters, gradients)
        scaler = self.scaler
        if scaler is not None and self.options.max_norm is not None:
            scaler.unscale_(self.optimizer)
        self._clip(parameters)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self._end(parameters)
        return result

    def search(self, evaluate: Callable[[], tuple[Any, Gradients]]) -> Any:
        """A step of an optimizer that asks for losses itself; returns the first result.

        Args:
            evaluate: does what :meth:`differentiate` does, or a run of its program.
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

    def _take(self, parameters: Sequence[Tensor], gradients: Gradients) -> None:
        """Give the parameters their gradients, on top of what a ``zero_grad`` of the optimizer's own has left."""
        if not clears_itself(self.optimizer):
            clear_gradients(parameters)
        take_gradients(parameters, gradients)

    def _clip(self, parameters: Sequence[Tensor]) -> None:
        if self.options.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.options.max_norm)

    def _end(self, parameters: Sequence[Tensor]) -> None:
        """Do what comes after the optimizer's step."""
        self.zero_gradients()
        if not clears_itself(self.optimizer):
            clear_gradients(parameters)
        if self.average is not None:
            follow(self.average, self.model, self.options.decay)
