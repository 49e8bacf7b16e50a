"""Calls that the model itself runs: nothing else works for them, or nothing else was faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from autostream.dispatch.replay import LikeCalls
from autostream.frontend.tree import Structure, flatten, same
from autostream.ir import Decision
from autostream.pipeline import versions
from autostream.reporting.report import Report


class EagerCall:
    """Calls that run eagerly.

    Args:
        label: describes the calls in reports.
        reason: why they run eagerly.
        schedule: the report of what else could run them, if anything could.
        warning: what the user is to know once a call has returned: of a wrong call, the model's own error says enough.

    Attributes:
        warning: the same.
    """

    def __init__(self, label: str, reason: str, schedule: Report | None = None, warning: str = "") -> None:
        self.label, self.reason, self.warning, self._schedule = label, reason, warning, schedule

    @property
    def is_choice(self) -> bool:
        """Whether the calls could run as scheduled, too."""
        return self._schedule is not None

    def reports(self, model: str) -> tuple[Report, ...]:
        """One report, with the reason."""
        report = self._schedule or Report(model, self.label, "plain", versions=versions())
        refusal = Decision("", "plain", self.reason)
        return (replace(report, mode="plain", parts=(), refusals=(refusal, *report.refusals)),)

    def count_replays(self, calls: int) -> None:
        """Calls on the fast path change nothing here."""

    def replay(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EagerReplay | None:
        """The fast path of calls like this one; ``None`` if they have to take the slow path."""
        try:
            tensors, call = flatten((args, kwargs), same)
        except Exception:  # there are objects without weak references
            return None
        return EagerReplay(model, call, tensors)


class EagerReplay(LikeCalls):
    """Calls the model itself for calls like an earlier one. That is right whatever the model is now: no guards.

    Args:
        model: the live model.
        call: the structure of ``(args, kwargs)``.
        tensors: the tensors in them.

    Attributes:
        repeatable: always false: an error of the model is the user's.
        is_in_place: always true: it holds no memory of the model.
    """

    repeatable, is_in_place = False, True

    def __init__(self, model: nn.Module, call: Structure, tensors: Sequence[Tensor]) -> None:
        super().__init__(call, tensors)
        self._model, self._training = model, _is_training(model)

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor] | None:
        """The tensors of a call if it is such a call; ``None`` where a schedule may be worth trying."""
        return self.tensors_of(args, kwargs) if _is_training(self._model) is self._training else None

    def check_guards_first(self) -> None:
        """There are none."""

    def __call__(self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model."""
        return self._model(*args, **kwargs)


def _is_training(model: Any) -> bool:
    return bool(getattr(model, "training", False))  # frozen TorchScript has none
