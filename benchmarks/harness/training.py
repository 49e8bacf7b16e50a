"""Whole training steps in several modes: forward, loss, backward, optimizer and ``zero_grad``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress, cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autostream.cli.modes import captured, relative_error, tensors_in
from autostream.explaining import reports_of
from autostream.runtime.capture import clear_cublas_workspaces
from autostream.training import train_step
from benchmarks.harness.accuracy import MOST, allowed_error
from benchmarks.harness.comparison import PreparedMode
from benchmarks.harness.steps import StepSubject, step_modes_of

STEPS = 3
"""Steps after which losses and parameters are compared."""

Step = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class TrainingSubject:
    """A model to train.

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

    @property
    def modules(self) -> nn.Module:
        """All that a step writes."""
        return self.model

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All optimizers that a step uses."""
        return (self.optimizer,)


Subject = TrainingSubject | StepSubject


def eager(subject: TrainingSubject) -> Step:
    """The eager step."""
    return _step(subject, subject.loss)


def compile_default(subject: TrainingSubject) -> Step:
    """Forward, loss and backward by ``torch.compile``, the optimizer in eager."""
    return _step(subject, _compiled(subject.loss))


def compile_reduce_overhead(subject: TrainingSubject) -> Step:
    """The same with ``torch.compile``'s CUDA graphs."""
    return _step(subject, _compiled(subject.loss, mode="reduce-overhead"))


def cuda_graph(subject: TrainingSubject) -> Step:
    """The whole eager step captured on one stream."""
    return _captured(subject, subject.loss)


def compile_captured(subject: TrainingSubject) -> Step:
    """The whole step captured on one stream, forward and backward with the kernels of ``torch.compile``."""
    return _captured(subject, _compiled(subject.loss))


def scheduled(subject: TrainingSubject, **options: Any) -> Step:
    """``autostream.train_step`` with these options; the first step is eager."""
    return train_step(subject.model, subject.optimizer, subject.loss, **options)


def autostream(subject: TrainingSubject, **options: Any) -> Step:
    """The same after one step, which makes the optimizer's state."""
    step = scheduled(subject, **options)
    step(*subject.data)
    return step


CPU: dict[str, Callable[[TrainingSubject], Step]] = {
    mode.__name__: mode for mode in (eager, compile_default, autostream)
}
CUDA = CPU | {mode.__name__: mode for mode in (compile_reduce_overhead, cuda_graph, compile_captured)}
CUDA |= {
    "autostream_inductor_sequential": partial(autostream, kernels="inductor", policy="sequential"),
    "autostream_any_memory": partial(autostream, memory_budget=math.inf),
}


def training_modes_of(device: torch.device) -> Mapping[str, Callable[[TrainingSubject], Step]]:
    """All modes of a device, by name."""
    return CPU if device.type == "cpu" else CUDA


