"""The eager training step, in parts: gradients, and the update that follows them; and the graphs of the same step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autostream.dispatch.eager_averages import EagerAverages
from autostream.dispatch.step_calls import WrittenStep
from autostream.dispatch.step_graphs import StepGraphs
from autostream.errors import TargetError
from autostream.frontend.averages import check_average, follow
from autostream.frontend.batches import Batch, detached, loss_in, parts_of, summed
from autostream.frontend.data_parallel import DataParallel
from autostream.frontend.eager_only import is_fully_sharded
from autostream.frontend.losses import Loss, modules_in
from autostream.frontend.modules import name_of
from autostream.frontend.optimizers import has_own_zero_grad
from autostream.frontend.parameters import (
    clear_gradients,
    foreign_parameters,
    parameters_of,
    set_aside,
    take_gradients,
)
from autostream.frontend.training_steps import Differentiation, Gradients, WholeStep
from autostream.options import StepOptions
from autostream.runtime.input_buffers import BufferTable


class Step:
    """Forward, loss, backward, clipping, optimizer and ``zero_grad``.

    Args:
        loss: of the model.
        optimizer: of the parameters that are trained.
        options: of the step.
        data_parallel: averages the gradients, if processes share the step.

    Raises:
        TargetError: the optimizer has a parameter of neither the model nor the loss.
    """

    def __init__(
        self, loss: Loss, optimizer: Optimizer, options: StepOptions, data_parallel: DataParallel | None = None
    ) -> None:
        self.loss, self.optimizer, self.options, self.data_parallel = loss, optimizer, options, data_parallel
        self._averages = None if data_parallel is None else EagerAverages(data_parallel)
        self.model, self.average, self.scaler = loss.model, options.average, options.scaler
        self.check_parameters()

    @property
    def modules(self) -> nn.Module:
        """One module with the model, the loss and the average as submodules."""
        parts = nn.Module()
        parts.add_module("model", self.model)
        if isinstance(self.loss.loss_fn, nn.Module):
            parts.add_module("loss_fn", self.loss.loss_fn)
        if self.average is not None:
            parts.add_module("average", self.average)
        return parts

    def check_parameters(self) -> None:
        """Check that all of the optimizer's parameters belong to the model, or to modules that the loss refers to.

        Raises:
            TargetError: one does not.
        """
        if is_fully_sharded(self.modules):
            return  # it may have gathered parameters now
        if foreign_parameters(self.optimizer, self.modules.parameters()):
            modules = (self.modules, *modules_in(self.loss.loss_fn))
            parameters = chain.from_iterable(module.parameters() for module in modules)
            if reason := foreign_parameters(self.optimizer, parameters):
                raise TargetError(reason)

    def check(self, batch: Batch) -> None:
        """Check what may be wrong before a weight is changed.

        Raises:
            TargetError: the average or the optimizer has other parameters than the model, ``loss_fn`` does not take the
                batch, or it cannot be divided into equal parts.
        """
        self.check_parameters()
        self.check_average()
        self.loss.check(len(batch))
        if self.options.microbatches > 1:
            parts_of(batch, self.options.microbatches)

    def check_average(self) -> None:
        """Check that the average has the model's parameters.

        Raises:
            TargetError: it has other ones.
        """
        if self.average is not None:
            check_average(self.average, self.model)

    def differentiate(self, batch: Batch) -> tuple[Any, Gradients]:
        """Run forward and backward.

        Returns:
            What ``loss_fn`` returns, detached, and the gradients of the optimizer's parameters.

        Raises:
            GroupError: another process has other gradients, or has not come as far in time.
            TargetError: the loss is not a scalar that depends on a parameter, the batch cannot be divided into equal
                parts, or the average or the optimizer belongs to another model.
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
            parameters = parameters_of(self.optimizer)  # the forward may have added some
            if self._averages is not None:
                self._averages.average(parameters)
            gradients = [parameter.grad for parameter in parameters]
        clear_gradients(set(parameters).difference(known))
        if any(gradient is None for gradient in gradients):
            self.check_parameters()
        return summed(results), gradients

    def zero_gradients(self) -> None:
        """Call the optimizer's ``zero_grad``, if the optimizer overrides it."""
        if has_own_zero_grad(self.optimizer):
            self.optimizer.zero_grad()

    def complete(self, result: Any, gradients: Gradients) -> Any:
        """Clip the gradients, update the parameters and the average; returns the result."""
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
        self._finish(parameters)
        return result

    def minimize(self, evaluate: Callable[[], tuple[Any, Gradients]]) -> Any:
        """Run a step of an optimizer that takes a closure; returns the result of its first call.

        Args:
            evaluate: returns what :meth:`differentiate` does.
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
        self._finish(parameters_of(self.optimizer))
        return results[0]

    def _take(self, parameters: Sequence[Tensor], gradients: Gradients) -> None:
        """Set the parameters' gradients; an optimizer that overrides ``zero_grad`` may have left some, which add up."""
        if not has_own_zero_grad(self.optimizer):
            clear_gradients(parameters)
        take_gradients(parameters, gradients)

    def _clip(self, parameters: Sequence[Tensor]) -> None:
        if self.options.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.options.max_norm)

    def _finish(self, parameters: Sequence[Tensor]) -> None:
        """Clear the gradients and update the average."""
        self.zero_gradients()
        if not has_own_zero_grad(self.optimizer):
            clear_gradients(parameters)
        if self.average is not None:
            follow(self.average, self.model, self.options.decay)


def graphs_of(step: Step, input_buffers: BufferTable, *, whole: bool) -> StepGraphs:
    """The compiled graphs of a step, or of its forward and backward.

    Args:
        step: the step.
        input_buffers: buffers that captured graphs may read in place.
        whole: whether the graphs do all of the step. Otherwise they return what :meth:`Step.differentiate` does.
    """

    def eager(*batch: Any) -> Any:
        differentiated = step.differentiate(batch)
        return step.complete(*differentiated) if whole else differentiated

    loss, optimizer, options = step.loss, step.optimizer, step.options
    parallel = step.data_parallel
    body = WholeStep(loss, optimizer, options, parallel) if whole else Differentiation(loss, options, parallel)
    name = f"{name_of(step.model)}, {'TrainingStep' if whole else 'Backward'}"
    written = WrittenStep(body, (optimizer,), name, lambda: step.modules, eager, parallel, updates=whole)
    return StepGraphs(written, options, input_buffers)
