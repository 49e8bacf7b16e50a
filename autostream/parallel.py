"""``Parallel``: a module whose children run side by side on CUDA streams.

    call ──▶ traced, on the CPU, or one stream? ──▶ one child after another; if it is traced, the scheduler decides
              │ no
              └─▶ children as ops, scheduled over streams (dispatch/children.py)

Results, random numbers and gradients are those of the children called one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from autostream.dispatch.children import Arguments, shared_buffers, side_by_side
from autostream.errors import OptionError, TargetError, TraceError, shown
from autostream.frontend.eager_only import unusual_tensor, watched_call
from autostream.frontend.tree import flatten
from autostream.options import Options, disabled
from autostream.runtime.runs import StreamRun

_AUTO_STREAMS = 8
"""How many streams CUDA runs side by side by default (``CUDA_DEVICE_MAX_CONNECTIONS``)."""


class Parallel(nn.Module):
    """Modules that run side by side on the same input, or each on an input of its own; their results are joined.

    ``Parallel(left, right)(x)`` is ``(left(x), right(x))``. A tuple with one input for each module is distributed:
    ``Parallel(left, right)((x, y))`` is ``(left(x), right(y))``, so one may follow another in an ``nn.Sequential``.
    Several arguments, and keyword arguments, go to every module.

    :func:`autostream.optimize`, :func:`autostream.train_step` and ``torch.compile`` trace through it, and the scheduler
    finds out what is independent and what is faster. Elsewhere, modules and their backwards run on CUDA streams. That
    helps if they keep the GPU busy for longer than the host takes to launch them. On the CPU they run one after
    another. Random numbers are always generated in the order of the modules.

    Args:
        modules: at least one. None may write to its input, nor change a container that it is given: that raises an
            error on CUDA streams, except for inference tensors, which have no version counter; elsewhere the other
            modules may see it. A submodule of several modules must not set plain attributes while they run; it may
            write buffers. They may be on several devices.
        streams: how many at most, the caller's among them, or ``"auto"``.
        reduce: a function or module that takes the results as arguments, such as ``torch.mm`` for two; without it, the
            tuple of them is returned.

    Raises:
        OptionError: ``streams`` has a value that is not allowed.
        TargetError: there is no module, or an argument is no module. Calls raise it if a tuple does not have one input
            for each module, or, on CUDA streams, if a module writes to its input or returns a container of an unknown
            type.

    Example:
        >>> both = Parallel(nn.ReLU(), nn.Tanh(), reduce=torch.add)
        >>> both(torch.tensor([-1.0, 0.0]))
        tensor([-0.7616,  0.0000])
        >>> nn.Sequential(Parallel(nn.ReLU(), nn.Identity()), both)(torch.zeros(2))
        tensor([0., 0.])
    """

    def __init__(
        self,
        *modules: nn.Module,
        streams: Literal["auto"] | int = "auto",
        reduce: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        if not modules:
            raise TargetError("Parallel takes at least one module")
        for module in modules:
            if isinstance(module, (list, tuple, nn.ModuleList)):
                raise TargetError(f"Parallel takes modules, not {shown(module)} of them: write Parallel(*modules)")
            if not isinstance(module, nn.Module):
                raise TargetError(f"Parallel takes modules, not {shown(module)}: make it an nn.Module")
        if reduce is not None and not callable(reduce):
            raise OptionError(f"reduce={reduce!r} is not allowed: use None or a function of {len(modules)} results")
        if reduce is sum:  # sum(a, b) adds up the rows of the first result
            raise OptionError("reduce=sum is not allowed: it takes one list; use lambda *results: sum(results)")
        self.branches = nn.ModuleList(modules)
        self.streams = Options(streams=streams).streams
        self.reduce = reduce
        self._disabled = disabled()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The tuple of the modules' results, or ``reduce(*results)``."""
        arguments = self._arguments(inputs, kwargs)
        results = self._in_order(arguments) if torch.compiler.is_compiling() else self._results(arguments)
        return results if self.reduce is None else self.reduce(*results)

    def extra_repr(self) -> str:
        """Its number of streams."""
        return f"streams={self.streams!r}"

    def _arguments(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, ...]:
        """The arguments of each module."""
        count = len(self.branches)
        if len(inputs) != 1 or type(inputs[0]) is not tuple:  # a named tuple is one value
            return ((inputs, kwargs),) * count
        if len(inputs[0]) != count:
            raise TargetError(
                f"Parallel has {count} modules and is given a tuple of {len(inputs[0])} inputs: give one each"
            )
        return tuple(((each,), kwargs) for each in inputs[0])

    def _in_order(self, arguments: tuple[Arguments, ...]) -> tuple[Any, ...]:
        return tuple(child(*args, **kwargs) for child, (args, kwargs) in zip(self.branches, arguments, strict=True))

    def _results(self, arguments: tuple[Arguments, ...]) -> tuple[Any, ...]:
        device, streams = _device_of(arguments), self._stream_count()
        if device is None or streams == 1 or self._disabled:
            return self._in_order(arguments)
        children = tuple(self.branches)
        run: Any = StreamRun(side_by_side(device, streams, shared_buffers(children)), device)
        results: tuple[Any, ...] = run(children, arguments)
        return results

    def _stream_count(self) -> int:
        return min(len(self.branches), _AUTO_STREAMS if self.streams == "auto" else self.streams)


def _device_of(arguments: tuple[Arguments, ...]) -> str | None:
    """The CUDA device whose streams modules run on, or ``None`` if they run one after another."""
    try:
        tensors, _ = flatten(arguments)
    except TraceError:  # an unknown container may hold tensors that would have to be copied
        return None
    if unusual_tensor(tensors) or watched_call():
        return None
    return next((str(tensor.device) for tensor in tensors if tensor.is_cuda), None)
