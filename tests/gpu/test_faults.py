"""Faults on a GPU: no memory, captures that fail or that other threads break, busy streams, forks.

Each test runs in a new process, so that it does not affect other tests. After the fault the model runs, memory is
free, and streams, device and generators are as before.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from tests.alone import alone
from tests.faults import Noisy, Quiet, Risk, Surroundings, check_free, check_works, out_of_memory, strike
from tests.gpu.common import EAGER as ATEN
from tests.gpu.common import GPU, MIB, reserved_bytes
from tests.semantics import force_streams
from tests.step_faults import strike_steps

pytestmark = pytest.mark.gpu

SEGMENT = 24 * MIB
"""The allocator may keep one segment more, where blocks of other code lie between."""

EAGER: dict[str, Any] = {**ATEN, "policy": "critical_path", "streams": 2}


def limit(size: float) -> None:
    """Let the allocator take so many bytes of the GPU's memory at most."""
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, size / total))


def large() -> tuple[Quiet, Tensor]:
    """A model whose inputs, outputs and intermediate tensors are 32 MiB each, and an input."""
    torch.manual_seed(0)
    return Quiet(1024).to(GPU), torch.randn(8192, 1024, device=GPU)


def check_calls(called: Callable[[Tensor], Tensor], x: Tensor, expected: Tensor) -> None:
    """Three calls, each of whose outputs is freed."""
    for _ in range(3):
        assert torch.equal(called(x), expected)
    torch.cuda.synchronize()


# Out of memory


@pytest.mark.parametrize("costs", ["roofline", "measured"])
@alone
@torch.no_grad()
def test_a_model_runs_with_any_amount_of_memory_that_eager_can_do_with(costs: str) -> None:
    """Memory runs out while ops are measured, in the warmup, the capture or a call, or not at all."""
    model, x = large()
    expected = model(x)
    before = reserved_bytes()
    torch.cuda.reset_peak_memory_stats()
    check_calls(model, x, expected)
    peak, modes = torch.cuda.max_memory_reserved(), []
    for spare in (64, 96, 128, 160, 224, 320, 512, 4096):
        limit(peak + spare * MIB)
        fast = autostream.optimize(model, **{**EAGER, "costs": costs})
        check_calls(fast, x, expected)
        check_free(fast)
        modes += [report.mode for report in fast.reports]
        limit(math.inf)
        check_calls(fast, x, expected)
        del fast
        assert reserved_bytes() <= before + SEGMENT, (spare, modes, reserved_bytes() - before)
    assert len(modes) == 8
    assert modes[0] != "cuda graph", modes
    assert modes[-1] == "cuda graph", modes


@alone
@torch.no_grad()
def test_compiling_without_enough_memory_changes_nothing() -> None:
    """Buffers and generators are restored, wherever it fails."""
    torch.manual_seed(0)
    model, x = Noisy(1024).to(GPU), torch.randn(8192, 1024, device=GPU)
    check_works(model, model, x)
    autostream.optimize(nn.ReLU(), x, **EAGER)  # its imports set filters of warnings
    before = reserved_bytes()
    for spare in (16, 48, 96, 160, 256, 512):
        fast, surroundings = autostream.optimize(model, **EAGER), Surroundings(model)
        limit(reserved_bytes() + spare * MIB)
        fast.prepare(x)
        limit(math.inf)
        surroundings.check(Surroundings(model))
        check_free(fast)
        check_works(fast, model, x)
        del fast, surroundings
        assert reserved_bytes() <= before + SEGMENT, (spare, reserved_bytes() - before)


@alone
@torch.no_grad()
def test_weights_may_move_without_memory_for_another_capture() -> None:
    """The old graph and its memory are freed first."""
    model, x = large()
    fast = autostream.optimize(model, x, cuda_graph=True, **EAGER)
    assert fast.reports[0].mode == "cuda graph", fast.reports[0].refusals
    expected = model(x)
    check_calls(fast, x, expected)
    model.left.weight.data = model.left.weight.clone()
    limit(reserved_bytes() + 40 * MIB)
    check_calls(fast, x, expected)
    check_free(fast)
    limit(math.inf)
    check_calls(fast, x, expected)
    assert len(fast.reports) == 1


