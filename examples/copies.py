"""A model with copies from and to the host, which overlap with computation.

python examples/copies.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autostream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Copying(nn.Module):
    """Adds rows of a table on the host late, and copies its first result to the host early."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The rows are copied while ``first`` computes, and its result while ``second`` does."""
        x = self.first(x)
        return self.second(x + rows.to(x.device, non_blocking=True)), x.cpu()


def main() -> None:
    """Optimize the model, compare it with eager, and print what overlaps."""
    torch.manual_seed(0)
    model = Copying().to(DEVICE).eval()
    fast = autostream.optimize(model)
    rows = torch.randn(2048, 512)
    rows = rows.pin_memory() if DEVICE == "cuda" else rows  # pinned, so that the copy is asynchronous
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(2048, 512, device=DEVICE)
            torch.testing.assert_close(fast(x, rows), model(x, rows), rtol=1e-3, atol=1e-3)
    print(autostream.explain(fast, ops=5))


if __name__ == "__main__":
    main()
