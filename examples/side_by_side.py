"""Two independent blocks run concurrently: ``y = mm(block1(x), block2(x))``.

python examples/side_by_side.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autostream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class SideBySide(nn.Module):
    """Two independent blocks, and the product of their outputs."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.block1 = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.block2 = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(self.block1(x), self.block2(x))


def main() -> None:
    """Optimize the model, compare it with eager, and print the explanation."""
    torch.manual_seed(0)
    model = SideBySide().to(DEVICE).eval()
    x = torch.randn(256, 256, device=DEVICE)

    fast = autostream.optimize(model)
    with torch.inference_mode():
        assert torch.equal(fast(x), model(x))
    print(autostream.explain(fast))


if __name__ == "__main__":
    main()
