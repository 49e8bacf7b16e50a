"""Faults that only a GPU can suffer: no memory, captures that fail or are broken by others, busy streams, forks.

Each in a process of its own: what it leaves behind, or takes away, must not reach other tests. Afterwards the model
runs, memory has come back, and streams, device and generators are as they were.
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
from tests.gpu.test_memory import reserved
from tests.semantics import force_streams

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
MIB = 2**20
SEGMENT = 24 * MIB
"""The allocator may keep one segment more, where the blocks of others are in the way."""

EAGER: dict[str, Any] = {
    "kernels": "eager", "costs": "roofline", "policy": "critical_path", "streams": 2, "memory_budget": math.inf,
}  # fmt: skip


def limit(size: float) -> None:
    """What the allocator may take of the device's memory from now on, bytes."""
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, size / total))


def large() -> tuple[Quiet, Tensor]:
    """A model whose inputs, outputs and results in between are 32 MiB each, and an input."""
    torch.manual_seed(0)
    return Quiet(1024).to(GPU), torch.randn(8192, 1024, device=GPU)


def check_calls(called: Callable[[Tensor], Tensor], x: Tensor, expected: Tensor) -> None:
    """Three calls, each of which gives its output back."""
    for _ in range(3):
        assert torch.equal(called(x), expected)
    torch.cuda.synchronize()


# Out of memory


@pytest.mark.parametrize("costs", ["roofline", "measured"])
@alone
@torch.no_grad()
def test_with_whatever_memory_is_left_above_what_the_model_takes_it_runs(costs: str) -> None:
    """It runs out while ops are measured or copied for, while it is warmed up, captured or called, or not at all."""
    model, x = large()
    expected = model(x)
    before = reserved()
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
        assert reserved() <= before + SEGMENT, (spare, modes, reserved() - before)
    assert len(modes) == 8
    assert modes[0] != "cuda graph", modes
    assert modes[-1] == "cuda graph", modes


@alone
@torch.no_grad()
def test_preparing_without_enough_memory_changes_nothing() -> None:
    """Buffers that are written and generators that are drawn from are put back, wherever it ends."""
    torch.manual_seed(0)
    model, x = Noisy(1024).to(GPU), torch.randn(8192, 1024, device=GPU)
    check_works(model, model, x)
    autostream.optimize(nn.ReLU(), x, **EAGER)  # what is imported for it sets filters of warnings
    before = reserved()
    for spare in (16, 48, 96, 160, 256, 512):
        fast, surroundings = autostream.optimize(model, **EAGER), Surroundings(model)
        limit(reserved() + spare * MIB)
        fast.prepare(x)
        limit(math.inf)
        surroundings.check(Surroundings(model))
        check_free(fast)
        check_works(fast, model, x)
        del fast, surroundings
        assert reserved() <= before + SEGMENT, (spare, reserved() - before)


@alone
@torch.no_grad()
def test_weights_that_move_when_there_is_no_memory_to_capture_again() -> None:
    """The graph goes, and so does its memory; what comes instead has to do with that."""
    model, x = large()
    fast = autostream.optimize(model, x, cuda_graph=True, **EAGER)
    assert fast.reports[0].mode == "cuda graph", fast.reports[0].refusals
    expected = model(x)
    check_calls(fast, x, expected)
    model.left.weight.data = model.left.weight.clone()
    limit(reserved() + 40 * MIB)
    check_calls(fast, x, expected)
    check_free(fast)
    limit(math.inf)
    check_calls(fast, x, expected)
    assert len(fast.reports) == 1


@alone
@torch.no_grad()
def test_a_signature_for_which_there_is_no_memory_leaves_the_others_alone() -> None:
    model, x = large()
    fast = autostream.optimize(model, x[:1024], cuda_graph=True, **EAGER)
    assert fast.reports[0].mode == "cuda graph", fast.reports[0].refusals
    expected = {rows: model(x[:rows]) for rows in (512, 1024, 8192)}
    torch.cuda.synchronize()
    limit(reserved() + 192 * MIB)
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
def test_an_op_that_raises_at_any_time_while_it_is_prepared(fault: str) -> None:
    """While it is warmed up and captured, again and again; a replay runs no Python."""
    make = {"out_of_memory": out_of_memory, "RuntimeError": RuntimeError, "KeyboardInterrupt": KeyboardInterrupt}[fault]
    model, x = Noisy(64).to(GPU), torch.randn(128, 64, device=GPU)
    check_works(autostream.optimize(model, x, **EAGER), model, x)
    before = reserved()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autostream.tuning.select.VARIANTS", 0)
        assert strike(model, x, {**EAGER, **force_streams(patch)}, make, range(1, 30)) >= 6
    assert reserved() <= before + SEGMENT
    fast = autostream.optimize(model, x, **EAGER)
    check_works(fast, model, x)
    assert fast.reports[0].mode == "cuda graph", fast.reports[0].refusals


@alone
@torch.no_grad()
def test_an_op_that_raises_in_a_call_on_streams() -> None:
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


# Other threads, streams and processes


@torch.library.custom_op("tests_faults::meddled_with", mutates_args=())
def meddled_with(x: Tensor) -> Tensor:
    """The same; while it is captured, another thread meddles."""
    if torch.cuda.is_current_stream_capturing():
        thread = threading.Thread(target=_meddle, args=(Meddling.how, torch.cuda.current_stream()))
        thread.start()
        thread.join()
    return x.clone()


@meddled_with.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Meddling(nn.Module):
    """A model that another thread meddles with, and how."""

    how = ""
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        return meddled_with(x.sin()) + torch.dropout(x.cos(), 0.5, True)


def _meddle(how: str, stream: torch.cuda.Stream) -> None:
    Meddling.count += 1
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
def test_a_thread_that_meddles_with_a_capture(how: str) -> None:
    """Some of it ends the capture, and then it runs without; some does no harm, and then there is nothing to say."""
    model, x = Meddling(), torch.randn(64, 64, device=GPU)
    autostream.optimize(nn.ReLU(), x, **EAGER)  # what is imported for it sets filters of warnings
    fast, before = autostream.optimize(model, **EAGER), Surroundings(model)
    Meddling.how = how
    fast.prepare(x)
    assert Meddling.count
    before.check(Surroundings(model))
    check_free(fast)
    check_works(fast, model, x)
    (report,) = fast.reports
    assert [refusal.choice for refusal in report.refusals] == (["not captured"] if report.mode != "cuda graph" else [])
    Meddling.how = ""
    again = autostream.optimize(model, x, **EAGER)
    check_works(again, model, x)
    assert again.reports[0].mode == "cuda graph", again.reports[0].refusals


@alone
@torch.no_grad()
def test_streams_that_others_keep_busy() -> None:
    """Half a second of work on each waits while a model is prepared and called, and comes to what it should."""
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
def test_a_process_that_is_forked_after_cuda_has_started() -> None:
    """It has no device: calls there say so, and models on the CPU run. The process that it comes from goes on."""
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


@alone
@torch.no_grad()
def test_measurements_that_cannot_be_kept() -> None:
    os.environ["AUTOSTREAM_CACHE_DIR"] = __file__  # which is no folder
    model, x = Quiet(64).to(GPU), torch.randn(128, 64, device=GPU)
    fast = autostream.optimize(model, x, **{**EAGER, "costs": "measured"})
    check_works(fast, model, x)
    (report,) = fast.reports
    assert [refusal.choice for refusal in report.refusals] == ["not cached"], report.refusals
    assert report.mode == "cuda graph"
