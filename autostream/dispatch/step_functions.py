"""Step functions: a training step as its user writes it, which runs as one scheduled graph where it can.

call ──▶ like a recent one? ──▶ replay
          │ no
          ├─▶ do optimizers make state in it? ──▶ eager
          └─▶ StepGraphs ──refused──▶ eager, and reports have the reason
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copyreg import __newobj__  # type: ignore[attr-defined]
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from autostream.dispatch.captured_step import TracedStep, traced_step
from autostream.dispatch.eager_averages import EagerAverages
from autostream.dispatch.step_calls import WrittenStep
from autostream.dispatch.step_graphs import Done, StepGraphs
from autostream.errors import TargetError
from autostream.frontend.data_parallel import DataParallel, data_parallel_of
from autostream.frontend.dynamo import graph_break
from autostream.frontend.losses import modules_in
from autostream.frontend.optimizers import note_step
from autostream.frontend.parameters import parameters_of, stateless
from autostream.frontend.step_capture import Body
from autostream.frontend.tensor_parallel import is_distributed
from autostream.frontend.tree import map_tensors
from autostream.ir import Decision, DeviceProfile
from autostream.options import Options, disabled
from autostream.pipeline import versions
from autostream.reporting.report import Report
from autostream.runtime.input_buffers import BufferTable
from autostream.utils.locks import lock_of
from autostream.utils.logs import Log

log = Log(__name__)

_MOST_REASONS = 100


class StepFunction:
    """A step function that runs as one scheduled graph where it can, and as it is written elsewhere.

    Args:
        function: the step.
        optimizers: those whose ``step`` it calls.
        options: how to schedule it.
        data_parallel: averages the gradients of each backward, if processes share the step.

    Attributes:
        input_buffers: buffers that captured graphs read in place, filled by :func:`autostream.prefetch`.
        disabled: whether every step runs eagerly: ``AUTOSTREAM_DISABLE`` was set when this was made.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        optimizers: Sequence[Optimizer],
        options: Options,
        data_parallel: DataParallel | None = None,
    ) -> None:
        self._function, self._optimizers = function, tuple(optimizers)
        self._options, self._data_parallel = options, data_parallel
        self._averages = None if data_parallel is None else EagerAverages(data_parallel)
        update_wrapper(self, function)
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._stateless: list[frozenset[int]] = [frozenset() for _ in optimizers]
        self.input_buffers, self.disabled = BufferTable(), disabled()
        body, modules = Body(function), partial(_owner_of, function)
        step = WrittenStep(body, self._optimizers, self._name, modules, self.eager, data_parallel, averages=True)
        self._graphs = StepGraphs(step, options, self.input_buffers)
        self._eager: dict[str, Decision] = {}
        self._lock = lock_of(self)
        """Steps write the same tensors, so those of several threads run one after the other."""

    @graph_break
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step; returns what the function returns, detached. It is a graph break of ``torch.compile``."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self(*args, **kwargs)
        with self._lock, torch.set_grad_enabled(False):  # takes half the time of no_grad
            result = self._run(args, kwargs)
        for optimizer in self._optimizers:
            note_step(optimizer)
        return result

    def __get__(self, instance: object, owner: type | None = None) -> StepFunction:
        """Itself, from a class.

        Raises:
            TargetError: it decorates a method, whose object a graph cannot take as an argument.
        """
        if instance is not None:
            name = self.__name__  # type: ignore[attr-defined]
            raise TargetError(
                f"step decorates functions and bound methods: write self.{name} = autostream.step(...)(self.{name})"
            )
        return self

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.disabled:
            return self.eager(*args, **kwargs)
        if (done := self._graphs.replayed(args, kwargs)) is not None:
            return done.result
        if not all(stateless(o) <= known for o, known in zip(self._optimizers, self._stateless, strict=True)):
            result = self.eager(*args, **kwargs)
            self._stateless = [stateless(optimizer) for optimizer in self._optimizers]
            return result
        done_or_refusal = self._graphs(args, kwargs)
        if isinstance(done_or_refusal, Done):
            return done_or_refusal.result
        try:
            result = self.eager(*args, **kwargs)
        except Exception:  # capturing has failed for the same reason, which may not hold for the next call
            self._graphs.forget_refusals()
            raise
        reason = done_or_refusal.reason
        if not done_or_refusal.first and reason not in self._eager and len(self._eager) < _MOST_REASONS:
            log.warning("the step %s runs as it is written: %s", self._name, reason)
            self._eager[reason] = Decision("", "plain", reason)
        return result

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step as it is written."""
        averaging = self._averages.after_backwards(self._optimizers) if self._averages else nullcontext()
        with torch.enable_grad(), averaging:
            return map_tensors(Tensor.detach, self._function(*args, **kwargs))

    @property
    def has_shards(self) -> bool:
        """Whether it trains DTensors, of which each process has a part."""
        return any(is_distributed(each) for optimizer in self._optimizers for each in parameters_of(optimizer))

    def over(self, group: ProcessGroup | Literal[False]) -> StepFunction:
        """The same step, whose gradients are averaged over this group, or over none."""
        return StepFunction(self._function, self._optimizers, self._options, data_parallel_of(group))

    def traced(self, args: tuple[Any, ...], options: Options, profile: DeviceProfile | None = None) -> TracedStep:
        """The step, traced for dry runs, after one eager step, which makes the optimizers' state.

        Raises:
            OptionError: see :func:`autostream.pipeline.plan`.
            TargetError: the step itself fails.
            TraceError: no graph computes the step.
        """
        with self._lock, torch.set_grad_enabled(False):
            return traced_step(self._graphs.step, self.eager, args, options, profile)

    @property
    def reports(self) -> tuple[Report, ...]:
        """A report for each kind of call, the most recently used first, then one for calls that run as written."""
        reports = self._graphs.reports
        if not self._eager:
            return reports
        refusals = tuple(self._eager.values())
        return (*reports, Report(self._name, "some steps", "plain", refusals=refusals, versions=versions()))

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        """Copy and pickle the step of an object with its object; the copy compiles its own graphs.

        A decorated function is, as every function, copied and pickled as a reference to it.
        """
        if not isinstance(self._function, MethodType):
            return self.__qualname__  # type: ignore[attr-defined, no-any-return]
        parts = self._function.__func__, self._function.__self__, self._optimizers, self._options, self._data_parallel
        return __newobj__, (type(self),), parts

    def __setstate__(self, parts: tuple[Any, ...]) -> None:
        function, instance, *others = parts
        self.__init__(MethodType(function, instance), *others)  # type: ignore[misc]

    def __repr__(self) -> str:
        """The class with the function."""
        return f"{type(self).__name__}({self._name})"


def _owner_of(function: Callable[..., Any]) -> nn.Module:
    """One module with the modules that the step refers to, for names in reports."""
    owner = nn.Module()
    for at, module in enumerate(modules_in(function)):
        owner.add_module(f"module_{at}", module)
    return owner
