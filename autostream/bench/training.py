"""Whole training steps in several modes: forward, loss, backward, optimizer and ``zero_grad``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autostream.bench.accuracy import allowed_error, dtype_of, relative_error
from autostream.bench.contest import Contender
from autostream.bench.modes import captured, tensors_in

STEPS = 3
"""Steps after which loss and parameters are compared."""

Step = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class TrainingSubject:
    """What a training step takes.

    Attributes:
        model: in training mode, on the device that is timed.
        optimizer: of its parameters.
        data: inputs and targets.
        loss: ``loss(model, *data)``, a scalar.
    """

    model: nn.Module
    optimizer: Optimizer
    data: tuple[Tensor, ...]
    loss: Callable[..., Tensor]


def eager(subject: TrainingSubject) -> Step:
    """The step as users write it."""
    return _step(subject, subject.loss)


def compile_default(subject: TrainingSubject) -> Step:
    """Forward, loss and backward by ``torch.compile``, the optimizer as it is."""
    return _step(subject, _compiled(subject.loss))


def compile_reduce_overhead(subject: TrainingSubject) -> Step:
    """The same with CUDA graphs of ``torch.compile``'s own."""
    return _step(subject, _compiled(subject.loss, mode="reduce-overhead"))


def cuda_graph(subject: TrainingSubject) -> Step:
    """The whole eager step captured on one stream."""
    return _captured(subject, subject.loss)


def compile_captured(subject: TrainingSubject) -> Step:
    """The whole step captured on one stream, forward and backward with the kernels of ``torch.compile``."""
    return _captured(subject, _compiled(subject.loss))


CPU: dict[str, Callable[[TrainingSubject], Step]] = {mode.__name__: mode for mode in (eager, compile_default)}
CUDA = CPU | {mode.__name__: mode for mode in (compile_reduce_overhead, cuda_graph, compile_captured)}


def training_modes_of(device: torch.device) -> Mapping[str, Callable[[TrainingSubject], Step]]:
    """All modes that a device has, by name."""
    return CPU if device.type == "cpu" else CUDA


class Training:
    """A :class:`~autostream.bench.contest.Contest` of modes of training.

    Right is what brings losses, parameters and the optimizer's state, which gathers the gradients, to where steps in
    float64 bring them.

    Args:
        make: makes the subject, the same one each time: steps change it, so each mode has its own.
    """

    def __init__(self, make: Callable[[], TrainingSubject]) -> None:
        self._make = make
        subject = make()
        self.device = subject.data[0].device
        self._expected = _results(in_float64 := _in_float64(subject), eager(in_float64))
        self.eager_error = self._error(subject, eager(subject))
        self.allowed_error = allowed_error(self.eager_error, dtype_of(subject.model, subject.data))

    def contender(self, mode: str) -> Contender:
        """Prepare a mode with a subject of its own."""
        subject = self._make()
        start = {name: value.clone() for name, value in subject.model.state_dict().items()}
        step = training_modes_of(self.device)[mode](subject)

        def error() -> float:
            _restore(subject, start)
            return self._error(subject, step)

        return Contender(lambda: step(*subject.data), error)

    def _error(self, subject: TrainingSubject, step: Step) -> float:
        pairs = zip(_results(subject, step), self._expected, strict=True)
        return max(relative_error(result, expected) for result, expected in pairs)


def _results(subject: TrainingSubject, step: Step) -> tuple[list[Tensor], ...]:
    """The losses of some steps, and parameters and the optimizer's state after them."""
    losses = [step(*subject.data).detach().clone() for _ in range(STEPS)]
    parameters = [parameter.detach().clone() for parameter in subject.model.parameters()]
    return losses, parameters, [value.clone() for value in _optimizer_state(subject)]


def _optimizer_state(subject: TrainingSubject) -> list[Tensor]:
    state = subject.optimizer.state
    return [tensor for parameter in subject.model.parameters() for tensor in tensors_in(state[parameter])]


def _in_float64(subject: TrainingSubject) -> TrainingSubject:
    twin = copy.deepcopy(subject)
    data = tuple(x.double() if x.is_floating_point() else x for x in twin.data)
    return replace(twin, model=twin.model.double(), data=data)


@torch.no_grad()
def _restore(subject: TrainingSubject, start: Mapping[str, Tensor]) -> None:
    """Go back to before the first step, in place, where graphs expect their tensors."""
    for name, value in subject.model.state_dict().items():
        value.copy_(start[name])
    for tensor in _optimizer_state(subject):
        tensor.zero_()


def _step(subject: TrainingSubject, loss: Callable[..., Tensor]) -> Step:
    def step(*data: Tensor) -> Tensor:
        value = loss(subject.model, *data)
        value.backward()  # type: ignore[no-untyped-call]
        subject.optimizer.step()
        subject.optimizer.zero_grad()
        return value.detach()

    return step


def _captured(subject: TrainingSubject, loss: Callable[..., Tensor]) -> Step:
    for group in subject.optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    return captured(_step(subject, loss), subject.data)


def _compiled(loss: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    return torch.compile(loss, dynamic=False, **options)
