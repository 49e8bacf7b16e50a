"""cuBLAS workspaces and captured graphs: who may scribble where."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autostream.cli.modes import captured

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("aten_ops")]


@torch.no_grad()
def test_a_captured_baseline_never_writes_to_memory_that_was_given_away() -> None:
    """Its products split their sums over a workspace; what captures later frees those of everybody."""
    torch.manual_seed(0)
    model = nn.Linear(8192, 64, bias=False).cuda().half()
    x = torch.randn(16, 8192, device="cuda", dtype=torch.float16)
    call = captured(model, (x,))
    expected = call(x)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    # Blocks of a workspace's size, among them the one that was given back.
    others = [torch.full((size,), 7, device="cuda") for size in [4 * 2**20] * 12 + [2**20] * 8]
    for _ in range(5):
        assert torch.equal(call(x), expected)
    torch.cuda.synchronize()
    assert all(bool((other == 7).all()) for other in others)
