"""The modes of training steps that ``autostream bench`` compares, and the check of what they return.

TARGET ──▶ a new step and its batch, by mode ──▶ the first steps ──▶ as the eager ones? ──▶ timed
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autostream.cli.modes import relative_error, tensors_in
from autostream.cli.targets import Step
from autostream.cli.zoo import SEED
from autostream.dispatch.step_functions import StepFunction
from autostream.errors import TargetError, first_line

FreshStep = Callable[[], tuple[Step, tuple[Any, ...]]]
"""Makes a step and its batch: equal ones each time."""

Mode = Callable[[Step], Callable[..., Any]]

MODES: Mapping[str, Mode] = {
    "eager": lambda step: step.eager,
    "compile_default": lambda step: torch.compile(inspect.unwrap(step), dynamic=False),
    "compile_reduce_overhead": lambda step: torch.compile(inspect.unwrap(step), dynamic=False, mode="reduce-overhead"),
    "autostream": lambda step: step,
}
"""All modes by name."""

_CHECKED = 4
"""How many steps are compared: the second one of autostream is the first in a graph."""


def modes_of(step: Step, device: torch.device) -> dict[str, Mode]:
    """The modes of a step by name: torch.compile's for one that its user wrote, and CUDA graphs on a GPU."""
    written, gpu = isinstance(step, StepFunction), device.type == "cuda"
    left_out = {"compile_default": not written, "compile_reduce_overhead": not (written and gpu)}
    return {name: mode for name, mode in MODES.items() if not left_out.get(name)}


@dataclass(frozen=True)
class Steps:
    """A step in a mode, with what its first runs returned.

    Attributes:
        call: runs a step.
        returned: the tensors of the first steps.
    """

    call: Callable[[], Any]
    returned: list[Tensor]


class StepCheck:
    """Compares what steps return with the eager step.

    Args:
        fresh: makes the step.
        allowed: the largest relative error for the dtypes of these tensors. Where the step draws random numbers, which
            each mode may draw in its own way, it only has to be as close as eager steps with other numbers are.

    Raises:
        TargetError: the step fails, returns no tensors, or two runs of it differ.
    """

    def __init__(self, fresh: FreshStep, allowed: Callable[[Sequence[Tensor]], float]) -> None:
        self._fresh = fresh
        try:
            batch = tensors_in(fresh()[1])
            self._expected, again, other = (self.prepared(MODES["eager"], seed).returned for seed in (SEED, SEED, 1))
        except Exception as error:
            raise TargetError(f"the step failed: {first_line(error)}") from error
        if not self._expected:
            raise TargetError("the step returns no tensors that could be checked: return its losses")
        most, apart = allowed([*batch, *self._expected]), relative_error(again, self._expected)
        if not apart <= most:
            raise TargetError(
                f"results cannot be checked: two runs of the step differ by {apart:.1e}, {most:.1e} allowed; make its "
                "models and its batch in the factory, each time anew"
            )
        self.allowed = max(most, 2 * relative_error(other, self._expected))

    def prepared(self, mode: Mode, seed: int = SEED) -> Steps:
        """A new step in a mode, after its first steps."""
        torch.manual_seed(SEED)
        step, batch = self._fresh()
        run = mode(step)
        torch.manual_seed(seed)
        returned = [tensor.detach().clone() for _ in range(_CHECKED) for tensor in tensors_in(run(*batch))]
        return Steps(lambda: run(*batch), returned)

    def timed(self, steps: Steps) -> Callable[[], Any]:
        """What is timed of it."""
        return steps.call

    def error(self, steps: Steps) -> float:
        """The largest relative error of what the first steps returned."""
        return relative_error(steps.returned, self._expected)
