"""Prefetched batches that a captured graph reads in its input buffers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.api import OptimizedModule
from autostream.runtime.profiled_kernels import profiled
from autostream.runtime.streams import copy_stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # as errors, PyTorch's own would make it fall back
]

SIZE = 1 << 20
"""Elements of a batch: so many that its copy is no kernel for several tensors, and takes a while."""


class Late(Iterable[Tensor]):
    """Pinned batches of the numbers 0, 1, …; the copy of each starts late, after a kernel that spins."""

    def __init__(self, count: int, cycles: int = 0, last: int = SIZE) -> None:
        self.count, self.cycles, self.last = count, cycles, last

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.count):
            with torch.cuda.stream(copy_stream(torch.cuda.current_device())):
                torch.cuda._sleep(self.cycles)
            size = self.last if number + 1 == self.count else SIZE
            yield torch.full((size,), float(number)).pin_memory()


class Twice(nn.Module):
    """Exact for each number; reads the first and the last element of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + x).amin() + (x * 2).amax()


def optimized() -> OptimizedModule:
    return autostream.optimize(Twice(), kernels="eager", costs="roofline")


@torch.no_grad()
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(("copy", "work"), [(0, 0), (1_000_000, 0), (0, 1_000_000), (300_000, 300_000)])
def test_late_copies_and_late_replays_change_nothing(copy: int, work: int, depth: int) -> None:
    """Over two epochs, on the default stream and on another; the last batch is smaller, so it has no input buffer."""
    fast = optimized()
    ahead = autostream.prefetch(Late(12, copy, last=SIZE // 2), "cuda", depth, into=fast)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        outputs = []
        for _ in range(2):
            with torch.cuda.stream(stream):
                for batch in ahead:
                    torch.cuda._sleep(work)
                    outputs.append(fast(batch))
        stream.synchronize()
        assert [each.item() for each in outputs] == [4.0 * number for number in range(12)] * 2


def on_device(run: Callable[[], object]) -> list[Mapping[str, Any]]:
    """The kernels and copies that the GPU ran."""
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    return [event for event in profiled(run, "cuda") if event.get("cat") in kinds]


def large_copies(events: Iterable[Mapping[str, Any]]) -> int:
    """How many copies on the GPU are as large as a batch."""
    copies = [event for event in events if event["name"].startswith("Memcpy DtoD")]
    return sum(event["args"]["bytes"] >= 4 * SIZE for event in copies)


@torch.no_grad()
def test_no_batch_is_copied_on_the_device() -> None:
    def measured(into: bool) -> list[Mapping[str, Any]]:
        fast = optimized()
        batches = iter(autostream.prefetch(Late(30), "cuda", into=fast if into else None))
        for batch in islice(batches, 10):
            fast(batch)
        del batch
        return on_device(lambda: [fast(batch) for batch in islice(batches, 6)])

    without, within = measured(into=False), measured(into=True)
    assert large_copies(without) == 6, "otherwise this test shows nothing"
    assert large_copies(within) == 0
    assert len(within) == len(without) - 6


def test_a_training_step_copies_no_batch_and_trains_the_same() -> None:
    def trained(into: bool) -> tuple[list[float], int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = autostream.train_step(model, optimizer, nn.MSELoss(), kernels="eager", costs="roofline")
        data = [(torch.randn(512, 256).pin_memory(), torch.randn(512, 8).pin_memory()) for _ in range(20)]
        batches = iter(autostream.prefetch(data, "cuda", into=step if into else None))
        losses = []
        for x, y in islice(batches, 10):
            losses.append(step(x, y))
        del x, y
        events = on_device(lambda: losses.extend(step(*batch) for batch in batches))
        assert {report.mode for report in step.reports} == {"cuda graph"}
        return [loss.item() for loss in losses], len(events)

    (theirs, more), (ours, fewer) = trained(into=False), trained(into=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert fewer < more


@torch.no_grad()
def test_memory_of_input_buffers_is_freed() -> None:
    fast = optimized()
    for batch in islice(Late(2), 2):
        fast(batch.cuda())
    del batch
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        ahead = autostream.prefetch(Late(8), "cuda", into=fast)
        for batch in ahead:
            fast(batch)
        assert torch.cuda.memory_allocated() > before
        del batch, ahead
        assert torch.cuda.memory_allocated() == before


@torch.no_grad()
def test_a_loop_that_is_left_early_frees_its_memory_safely() -> None:
    """Copies and replays are not complete when the loop ends."""
    fast = optimized()
    for _ in range(5):
        batches = iter(autostream.prefetch(Late(8, 1_000_000), "cuda", into=fast))
        torch.cuda._sleep(1_000_000)
        first = fast(next(batches))
        del batches
        mine = torch.full((4, SIZE), 7.0, device="cuda")
        assert bool((mine == 7.0).all())
        assert first.item() == 0.0
        del mine
