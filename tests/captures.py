"""Fake captures: programs scheduled on the CPU are recorded and replayed, as CUDA graphs are on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from autostream.dispatch import scheduled_program
from autostream.runtime import cuda_graph
from autostream.runtime.cuda_graph import CapturedGraph
from autostream.runtime.restore import undone
from autostream.runtime.static_inputs import static_copies
from autostream.tuning.select import repeatable, written
from autostream.tuning.tune import Tuned, tune
from tests.replays import CPU, Cuda


class Captures:
    """Replaces uncaptured runs on the CPU by fake captures.

    Attributes:
        alive: the graphs that have not been freed.
        count: of captures.
        failure: an exception that the next captures raise.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.alive: WeakSet[CapturedGraph] = WeakSet()
        self.count = 0
        self.failure: Exception | None = None
        cuda, captured, init = Cuda.installed(patch), cuda_graph._captured, CapturedGraph.__init__

        def created(graph: CapturedGraph, *args: Any, **kwargs: Any) -> None:
            init(graph, *args, **kwargs)
            self.alive.add(graph)

        def failing(*args: Any) -> Any:
            if self.failure is not None:
                raise self.failure
            self.count += 1
            return captured(*args)

        def captures(*args: Any) -> Tuned:
            return self.captured(tune(*args), args[1], args[2])

        patch.setattr(CapturedGraph, "__init__", created)
        patch.setattr(cuda_graph, "_captured", failing)
        patch.setattr(scheduled_program, "tune", captures)
        self.cuda = cuda

    def captured(self, tuned: Tuned, arguments: Sequence[Tensor], bound: Sequence[bool]) -> Tuned:
        run, writes = tuned.selection.execution, written(tuned.program, tuned.priced.graph)
        random = not repeatable(tuned.program, tuned.priced.graph) and not any(writes)
        with torch.inference_mode(False), torch.no_grad():
            static = static_copies(arguments, [at for at, stays in enumerate(bound) if not stays])
            with undone(static, writes, ["cpu"]) as restore:
                graph = CapturedGraph(run, static, bound, writes, CPU, random=random, restore=restore)
        return replace(tuned, selection=replace(tuned.selection, execution=graph))
