"""Inference of a model in the modes of :mod:`benchmarks.harness.modes`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autostream.cli.modes import relative_error, tensors_in
from autostream.cli.restarted import restarted
from autostream.errors import TargetError
from autostream.explaining import reports_of
from benchmarks.harness.accuracy import allowed_error, dtype_of, reference
from benchmarks.harness.comparison import PreparedMode
from benchmarks.harness.modes import modes_of


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in eval mode and its inputs.

    Attributes:
        model: on the device that is timed.
        args: inputs that it is prepared for and timed with.
        others: inputs with other values, to check that a mode reads its inputs.
    """

    model: nn.Module
    args: tuple[Any, ...]
    others: tuple[Any, ...]


class Inference:
    """A :class:`~benchmarks.harness.comparison.Comparison` of modes of inference.

    A model that changes its state or its inputs starts each call with the same ones, and
    restoring them counts as its time (:func:`~autostream.cli.restarted.restarted`).

    Args:
        subject: the model.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject = replace(subject, model=restarted(subject.model, subject.args))
        self.device = device_of(subject)
        self.modes = modes_of(self.device)
        with torch.no_grad():
            self._expected = [(args, reference(subject.model, args)) for args in (subject.args, subject.others)]
            self.eager_error = self._error(subject.model)
        self.allowed_error = allowed_error(self.eager_error, dtype_of(subject.model, subject.args))

    @property
    def telling(self) -> float:
        """The error of outputs for other inputs; the allowed error must be smaller, or the check is meaningless."""
        (_, ours), (_, others) = self._expected
        return min(relative_error(other, [our]) for our, other in zip(ours, others, strict=True))

    def require_checkable(self) -> None:
        """Check that the check is meaningful.

        Raises:
            TargetError: eager itself is not accurate, or outputs for other inputs would pass.
        """
        error, allowed = f"{self.eager_error:.1e}", f"{self.allowed_error:.1e}"
        if not self.eager_error <= self.allowed_error:
            raise TargetError(
                f"results cannot be checked: the plain model misses its own reference by {error}, {allowed} allowed; "
                "it draws random numbers or keeps a state that is no tensor of its own, or its values are too small or "
                "too large for their dtype"
            )
        if self.telling < self.allowed_error:
            raise TargetError(
                f"results cannot be checked: other inputs change an output by {self.telling:.1e}, and {allowed} is "
                "allowed as rounding; give inputs or weights on which the outputs depend"
            )

    def prepare(self, mode: str) -> PreparedMode:
        """Prepare a mode for the inputs."""
        subject = self._subject
        with torch.no_grad():
            call = self.modes[mode](subject.model, subject.args)

        @torch.no_grad()
        def run() -> object:
            return call(*subject.args)

        return PreparedMode(run, lambda: self._error(call), lambda: reports_of(call))

    @torch.no_grad()
    def _error(self, call: Any) -> float:
        # The first inputs once more at the end: a mode may keep those of the last call.
        cases = (*self._expected, self._expected[0])
        return max(relative_error(call(*args), expected) for args, expected in cases)


def subject_of(model: nn.Module, args: tuple[Any, ...]) -> Subject:
    """A model with its inputs, and other inputs made from them: smaller values in reverse order.

    Integers may be indices and stay, unless there are only integers.

    Example:
        >>> subject_of(nn.Identity(), (torch.tensor([1.0, 2.0]), torch.tensor([3, 4]))).others
        (tensor([1.5000, 0.7500]), tensor([3, 4]))
    """
    floating = any(tensor.is_floating_point() for tensor in tensors_in(args))

    def other(x: Tensor) -> Tensor:
        reverse = x.flip(tuple(range(x.dim())))
        return reverse * 0.75 if x.is_floating_point() else x if floating else reverse

    return Subject(model, args, pytree.tree_map_only(Tensor, other, args))


def device_of(subject: Subject) -> torch.device:
    """The device of a subject."""
    tensors = (*subject.model.parameters(), *tensors_in(subject.args))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