class Training:
    """A :class:`~benchmarks.harness.comparison.Comparison` of modes of training.

    A mode is checked in float32, not TF32, against steps in float64: updates in half precision are mostly rounding,
    which would hide errors. Losses, changes of parameters, and optimizer state, which accumulates the gradients, are
    compared. In the dtype that is timed, only losses are.

    Args:
        make: makes an equal subject in a dtype each time; steps change it, so each mode has one.
        dtype: the dtype that is timed.
        make_timed: makes the subject that is timed, if that draws random numbers; ``make`` by default.
    """

    def __init__(
        self,
        make: Callable[[torch.dtype], Subject],
        dtype: torch.dtype,
        make_timed: Callable[[torch.dtype], Subject] | None = None,
    ) -> None:
        self._make, self._dtype, self._make_timed = make, dtype, make_timed or make
        subject = make(torch.float64)
        self.device = subject.data[0].device
        is_step = isinstance(subject, StepSubject)
        self.modes: Mapping[str, Callable[[Any], Step]] = (step_modes_of if is_step else training_modes_of)(self.device)
        self._expected = _results(subject, self.modes["eager"])
        subjects = [make(torch.float32), *(_nudged(make(torch.float32), seed) for seed in range(_NUDGES))]
        runs = [_errors(_results(subject, self.modes["eager"]), self._expected) for subject in subjects]
        self._compared = [max(errors) < _NOISE for errors in zip(*runs, strict=True)]
        self.eager_error = max(compress(runs[0], self._compared))
        self.allowed_error = allowed_error(self.eager_error, torch.float32)

    def prepare(self, mode: str) -> PreparedMode:
        """Prepare a mode with a subject of its own."""
        subject = self._make_timed(self._dtype)
        clear_cublas_workspaces()  # so that no mode is charged for those of the check
        step = self.modes[mode](subject)

        def drift() -> float:
            return self._drift(subject, step)

        return PreparedMode(
            lambda: step(*subject.data),
            lambda: max(self._error(mode), drift()),
            lambda: reports_of(step),
            late_error=drift,
        )

    def _error(self, mode: str) -> float:
        subject = self._make(torch.float32)
        errors = _errors(_results(subject, self.modes[mode]), self._expected)
        return max(compress(errors, self._compared))

    def _drift(self, subject: Subject, step: Step) -> float:
        """0 where losses in the timed dtype are close to those expected, else infinity."""
        fresh = self._make_timed(self._dtype)
        _restore(subject, fresh.modules.state_dict())
        losses = _losses(step, fresh.data)
        if self._make_timed is self._make:
            near = _errors(losses, self._expected[: len(losses)])
        else:  # steps that draw random numbers are near each other in the mean
            near = _errors([sum(losses)], [sum(_losses(self.modes["eager"](fresh), fresh.data))])  # type: ignore[list-item]
        return 0.0 if max(near) < MOST else float("inf")


_NOISE = 0.01
"""Tensors that eager steps in float32 miss by more are not compared: they cancel out, as the gradient of a bias before
a norm does."""

_NUDGES, _NUDGE = 4, 1e-6
"""So many eager steps begin with weights that differ by that share. An optimizer divides a gradient by its size, so the
sign of one that is almost zero, which rounding decides, moves a weight as far as any other."""


def _nudged(subject: Any, seed: int) -> Any:
    """A subject whose weights differ from what they were by a few roundings."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in subject.modules.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.mul_(1 + _NUDGE * noise)
    return subject


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Let convolutions compute in float32: PyTorch's default, TF32, has three digits.

    Whether a convolution uses it depends on its layout, so modes would differ by it. An optimizer divides a gradient by
    its size, and so makes whole steps of such differences.
    """
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@_without_tf32()
def _results(subject: Any, mode: Callable[[Any], Step]) -> list[Tensor]:
    """Losses of some steps, changes of the parameters, and the optimizers' state."""
    parameters = list(subject.modules.parameters())
    start = {name: value.clone() for name, value in subject.modules.state_dict().items()}
    step = mode(subject)  # may run steps to warm up
    step(*subject.data)  # the first call may compile or capture
    _restore(subject, start)
    before = [parameter.detach().clone() for parameter in parameters]
    losses = _losses(step, subject.data)
    changes = [after.detach() - value for after, value in zip(parameters, before, strict=True)]
    return [*losses, *changes, *(value.clone() for value in _optimizer_state(subject))]


def _losses(step: Step, data: tuple[Tensor, ...]) -> list[Tensor]:
    return [loss.detach().clone() for batch in _batches(data) for loss in tensors_in(step(*batch))]


def _batches(data: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """The batch, and one with permuted inputs, in turn."""
    other = (data[0].flip(0), *data[1:])
    return islice(cycle((data, other)), STEPS)


def _errors(results: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    if len(results) != len(expected):  # a step without the optimizer leaves no state
        return [float("inf")] * len(expected)
    return list(map(relative_error, results, ([right] for right in expected)))


def _optimizer_state(subject: Subject) -> list[Tensor]:
    states = (optimizer.state for optimizer in subject.optimizers)
    parameters = list(subject.modules.parameters())
    return [tensor for state in states for parameter in parameters for tensor in tensors_in(state.get(parameter))]


@torch.no_grad()
def _restore(subject: Subject, start: Mapping[str, Tensor]) -> None:
    """Restore the state before the first step, in place, since graphs hold addresses."""
    for name, value in subject.modules.state_dict().items():
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
