"""The training steps that ``train_step`` captures, written out: all of a step, or its forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autostream.errors import TargetError
from autostream.frontend.averages import follow_tensors, pairs_of
from autostream.frontend.batches import Batch, parts_of, summed
from autostream.frontend.data_parallel import DataParallel
from autostream.frontend.losses import Loss
from autostream.frontend.step_capture import Body
from autostream.options import StepOptions

Gradients = Sequence[Tensor | None]
"""For each parameter of an optimizer its gradient, or ``None``."""


class Differentiation(Body):
    """Forward and backward: returns what ``loss_fn`` returns, and the gradients of the optimizer's parameters.

    Args:
        loss: of the model.
        options: of the step.
        data_parallel: averages the gradients, if processes share the step.
    """

    takes_gradients = False

    def __init__(self, loss: Loss, options: StepOptions, data_parallel: DataParallel | None = None) -> None:
        super().__init__(loss)
        self.loss, self.options, self.data_parallel = loss, options, data_parallel

    def run(self, *batch: Any) -> tuple[Any, Gradients]:
        """Differentiate the loss, scaled if there is a scaler."""
        return self.differentiate(batch)

    def differentiate(self, batch: Batch) -> tuple[Any, Gradients]:
        """The result of ``loss_fn``, and gradients, each in memory of its own."""
        (parameters,), parts, scaler = self.parameters, self.options.microbatches, self.options.scaler
        trained = list({parameter: None for parameter in parameters if parameter.requires_grad})  # one may occur twice
        gradients: dict[Tensor, Tensor] = {}
        results = []
        for part in parts_of(batch, parts):
            loss, result = self.loss(*part)
            if parts > 1:
                if result is not loss:
                    raise TargetError("with microbatches, loss_fn has to return the loss alone")
                loss = result = loss / parts
            scaled = loss if scaler is None else scaler.scale(loss)
            found = torch.autograd.grad(scaled, trained, allow_unused=True)
            for parameter, gradient in zip(trained, found, strict=True):
                if gradient is not None:
                    memory = torch.empty_like(parameter)  # ``frontend/steps.py`` leaves out the copy where it may
                    memory.copy_(gradient)
                    gradients[parameter] = gradients[parameter].add_(memory) if parameter in gradients else memory
            results.append(result)
        for parameter in trained:
            if parameter.grad is not None:  # of a backward in loss_fn, to which that of the loss adds
                added = gradients.get(parameter)
                gradients[parameter] = parameter.grad.clone() if added is None else added + parameter.grad
        if self.data_parallel is not None:
            with torch.no_grad():
                means = self.data_parallel.in_graph([*gradients.values()], [*gradients])
                gradients = dict(zip(gradients, means, strict=True))
        return summed(results), [gradients.get(parameter) for parameter in parameters]


class WholeStep(Differentiation):
    """Forward, backward, clipping, the optimizer's update, ``zero_grad`` and the average's update.

    Args:
        loss: of the model.
        optimizer: of its parameters.
        options: of the step.
        data_parallel: averages the gradients, if processes share the step.
    """

    def __init__(
        self, loss: Loss, optimizer: Optimizer, options: StepOptions, data_parallel: DataParallel | None = None
    ) -> None:
        super().__init__(loss, options, data_parallel)
        self.optimizer = optimizer

    def run(self, *batch: Any) -> Any:
        """Run the step; returns what ``loss_fn`` returns."""
        (parameters,), options, scaler = self.parameters, self.options, self.options.scaler
        result, gradients = self.differentiate(batch)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            if options.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, options.max_norm)
            if scaler is None:
                self.optimizer.step()
            else:
                scaler.step(self.optimizer)
                scaler.update()
            self.optimizer.zero_grad()
            if options.average is not None:
                follow_tensors(*pairs_of(options.average, self.loss.model), options.decay)
        return result
