"""Make-believe captures: whatever is scheduled on the CPU is recorded and replayed as one graph is on a GPU."""

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
    """What is captured instead of run op by op.

    Attributes:
        alive: the graphs that somebody still has.
        count: how often something was captured.
        failure: what the next captures raise.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.alive: WeakSet[CapturedGraph] = WeakSet()
        self.count = 0
        self.failure: Exception | None = None
        cuda, captured, init = Cuda.installed(patch), cuda_graph._captured, CapturedGraph.__init__

        def noted(graph: CapturedGraph, *args: Any, **kwargs: Any) -> None:
            init(graph, *args, **kwargs)
            self.alive.add(graph)

        def failing(*args: Any) -> Any:
            if self.failure is not None:
                raise self.failure
            self.count += 1
            return captured(*args)

        def captures(*args: Any) -> Tuned:
            return self.captured(tune(*args), args[1], args[2])

        patch.setattr(CapturedGraph, "__init__", noted)
        patch.setattr(cuda_graph, "_captured", failing)
        patch.setattr(scheduled_program, "tune", captures)
        self.cuda = cuda

    def captured(self, tuned: Tuned, arguments: Sequence[Tensor], bound: Sequence[bool]) -> Tuned:
        run, writes = tuned.selection.execution, written(tuned.program, tuned.priced.graph)
        draws = not repeatable(tuned.program, tuned.priced.graph) and not any(writes)
        with torch.inference_mode(False), torch.no_grad():
            static = static_copies(arguments, [at for at, stays in enumerate(bound) if not stays])
            with undone(static, writes, ["cpu"]) as restore:
                graph = CapturedGraph(run, static, bound, writes, CPU, random=draws, restore=restore)
        return replace(tuned, selection=replace(tuned.selection, execution=graph))
