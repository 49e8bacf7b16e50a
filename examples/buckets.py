"""Buckets: sentences of any length share two schedules.

python examples/buckets.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autostream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Encoder(nn.Module):
    """Two parallel branches for each token, and the mean over the tokens without padding."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.left, self.right = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2))

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """One vector for each token, and one for the sentence."""
        x = self.embed(tokens)
        x = self.left(x) + self.right(x)
        return x, (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def main() -> None:
    """Run sentences of all lengths, and compare them with eager."""
    torch.manual_seed(0)
    model = Encoder().to(DEVICE).eval()
    length = autostream.Bucket("length", (16, 32))
    fast = autostream.optimize(model, dynamic={"tokens": {1: length}, "mask": {1: length}}, tuning_seconds=1.0)
    with torch.inference_mode():
        for words in range(1, 33):
            tokens = torch.randint(100, (1, words), device=DEVICE)
            mask = torch.ones(1, words, device=DEVICE)  # padding is 0
            torch.testing.assert_close(fast(tokens, mask), model(tokens, mask), rtol=1e-2, atol=1e-3)
    print(autostream.explain(fast, ops=5))
    assert len(fast.reports) == 2


if __name__ == "__main__":
    main()
