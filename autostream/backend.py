"""The ``torch.compile`` backend: ``torch.compile(model, backend="autostream", options={"streams": 4})``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from autostream.api import OptimizedModule
from autostream.options import Options
from autostream.tracing.dynamo import bound_inputs


def autostream(
    module: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Schedule one graph of Dynamo's, when it is first called.

    Args:
        module: the graph.
        example_inputs: as Dynamo passes them; sizes among them become part of the signature.
        options: as for :func:`autostream.optimize`.

    Raises:
        OptionError: an option is unknown or has a value that is not allowed.

    Example:
        >>> import torch
        >>> fast = torch.compile(torch.nn.ReLU(), backend="autostream")
        >>> with torch.no_grad():
        ...     fast(torch.tensor([-1.0, 1.0]))
        tensor([0., 1.])
    """
    return OptimizedModule(module, Options.parse(dict(options or {})), bound_inputs(example_inputs))
