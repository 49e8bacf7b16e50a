"""The ``torch.compile`` backend: ``torch.compile(model, backend="autostream", options={"streams": 4})``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch.fx import GraphModule

from autostream.api import OptimizedModule
from autostream.dispatch import Dispatcher
from autostream.errors import OptionError
from autostream.options import Options
from autostream.tracing.dynamo import aot_eager, bound_inputs, drawn_again
from autostream.tracing.inductor import check_level

log = logging.getLogger(__name__)


def autostream(
    module: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Schedule one graph of Dynamo's, when it is first called.

    Args:
        module: the graph.
        example_inputs: as Dynamo passes them; sizes among them become part of the signature.
        options: as for :func:`autostream.optimize`.

    Returns:
        What runs in the place of the graph. Where an option is unknown or has a value that is not allowed, its calls
        raise an :class:`~autostream.errors.OptionError`: of one raised earlier, Dynamo would make pages of its own.

    Example:
        >>> import torch
        >>> fast = torch.compile(torch.nn.ReLU(), backend="autostream")
        >>> with torch.no_grad():
        ...     fast(torch.tensor([-1.0, 1.0]))
        tensor([0., 1.])
    """
    bound = bound_inputs(example_inputs)
    try:
        chosen = Options.parse(dict(options or {}))
        check_level(chosen.kernels, [example_inputs[at] for at in bound])
        if reason := drawn_again(module):
            log.warning("a graph is not scheduled, but left to AOTAutograd: %s", reason)
            return aot_eager(module, example_inputs)
        return OptimizedModule(Dispatcher(module, chosen, bound))
    except OptionError as error:
        return _refusing(str(error))


def _refusing(reason: str) -> Callable[..., NoReturn]:
    def refuse(*args: object) -> NoReturn:
        raise OptionError(reason)

    return refuse
