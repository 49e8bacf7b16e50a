"""Which way a lowered graph runs uncaptured, and what a run over CUDA streams leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import fx

from autostream.runtime import runs
from autostream.runtime.emulator import ThreadedProgram
from autostream.runtime.lower import lower
from autostream.runtime.runs import StreamRun, UncastRun, uncaptured, without_autocast
from tests.runtime.programs import random_schedule, same, sample


def lowered(streams: int) -> fx.GraphModule:
    case = sample("towers")
    return lower(case.program, case.graph, random_schedule(case.graph, streams, seed=1))


@pytest.mark.parametrize("streams", [1, 3])
def test_the_cpu_computes_the_same_whatever_the_number_of_streams(streams: int) -> None:
    case = sample("towers")
    run = uncaptured(lowered(streams), "cpu", streams)
    assert isinstance(run, ThreadedProgram) == (streams > 1)
    with torch.no_grad():
        assert same(run(*case.args()), case.expected()[0])


@pytest.mark.parametrize("streams", [1, 3])
def test_a_gpu_gets_streams_even_if_it_is_one(streams: int) -> None:
    """A run over one stream also puts back the device and the stream, and needs autocast's cache off no less."""
    assert isinstance(uncaptured(lowered(streams), "cuda:0", streams), StreamRun)


def test_fused_kernels_take_their_arguments_as_they_are() -> None:
    a, b = torch.randn(2, 2), torch.randn(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        (product,) = UncastRun(lambda a, b: [a @ b])(a, b)
        assert product is not None
        assert product.dtype == torch.float32
        assert (a @ b).dtype == torch.bfloat16, "afterwards all is as before"
        with without_autocast("aten"):
            assert (a @ b).dtype == torch.bfloat16


def test_a_run_happens_inside_of_restored_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    @contextmanager
    def restored(device: str) -> Iterator[None]:
        log.append(f"enter {device}")
        try:
            yield
        finally:
            log.append("exit")

    def forward(x: int) -> tuple[int]:
        log.append("run")
        return (1 // x,)

    monkeypatch.setattr(runs, "restored", restored)
    module = lowered(1)
    monkeypatch.setattr(type(module), "forward", staticmethod(forward))
    run = StreamRun(module, "cuda:1")
    assert run(1) == (1,)
    with pytest.raises(ZeroDivisionError):
        run(0)
    assert log == ["enter cuda:1", "run", "exit"] * 2


def test_what_an_op_raises_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Calling an fx module prints the line that failed to stderr, which is no place for a library."""
    run = uncaptured(lowered(1), "cpu", 1)
    with pytest.raises(RuntimeError), torch.no_grad():
        run(*(torch.ones(1) for _ in sample("towers").args()))
    assert capsys.readouterr() == ("", "")
