"""A model that copies from the host and to it: its copies run beside what does not need them.

python examples/copies.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autostream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Looking(nn.Module):
    """Adds rows of a table on the host late, and hands what it computed first to the host early."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The rows are copied while ``first`` computes, and its result while ``second`` does."""
        x = self.first(x)
        return self.second(x + rows.to(x.device, non_blocking=True)), x.cpu()


def main() -> None:
    """Optimize the model, compare it with the plain one, and say what runs beside what."""
    torch.manual_seed(0)
    model = Looking().to(DEVICE).eval()
    fast = autostream.optimize(model)
    rows = torch.randn(2048, 512)
    rows = rows.pin_memory() if DEVICE == "cuda" else rows  # pinned, for the host to go on meanwhile
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(2048, 512, device=DEVICE)
            torch.testing.assert_close(fast(x, rows), model(x, rows), rtol=1e-3, atol=1e-3)
    print(autostream.explain(fast, ops=5))


if __name__ == "__main__":
    main()
