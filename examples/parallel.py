"""``autostream.Parallel``: two blocks that are declared to be independent run on streams.

python examples/parallel.py
"""

from __future__ import annotations

import torch
from torch import nn

import autostream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def block(width: int = 256) -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def main() -> None:
    """Train it for a step on streams, then optimize it for inference."""
    torch.manual_seed(0)
    model = nn.Sequential(autostream.Parallel(block(), block(), reduce=torch.mm), nn.Tanh()).to(DEVICE)
    x = torch.randn(256, 256, device=DEVICE)
    model(x).square().mean().backward()  # the blocks' backwards are concurrent as well

    fast = autostream.optimize(model.eval())
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), model(x))
    print(autostream.explain(fast))


if __name__ == "__main__":
    main()
