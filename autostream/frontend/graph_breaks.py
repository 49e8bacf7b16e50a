"""Graph breaks: what runs a model that Dynamo cannot capture as one graph.

``torch.compile`` splits such a model at graph breaks, runs what is between the graphs in Python, and compiles each
graph with a backend of ours. Private interfaces of Dynamo are listed in ``frontend/__init__.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from autostream.errors import first_line
from autostream.frontend.dynamo import compiling, errors_not_logged
from autostream.frontend.reasons import reason_of_break
from autostream.utils.locks import preparing

Backend = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
"""A backend of ``torch.compile``."""

_RECOMPILES = 1024
"""Limit of recompilations. All models of a class share one limit, and ``dispatch/admission.py`` decides instead."""

_BACKEND = "_torchdynamo_orig_backend"
"""The attribute of a callback by which Dynamo finds the code that it has compiled before."""

_NESTED = "using FX to symbolically trace a dynamo-optimized function"

_STANCES_WITH_CALLBACK = ("default", "force_eager")
"""The stances in which compiled code may be called without the lock: compiling, if any, goes through the callback."""


def with_breaks(model: nn.Module, backend: Backend, on_skip: Callable[[str], None]) -> Callable[..., Any]:
    """A function that runs the model as graphs, each made by ``backend`` in the first call that reaches it.

    Args:
        model: the model.
        backend: makes what runs a graph.
        on_skip: gets the reason for which Dynamo runs a part of the model eagerly.
    """
    from torch._dynamo.exc import ResumePrologueTracingError, TorchDynamoException
    from torch._dynamo.types import ConvertFrameReturn

    settings = {
        "use_recursive_dict_tags_for_guards": False,  # guards.py cannot correct Dynamo's choice for these guards
        "suppress_errors": True,
        "trace_autograd_ops": False,  # of a loss that an earlier graph has computed, it would trace no backward
        "capture_scalar_outputs": False,  # a graph that returned a number could not be scheduled: it ends there instead
        "recompile_limit": _RECOMPILES,
        "accumulated_recompile_limit": _RECOMPILES,
    }
    context: Any = torch._dynamo.optimize(backend, dynamic=False)
    compile_frame: Any = getattr(context, "callback", None)
    has_callback = callable(compile_frame) and hasattr(compile_frame, _BACKEND)
    if has_callback:

        def callback(*args: Any, **kwargs: Any) -> Any:
            with compiling(**settings), errors_not_logged(on_skip):
                try:
                    return compile_frame(*args, **kwargs)
                except TorchDynamoException as error:  # some are raised in spite of ``suppress_errors``
                    if isinstance(error, ResumePrologueTracingError):
                        raise
                    on_skip(first_line(error))
                    return ConvertFrameReturn()

        setattr(callback, _BACKEND, getattr(compile_frame, _BACKEND))
        context.callback = callback
    compiled: Callable[..., Any] = context(model)

    def run(*args: Any, **kwargs: Any) -> Any:
        if has_callback and _stance() in _STANCES_WITH_CALLBACK:
            try:
                return compiled(*args, **kwargs)
            except RuntimeError as error:
                if _NESTED not in str(error):
                    raise
                return model(*args, **kwargs)  # another thread is tracing, and nothing has run yet
        with preparing, compiling(**settings), errors_not_logged(on_skip):
            return compiled(*args, **kwargs)

    return run


def _stance() -> str:
    """The user's stance on compiling (``torch.compiler.set_stance``): some stances replace the callback."""
    return getattr(getattr(torch._dynamo.eval_frame, "_stance", None), "stance", "unknown")


def ending_of(module: GraphModule) -> str:
    """The reason for the graph break after a graph, with the user's line; ``""`` without a break."""
    reason = getattr(module, "compile_subgraph_reason", None)
    return reason_of_break(reason.reason, reason.user_stack) if reason and reason.graph_break else ""
