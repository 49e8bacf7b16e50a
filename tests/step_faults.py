"""Steps that meet faults beside eager ones that meet the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import autostream
from autostream.dispatch.captured_step import CapturedStep
from autostream.dispatch.step_functions import StepFunction
from tests.faults import Noisy, Risk
from tests.semantics import same

X = torch.randn(4, 8, dtype=torch.double, generator=torch.Generator().manual_seed(1))


class Trainer:
    """A model, an average that follows it, and the step that trains it; and everything that may go wrong there.

    Args:
        device: where it is trained.
        options: of the step; without them it is the eager one.
    """

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        torch.manual_seed(0)
        self.fails = False
        self.model = Noisy().double().to(device)
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.adam = torch.optim.Adam(self.model.parameters(), lr=0.01)
        decorate: Any = autostream.step(optimizers=[self.adam], **options) if options else lambda function: function
        self.step = decorate(self.update)
        self._calls = 0

    def update(self, x: Tensor) -> Tensor:
        self.adam.zero_grad()  # else it is captured twice: with gradients, and without
        loss = self.model(x).square().mean()
        if self.fails:
            raise ValueError("the user's own")
        loss.backward()
        self.adam.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 0.1)
        self.adam.zero_grad()
        return loss.detach()

    def call(self, *batch: Any) -> Any:
        """The step's result, or the error that it raises."""
        self._calls += 1
        torch.manual_seed(self._calls)
        try:
            return self.step(*batch)
        except BaseException as error:
            return type(error), str(error)

    @property
    def state(self) -> list[Any]:
        """All that a step may write."""
        parameters = [*self.model.parameters()]
        tensors = [*parameters, *self.model.buffers(), *self.average.parameters(), *_generators()]
        states = [dict(self.adam.state.get(parameter, {})) for parameter in parameters]
        for state in states:
            if "step" in state:
                state["step"] = state["step"].cpu()  # where a graph has read it, it stays on the GPU
        return copy.deepcopy([tensors, [parameter.grad for parameter in parameters], states])

    @property
    def surroundings(self) -> list[object]:
        """What a capture changes of optimizers and of PyTorch, until it ends."""
        from torch._dynamo.side_effects import SideEffects
        from torch._dynamo.variables import TensorVariable

        return [
            sorted(vars(self.adam).keys() - {"_opt_called"}),
            [sorted(vars(parameter)) for parameter in self.model.parameters()],
            copy.deepcopy([{**group, "params": ()} for group in self.adam.param_groups]),
            SideEffects.register_hook,
            TensorVariable._collect_backward_inputs,
            torch.amp.GradScaler.step,
            torch.is_anomaly_enabled(),
            torch._C._is_multithreading_enabled(),
            torch._C._functorch.maybe_current_level(),
        ]


Script = Sequence[tuple[Any, ...] | Callable[[Trainer], object]]


def check_alike(ours: Trainer, eager: Trainer, script: Script = ((X,), (X,))) -> None:
    """Let both do the same, and compare each outcome and all that it leaves."""
    for act in script:
        if callable(act):
            act(ours), act(eager)
            continue
        outcomes, states = zip(*[(each.call(*act), each.state) for each in (ours, eager)], strict=True)
        same(*outcomes, tolerance=1e-10)
        same(*states, tolerance=1e-10)


def modes(trainer: Trainer) -> list[str]:
    return [report.mode for report in trainer.step.reports]


def strike_steps(
    options: Mapping[str, Any], make_fault: Callable[[], BaseException], runs: Iterable[int], device: str = "cpu"
) -> int:
    """Let an op raise in one of its runs while a step is prepared, in another each time; count the errors."""
    x, struck = X.to(device), 0
    for run in runs:
        ours, eager = Trainer(device, **options), Trainer(device)
        check_alike(ours, eager, [(x,)])
        torch.manual_seed(7)
        before, surroundings = ours.state, ours.surroundings
        Risk.is_at(run, make_fault)
        with pytest.MonkeyPatch.context() as patch:  # nothing but the preparation runs
            patch.setattr(CapturedStep, "run", _end)
            patch.setattr(StepFunction, "eager", _end)
            with pytest.raises((Prepared, KeyboardInterrupt)) as raised:
                ours.step(x)
        strikes = Risk.runs >= run
        Risk.is_over()
        assert (raised.type is KeyboardInterrupt) == (strikes and make_fault is KeyboardInterrupt)
        same(ours.state, before)
        assert ours.surroundings == surroundings
        check_alike(ours, eager, [(x,), (x,)])
        if not strikes:
            break
        struck += 1
    return struck


class Prepared(Exception):  # noqa: N818 - says how far a call has come
    """The step has been prepared, or refused."""


def _end(*_: Any) -> Any:
    raise Prepared


def _generators() -> list[Tensor]:
    """The states of the random generators."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
