"""From a lowered graph to something that a caller can call.

uncaptured, CUDA    StreamRun       real streams, forked from and joined to the caller's current one
uncaptured, CPU     ThreadedProgram (cpu_streams.py): a thread for each stream; of one stream, the graph's own code
captured            CapturedGraph   (cuda_graph.py): a StreamRun captured once, then replayed
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from autostream.runtime.cuda_graph import FlatFunction
from autostream.runtime.emulator import ThreadedProgram
from autostream.runtime.static_inputs import Output
from autostream.runtime.streams import restored


class StreamRun:
    """A lowered graph on CUDA streams; the thread's current device and stream are afterwards as before.

    Args:
        lowered: takes and returns flat tensors.
        device: e.g. ``"cuda:0"``.
    """

    def __init__(self, lowered: fx.GraphModule, device: str) -> None:
        self.lowered = lowered
        self._device = device
        # Not __call__: fx prints the failing line of generated code to stderr before it raises.
        self._forward: Any = lowered.forward

    def __call__(self, *tensors: Tensor) -> Sequence[Output]:
        """Enqueue one run, behind the work of the device's current stream."""
        with restored(self._device):
            outputs: Sequence[Output] = self._forward(*tensors)
            return outputs


class UncastRun:
    """A run whose ops take their arguments as they are, whatever the caller's autocast.

    A compiler has put in the casts that autocast asked for when it was traced, and its kernels count on them.
    """

    def __init__(self, run: FlatFunction) -> None:
        self._run = run

    def __call__(self, *tensors: Tensor) -> Sequence[Output]:
        """Run it without autocast."""
        with without_autocast("inductor"):
            return self._run(*tensors)


def without_autocast(level: str) -> AbstractContextManager[None]:
    """No autocast inside, for fused kernels; for ops of ATen, which cast as the model does, as it is.

    Private to PyTorch (seen in 2.11 and 2.13): what AOTAutograd runs its graphs under; without it nothing is fused.
    """
    off: AbstractContextManager[None] = torch._C._DisableAutocast() if level == "inductor" else nullcontext()
    return off


def uncaptured(lowered: fx.GraphModule, device: str, streams: int) -> FlatFunction:
    """The way to run a lowered graph of so many streams without a CUDA graph."""
    if device != "cpu":
        return StreamRun(lowered, device)
    return ThreadedProgram(lowered) if streams > 1 else lowered.forward
