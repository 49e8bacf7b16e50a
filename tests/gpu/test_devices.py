"""A model on a device that is not the current one: the whole way runs there, and the current one is left alone.

With one GPU, the device is the current one; the second is tested where there are two, and so are models over both.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.reporting.report import Report

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("aten_ops")]

DEVICES = [f"cuda:{index}" for index in range(max(1, torch.cuda.device_count()))]

two_gpus = pytest.mark.skipif(len(DEVICES) < 2, reason="needs two GPUs")


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


@two_gpus
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


class Stage(nn.Module):
    """Three branches of a layer each, and dropout, on a device to which what it is given is copied."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.branches = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)).to(device)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.device)
        return nn.functional.dropout(torch.stack([b(x).tanh() for b in self.branches]).sum(0), training=self.training)


class Pipeline(nn.Module):
    """Two stages; what comes out of the middle of the first goes to the end of the second, too."""

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
    """The devices of parts that are captured, in the order in which these run."""
    return [part.graph.device for part in report.parts if part.mode == "cuda graph" and part.graph is not None]


@two_gpus
def test_each_stage_of_a_pipeline_is_captured_on_its_device() -> None:
    model = pipeline()
    fast = autostream.optimize(model)
    with torch.no_grad():
        found = [fast(x(seed)) for seed in range(30)]
        for seed, y in enumerate(found):
            torch.testing.assert_close(y, model(x(seed)), rtol=0, atol=0)
            assert y.device == torch.device(DEVICES[1])
    (report,) = fast.reports
    assert report.mode == "sections", report.refusals
    assert captured(report) == DEVICES[:2], [part.refusals for part in report.parts]
    assert "copies from cuda:0 to cuda:1" in report.parts[0].ended
    assert "test_devices.py" in report.parts[0].ended


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
@pytest.mark.parametrize("current", DEVICES[:2])
@pytest.mark.parametrize("on", [None, *DEVICES[:2]], ids=lambda on: f"stream of {on}")
def test_whatever_the_callers_device_and_stream(current: str, on: str | None) -> None:
    model = pipeline()
    fast, given = autostream.optimize(model), [x(seed) for seed in range(5)]
    for device in DEVICES[:2]:
        torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(on) if on else None
    with torch.no_grad(), torch.cuda.stream(stream), torch.cuda.device(current):
        before = torch.cuda.current_device(), *map(torch.cuda.current_stream, DEVICES[:2])
        found = [fast(each) for each in given]
        assert (torch.cuda.current_device(), *map(torch.cuda.current_stream, DEVICES[:2])) == before
        for y, each in zip(found, given, strict=True):
            torch.testing.assert_close(y, model(each), rtol=0, atol=0)


@two_gpus
def test_generators_of_both_devices_are_drawn_from() -> None:
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


@two_gpus
def test_weights_of_both_devices_may_change() -> None:
    model = pipeline()
    fast = autostream.optimize(model)
    layers = [stage.branches[0] for stage in (model.first, model.second)]
    with torch.no_grad():
        fast(x(0))
        for layer in layers:
            layer.weight.mul_(2)
            torch.testing.assert_close(fast(x(1)), model(x(1)), rtol=0, atol=0)
            layer.weight.data = layer.weight.flip(0)
            torch.testing.assert_close(fast(x(1)), model(x(1)), rtol=0, atol=0)
            layer.weight = nn.Parameter(layer.weight.flip(1))
            torch.testing.assert_close(fast(x(1)), model(x(1)), rtol=0, atol=0)


class Returning(nn.Module):
    """A stage that returns to the device that it was given its input on."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        return self.stage(x).to(x.device)


@two_gpus
def test_children_side_by_side_on_two_devices() -> None:
    """The second device's is launched first, though it is called last: its input is copied before all else."""
    torch.manual_seed(0)
    model = autostream.Parallel(*(Returning(Stage(device)) for device in DEVICES[:2])).eval()
    fast = autostream.optimize(model)
    with torch.no_grad():
        for seed in range(5):
            torch.testing.assert_close(fast(x(seed)), model(x(seed)), rtol=0, atol=0)
    (report,) = fast.reports
    assert captured(report) == [DEVICES[1], DEVICES[0]], [part.ended for part in report.parts]


@two_gpus
def test_to_another_device_and_back_while_the_first_goes_on() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.here, self.last = (Stage(DEVICES[0]) for _ in range(3))
            self.there = Stage(DEVICES[1])

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.last(self.here(x) + self.there(x).to(DEVICES[0]))

    torch.manual_seed(0)
    model = Branching().eval()
    fast = autostream.optimize(model)
    with torch.no_grad():
        found = [fast(x(seed)) for seed in range(30)]
        for seed, y in enumerate(found):
            torch.testing.assert_close(y, model(x(seed)), rtol=0, atol=0)
    stem, there, here, last = captured(fast.reports[0])
    assert (stem, there, here, last) == (DEVICES[0], DEVICES[1], DEVICES[0], DEVICES[0])


@pytest.mark.parametrize("pinned", [False, True])
def test_a_batch_that_the_model_itself_copies_from_the_host(pinned: bool) -> None:
    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.Sequential(*map(Stage, DEVICES[:2]))

        def forward(self, x: Tensor) -> Tensor:
            return self.stages(x.to(DEVICES[0], non_blocking=True))

    torch.manual_seed(0)
    model = Copying().eval()
    fast = autostream.optimize(model)
    batches = [x(seed, "cpu").pin_memory() if pinned else x(seed, "cpu") for seed in range(6)]
    with torch.no_grad():
        found = [fast(batch) for batch in batches]
        for y, batch in zip(found, batches, strict=True):
            torch.testing.assert_close(y, model(batch), rtol=0, atol=0)
    assert captured(fast.reports[0]) == DEVICES[:2]
    assert fast.reports[0].refusals[0].reason.startswith("aten.to")


@two_gpus
def test_calls_that_record_gradients_go_to_the_model_itself() -> None:
    model = pipeline()
    fast = autostream.optimize(model)
    ours, theirs = (torch.autograd.grad(run(x(0)).sum(), list(model.parameters())) for run in (fast, model))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert any("several devices" in refusal.reason for refusal in fast.reports[0].refusals)
