"""Models on a device that is not the current one, and models over two devices; the current device stays the same.

With one GPU, that is the current device, and the tests of two devices are skipped.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.reporting.report import Report

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("aten_ops")]

DEVICES = [f"cuda:{index}" for index in range(max(1, torch.cuda.device_count()))]

two_gpus = pytest.mark.skipif(len(DEVICES) < 2, reason="needs two GPUs")


class Branches(nn.Module):
    """Three branches with dropout and batch statistics: the device's generator and buffers are used."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([nn.functional.dropout(branch(x)) for branch in self.branches])


@torch.no_grad()
@pytest.mark.parametrize("mode", ["cuda graph", "streams"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_model_runs_on_its_device_and_the_callers_device_and_stream_stay(device: str, mode: str) -> None:
    torch.manual_seed(0)
    model = Branches().to(device)
    options: dict[str, Any] = {"policy": "critical_path", "streams": 3, "memory_budget": math.inf}
    fast = autostream.optimize(model, cuda_graph=mode == "cuda graph", **options)
    stream, other = torch.cuda.Stream(device), torch.cuda.Stream("cuda:0")
    for seed in range(4):
        x = torch.randn(32, 64, device=device)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        torch.cuda.synchronize(device)
        with torch.cuda.stream(other if seed % 2 else None), torch.cuda.stream(stream if seed % 2 else None):
            torch.cuda.set_device("cuda:0")
            streams = [torch.cuda.current_stream(each) for each in DEVICES]
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
            assert [torch.cuda.current_stream(each) for each in DEVICES] == streams
        torch.cuda.synchronize(device)
    (report,) = fast.reports
    assert report.mode in (mode, "one stream"), report.refusals
    assert report.signature.startswith(f"32x64:float32 on {device}")


@two_gpus
def test_a_model_may_be_moved_to_another_device_and_back() -> None:
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


class Stage(nn.Module):
    """Three branches of a layer each, and dropout, on a device; the input is copied there."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.branches = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)).to(device)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.device)
        return nn.functional.dropout(torch.stack([b(x).tanh() for b in self.branches]).sum(0), training=self.training)


class Pipeline(nn.Module):
    """Three stages, the last of them on another device; the output of the first one skips to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.second = Stage(DEVICES[0]), Stage(DEVICES[0]), Stage(DEVICES[-1])

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        return self.second(self.last(skip)) * skip.to(DEVICES[-1])


def pipeline() -> Pipeline:
    torch.manual_seed(0)
    return Pipeline().eval()


def x(seed: int, device: str = DEVICES[0]) -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).to(device)


def captured(report: Report) -> list[str]:
    """The devices of parts that are captured, in the order in which the parts run."""
    return [part.graph.device for part in report.parts if part.mode == "cuda graph" and part.graph is not None]


@two_gpus
def test_each_stage_of_a_pipeline_is_captured_on_its_device() -> None:
    """Weights of both devices may change; calls that record gradients run eagerly."""
    model = pipeline()
    fast = autostream.optimize(model)
    with torch.no_grad():
        outputs = [fast(x(seed)) for seed in range(30)]
        for seed, y in enumerate(outputs):
            torch.testing.assert_close(y, model(x(seed)), rtol=0, atol=0)
            assert y.device == torch.device(DEVICES[1])
    (report,) = fast.reports
    assert report.mode == "sections", report.refusals
    assert captured(report) == DEVICES[:2], [part.refusals for part in report.parts]
    assert "copies from cuda:0 to cuda:1" in report.parts[0].ended
    assert "test_devices.py" in report.parts[0].ended
    with torch.no_grad():
        for layer in (model.first.branches[0], model.second.branches[0]):
            layer.weight.mul_(2)
            torch.testing.assert_close(fast(x(1)), model(x(1)), rtol=0, atol=0)
            layer.weight.data = layer.weight.flip(0)
            torch.testing.assert_close(fast(x(1)), model(x(1)), rtol=0, atol=0)
            layer.weight = nn.Parameter(layer.weight.flip(1))
            torch.testing.assert_close(fast(x(1)), model(x(1)), rtol=0, atol=0)
    fast = autostream.optimize(model)
    ours, theirs = (torch.autograd.grad(run(x(0)).sum(), list(model.parameters())) for run in (fast, model))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert any("several devices" in refusal.reason for refusal in fast.reports[0].refusals)


@two_gpus
@pytest.mark.filterwarnings("ignore:TensorFloat32")  # as an error, Inductor's own would make it fall back
def test_fused_kernels_are_captured_on_each_device() -> None:
    model = pipeline()
    fast = autostream.optimize(model, kernels="inductor")
    with torch.no_grad():
        for seed in range(3):
            torch.testing.assert_close(fast(x(seed)), model(x(seed)), rtol=1e-3, atol=1e-3)
    (report,) = fast.reports
    assert captured(report) == DEVICES[:2], [part.refusals for part in report.parts]
    fused = {part.level for part in report.parts if part.mode == "cuda graph"}
    assert fused == {"inductor"}, [part.refusals for part in report.parts]


@two_gpus
@torch.no_grad()
@pytest.mark.parametrize("stream", [None, *DEVICES[:2]], ids=lambda device: f"stream of {device}")
def test_the_callers_device_and_stream_stay(stream: str | None) -> None:
    model = pipeline()
    fast, inputs = autostream.optimize(model), [x(seed) for seed in range(5)]
    for current in DEVICES[:2]:
        for device in DEVICES[:2]:
            torch.cuda.synchronize(device)
        with torch.cuda.stream(torch.cuda.Stream(stream) if stream else None), torch.cuda.device(current):
            before = torch.cuda.current_device(), *map(torch.cuda.current_stream, DEVICES[:2])
            outputs = [fast(each) for each in inputs]
            assert (torch.cuda.current_device(), *map(torch.cuda.current_stream, DEVICES[:2])) == before
            for y, each in zip(outputs, inputs, strict=True):
                torch.testing.assert_close(y, model(each), rtol=0, atol=0)


@two_gpus
def test_generators_of_both_devices_are_used_as_in_eager() -> None:
    model = pipeline().train()
    fast = autostream.optimize(model)
    with torch.no_grad():
        fast.prepare(x(0))
        for seed in range(4):
            seen = []
            for run in (fast, model):
                torch.cuda.manual_seed_all(seed)
                y = run(x(seed))
                seen.append((y, *(torch.rand(3, device=device) for device in DEVICES[:2])))
            torch.testing.assert_close(*seen, rtol=0, atol=0)
    assert captured(fast.reports[0]) == DEVICES[:2]


class Branching(nn.Module):
    """A stage, stages on two devices side by side, and a last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.here, self.last = (Stage(DEVICES[0]) for _ in range(3))
        self.there = Stage(DEVICES[1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y: Tensor = self.last(self.here(x) + self.there(x).to(DEVICES[0]))
        return y


@two_gpus
@torch.no_grad()
def test_the_first_device_computes_while_the_second_does() -> None:
    torch.manual_seed(0)
    model = Branching().eval()
    fast = autostream.optimize(model)
    outputs = [fast(x(seed)) for seed in range(30)]
    for seed, y in enumerate(outputs):
        torch.testing.assert_close(y, model(x(seed)), rtol=0, atol=0)
    assert captured(fast.reports[0]) == [DEVICES[0], DEVICES[0], DEVICES[1], DEVICES[0]]


class Copying(nn.Module):
    """Copies a batch from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*map(Stage, DEVICES[:2]))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stages(x.to(DEVICES[0], non_blocking=True))
        return y


@torch.no_grad()
@pytest.mark.parametrize("pinned", [False, True])
def test_a_model_may_copy_batches_from_the_host(pinned: bool) -> None:
    torch.manual_seed(0)
    model = Copying().eval()
    fast = autostream.optimize(model)
    batches = [x(seed, "cpu").pin_memory() if pinned else x(seed, "cpu") for seed in range(6)]
    outputs = [fast(batch) for batch in batches]
    for y, batch in zip(outputs, batches, strict=True):
        torch.testing.assert_close(y, model(batch), rtol=0, atol=0)
    assert captured(fast.reports[0]) == DEVICES[:2]
    assert fast.reports[0].refusals[0].reason.startswith("aten.to")
