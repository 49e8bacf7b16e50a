"""Callables that run a lowered graph.

uncaptured, CUDA    StreamRun       on real streams, forked from the caller's current one and joined to it
uncaptured, CPU     ThreadedProgram (emulator.py): a thread for each stream; for one stream, the graph's own code
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
    """Runs a lowered graph on CUDA streams, and restores the thread's current device and stream.

    Args:
        lowered: takes and returns flat tensors.
        device: e.g. ``"cuda:0"``.
    """

    def __init__(self, lowered: fx.GraphModule, device: str) -> None:
        self.lowered = lowered
        self._device = device
        # Not __call__, which prints the failing line of generated code to stderr before it raises.
        self._forward: Any = lowered.forward

    def __call__(self, *tensors: Tensor) -> Sequence[Output]:
        """Enqueue one run, after the work of the device's current stream."""
        with restored(self._device):
            outputs: Sequence[Output] = self._forward(*tensors)
            return outputs


def uncast(run: FlatFunction) -> FlatFunction:
    """A run without the caller's autocast.

    Inductor has traced the casts that autocast inserts, and its kernels expect the dtypes after these.
    """

    def uncast_run(*tensors: Tensor) -> Sequence[Output]:
        with without_autocast("inductor"):
            return run(*tensors)

    return uncast_run


def without_autocast(level: str) -> AbstractContextManager[None]:
    """Disable autocast inside for a program of fused kernels; ATen ops need it, as the model does.

    Private to PyTorch (seen in 2.11 and 2.13): AOTAutograd runs its graphs so. Without it no program is fused.
    """
    off: AbstractContextManager[None] = torch._C._DisableAutocast() if level == "inductor" else nullcontext()
    return off


def uncaptured(lowered: fx.GraphModule, device: str, streams: int) -> FlatFunction:
    """A function that runs a lowered graph of so many streams without a CUDA graph."""
    if device != "cpu":
        return StreamRun(lowered, device)
    return ThreadedProgram(lowered) if streams > 1 else lowered.forward
