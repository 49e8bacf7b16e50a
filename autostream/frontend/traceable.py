"""Methods of PyTorch's classes that read the host, and what Dynamo traces in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.swa_utils import AveragedModel

from autostream.frontend import averages, scalers
from autostream.frontend.optimizers import is_pytorchs

_METHODS: tuple[tuple[type, Callable[..., Any]], ...] = (
    *((GradScaler, method) for method in (scalers.scale, scalers.unscale_, scalers.step, scalers.update)),
    (AveragedModel, averages.update_parameters),
)
"""Classes, and functions with the names of the methods that they replace."""


@contextmanager
def traceable_methods() -> Iterator[None]:
    """Let Dynamo trace them. In other threads, which may call them meanwhile, they do what they do."""
    with ExitStack() as stack:
        for owner, traced in _METHODS:
            eager = vars(owner)[traced.__name__]
            if is_pytorchs(eager):
                stack.enter_context(mock.patch.object(owner, traced.__name__, either(traced, eager)))
        yield


def is_traceable_method(owner: object, name: str) -> bool:
    """Whether what Dynamo reaches by this step is such a method: it reads a copy of the class's dictionary."""
    return any(
        name == method.__name__ and isinstance(owner, dict) and owner == dict(vars(kind)) for kind, method in _METHODS
    )


def either(traced: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is one to Dynamo's tracer, and the other where it is called."""

    @wraps(eager)
    def function(*args: Any, **kwargs: Any) -> Any:
        return (traced if torch.compiler.is_dynamo_compiling() else eager)(*args, **kwargs)

    return function
