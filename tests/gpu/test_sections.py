"""Programs of which only parts can be captured: a number that is read, an op on the CPU, a data-dependent shape."""

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
    """Four branches, an op that cannot be captured, four branches."""
    torch.manual_seed(0)
    return Branches(BETWEEN[between]).cuda()


def x(seed: int, rows: int = 1024) -> Tensor:
    return torch.randn(rows, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def captured(report: Report) -> list[Report]:
    return [part for part in report.parts if part.mode == "cuda graph"]


@torch.no_grad()
@pytest.mark.parametrize("between", [NUMBER, ON_HOST, SHAPE])
def test_the_ops_before_and_after_are_captured(between: str) -> None:
    """Also on another stream, which stays the current one, and after weights have moved."""
    model, stream = branches(between), torch.cuda.Stream()
    fast = autostream.optimize(model)
    for seed in range(5):
        torch.testing.assert_close(fast(x(seed)), model(x(seed)), rtol=0, atol=0)
    (report,) = fast.reports
    assert report.mode == "sections"
    assert len(captured(report)) == 2
    assert "partial_graphs.py" in captured(report)[0].ended
    assert (captured_share(report) or 0.0) >= 0.8

    given = x(5)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        output = fast(given)
        assert torch.cuda.current_stream() == stream
    stream.synchronize()
    torch.testing.assert_close(output, model(given), rtol=0, atol=0)

    if between == NUMBER:
        for layer in (model.before[0], model.after[3]):
            layer.weight = nn.Parameter(torch.randn_like(layer.weight))
        for seed in range(3):
            torch.testing.assert_close(fast(x(seed)), model(x(seed)), rtol=0, atol=0)


@torch.no_grad()
def test_captured_parts_have_fused_kernels() -> None:
    model = branches(NUMBER)
    fast = autostream.optimize(model, kernels="inductor")
    for seed in range(3):
        torch.testing.assert_close(fast(x(seed)), model(x(seed)), rtol=1e-3, atol=1e-3)
    (report,) = fast.reports
    levels = [part.level for part in captured(report)]
    assert levels == ["inductor"] * 2, [part.refusals for part in report.parts]


@pytest.mark.parametrize(("between", "mode"), [(NUMBER, "cuda graph"), (ON_HOST, "sections")])
def test_gradients_are_those_of_eager(between: str, mode: str) -> None:
    """AOTAutograd computes with the number as a tensor, on the device, so one graph holds everything."""
    model = branches(between)
    copied = copy.deepcopy(model)
    fast = autostream.optimize(model)
    for seed in range(3):
        for run, module in ((fast, model), (copied, copied)):
            module.zero_grad()
            run(x(seed)).square().mean().backward()
        for ours, theirs in zip(model.parameters(), copied.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    (report,) = fast.reports
    assert [part.mode for part in report.parts] == [mode, mode]
    assert all(captured(part) for part in report.parts if mode == "sections")


def dropped(s: Model, x: Tensor) -> Tensor:
    """Random numbers before and after a number is read."""
    y = nn.functional.dropout(x, 0.5).sin().cos().exp().tanh()
    return nn.functional.dropout(y * y.max().item(), 0.5).sin().cos().exp() + torch.rand_like(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, x: (x.add_(x.sin().cos().exp().tanh().max().item()), x.cos().sin().exp().tanh().neg(), x.t()),
        lambda s, x: (s.w.mul_(x.sin().cos().exp().mean().item()).sin().cos().exp() + s.w.tanh().neg(), s.w),
        lambda s, x: (torch.rand_like(x).sin().cos().exp() * x.max().item() + torch.rand_like(x).sin().cos()).exp(),
        dropped,
        lambda s, x: ([y := x.sin().cos().exp().tanh(), {"view": y[1:]}], y * y.max().item()),
    ],
    ids=["a mutated input", "a mutated buffer", "random", "dropout", "views"],
)
def test_everything_that_a_caller_observes_is_as_in_eager(function: Callable[..., Any]) -> None:
    """Mutation, random numbers, the states of generators, and aliases, around a number that is read."""
    with torch.device("cuda"):
        model, inputs = Model(function, w=nn.Buffer(torch.randn(4, 4))), ((torch.randn(4, 4),), {})
    assert "sections" in [report.mode for report in check_same(model, inputs, {}).reports]


def test_a_training_step_that_reads_a_number_is_captured_in_sections() -> None:
    """The loss is scaled by a number that is read from the device."""
    model = branches(NUMBER)
    copied = copy.deepcopy(model)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    step = autostream.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    for seed in range(4):
        step(x(seed))
        optimizer.zero_grad()
        loss(copied, x(seed)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for ours, theirs in zip(model.parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert step.reports[0].mode == "sections"
    assert captured(step.reports[0])


@torch.no_grad()
@pytest.mark.parametrize("pinned", [False, True])
def test_copies_overlap_captured_parts(pinned: bool) -> None:
    """The copy from the host overlaps the first branches, the copy to the host the second.

    As in eager, a batch may be overwritten when the call has returned; a pinned one, which the model copies without
    blocking, when the stream has been synchronized.
    """
    torch.manual_seed(0)
    model = Copying().cuda()
    fast = autostream.optimize(model)
    batches = [torch.randn(1024, WIDTH, pin_memory=pinned) for _ in range(6)]
    originals = [batch.clone() for batch in batches]
    fast.prepare(x(0), batches[0])
    outputs = []
    for seed, batch in enumerate(batches):
        outputs.append(fast(x(seed), batch))
        if pinned:
            torch.cuda.current_stream().synchronize()
        batch.fill_(torch.nan)
    for seed, (batch, (ours, on_host)) in enumerate(zip(originals, outputs, strict=True)):
        theirs, expected_on_host = model(x(seed), batch)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        torch.testing.assert_close(on_host, expected_on_host, rtol=0, atol=0)
        assert on_host.is_pinned() == expected_on_host.is_pinned()
    (report,) = fast.reports
    assert [part.mode == "cuda graph" for part in report.parts] == [True, False, True, False]
