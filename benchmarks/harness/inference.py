"""A model at one set of inputs, in the modes of :mod:`benchmarks.harness.modes`."""

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
from benchmarks.harness.contest import Contender
from benchmarks.harness.modes import modes_of


@dataclass(frozen=True, slots=True)
class Subject:
    """What is run: a model in eval mode.

    Attributes:
        model: on the device that is timed.
        args: what it is prepared for and timed with.
        others: such arguments with other values, to see that a mode reads what it is given.
    """

    model: nn.Module
    args: tuple[Any, ...]
    others: tuple[Any, ...]


class Inference:
    """A :class:`~benchmarks.harness.contest.Contest` of modes of inference.

    A model that changes its state, or its inputs, runs on the same ones every time, in every mode: its calls begin by
    putting them back (:func:`~autostream.cli.restarted.restarted`), and that is part of their time.

    Args:
        subject: what is run.
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
        """The error of an output that belongs to other inputs: what is allowed must be less, or nothing is checked."""
        (_, ours), (_, others) = self._expected
        return min(relative_error(other, [our]) for our, other in zip(ours, others, strict=True))

    def require_checkable(self) -> None:
        """See that a mode which computes something else could not pass for right.

        Raises:
            TargetError: it could, or the plain model itself could not.
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

    def contender(self, mode: str) -> Contender:
        """Prepare a mode for the subject's arguments."""
        subject = self._subject
        with torch.no_grad():
            call = self.modes[mode](subject.model, subject.args)

        @torch.no_grad()
        def run() -> object:
            return call(*subject.args)

        return Contender(run, lambda: self._error(call), lambda: reports_of(call))

    @torch.no_grad()
    def _error(self, call: Any) -> float:
        # The first arguments once more at the end: a mode may hold on to those of the last call.
        turns = (*self._expected, self._expected[0])
        return max(relative_error(call(*args), expected) for args, expected in turns)


def subject_of(model: nn.Module, args: tuple[Any, ...]) -> Subject:
    """A model with its arguments, and others made of them: smaller values, in reverse.

    Integers may be indices that belong to a place, so they stay, unless there is nothing else.

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
    """Where a subject is."""
    tensors = (*subject.model.parameters(), *tensors_in(subject.args))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
