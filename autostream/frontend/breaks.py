"""A model that Dynamo cannot capture as one graph: ``torch.compile`` splits it at graph breaks.

Private interfaces of Dynamo (seen in torch 2.11 and 2.13): the ``callback`` of its contexts and what that returns, its
exceptions, the stance that the user takes, and the reason for which a graph ends (``compile_subgraph_reason``).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from autostream.errors import first_line
from autostream.frontend.capture import compiling
from autostream.frontend.dynamo_log import overheard
from autostream.utils.locks import preparing

_MANY = 1024

Backend = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
"""As ``torch.compile`` takes one."""


def with_breaks(model: nn.Module, backend: Backend, refused: Callable[[str], None]) -> Callable[..., Any]:
    """A function that runs the model in graphs, each made by ``backend`` in the first call that gets there.

    Args:
        model: the model.
        backend: makes what runs a graph.
        refused: is told why Dynamo runs a part of the model as it is.
    """
    from torch._dynamo.exc import ResumePrologueTracingError, TorchDynamoException
    from torch._dynamo.types import ConvertFrameReturn

    # Models of one class share a limit of recompilations: whether one more is worth it is not for Dynamo to say here.
    # A number that a graph returns keeps it from being scheduled: it ends there. Whether what guards skip is vouched
    # for can be looked at only where they are built here.
    settings = {
        "use_recursive_dict_tags_for_guards": False,
        "suppress_errors": True,
        "capture_scalar_outputs": False,
        "recompile_limit": _MANY,
        "accumulated_recompile_limit": _MANY,
    }
    context: Any = torch._dynamo.optimize(backend, dynamic=False)
    compile_frame: Any = getattr(context, "callback", None)
    ours = callable(compile_frame) and hasattr(compile_frame, _BACKEND)
    if ours:

        def callback(*args: Any, **kwargs: Any) -> Any:
            with compiling(**settings), overheard(refused):
                try:
                    return compile_frame(*args, **kwargs)
                except TorchDynamoException as error:  # some it raises whatever it is told
                    if isinstance(error, ResumePrologueTracingError):
                        raise
                    refused(first_line(error))
                    return ConvertFrameReturn()

        setattr(callback, _BACKEND, getattr(compile_frame, _BACKEND))  # by it Dynamo finds what it has compiled
        context.callback = callback
    compiled: Callable[..., Any] = context(model)

    def run(*args: Any, **kwargs: Any) -> Any:
        if ours and _stance() in _PAST_NO_CALLBACK:
            try:
                return compiled(*args, **kwargs)
            except RuntimeError as error:
                if _NESTED not in str(error):
                    raise
                return model(*args, **kwargs)  # another thread is tracing, and nothing has been run yet
        with preparing, compiling(**settings), overheard(refused):
            return compiled(*args, **kwargs)

    return run


def _stance() -> str:
    """How the user has Dynamo go about compiling (``torch.compiler.set_stance``): some ways lead past its callbacks."""
    return getattr(getattr(torch._dynamo.eval_frame, "_stance", None), "stance", "unknown")


_NESTED = "using FX to symbolically trace a dynamo-optimized function"

_PAST_NO_CALLBACK = ("default", "force_eager")


_BACKEND = "_torchdynamo_orig_backend"


def ending_of(module: GraphModule) -> tuple[str, str]:
    """Why a graph ends where it does, and the stack there as text; nothing where the model returns."""
    found = getattr(module, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return "", ""
    reason = found.reason.strip().partition("\n")[0]
    said = "a branch depends on the value of a tensor" if reason.startswith("generic_jump") else reason
    return said, "".join(traceback.format_list(found.user_stack))