@alone
@torch.no_grad()
def test_a_signature_without_enough_memory_leaves_the_others_captured() -> None:
    model, x = large()
    fast = autostream.optimize(model, x[:1024], cuda_graph=True, **EAGER)
    assert fast.reports[0].mode == "cuda graph", fast.reports[0].refusals
    expected = {rows: model(x[:rows]) for rows in (512, 1024, 8192)}
    torch.cuda.synchronize()
    limit(reserved_bytes() + 192 * MIB)
    check_calls(fast, x, expected[8192])
    check_calls(fast, x[:1024], expected[1024])
    limit(math.inf)
    for rows, output in expected.items():
        check_calls(fast, x[:rows], output)
    assert [report.mode for report in fast.reports if "512x" in report.signature] == ["cuda graph"]


# Ops that raise, and Ctrl-C


@pytest.mark.parametrize("fault", ["out_of_memory", "RuntimeError", "KeyboardInterrupt"])
@alone
@torch.no_grad()
def test_an_op_may_raise_in_any_run_while_its_model_is_compiled(fault: str) -> None:
    """In the warmup and in the capture of each candidate; a replay runs no Python."""
    make = {"out_of_memory": out_of_memory, "RuntimeError": RuntimeError, "KeyboardInterrupt": KeyboardInterrupt}[fault]
    model, x = Noisy(64).to(GPU), torch.randn(128, 64, device=GPU)
    check_works(autostream.optimize(model, x, **EAGER), model, x)
    before = reserved_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autostream.tuning.select.VARIANTS", 0)
        assert strike(model, x, {**EAGER, **force_streams(patch)}, make, range(1, 30)) >= 6
    assert reserved_bytes() <= before + SEGMENT
    fast = autostream.optimize(model, x, **EAGER)
    check_works(fast, model, x)
    assert fast.reports[0].mode == "cuda graph", fast.reports[0].refusals


@alone
@torch.no_grad()
def test_an_op_may_raise_in_a_call_on_streams() -> None:
    model, x = Noisy(64).to(GPU), torch.randn(128, 64, device=GPU)
    with pytest.MonkeyPatch.context() as patch:
        fast = autostream.optimize(model, x, cuda_graph=False, **{**EAGER, **force_streams(patch)})
    assert fast.reports[0].mode == "streams", fast.reports[0].refusals
    for make_fault in (RuntimeError, KeyboardInterrupt):
        place = Surroundings(model).place
        Risk.is_at(1, make_fault)
        with pytest.raises(make_fault):
            fast(x)
        assert Surroundings(model).place == place
        check_free(fast)
        check_works(fast, model, x)
    assert [report.mode for report in fast.reports] == ["streams"]


# Steps


