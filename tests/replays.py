"""A fake CUDA graph: it records a run on the CPU and repeats it in a replay.

capture:  run ─▶ outputs ─┐ in the pool
replay:   run ─▶ the same outputs, while outputs of other graphs in the pool become garbage
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from autostream.runtime import cuda_graph
from autostream.utils.storages import storage_of

CPU = torch.device("cpu")


@dataclass(eq=False)
class Stream:
    """A stream that only knows which streams it waits for."""

    name: str
    device: torch.device = CPU
    waits: list[Stream] = field(default_factory=list)

    @property
    def cuda_stream(self) -> int:
        return id(self)

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other)


class Replayable:
    """A recorded run: a replay runs it again and writes the results to the outputs of the recorded run.

    Results of other graphs in the same pool are garbage afterwards; arguments that they return are not.
    """

    def __init__(self, run: Callable[[], Sequence[Tensor]], pool: list[Replayable]) -> None:
        self._run = torch.inference_mode(False)(torch.no_grad()(run))  # a replay is in no mode
        self.outputs = self._run()
        self._computed: list[Tensor] = []
        self._pool = pool
        pool.append(self)

    def instantiate(self) -> None:
        pass

    def replay(self) -> None:
        results = self._run()
        pairs = zip(self.outputs, results, strict=True)
        self._computed = [recorded for recorded, new in pairs if storage_of(recorded) != storage_of(new)]
        for recorded, new in zip(self.outputs, results, strict=True):
            if storage_of(recorded) != storage_of(new):  # not an argument
                recorded.copy_(new)
        arguments = set(map(storage_of, results))  # an argument that both return is not in the pool
        for output in (output for other in self._pool if other is not self for output in other._computed):
            if storage_of(output) not in arguments:
                output.fill_(math.nan if output.is_floating_point() or output.is_complex() else 99)


@dataclass
class Cuda:
    """The current stream, and a log of captures."""

    home: Stream = field(default_factory=lambda: Stream("home"))
    capturing: Stream = field(default_factory=lambda: Stream("capturing"))
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.current = self.home

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def capture(
        self, run: Callable[[], Sequence[Tensor]], stream: Stream, pool: list[Replayable], *, keep_nodes: bool
    ) -> tuple[Replayable, Sequence[Tensor]]:
        self.log.append(f"capture on {stream.name}, current {self.current.name}")
        graph = Replayable(run, pool)
        return graph, graph.outputs

    @classmethod
    def installed(cls, patch: pytest.MonkeyPatch) -> Cuda:
        """Replace CUDA as far as captured graphs use it."""
        fake = cls()
        patch.setattr(torch.cuda, "current_stream", lambda device: fake.current)
        patch.setattr(torch.cuda, "default_stream", lambda device: fake.home)
        patch.setattr(torch.cuda, "stream", fake.on)
        patch.setattr(torch.cuda, "device", nullcontext)
        patch.setattr(torch.cuda, "graph_pool_handle", list)
        patch.setattr(cuda_graph, "current_device", lambda: CPU.index)
        patch.setattr(cuda_graph, "raw_stream", lambda device: fake.current.cuda_stream)
        patch.setattr(cuda_graph, "capture", fake.capture)
        patch.setattr(cuda_graph, "capture_stream", lambda device: fake.capturing)
        patch.setattr(cuda_graph, "_last_random", {})
        return fake
