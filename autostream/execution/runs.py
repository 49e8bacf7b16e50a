"""From a lowered graph to something that a caller can call.

uncaptured, CUDA    StreamRun       real streams, forked from and joined to the caller's current one
uncaptured, CPU     ThreadedProgram (cpu_streams.py): a thread for each stream
captured            CapturedGraph   (cuda_graph.py): a StreamRun captured once, then replayed
one stream          LoweredRun      plain code
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from autostream.execution.cpu_streams import ThreadedProgram
from autostream.execution.cuda_graph import Run
from autostream.execution.static import Output
from autostream.execution.streams import restored


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


def uncaptured(lowered: fx.GraphModule, device: str, streams: int) -> Run:
    """The way to run a lowered graph of so many streams without a CUDA graph."""
    if device != "cpu":
        return StreamRun(lowered, device)
    return ThreadedProgram(lowered) if streams > 1 else lowered.forward
