"""A scheduled method of a module: a plain callable, so that it can be an attribute of the module that it belongs to.

    model._compiled_call_impl ─┐
    model.forward ─────────────┼─▶ OptimizedMethod ──▶ Dispatcher ──▶ graphs of the method, or the method itself
    model.training_step ───────┘

The first is where ``nn.Module.compile`` puts its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from inspect import unwrap
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule

from autostream.dispatch.dispatcher import Dispatcher
from autostream.dispatch.optimized_callable import OptimizedCallable
from autostream.frontend.modules import FunctionModule, forward_of
from autostream.reporting.report import Report


class OptimizedMethod(OptimizedCallable):
    """A method with its schedules. It has the method's signature, and does not run where a graph of it is traced.

    It is no module: assigned to an attribute of its owner, it does not become a submodule.

    Args:
        dispatcher: runs the method's calls.

    Attributes:
        dispatcher: the same.

    Example:
        >>> from autostream.options import Options
        >>> from autostream.frontend.modules import module_of
        >>> relu = torch.nn.ReLU()
        >>> relu.forward = OptimizedMethod(Dispatcher(module_of(relu.forward), Options()))
        >>> relu(torch.tensor([-1.0, 1.0])), list(relu.children())
        (tensor([0., 1.]), [])
        >>> [report.signature for report in relu.forward.reports]
        ['2:float32 on cpu, train, no gradients']
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        if torch.compiler.is_dynamo_compiling():
            model = self.dispatcher.model
            return (model._autostream_function if isinstance(model, FunctionModule) else model)(*args, **kwargs)
        return self.dispatcher(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What takes the arguments, for :func:`inspect.signature`."""
        return forward_of(self.dispatcher.model)

    @property
    def __code__(self) -> CodeType:
        """Of what takes the arguments, which ``torch.export`` names in its errors."""
        code: CodeType = unwrap(self.__wrapped__).__code__
        return code

    @property
    def reports(self) -> tuple[Report, ...]:
        """See :attr:`Dispatcher.reports`."""
        return self.dispatcher.reports

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """See :meth:`Dispatcher.prepare`."""
        self.dispatcher.prepare(*args, **kwargs)

    def static_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`Dispatcher.static_inputs`."""
        return self.dispatcher.static_inputs(*args, **kwargs)

    def lowered(self, *args: Any, **kwargs: Any) -> GraphModule | None:
        """See :meth:`Dispatcher.lowered`."""
        return self.dispatcher.lowered(*args, **kwargs)

    def __repr__(self) -> str:
        """The class with the model's or the method's name."""
        return f"{type(self).__name__}({self.dispatcher.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the method, with its owner, and the options, without schedules."""
        return OptimizedMethod, (copy.copy(self.dispatcher),)
