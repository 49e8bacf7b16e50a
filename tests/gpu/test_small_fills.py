"""Small fills of a captured graph become kernels, which compute the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autostream
from autostream.dispatch.dispatcher import Dispatcher
from autostream.options import Options
from autostream.runtime.capture import capture
from autostream.runtime.graph_nodes import nodes_of
from autostream.runtime.small_fills import fill_by_kernels
from autostream.runtime.streams import capture_stream
from tests.gpu.common import GPU

pytestmark = pytest.mark.gpu


def filled(size: int, value: int, tensor: Tensor) -> None:
    """Fill a tensor on the current stream by the driver, in elements of 1, 2 or 4 bytes."""
    from cuda.bindings import driver

    fill = {1: driver.cuMemsetD8Async, 2: driver.cuMemsetD16Async, 4: driver.cuMemsetD32Async}[size]
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    (status,) = fill(driver.CUdeviceptr(tensor.data_ptr()), value, tensor.nbytes // size, stream)
    assert int(status) == 0


def replayed(run: Callable[[], object]) -> tuple[int, int]:
    """Capture, replace, replay: how many fills were replaced, and how many were left."""
    graph, _ = capture(run, stream := capture_stream(GPU), keep_nodes=True)
    replaced = fill_by_kernels(graph, stream)
    graph.replay()
    torch.cuda.synchronize()
    return replaced, len(nodes_of(graph, "MEMSET"))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("value", [0, 1, 0xFE, 0xDEADBEEF])
def test_a_small_fill_becomes_a_kernel(size: int, value: int) -> None:
    memory = torch.zeros(4 * 8, dtype=torch.uint8, device=GPU)
    value &= (1 << 8 * size) - 1
    assert replayed(lambda: filled(size, value, memory[4:16])) == (1, 0)
    between = bytes(memory.tolist())
    assert between == bytes(4) + value.to_bytes(size, "little") * (12 // size) + bytes(16)


def test_fills_keep_their_places_among_kernels_and_streams() -> None:
    """Two streams fill the same number again and again, and add it to a sum after each fill."""
    sums, x = torch.zeros(2, device=GPU), torch.ones(2, 1 << 20, dtype=torch.int32, device=GPU)
    side = torch.cuda.Stream()

    def branch(at: int) -> None:
        for value in range(1, 6):
            filled(4, value, x[at, :1])
            sums[at].add_(x[at].sum() - (1 << 20) + 1)

    def run() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            branch(1)
        branch(0)
        main.wait_stream(side)

    for at in (0, 1):
        branch(at)
    sums.zero_()
    torch.cuda.synchronize()
    replaced, left = replayed(run)
    assert replaced >= 10  # and those of the large sums
    assert left == 0
    assert sums.tolist() == [15, 15]


def test_a_large_fill_stays() -> None:
    memory = torch.ones(1 << 20, dtype=torch.uint8, device=GPU)
    assert replayed(lambda: filled(1, 7, memory)) == (0, 1)
    assert memory.unique().tolist() == [7]


class Attention(nn.Module):
    """cuDNN's attention, which begins with a fill of a few bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(256, 3 * 256)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(x).view(8, 128, 3, 4, 64).permute(2, 0, 3, 1, 4)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v)


def test_an_optimized_model_has_no_small_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    def count(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> int:
        counted.append((fill_by_kernels(graph, stream), len(nodes_of(graph, "MEMSET"))))
        return counted[-1][0]

    monkeypatch.setattr("autostream.runtime.cuda_graph.fill_by_kernels", count)
    model, x = Attention().to(GPU, torch.bfloat16).eval(), torch.randn(8, 128, 256, dtype=torch.bfloat16, device=GPU)
    with torch.inference_mode():
        torch.testing.assert_close(autostream.optimize(model)(x), model(x))
    assert counted
    assert all(replaced > 0 and left == 0 for replaced, left in counted), counted


def test_a_replay_with_small_fills_is_mapped_back_to_its_ops() -> None:
    """Op by op they are fills, and kernels in the graph."""
    model, x = Attention().to(GPU, torch.bfloat16).eval(), torch.randn(8, 128, 256, dtype=torch.bfloat16, device=GPU)
    with torch.inference_mode():
        report = Dispatcher(model, Options()).watched(x)
    assert report is not None
    assert report.graph is not None
    assert report.measured is not None, report.refusals
    assert report.measured.starts.keys() == report.graph.ops.keys()
