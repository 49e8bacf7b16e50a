"""The ``torch.compile`` backend: ``torch.compile(model, backend="autostream", options={"streams": 4})``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch.fx import GraphModule

from autostream.dispatch.compiled_graph import CompiledGraph, InputNames, eager_reason, reports_of_graph
from autostream.dispatch.optimized_callable import OptimizedCallable
from autostream.dispatch.requirements import check_requirements
from autostream.dispatch.scheduled_program import ModelContext
from autostream.errors import OptionError
from autostream.frontend.autograd import op_by_op, run_graph
from autostream.frontend.inputs import names_like
from autostream.ir import Decision, Role
from autostream.options import Options, disabled
from autostream.pipeline import versions
from autostream.reporting.report import Report
from autostream.runtime.cuda_graph import GraphPools
from autostream.runtime.input_buffers import BufferTable


def autostream(
    module: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's, which is scheduled when it is first called.

    Args:
        module: the graph.
        example_inputs: from Dynamo; sizes among them become part of the signature.
        options: as for :func:`autostream.optimize`.

    Returns:
        A callable that runs the graph. If an option is unknown or has a value that is not allowed, calling it raises
        an :class:`~autostream.errors.OptionError`; raised earlier, Dynamo would wrap it in an error of its own.

    Example:
        >>> import torch
        >>> fast = torch.compile(torch.nn.ReLU(), backend="autostream")
        >>> with torch.no_grad():
        ...     fast(torch.tensor([-1.0, 1.0]))
        tensor([0., 1.])
    """
    try:
        chosen = Options.parse(dict(options or {}))
        names = names_like(example_inputs)
        state = [value for value, (role, _) in zip(example_inputs, names, strict=True) if role is not Role.INPUT]
        check_requirements(chosen, state)
    except OptionError as error:
        return _refusing(str(error))
    return BackendGraph(module, example_inputs, chosen)


class BackendGraph(OptimizedCallable):
    """Runs a graph of Dynamo's; :func:`autostream.explain` takes it.

    Args:
        module: the graph.
        example_inputs: from Dynamo.
        options: how to schedule.

    Attributes:
        disabled: whether it runs op by op, as ``AUTOSTREAM_DISABLE`` was set when this was made.
    """

    def __init__(self, module: GraphModule, example_inputs: Sequence[Any], options: Options) -> None:
        self._context = ModelContext(options, GraphPools(), BufferTable())
        self._compiled: list[CompiledGraph] = []
        self._reason = eager_reason(options, example_inputs)
        self.disabled = disabled()
        eager = self.disabled or self._reason
        self._run = op_by_op(module, example_inputs) if eager else run_graph(module, example_inputs, self._make)

    def __call__(self, *values: Any) -> Any:
        """Run the graph."""
        return self._run(*values)

    @property
    def reports(self) -> tuple[Report, ...]:
        """The reports of the graph, or one of its forward and its backward."""
        if not self._reason:
            return reports_of_graph("GraphModule", self._compiled)
        refusal = Decision("", "plain", self._reason)
        return (Report("GraphModule", "gradients", "plain", refusals=(refusal,), versions=versions()),)

    def _make(self, module: GraphModule, names: InputNames, *, half: str = "") -> CompiledGraph:
        compiled = CompiledGraph(module, names, "GraphModule", self._context, half=half)
        self._compiled.append(compiled)
        return compiled


def _refusing(reason: str) -> Callable[..., NoReturn]:
    def refuse(*args: object) -> NoReturn:
        raise OptionError(reason)

    return refuse
