"""``Parallel``: modules that run side by side, as a module.

call ──▶ traced, on the CPU, or one stream? ──▶ one child after the other: a scheduler that traces it decides
              │ no
              └─▶ children as ops, scheduled over streams (children.py)
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
"""CUDA runs so many streams side by side, unless ``CUDA_DEVICE_MAX_CONNECTIONS`` says otherwise."""


class Parallel(nn.Module):
    """Modules that run side by side on the same input, or each on its own; their results are joined.

    ``Parallel(left, right)(x)`` is ``(left(x), right(x))``, and given a tuple of as many inputs as it has modules, each
    takes one: ``Parallel(left, right)((x, y))`` is ``(left(x), right(y))``, so that one may follow another in an
    ``nn.Sequential``. Several arguments, and keyword arguments, go to every module.

    Inside of :func:`autostream.optimize`, :func:`autostream.train_step` and ``torch.compile`` it is traced through, as
    if it were written out: the scheduler finds what is independent, and what is faster. Elsewhere, modules run on CUDA
    streams, and so do their backwards; that helps where they keep the GPU busy for longer than the host takes to launch
    them. On the CPU they run in turn. Random numbers are drawn in the order of the modules in any case.

    Args:
        modules: at least one; none of them may write to its input, nor put anything into a container that it is given.
            That raises on CUDA streams, except for tensors of inference mode, whose writes nobody counts; elsewhere the
            others may see it. What they share must keep nothing in plain attributes while they run; buffers it may
            write. They need not be on one device.
        streams: how many at most, the caller's among them, or ``"auto"``.
        reduce: a function or module that takes the results as arguments, such as ``torch.mm`` for two; without it, the
            tuple of them is returned.

    Raises:
        OptionError: ``streams`` has a value that is not allowed.
        TargetError: there is no module, or something that is none. Calls raise it where a tuple has not as many inputs
            as there are modules, or, on CUDA streams, a module is seen to write to its input, or returns a container
            that is not known.

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
        if reduce is sum:  # of two results it would add up the rows of the first, and say nothing
            raise OptionError("reduce=sum is not allowed: it takes one list; use lambda *results: sum(results)")
        self.branches = nn.ModuleList(modules)
        self.streams = Options(streams=streams).streams
        self.reduce = reduce
        self._disabled = disabled()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The tuple of what the modules return, or what ``reduce`` makes of it."""
        dealt = self._dealt(inputs, kwargs)
        results = self._in_turn(dealt) if torch.compiler.is_compiling() else self._results(dealt)
        return results if self.reduce is None else self.reduce(*results)

    def extra_repr(self) -> str:
        """What it was made with."""
        return f"streams={self.streams!r}"

    def _dealt(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, ...]:
        """The arguments of each module."""
        count = len(self.branches)
        if len(inputs) != 1 or type(inputs[0]) is not tuple:  # others, such as named ones, are one value
            return ((inputs, kwargs),) * count
        if len(inputs[0]) != count:
            raise TargetError(
                f"Parallel has {count} modules and is given a tuple of {len(inputs[0])} inputs: give one each"
            )
        return tuple(((each,), kwargs) for each in inputs[0])

    def _in_turn(self, dealt: tuple[Arguments, ...]) -> tuple[Any, ...]:
        return tuple(child(*args, **kwargs) for child, (args, kwargs) in zip(self.branches, dealt, strict=True))

    def _results(self, dealt: tuple[Arguments, ...]) -> tuple[Any, ...]:
        device, streams = _device_of(dealt), self._stream_count()
        if device is None or streams == 1 or self._disabled:
            return self._in_turn(dealt)
        children = tuple(self.branches)
        run: Any = StreamRun(side_by_side(device, streams, shared_buffers(children)), device)
        results: tuple[Any, ...] = run(children, dealt)
        return results

    def _stream_count(self) -> int:
        return min(len(self.branches), _AUTO_STREAMS if self.streams == "auto" else self.streams)


def _device_of(dealt: tuple[Arguments, ...]) -> str | None:
    """The CUDA device whose streams modules run on, or ``None`` where they run in turn."""
    try:
        tensors, _ = flatten(dealt)
    except TraceError:  # what it holds cannot be seen, so nobody knows how long it is to be kept
        return None
    if unusual_tensor(tensors) or watched_call():
        return None
    return next((str(tensor.device) for tensor in tensors if tensor.is_cuda), None)