class Large:
    """A step of a model whose weights, gradients and states take 64 MiB each, and intermediate tensors 16 MiB."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.Tanh())]
        self.model = nn.Sequential(*layers).to(GPU)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def update(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.sgd.step()
        self.sgd.zero_grad()
        return loss.detach()


@pytest.mark.parametrize("costs", ["roofline", "measured"])
@alone
def test_a_step_runs_with_any_amount_of_memory_that_eager_can_do_with(costs: str) -> None:
    """Memory runs out while ops are measured, in the warm-up or the capture, or not at all; never in a replay."""
    x, calls = torch.randn(2048, 2048, device=GPU), 5
    eager = Large()
    expected = [eager.update(x).item() for _ in range(calls)]
    weights = [parameter.detach().cpu() for parameter in eager.model.parameters()]
    torch.cuda.synchronize()
    peak, modes = torch.cuda.max_memory_reserved(), []
    del eager
    torch.cuda.empty_cache()
    for spare in (48, 160, 320, 768, 1536, 8192):
        ours = Large()
        step = autostream.step(optimizers=[ours.sgd], **{**EAGER, "costs": costs})(ours.update)
        losses = [step(x).item()]
        limit(peak + spare * MIB)
        losses += [step(x).item() for _ in range(calls - 2)]
        limit(math.inf)
        losses.append(step(x).item())
        ends = [parameter.detach().cpu() for parameter in ours.model.parameters()]
        torch.testing.assert_close((losses, ends), (expected, weights), rtol=1e-4, atol=1e-5)
        modes += [report.mode for report in step.reports]
        del ours, step
        torch.cuda.empty_cache()
    assert len(modes) == 6
    assert modes[0] != "cuda graph", modes
    assert modes[-1] == "cuda graph", modes


@pytest.mark.parametrize("fault", ["out_of_memory", "RuntimeError", "KeyboardInterrupt"])
@alone
def test_an_op_may_raise_in_any_run_while_its_step_is_compiled(fault: str) -> None:
    """In the warm-up and in the capture of each candidate, in a forward and in a backward."""
    make = {"out_of_memory": out_of_memory, "RuntimeError": RuntimeError, "KeyboardInterrupt": KeyboardInterrupt}[fault]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autostream.tuning.select.VARIANTS", 0)
        options = {"kernels": "eager", "costs": "roofline", **force_streams(patch)}
        assert strike_steps(options, make, range(1, 60, 3), str(GPU)) >= 3


# Other threads, streams and processes


@torch.library.custom_op("tests_faults::interrupted", mutates_args=())
def interrupted(x: Tensor) -> Tensor:
    """A copy; while it is captured, another thread uses the GPU."""
    if torch.cuda.is_current_stream_capturing():
        thread = threading.Thread(target=_use_the_gpu, args=(Interrupted.how, torch.cuda.current_stream()))
        thread.start()
        thread.join()
    return x.clone()


@interrupted.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Interrupted(nn.Module):
    """A model during whose capture another thread uses the GPU, in one of four ways."""

    how = ""
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        return interrupted(x.sin()) + torch.dropout(x.cos(), 0.5, True)


def _use_the_gpu(how: str, stream: torch.cuda.Stream) -> None:
    Interrupted.count += 1
    try:
        match how:
            case "allocate":
                torch.empty(64 * MIB, dtype=torch.uint8, device=GPU)
                torch.cuda.empty_cache()
            case "wait for the device":
                torch.cuda.synchronize()
            case "wait for the stream":
                stream.synchronize()
            case "ask the stream":
                stream.query()
    except RuntimeError as error:
        print(how, error)  # CUDA refuses some of it


@pytest.mark.parametrize("how", ["allocate", "wait for the device", "wait for the stream", "ask the stream"])
@alone
@torch.no_grad()
def test_another_thread_may_use_the_gpu_during_a_capture(how: str) -> None:
    """If that ends the capture, the model runs without, and the report says so."""
    model, x = Interrupted(), torch.randn(64, 64, device=GPU)
    autostream.optimize(nn.ReLU(), x, **EAGER)  # its imports set filters of warnings
    fast, before = autostream.optimize(model, **EAGER), Surroundings(model)
    Interrupted.how = how
    fast.prepare(x)
    assert Interrupted.count
    before.check(Surroundings(model))
    check_free(fast)
    check_works(fast, model, x)
    (report,) = fast.reports
    assert [refusal.choice for refusal in report.refusals] == (["not captured"] if report.mode != "cuda graph" else [])
    Interrupted.how = ""
    again = autostream.optimize(model, x, **EAGER)
    check_works(again, model, x)
    assert again.reports[0].mode == "cuda graph", again.reports[0].refusals


@alone
@torch.no_grad()
def test_streams_of_other_code_may_be_busy() -> None:
    """Each has half a second of work while a model is compiled and called; the work has the right results."""
    model, x = Noisy(64).to(GPU), torch.randn(128, 64, device=GPU)
    check_works(model, model, x)
    streams, counts = [torch.cuda.Stream(GPU) for _ in range(4)], torch.zeros(4, device=GPU)
    torch.cuda.synchronize()
    for stream, count in zip(streams, counts, strict=True):
        with torch.cuda.stream(stream):
            for _ in range(50):
                torch.cuda._sleep(20_000_000)
                count.add_(1)
    fast, before = autostream.optimize(model, **EAGER), Surroundings(model)
    fast.prepare(x)
    before.check(Surroundings(model))
    check_works(fast, model, x)
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        check_works(fast, model, x)
        assert torch.cuda.current_stream() == streams[0]
    torch.cuda.synchronize()
    assert counts.tolist() == [50.0] * 4


@alone
@torch.no_grad()
def test_a_process_may_be_forked_after_cuda_has_started() -> None:
    """The child has no GPU: calls on it raise, and models on the CPU run. The parent process continues."""
    torch.set_num_threads(1)
    model, x = Quiet(64).to(GPU), torch.randn(128, 64, device=GPU)
    fast = autostream.optimize(model, x, **EAGER)
    check_works(fast, model, x)
    on_the_cpu, y = Quiet(64), torch.randn(8, 64)
    torch.cuda.synchronize()
    if not (child := os.fork()):
        signal.alarm(100)  # ends it if it hangs
        try:
            with pytest.raises(RuntimeError, match="CUDA"):
                fast(x)
            assert torch.equal(autostream.optimize(on_the_cpu)(y), on_the_cpu(y))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    check_works(fast, model, x)
    check_works(autostream.optimize(model, x[:64], **EAGER), model, x[:64])
