"""Batches that a captured graph reads where they come: what only a GPU can show."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.api import OptimizedModule
from autostream.dispatch.step_graphs import Entry
from autostream.runtime.measured_timeline import profiled
from autostream.runtime.streams import copy_stream
from autostream.training import TrainStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # as errors, PyTorch's own would make it fall back
]

SIZE = 1 << 20
"""Elements of a batch: large enough that a copy is no kernel of several tensors, and takes a while."""


class Late(Iterable[Tensor]):
    """Pinned batches of the numbers 0, 1, …; the copy of each starts late, by a kernel that spins on its stream."""

    def __init__(self, count: int, cycles: int = 0, last: int = SIZE) -> None:
        self.count, self.cycles, self.last = count, cycles, last

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.count):
            with torch.cuda.stream(copy_stream(torch.cuda.current_device())):
                torch.cuda._sleep(self.cycles)
            size = self.last if number + 1 == self.count else SIZE
            yield torch.full((size,), float(number)).pin_memory()


class Twice(nn.Module):
    """Exact, whichever number comes; reads the batch at its beginning and at its end."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + x).amin() + (x * 2).amax()


def optimized() -> OptimizedModule:
    return autostream.optimize(Twice(), kernels="eager", costs="roofline")


def variants(fast: Any) -> int:
    """For how many slots something was captured."""
    if isinstance(fast, TrainStep):
        made = chain.from_iterable(fast._graphs[0]._admission.entries.values())
        entries = [entry.scheduled for entry in made if isinstance(entry, Entry)]
    else:
        made = chain.from_iterable(fast._autostream._admission.entries.values())
        entries = [entry._ready.scheduled for entry in made]
    assert all(entry.report.mode == "cuda graph" for entry in entries), [entry.report.refusals for entry in entries]
    graphs = [graph for entry in entries for graph in entry._execution._by_address.values()]  # type: ignore[union-attr]
    return sum(variant is not graph.graph for graph in graphs for _, variant in graph.by_input._variants.values())


@torch.no_grad()
@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(("copy", "work"), [(0, 0), (1_000_000, 0), (0, 1_000_000), (300_000, 300_000)])
def test_late_copies_and_late_replays_change_nothing(copy: int, work: int, depth: int, side: bool) -> None:
    """Over two epochs, on the default stream or another; the last batch is smaller, and copied as ever."""
    fast, stream = optimized(), torch.cuda.Stream() if side else torch.cuda.current_stream()
    ahead = autostream.prefetch(Late(12, copy, last=SIZE // 2), "cuda", depth, into=fast)
    for _ in range(2):
        seen = []
        with torch.cuda.stream(stream):
            for batch in ahead:
                torch.cuda._sleep(work)
                seen.append(fast(batch))
        stream.synchronize()
        assert [each.item() for each in seen] == [4.0 * number for number in range(12)]
    assert variants(fast) == depth + 1


@torch.no_grad()
def test_what_is_kept_is_not_overwritten() -> None:
    fast = optimized()
    ahead = autostream.prefetch(Late(9), "cuda", into=fast)
    kept = [(batch[SIZE // 2 :], fast(batch)) for batch in ahead]
    for number, (half, result) in enumerate(kept):
        assert bool((half == number).all())
        assert result.item() == 4.0 * number


def on_device(run: Callable[[], object]) -> list[Mapping[str, Any]]:
    """What the device did."""
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    return [event for event in profiled(run, "cuda") if event.get("cat") in kinds]


def copied(done: Iterable[Mapping[str, Any]]) -> list[int]:
    """Bytes of each copy from the device to the device."""
    return [event["args"]["bytes"] for event in done if event["name"].startswith("Memcpy DtoD")]


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
    large = [size for size in copied(without) if size == 4 * SIZE]
    assert len(large) == 6, "otherwise this test shows nothing"
    assert [size for size in copied(within) if size >= 4 * SIZE] == []
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
        done = on_device(lambda: losses.extend(step(*batch) for batch in batches))
        assert variants(step) == (3 if into else 0)
        return [loss.item() for loss in losses], len(done)

    (theirs, more), (ours, fewer) = trained(into=False), trained(into=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert fewer < more


@torch.no_grad()
def test_its_memory_comes_back() -> None:
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
        assert variants(fast) == 3
        del batch, ahead
        assert variants(fast) == 0
        assert torch.cuda.memory_allocated() == before


@torch.no_grad()
def test_a_loop_that_is_left_early_gives_its_memory_back_safely() -> None:
    """Copies are under way, and replays, when nobody is there any more."""
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
