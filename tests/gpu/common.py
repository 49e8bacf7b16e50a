"""Options, models and measures that several tests on a GPU use."""

from __future__ import annotations

import gc
import math
from typing import Any

import torch
from torch import Tensor, nn

from autostream.reporting.report import Report
from autostream.runtime.capture import clear_cublas_workspaces

GPU = torch.device("cuda", 0)
MIB = 2**20

EAGER: dict[str, Any] = {"kernels": "eager", "costs": "roofline", "memory_budget": math.inf}
FUSED: dict[str, Any] = {**EAGER, "kernels": "inductor"}
STREAMS: dict[str, Any] = {"policy": "critical_path", "streams": 4}


class Towers(nn.Module):
    """Four branches that read one input, and a concatenation.

    ::

        x ─┬─▶ linear ─▶ relu ─▶ linear ─▶ relu ─┬─▶ cat
           ├─▶ ...                               │
           └─▶ ...                               ┘
    """

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tower(x) for tower in self.towers], dim=-1)


class SmoothTowers(Towers):
    """Four branches with GELU and a softmax at the end: pointwise ops that Inductor fuses."""

    def __init__(self, width: int = 256) -> None:
        super().__init__(width)
        for tower in self.towers:
            tower[1] = nn.GELU()  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1)


def fused_kernels(report: Report) -> list[str]:
    """The Triton kernels of a schedule."""
    assert report.graph
    return [op.target for op in report.graph.ops.values() if op.target.startswith("triton_")]


def reserved_bytes() -> int:
    """The GPU memory in use, in whole segments of the caching allocator, without cuBLAS's workspaces outside graphs."""
    gc.collect()
    torch.cuda.synchronize()
    clear_cublas_workspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
