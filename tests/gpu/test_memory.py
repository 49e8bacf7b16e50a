"""Memory on the device: arenas full of rubbish, what a graph takes, and that it comes back."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.execution import arena
from autostream.ir import Candidate
from benchmarks.zoo import INFERENCE, prepare
from tests.agreement import check_calls, check_streams, examples_of, lanes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # as errors, Inductor's own would make it fall back
]

GPU = torch.device("cuda", 0)
FUSED = {"kernels": "inductor", "costs": "roofline", "memory_budget": math.inf}


@pytest.fixture(autouse=True)
def _memory_goes_back() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the arenas that were taken, each full of NaN, -1 and ``True``."""
    sizes: list[int] = []
    reserve = arena.reserve

    def filled(device: str, size: int) -> Tensor:
        sizes.append(size)
        return reserve(device, size).fill_(0xFF)

    monkeypatch.setattr(arena, "reserve", filled)
    return sizes


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules place whatever can be placed, even where blocks that come and go would need no more."""
    monkeypatch.setattr("autostream.candidates.peak_bytes", lambda graph, schedule: -schedule.arena.bytes)


@pytest.mark.usefixtures("placed")
@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("name", ["googlenet", "squeezenet1_1", "resnet50", "bert_base", "towers8", "moe8"])
def test_nothing_is_read_in_an_arena_that_was_not_written(name: str, streams: int, poisoned: list[int]) -> None:
    """Each replay starts with rubbish: to fill it is part of what is captured."""
    subject = prepare(INFERENCE[name], 1, GPU, torch.float16)
    examples = examples_of(subject.model, [subject.args, subject.others])
    policy = "critical_path" if streams > 1 else "sequential"
    fast = autostream.optimize(subject.model, policy=policy, streams=streams, **FUSED)
    check_calls(fast, examples)
    check_streams(fast, examples, lanes(GPU, 2))
    assert poisoned
    (report,) = fast.reports
    assert report.chosen is not None
    assert report.chosen.schedule.arena.bytes in poisoned


def test_all_that_a_convolutional_model_computes_in_between_lies_in_the_arena() -> None:
    subject = prepare(INFERENCE["googlenet"], 1, GPU, torch.float16)
    with torch.no_grad():
        fast = autostream.optimize(subject.model, subject.args, policy="critical_path", streams=4, **FUSED)
    (report,) = fast.reports
    assert report.graph is not None
    assert report.chosen is not None
    inner = [s for s in report.graph.storages.values() if s.role.value == "intermediate" and not s.escapes]
    assert {s.name for s in inner if s.bytes} == report.chosen.schedule.arena.offsets.keys()


def captured_bytes(model: nn.Module, args: tuple[Tensor, ...], **options: object) -> tuple[int, Candidate]:
    """What one captured schedule keeps of the device's memory, and the schedule."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with torch.no_grad():
        fast = autostream.optimize(model, args, **options)
    gc.collect()
    torch.cuda.empty_cache()
    (report,) = fast.reports
    assert report.chosen is not None
    assert report.chosen.captured
    return torch.cuda.memory_reserved() - before, report.chosen


@pytest.mark.parametrize("batch", [1, 32])
def test_a_graph_keeps_about_what_its_plan_says(batch: int) -> None:
    """Workspaces, segments of the allocator and copies of inputs and outputs come on top."""
    subject = prepare(INFERENCE["googlenet"], batch, GPU, torch.float16)
    for streams, policy in ((1, "sequential"), (3, "critical_path")):
        kept, chosen = captured_bytes(subject.model, subject.args, policy=policy, streams=streams, **FUSED)
        given = sum(tensor.nbytes for tensor in subject.args)
        assert kept <= chosen.memory_bytes + given + 34 * 2**20 * chosen.schedule.streams + 32 * 2**20


def test_dropping_a_model_gives_its_memory_back() -> None:
    subject = prepare(INFERENCE["squeezenet1_1"], 8, GPU, torch.float16)

    def used() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def cycle() -> tuple[int, int]:
        with torch.no_grad():
            fast = autostream.optimize(subject.model, subject.args, kernels="inductor")
            fast(*subject.args)
        del fast
        return used()

    first = cycle()
    for _ in range(3):
        assert cycle() <= first


@pytest.mark.slow
def test_a_thousand_models_leave_nothing_behind() -> None:
    """A small model of ATen ops, optimized and dropped: neither the device's memory nor the graphs' pools grow."""
    x = torch.randn(8, 64, device=GPU)

    def cycle() -> int:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda().eval()
        with torch.no_grad():
            autostream.optimize(model, (x,), kernels="eager", costs="roofline")(x)
        del model
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    for _ in range(5):
        before = cycle()
    for _ in range(995):
        after = cycle()
    assert after <= before
