"""A model on a device that is not the current one: the whole way runs there, and the current one is left alone.

With one GPU, the device is the current one; the second is tested where there are two.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import autostream

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("aten_ops")]

DEVICES = [f"cuda:{index}" for index in range(max(1, torch.cuda.device_count()))]


class Branches(nn.Module):
    """Three branches with dropout and batch statistics, so that generators and buffers are on the device as well."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([nn.functional.dropout(branch(x)) for branch in self.branches])


@pytest.mark.parametrize("mode", ["cuda graph", "streams"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_model_runs_where_it_lies(device: str, mode: str) -> None:
    torch.manual_seed(0)
    model = Branches().to(device)
    options = {"policy": "critical_path", "streams": 3, "memory_budget": math.inf}
    fast = autostream.optimize(model, cuda_graph=mode == "cuda graph", **options)
    with torch.no_grad():
        for seed in range(4):
            x = torch.randn(32, 64, device=device)
            before = {name: value.clone() for name, value in model.state_dict().items()}
            torch.cuda.manual_seed_all(seed)
            y = fast(x)
            rng, after = torch.cuda.get_rng_state(device), {k: v.clone() for k, v in model.state_dict().items()}
            model.load_state_dict(before)
            torch.cuda.manual_seed_all(seed)
            torch.testing.assert_close(y, model(x), rtol=0, atol=0)
            assert torch.equal(torch.cuda.get_rng_state(device), rng)
            torch.testing.assert_close(dict(model.state_dict()), after, rtol=0, atol=0)
            assert y.device == torch.device(device)
            assert torch.cuda.current_device() == 0
            assert torch.cuda.current_stream() == torch.cuda.default_stream()
    (report,) = fast.reports
    assert report.mode in (mode, "one stream"), report.refusals
    assert report.signature.startswith(f"32x64:float32 on {device}")


@pytest.mark.parametrize("device", DEVICES)
def test_callers_of_another_device_and_stream_keep_theirs(device: str) -> None:
    model = Branches().to(device).eval()
    fast = autostream.optimize(model, cuda_graph=True)
    x = torch.randn(32, 64, device=device)
    stream, own = torch.cuda.Stream(device), torch.cuda.Stream("cuda:0")
    torch.cuda.synchronize(device)
    with torch.no_grad(), torch.cuda.stream(own), torch.cuda.stream(stream):
        torch.cuda.set_device("cuda:0")
        torch.cuda.manual_seed_all(1)
        y = fast(x)
        assert torch.cuda.current_device() == 0
        assert torch.cuda.current_stream(device) == stream
        stream.synchronize()
        torch.cuda.manual_seed_all(1)
        torch.testing.assert_close(y, model(x), rtol=0, atol=0)


@pytest.mark.skipif(len(DEVICES) < 2, reason="needs two GPUs")
def test_one_model_moved_to_another_device() -> None:
    model = Branches().to(DEVICES[0]).eval()
    fast = autostream.optimize(model)
    with torch.no_grad():
        for device in (*DEVICES[:2], DEVICES[0]):
            fast.to(device)
            x = torch.randn(32, 64, device=device)
            torch.manual_seed(1)
            y = fast(x)
            torch.manual_seed(1)
            torch.testing.assert_close(y, model(x), rtol=0, atol=0)


@pytest.mark.skipif(len(DEVICES) < 2, reason="needs two GPUs")
def test_a_model_over_two_devices_is_refused_and_runs() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8).to(DEVICES[0]), nn.Linear(8, 8).to(DEVICES[1])

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).to(DEVICES[1]))

    model = Split()
    fast, x = autostream.optimize(model), torch.randn(4, 8, device=DEVICES[0])
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0)
    assert any("several devices" in refusal.reason for refusal in fast.reports[0].refusals)
