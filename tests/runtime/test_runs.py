"""Uncaptured runs of lowered graphs."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autostream.runtime.emulator import ThreadedProgram
from autostream.runtime.lower import lower
from autostream.runtime.runs import StreamRun, uncaptured, uncast, without_autocast
from tests.runtime.programs import random_schedule, same, sample


def lowered(streams: int) -> fx.GraphModule:
    case = sample("towers")
    return lower(case.program, case.graph, random_schedule(case.graph, streams, seed=1))


@pytest.mark.parametrize("streams", [1, 3])
def test_a_cpu_runs_streams_in_threads_and_a_gpu_on_streams(streams: int, capsys: pytest.CaptureFixture[str]) -> None:
    case = sample("towers")
    run = uncaptured(lowered(streams), "cpu", streams)
    assert isinstance(run, ThreadedProgram) == (streams > 1)
    with torch.no_grad():
        assert same(run(*case.args()), case.expected()[0])
        with pytest.raises(RuntimeError):
            run(*(torch.ones(1) for _ in case.args()))
    assert capsys.readouterr() == ("", ""), "fx would print the failing line"
    assert isinstance(uncaptured(lowered(streams), "cuda:0", streams), StreamRun)


def test_fused_kernels_run_without_autocast() -> None:
    a, b = torch.randn(2, 2), torch.randn(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        (product,) = uncast(lambda a, b: [a @ b])(a, b)
        assert product is not None
        assert product.dtype == torch.float32
        assert (a @ b).dtype == torch.bfloat16
        with without_autocast("aten"):
            assert (a @ b).dtype == torch.bfloat16
