"""Gradient scalers in a graph: ``GradScaler``'s own code, run on the tensors of a trace.

    unscale_, step, update ──Dynamo──▶ an op for each ──trace──▶ the same method, of a scaler of traced tensors

Nothing goes to the host: a step whose gradients are not finite is computed too, and what it wrote is set back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from autostream.errors import TraceError
from autostream.frontend.parameters import clear_gradients
from autostream.frontend.reasons import EACH_OPTIMIZER

_LIBRARY = torch.library.Library("autostream", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "scaler(str method, Tensor scale, Tensor growth_tracker, float growth_factor, float backoff_factor, "
    "int growth_interval, int index, Tensor[] parameters, Tensor?[] gradients) -> ()"
)
"""Stands for the call of a scaler's method, with the optimizer with this index; it is never run in a captured graph."""


def _nothing(*_: Any) -> None: ...


torch.library.register_fake("autostream::scaler", _nothing)
_LIBRARY.impl("scaler", _nothing, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]

SCALER = torch.ops.autostream.scaler


def scale(self: Any, outputs: Any) -> Any:
    """What ``GradScaler.scale`` does, on one device."""
    if type(self) not in _CLASSES:
        raise TraceError("it has a scaler that is none of PyTorch's")
    if not self._enabled:
        return outputs
    if not isinstance(outputs, Tensor):
        return type(outputs)([self.scale(output) for output in outputs])
    if self._scale is None:
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=outputs.device)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=outputs.device)
    return outputs * self._scale.to(outputs.device)


def unscale_(self: Any, optimizer: Any) -> None:
    """An op for ``GradScaler.unscale_``."""
    if self._enabled:
        _scaled(optimizer, "unscale_", self)


def step(self: Any, optimizer: Any) -> None:
    """An op for ``GradScaler.step``."""
    if self._enabled:
        _scaled(optimizer, "step", self)
    else:
        optimizer.step()


def update(self: Any) -> None:
    """An op for ``GradScaler.update``."""
    if self._enabled:
        call("update", self, -1, [])


_CLASSES = (GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler)  # type: ignore[attr-defined]


def _scaled(optimizer: Any, method: str, scaler: Any) -> None:
    try:  # ``hasattr`` would be guarded
        scaled = optimizer.scaled
    except AttributeError:
        scaled = None
    if scaled is None:
        raise TraceError(f"it gives a GradScaler another optimizer: {EACH_OPTIMIZER}")
    scaled(method, scaler)


def call(method: str, scaler: Any, index: int, parameters: Sequence[Tensor]) -> None:
    """The op for a method of a scaler, where Dynamo traces it."""
    if len(scaler._per_optimizer_states) > 0:  # whether it is true is not guarded in torch 2.13
        raise TraceError("it begins between unscale_() and update() of its GradScaler")
    numbers = scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval
    gradients = [parameter.grad for parameter in parameters]
    with torch.no_grad():
        SCALER(method, scaler._scale, scaler._growth_tracker, *numbers, index, parameters, gradients)


class _Scaler(GradScaler):
    def _maybe_opt_step(self, optimizer: Any, optimizer_state: dict[str, Any], *_: Any, **__: Any) -> None:
        found = [*optimizer_state["found_inf_per_device"].values()]
        optimizer.step(reduce(torch.add, (each.to(found[0].device) for each in found)))


class Scalers:
    """The scalers of a trace.

    Args:
        update: runs the step of the optimizer with an index on parameters with these gradients, unless the last of its
            arguments is a tensor that is not zero.
    """

    def __init__(self, update: Callable[[int, Sequence[Tensor], Sequence[Tensor | None], Tensor], None]) -> None:
        self._update = update
        self._scalers = dict[Tensor, _Scaler]()
        self._optimizers = dict[int, SimpleNamespace]()

    def __call__(
        self,
        method: str,
        scale: Tensor,
        growth_tracker: Tensor,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        index: int,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Call a method."""
        scaler = self._scalers.get(scale)
        if scaler is None:
            scaler = self._scalers[scale] = _Scaler("cpu", 1.0, growth_factor, backoff_factor, growth_interval)
            scaler._scale, scaler._growth_tracker = scale, growth_tracker
        if method == "update":
            scaler.update()
            return
        optimizer = self._optimizers.setdefault(index, SimpleNamespace())
        optimizer.param_groups = [{"params": parameters}]
        optimizer.step = partial(self._update, index, parameters, gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        getattr(scaler, method)(optimizer)
        clear_gradients(parameters)

    def check(self) -> None:
        """Check that each scaler has ended its step.

        Raises:
            TraceError: one has not.
        """
        if any(scaler._per_optimizer_states for scaler in self._scalers.values()):
            raise TraceError("it leaves a GradScaler between unscale_() and update(): call scaler.update() in it")
