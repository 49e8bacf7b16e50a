"""Captures of CUDA graphs, and what they leave behind if they fail; on a GPU, in a process of their own."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autostream.runtime.capture import capture
from tests.alone import run_alone


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of graphs that capture nothing."""
    log: list[Any] = []

    class Graph:
        def __init__(self, **settings: object) -> None:
            log.append(settings)

        def capture_begin(self, **settings: object) -> None:
            log.append(("begin", settings.get("pool")))

        def capture_end(self) -> None:
            log.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "new pool")
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda device, pool: None, raising=False)
    monkeypatch.setattr("autostream.runtime.capture.idle_capture_stream", lambda device: STREAM)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)
    return log


STREAM: Any = SimpleNamespace(device=torch.device("cuda:0"), synchronize=lambda: None)


def test_a_capture_has_cublas_workspaces_of_its_own(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two graphs that are replayed side by side would both write to earlier workspaces. Also after an error."""
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: log.append("clear"), raising=False)
    _, result = capture(lambda: log.append("run") or 7, STREAM, "a pool")  # type: ignore[func-returns-value]
    assert (log, result) == ([{}, "clear", ("begin", "a pool"), "run", "end", "clear"], 7)
    log.clear()
    with pytest.raises(ZeroDivisionError):
        capture(lambda: 1 / 0, STREAM, keep_nodes=True)
    assert log == [{"keep_graph": True}, "clear", ("begin", "new pool"), "end", {}, ("begin", None), "end", "clear"]


@pytest.mark.parametrize("invalidated", [False, True])
def test_a_failed_capture_releases_its_reference_to_the_pool(
    invalidated: bool, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch counts the graphs of a pool, and itself releases only those whose capture it could end."""
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", raising if invalidated else lambda graph: None)
    end = (lambda device, pool: None) if invalidated else raising
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    released: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *args: released.append(args), raising=False)
    with pytest.raises(ZeroDivisionError):
        capture(lambda: 1 / 0, STREAM, "a pool")
    assert released == ([(0, "a pool")] if invalidated else [])


def raising(*args: object) -> None:
    raise RuntimeError


@pytest.mark.gpu
def test_after_a_failed_capture_the_process_works_as_before() -> None:
    run_alone(
        """
        import torch
        from autostream.runtime.capture import capture

        torch.cuda.manual_seed(7)
        expected = [torch.rand(4, device="cuda") for _ in range(3)]
        torch.cuda.manual_seed(7)
        assert torch.equal(torch.rand(4, device="cuda"), expected[0])

        x, stream = torch.ones(1024, device="cuda"), torch.cuda.Stream()
        for fails in (lambda: x.sum().item(), lambda: torch.nonzero(x), lambda: 1 / 0):
            try:
                capture(fails, stream)
            except Exception as error:
                print(type(error).__name__, error)
            else:
                raise AssertionError("a capture that waits for the device must fail")
            assert not torch.cuda.is_current_stream_capturing()
            state = torch.cuda.get_rng_state()
            torch.rand(4, device="cuda")
            torch.cuda.set_rng_state(state)

        assert torch.equal(torch.rand(4, device="cuda"), expected[1])      # the generator continues
        before = torch.cuda.memory_allocated()
        block = torch.empty(1 << 20, device="cuda")
        assert torch.cuda.memory_allocated() > before
        del block
        assert torch.cuda.memory_allocated() == before
        w = torch.rand(1024, 8, device="cuda")
        with torch.cuda.stream(stream):
            x[None] @ w
        graph, y = capture(lambda: torch.dropout(x, 0.5, True)[None] @ w, stream)
        torch.cuda.manual_seed(1)
        graph.replay()
        first = y.clone()
        torch.cuda.manual_seed(1)
        graph.replay()
        assert torch.equal(first, y)
        torch.cuda.manual_seed(7)
        assert torch.equal(torch.rand(4, device="cuda"), expected[0])
        """
    )


@pytest.mark.gpu
def test_the_memory_of_a_failed_capture_is_freed() -> None:
    """That of a new pool at once, that of a shared pool with the last graph."""
    run_alone(
        """
        import gc, torch
        from autostream.runtime.capture import capture
        from autostream.runtime.streams import capture_stream

        def fails():
            block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
            x.sum().item()

        def reserved():
            gc.collect()
            torch.cuda.empty_cache()
            return torch.cuda.memory_reserved()

        def attempt(pool):
            try:
                capture(fails, stream, pool)
            except RuntimeError as error:
                print(error)
            else:
                raise AssertionError("a capture that waits for the device must fail")

        x, stream = torch.ones(1024, device="cuda"), capture_stream("cuda:0")
        x.sum().item()
        attempt(None)
        before = reserved()
        for _ in range(3):
            attempt(None)
        assert reserved() == before, (reserved(), before)

        graph, y = capture(lambda: x + 1, stream)
        attempt(graph.pool())
        graph.replay()
        assert y.eq(2).all().item()
        assert reserved() >= before + (64 << 20)
        del graph, y
        assert reserved() == before, (reserved(), before)
        """
    )


@pytest.mark.gpu
def test_a_model_whose_op_synchronizes_unexpectedly_runs_uncaptured() -> None:
    run_alone(
        """
        import torch, autostream
        from torch.library import custom_op

        @custom_op("tests::waits", mutates_args=())
        def waits(x: torch.Tensor) -> torch.Tensor:
            return x * (2 if x.sum().item() > 0 else 3)

        @waits.register_fake
        def _(x):
            return torch.empty_like(x)

        class Model(torch.nn.Module):
            def forward(self, x):
                return torch.dropout(waits(x) + torch.relu(x), 0.5, True)

        fast, x = autostream.optimize(Model(), kernels="eager"), torch.rand(64, device="cuda")
        with torch.no_grad():
            for seed in range(3):
                torch.cuda.manual_seed(seed)
                expected = Model()(x)
                torch.cuda.manual_seed(seed)
                assert torch.equal(fast(x), expected)
        (report,) = fast.reports
        assert report.mode in ("one stream", "streams"), report.mode
        assert any("waits" in refusal.reason for refusal in report.refusals), report.refusals
        """
    )
