"""Records the graphs of kernels into which TorchInductor fuses small models.

    python -m tests.kernel_graphs.record            all
    python -m tests.kernel_graphs.record towers     one

Needs a GPU and Triton. The models stay on the CPU, are traced as if they were on the GPU, and are not run. Recordings
depend on the version of PyTorch and, a little, on the GPU: tests should only expect what follows from the models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from autostream.frontend.trace import trace
from autostream.fusion.inductor import fuse
from autostream.ir import Program
from tests.kernel_graphs.recordings import DEVICE, recorded, write


def inception() -> nn.Module:
    r"""Four branches over one input, concatenated.

       ╭▶ branch1 ───────────╮
       ├▶ branch2.0 ─▶ 2.1 ──┤
    x ─┤                     ├▶ concatenation
       ├▶ branch3.0 ─▶ 3.1 ──┤
       ╰▶ pool ─▶ branch4.1 ─╯
    """
    from torchvision.models.googlenet import Inception  # needed for recording only

    return Inception(16, 8, 8, 16, 4, 8, 8).eval()


class Towers(nn.Module):
    """Three towers that write slices of one matrix, which two ops read."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([tower(x) for tower in self.towers], -1)
        return y.softmax(-1) @ y.t()


class Attention(nn.Module):
    """Attention of several heads as matrix products: queries, keys and values are independent."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        weights = (q @ k.transpose(-2, -1) / 4).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class Norms(nn.Module):
    """Two branches of different widths, each with a batch norm in training mode."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(width, wide), nn.BatchNorm1d(wide), nn.ReLU()) for wide in (width, 2 * width)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(branch(x) for branch in self.branches)


class Ranked(nn.Module):
    """Ops that Inductor does not fuse, with two results each, two of them random."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.best, self.sorted, self.dropped = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values, indices = self.best(x).topk(4)
        ordered, order = self.sorted(x).sort(-1)
        once, twice = torch.dropout(self.dropped(x), 0.5, True), torch.dropout(ordered, 0.5, True)
        return values * ordered.gather(1, indices), order, once + twice


class Written(nn.Module):
    """Mutates an input after it was read; returns a result of the new values, and a view of a result of the old ones.

    x ─▶ old ─▶ transposed
    │
    x += new(y) ─▶ last
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.old, self.new, self.last = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        old = self.old(x)
        x.add_(self.new(y))
        return self.last(x), old.t()


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Sequence[tuple[int, ...]]]] = {
    "inception": (inception, [(1, 16, 8, 8)]),
    "towers": (Towers, [(8, 16)]),
    "towers_on_a_stem": (lambda: nn.Sequential(nn.Linear(16, 16), Towers()), [(8, 16)]),
    "attention": (Attention, [(2, 8, 32)]),
    "norms": (Norms, [(8, 16)]),
    "ranked": (Ranked, [(8, 16)]),
    "written": (Written, [(8, 16), (8, 16)]),
}
"""Name of the recording to model and shapes of its inputs."""


def fused(name: str) -> Program:
    """A model in half precision, fused."""
    model, shapes = MODELS[name]
    return fuse(trace(model().half(), [torch.ones(shape).half() for shape in shapes], device=DEVICE).program)


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        write(name, recorded(fused(name)))
