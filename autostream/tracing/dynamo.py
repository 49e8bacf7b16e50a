"""Tracing through TorchDynamo, which splits a model where it cannot follow it; the parts that it can are graphs.

What is private to Dynamo is used here alone. Run on torch 2.11 and 2.13.
"""

from __future__ import annotations

import logging
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from autostream.errors import TraceError, first_line

_MANY = 1024

CompilePiece = Callable[[GraphModule, frozenset[int]], Callable[..., Any]]
"""Takes a graph and the positions of its inputs that stay where they are; returns what to run in its place."""


def split(
    model: nn.Module, compile_piece: CompilePiece, refused: Callable[[str], None], *, take_numbers: bool = False
) -> Callable[..., Any]:
    """A function that runs the model in pieces, each made by ``compile_piece`` in the first call that gets there.

    Sizes and numbers are specialised: a piece is made anew for others, as graphs for other signatures are. Where pieces
    take numbers, one that has been another is an input from then on: a float as a tensor without dimensions, a whole
    number or a size as what it is. What Dynamo fails to trace runs as it is from there on, for what came before has
    been done already; ``refused`` is told the reason.
    """

    def backend(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if "_lower_version_count_by_1(" in module.code:  # Dynamo's own, which fails at tensors of inference mode
            raise TraceError("the model gives a tensor other memory (.data = …), which a piece would not")
        if reason := drawn_again(module):
            raise TraceError(reason)
        return compile_piece(module, bound_inputs(example_inputs))

    compiling = partial(_compiling, refused)
    context: Any = torch._dynamo.optimize(backend, dynamic=None if take_numbers else False)
    within = _compiles_within(context, compiling)
    compiled = context(model)

    def run(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if within and _stance() == "default" else compiling():
            return compiled(*args, **kwargs)

    return run


def drawn_again(module: GraphModule) -> str:
    """Why the backward of a graph of Dynamo's would draw other random numbers than its forward has, or ``""``.

    Where a part is checkpointed, Dynamo leaves it to AOTAutograd to put the generators' states back.
    """
    graphs = (graph for graph in module.modules() if isinstance(graph, GraphModule))
    found = any("tag_activation_checkpoint(" in graph.code for graph in graphs)
    return "a part is checkpointed, whose backward, if any, would draw other random numbers" if found else ""


def aot_eager(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A graph of Dynamo's as AOTAutograd has it run, forward and backward, op by op."""
    run: Callable[..., Any] = torch._dynamo.lookup_backend("aot_eager")(module, [*example_inputs])
    return run


def _stance() -> str:
    """How the user has Dynamo go about compiling (``torch.compiler.set_stance``): some ways lead past its callbacks."""
    return getattr(getattr(torch._dynamo.eval_frame, "_stance", None), "stance", "unknown")


@contextmanager
def _compiling(refused: Callable[[str], None]) -> Iterator[None]:
    """Let Dynamo, in this thread, have settings for our pieces, and pass on why it leaves something alone."""
    from torch._dynamo import config

    # Models of one class share a limit of compilations; each of ours is for one signature, so none is in vain.
    limits = {"recompile_limit": _MANY, "accumulated_recompile_limit": _MANY}
    # As PyTorch's, NumPy's calls would draw other numbers and return arrays where there were scalars.
    with config.patch({"suppress_errors": True, "trace_numpy": False, **limits}), _overheard(refused):
        yield


def _compiles_within(context: Any, compiling: Callable[[], AbstractContextManager[None]]) -> bool:
    """Have Dynamo enter a context where it compiles a frame, rather than at each call, which takes as long as Dynamo.

    Private: the callback of its contexts (2.11 and 2.13). Where a version has none, nothing is done. Compilations of
    several threads come one after another, since settings are the whole process's in some versions (2.11).
    """
    lock = getattr(torch._dynamo.convert_frame, "compile_lock", None) or nullcontext()  # Dynamo's own: no other order
    compile_frame = getattr(context, "callback", None)
    if not callable(compile_frame) or not hasattr(compile_frame, _BACKEND):
        return False

    def callback(*args: Any, **kwargs: Any) -> Any:
        with lock, compiling():
            return compile_frame(*args, **kwargs)

    setattr(callback, _BACKEND, getattr(compile_frame, _BACKEND))  # by it Dynamo finds what it has compiled
    context.callback = callback
    return True


_BACKEND = "_torchdynamo_orig_backend"


@contextmanager
def _overheard(refused: Callable[[str], None]) -> Iterator[None]:
    """Pass on why Dynamo leaves something alone, instead of letting it log that at length; in this thread only."""
    thread = threading.get_ident()

    def elsewhere(record: logging.LogRecord) -> bool:
        if record.thread != thread or not record.exc_info:
            return True
        if record.name == _CONVERT_FRAME and isinstance(record.exc_info[1], Exception):
            refused(first_line(record.exc_info[1]))
        return False

    loggers = [logging.getLogger(name) for name in (_CONVERT_FRAME, "torch._subclasses.fake_tensor")]
    for logger in loggers:
        logger.addFilter(elsewhere)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(elsewhere)


_CONVERT_FRAME = "torch._dynamo.convert_frame"


def bound_inputs(example_inputs: Sequence[Any]) -> frozenset[int]:
    """Positions of the inputs that are weights or buffers of the model that Dynamo is splitting.

    Dynamo marks buffers with an attribute of its own. Where a version does not, they count as inputs like any other and
    are copied at each call: slower, and as right.
    """
    return frozenset(
        index
        for index, value in enumerate(example_inputs)
        if isinstance(value, nn.Parameter) or getattr(value, "_dynamo_static_input_type", None) is not None
    )


def ending_of(module: GraphModule) -> tuple[str, str]:
    """Why a piece ends where it does, and the stack there as text; nothing where the model returns.

    Dynamo keeps that with the graph (seen in 2.11 and 2.13). Where a version does not, nothing is known of it.
    """
    found = getattr(module, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return "", ""
    reason = found.reason.strip().partition("\n")[0]
    said = "a branch depends on the value of a tensor" if reason.startswith("generic_jump") else reason
    return said, "".join(traceback.format_list(found.user_stack))


def without_numbers(code: str) -> str:
    """The code of a graph without the numbers in it; those in names stay.

    Example:
        >>> without_numbers("mul_1 = relu_2 * 3.5e-05")
        'mul_1 = relu_2 * _'
    """
    return re.sub(r"(?<![\w.])\d[\d.]*(e[+-]?\d+)?", "_", code)


def is_refusal(error: Exception) -> bool:
    """Whether an exception says that Dynamo cannot handle the model, rather than that the model itself failed."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)
