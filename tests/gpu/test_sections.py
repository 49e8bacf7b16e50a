"""Programs that a CUDA graph cannot hold whole: sections of them are captured, and nobody can tell from the results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.reporting.parts import captured_share
from autostream.reporting.report import Report
from benchmarks.partial_graphs import BETWEEN, WIDTH, Branches, Copying
from tests.semantics import Model, check_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("aten_ops"),
    pytest.mark.filterwarnings("ignore:TensorFloat32"),  # as an error, Inductor's own would make it fall back
]

NUMBER, ON_HOST, SHAPE = "a number", "an op on the CPU", "a shape that depends on data"


def branches(between: str) -> Branches:
    """Four branches, something that no graph holds, four branches."""
    torch.manual_seed(0)
    return Branches(BETWEEN[between]).cuda()


def x(seed: int, rows: int = 1024) -> Tensor:
    return torch.randn(rows, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def captured(report: Report) -> list[Report]:
    return [part for part in report.parts if part.mode == "cuda graph"]


@pytest.mark.parametrize("between", [NUMBER, ON_HOST, SHAPE])
def test_what_comes_before_and_after_is_captured(between: str) -> None:
    model = branches(between)
    fast = autostream.optimize(model)
    with torch.no_grad():
        for seed in range(5):
            torch.testing.assert_close(fast(x(seed)), model(x(seed)), rtol=0, atol=0)
    (report,) = fast.reports
    assert report.mode == "sections"
    assert len(captured(report)) == 2
    assert "partial_graphs.py" in captured(report)[0].ended
    assert (captured_share(report) or 0.0) >= 0.8


def test_fused_kernels_are_captured_in_sections() -> None:
    model = branches(NUMBER)
    fast = autostream.optimize(model, kernels="inductor")
    with torch.no_grad():
        for seed in range(3):
            torch.testing.assert_close(fast(x(seed)), model(x(seed)), rtol=1e-3, atol=1e-3)
    (report,) = fast.reports
    levels = [part.level for part in captured(report)]
    assert levels == ["inductor"] * 2, [part.refusals for part in report.parts]


@pytest.mark.parametrize(("between", "mode"), [(NUMBER, "cuda graph"), (ON_HOST, "sections")])
def test_gradients_come_through_sections(between: str, mode: str) -> None:
    """AOTAutograd computes with the number as a tensor, on the device, so one graph holds all."""
    model = branches(between)
    twin = copy.deepcopy(model)
    fast = autostream.optimize(model)
    for seed in range(3):
        for run, own in ((fast, model), (twin, twin)):
            own.zero_grad()
            run(x(seed)).square().mean().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    (report,) = fast.reports
    assert [part.mode for part in report.parts] == [mode, mode]
    assert all(captured(part) for part in report.parts if mode == "sections")


@pytest.mark.parametrize(
    "function",
    [
        lambda s, x: (x.add_(x.sin().cos().exp().tanh().max().item()), x.cos().sin().exp().tanh().neg(), x.t()),
        lambda s, x: (s.w.mul_(x.sin().cos().exp().mean().item()).sin().cos().exp() + s.w.tanh().neg(), s.w),
        lambda s, x: (torch.rand_like(x).sin().cos().exp() * x.max().item() + torch.rand_like(x).sin().cos()).exp(),
        lambda s, x: ([y := x.sin().cos().exp().tanh(), {"view": y[1:]}], y * y.max().item()),
    ],
    ids=["input", "state", "random", "views"],
)
def test_nobody_can_tell_it_from_the_model(function: Callable[..., Any]) -> None:
    """Writes, random numbers around a number that is asked for, what generators are left at, and what aliases what."""
    with torch.device("cuda"):
        model, inputs = Model(function, w=nn.Buffer(torch.randn(4, 4))), ((torch.randn(4, 4),), {})
    assert "sections" in [report.mode for report in check_same(model, inputs, {}).reports]


def test_weights_that_move_are_found() -> None:
    model = branches(NUMBER)
    fast = autostream.optimize(model)
    with torch.no_grad():
        fast(x(0))
        for layer in (model.before[0], model.after[3]):
            layer.weight = nn.Parameter(torch.randn_like(layer.weight))
        for seed in range(3):
            torch.testing.assert_close(fast(x(seed)), model(x(seed)), rtol=0, atol=0)


def test_a_training_step_with_a_number_is_captured_in_sections() -> None:
    """The loss is scaled by a number that is asked of the device."""
    model = branches(NUMBER)
    twin = copy.deepcopy(model)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    step = autostream.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for seed in range(4):
        step(x(seed))
        optimizer.zero_grad()
        loss(twin, x(seed)).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert step.reports[0].mode == "sections"
    assert captured(step.reports[0])


def test_a_section_that_draws_leaves_the_generator_as_the_model_does() -> None:
    def draws(s: Model, x: Tensor) -> Tensor:
        y = nn.functional.dropout(x, 0.5).sin().cos().exp().tanh()
        return nn.functional.dropout(y * y.max().item(), 0.5).sin().cos().exp() + torch.rand_like(x)

    model = Model(draws)
    fast = autostream.optimize(model)
    with torch.no_grad():
        fast.prepare(x(0))
        for seed in range(3):
            states = []
            for run in (fast, model):
                torch.cuda.manual_seed(seed)
                states.append((run(x(seed)), torch.rand(3, device="cuda"), torch.cuda.get_rng_state()))
            torch.testing.assert_close(*states, rtol=0, atol=0)
    assert fast.reports[0].mode == "sections"


def test_streams_and_devices_are_as_before() -> None:
    model, stream = branches(NUMBER), torch.cuda.Stream()
    fast = autostream.optimize(model)
    given = x(0)
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(stream):
        found = fast(given)
        assert torch.cuda.current_stream() == stream
    stream.synchronize()
    with torch.no_grad():
        torch.testing.assert_close(found, model(given), rtol=0, atol=0)


@pytest.mark.parametrize("pinned", [False, True])
def test_copies_run_beside_sections(pinned: bool) -> None:
    """What the host copies to the device is copied beside the first branches; what is copied there, beside the second.

    Whoever overwrites a batch when the call has returned changes nothing, as with the model itself; of a pinned one,
    which the model copies without blocking, after the stream has come so far.
    """
    torch.manual_seed(0)
    model = Copying().cuda()
    fast = autostream.optimize(model)
    batches = [torch.randn(1024, WIDTH, pin_memory=pinned) for _ in range(6)]
    kept = [batch.clone() for batch in batches]
    with torch.no_grad():
        fast.prepare(x(0), batches[0])
        found = []
        for seed, batch in enumerate(batches):
            found.append(fast(x(seed), batch))
            if pinned:
                torch.cuda.current_stream().synchronize()
            batch.fill_(torch.nan)
        for seed, (batch, (ours, host)) in enumerate(zip(kept, found, strict=True)):
            theirs, there = model(x(seed), batch)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
            torch.testing.assert_close(host, there, rtol=0, atol=0)
            assert host.is_pinned() == there.is_pinned()
    (report,) = fast.reports
    assert [part.mode == "cuda graph" for part in report.parts] == [True, False, True, False]
