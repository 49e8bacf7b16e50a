"""autostream as a backend of ``torch.compile``, for a model with a graph break: each graph is scheduled.

python examples/compile_backend.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autostream


class Branching(nn.Module):
    """Branches on the value of a tensor, which is a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([tower(x) for tower in self.towers], dim=-1)
        if y.mean() > 0:
            return y.softmax(-1)
        return y.sigmoid()


def main() -> None:
    """Run it with the backend by name, and with ``optimize``, which uses the same path for graph breaks."""
    torch.manual_seed(0)
    model, x = Branching().eval(), torch.randn(8, 64)
    with torch.no_grad():
        compiled = torch.compile(model, backend="autostream", options={"streams": 2})
        assert torch.equal(compiled(x), model(x))

        fast = autostream.optimize(model)
        assert torch.equal(fast(x), model(x))
    print(autostream.explain(fast, ops=5))


if __name__ == "__main__":
    main()
