"""A model that reads a number in Python: the parts before and after it are captured.

python examples/partial_graphs.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autostream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Scaled(nn.Module):
    """Branches, a scale computed on the host, and branches again."""

    def __init__(self, width: int = 256, branches: int = 4) -> None:
        super().__init__()
        self.before, self.after = (nn.ModuleList(nn.Linear(width, width) for _ in range(branches)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """``.item()`` waits for the device and cannot be captured."""
        x = torch.stack([layer(x).relu() for layer in self.before]).sum(0)
        x = x / (1.0 + x.abs().max().item())
        return torch.stack([layer(x).tanh() for layer in self.after]).sum(0)


def main() -> None:
    """Optimize the model, compare it with eager, and print which parts are captured and why they end."""
    torch.manual_seed(0)
    model = Scaled().to(DEVICE).eval()
    fast = autostream.optimize(model)
    with torch.inference_mode():
        for seed in range(3):
            x = torch.randn(64, 256, device=DEVICE) * (1 + seed)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)
    print(autostream.explain(fast, ops=5))


if __name__ == "__main__":
    main()
