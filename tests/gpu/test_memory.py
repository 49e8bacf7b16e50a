"""Memory on the device: arenas full of rubbish, what a graph takes, and that it comes back."""

from __future__ import annotations

import gc
import math
from itertools import chain

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.api import OptimizedModule
from autostream.dispatch.captured_call import CapturedCall
from autostream.ir import Candidate
from autostream.runtime import arena
from autostream.runtime.capture import clear_cublas_workspaces
from autostream.runtime.cuda_graph import CapturedGraph
from benchmarks.zoo import INFERENCE, prepare
from tests.agreement import Example, check_calls, check_streams, check_threads, examples_of, lanes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # as errors, Inductor's own would make it fall back
]

GPU = torch.device("cuda", 0)
FUSED = {"kernels": "inductor", "costs": "roofline", "memory_budget": math.inf}


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
    monkeypatch.setattr("autostream.tuning.candidates.peak_bytes", lambda graph, schedule: -schedule.arena.bytes)


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


def reserved() -> int:
    """The device's memory that is in use, in whole segments of the allocator, bytes.

    Without cuBLAS's workspaces outside of graphs: whichever model comes first leaves them to all that follow.
    """
    gc.collect()
    torch.cuda.synchronize()
    clear_cublas_workspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def captured_bytes(
    model: nn.Module, *examples: tuple[Tensor, ...], **options: object
) -> tuple[int, tuple[Candidate, ...]]:
    """What captured schedules for these arguments keep of the device's memory, and the schedules, the last first."""
    before = reserved()
    fast = autostream.optimize(model, **options)
    for args in examples:
        fast.prepare(*args)
    chosen = tuple(report.chosen for report in fast.reports if report.chosen is not None)
    assert [candidate.captured for candidate in chosen] == [True] * len(examples)
    return reserved() - before, chosen


@pytest.mark.parametrize("batch", [1, 32])
def test_a_graph_keeps_about_what_its_plan_says(batch: int) -> None:
    """Workspaces, segments of the allocator and copies of inputs and outputs come on top."""
    subject = prepare(INFERENCE["googlenet"], batch, GPU, torch.float16)
    for streams, policy in ((1, "sequential"), (3, "critical_path")):
        kept, (chosen,) = captured_bytes(subject.model, subject.args, policy=policy, streams=streams, **FUSED)
        given = sum(tensor.nbytes for tensor in subject.args)
        assert kept <= chosen.memory_bytes + given + 34 * 2**20 * chosen.schedule.streams + 32 * 2**20


# Graphs of one model share a pool

MIB = 2**20

ONE_STREAM = {"policy": "sequential", "streams": 1}
THREE_STREAMS = {"policy": "critical_path", "streams": 3}
EAGER = {"kernels": "eager", "costs": "roofline", "memory_budget": math.inf}


@pytest.fixture
def streams_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen has several streams, if it may, and is the same each time: the clock has no say."""
    monkeypatch.setattr("autostream.tuning.select.interleaved", lambda timers, *_: [1.0, 0.5][: len(timers)])
    monkeypatch.setattr("autostream.tuning.select.VARIANTS", 0)


@pytest.mark.usefixtures("placed", "streams_win")
@pytest.mark.parametrize(
    ("options", "batch", "smaller"), [(ONE_STREAM, 8, 1), (ONE_STREAM, 8, 6), (THREE_STREAMS, 64, 48)]
)
def test_two_signatures_take_not_much_more_than_the_larger_alone(
    options: dict[str, object], batch: int, smaller: int
) -> None:
    """All that the smaller one computes in between lies where the larger one does.

    What is more: static inputs, and by stream a block for which none of the larger one's is large enough, a workspace
    of at most 32 MiB or a segment of 20, and 2 for small ones.
    """
    subject = prepare(INFERENCE["googlenet"], batch, GPU, torch.float16)
    large, small = subject.args, prepare(INFERENCE["googlenet"], smaller, GPU, torch.float16).args
    large_bytes, _ = captured_bytes(subject.model, large, **options, **FUSED)
    small_bytes, _ = captured_bytes(subject.model, small, **options, **FUSED)
    both_bytes, chosen = captured_bytes(subject.model, large, small, **options, **FUSED)
    more = 34 * MIB * max(candidate.schedule.streams for candidate in chosen) + sum(x.nbytes for x in small)
    told = f"{large_bytes / MIB:.0f} and {small_bytes / MIB:.0f} MiB alone, {both_bytes / MIB:.0f} MiB together"
    assert both_bytes <= large_bytes + more, told
    assert both_bytes < large_bytes + small_bytes, told


@pytest.mark.usefixtures("placed")
def test_a_larger_signature_takes_new_memory_for_what_does_not_fit() -> None:
    """A graph's memory does not move, so the arena of batch 1 stays: together, they take at most what they do apart."""
    subject = prepare(INFERENCE["googlenet"], 8, GPU, torch.float16)
    large, small = subject.args, prepare(INFERENCE["googlenet"], 1, GPU, torch.float16).args
    small_bytes, _ = captured_bytes(subject.model, small, **ONE_STREAM, **FUSED)
    large_bytes, _ = captured_bytes(subject.model, large, **ONE_STREAM, **FUSED)
    both_bytes, _ = captured_bytes(subject.model, small, large, **ONE_STREAM, **FUSED)
    told = f"{small_bytes / MIB:.0f} and {large_bytes / MIB:.0f} MiB alone, {both_bytes / MIB:.0f} MiB together"
    assert both_bytes <= small_bytes + large_bytes, told


def graphs(fast: OptimizedModule) -> list[CapturedGraph]:
    """The captured graphs of a model, the least recently used first."""
    entries = chain.from_iterable(fast._autostream._admission.entries.values())
    ready = [entry._ready for entry in entries if isinstance(entry, CapturedCall)]
    found = [signature.scheduled for signature in ready if signature is not None]
    return [scheduled.captured for scheduled in found if scheduled is not None and scheduled.captured is not None]


def two_signatures(name: str) -> tuple[nn.Module, list[Example]]:
    """A model and examples of two sizes, in turn."""
    one, eight = (prepare(INFERENCE[name], batch, GPU, torch.float16) for batch in (1, 8))
    return eight.model, examples_of(eight.model, [eight.args, one.args, eight.others, one.others])


@pytest.mark.usefixtures("placed", "streams_win")
@pytest.mark.parametrize("level", [FUSED, EAGER], ids=["fused", "eager"])
@pytest.mark.parametrize("name", ["googlenet", "bert_base", "towers8"])
def test_two_signatures_in_one_pool_compute_what_the_model_does(
    name: str, level: dict[str, object], poisoned: list[int]
) -> None:
    """In turn on one stream, on two streams, and from four threads; each replay fills its arena with rubbish first."""
    model, examples = two_signatures(name)
    fast = autostream.optimize(model, **THREE_STREAMS, **level)
    check_calls(fast, examples)
    first, second = graphs(fast)
    assert first.pool is second.pool
    assert poisoned or level is EAGER, "some memory is placed"
    check_streams(fast, examples, lanes(GPU, 2))
    check_threads(fast, examples, lanes(GPU, 4))


@pytest.mark.usefixtures("placed", "streams_win")
def test_weights_that_move_leave_both_signatures_in_one_pool(poisoned: list[int]) -> None:
    model, examples = two_signatures("squeezenet1_1")
    fast = autostream.optimize(model, **THREE_STREAMS, **FUSED)
    check_calls(fast, examples)
    before = graphs(fast)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    check_calls(fast, examples)
    check_streams(fast, examples, lanes(GPU, 2))
    after = graphs(fast)
    assert not set(before) & set(after), "all graphs are captured again"
    assert {graph.pool for graph in after} == {graph.pool for graph in before}
    assert len({graph.pool for graph in after}) == 1


class Convolutions(nn.Module):
    """Two branches, whose outputs are as large as what is computed in between."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Conv2d(64, 64, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.left(x).relu(), self.right(x).relu()
        return self.right(left) + right, self.left(right) - left


def test_signatures_that_come_and_go_compute_the_same_in_memory_that_does_not_grow() -> None:
    """Of three sizes, two are kept: each goes while replays of it and of others may still run on other streams."""
    torch.manual_seed(0)
    model = Convolutions().to(GPU, torch.float16).eval()
    inputs = [torch.randn(size, 64, 64, 64).to(GPU, torch.float16) for size in (16, 8, 24) for _ in range(2)]
    examples = examples_of(model, [(x,) for x in inputs])
    fast = autostream.optimize(model, max_signatures=2, **ONE_STREAM, **EAGER)

    def cycle() -> int:
        check_calls(fast, examples)
        return reserved()

    check_streams(fast, examples, lanes(GPU, 2))
    assert len({graph.pool for graph in graphs(fast)}) == 1
    before = cycle()
    for _ in range(3):
        after = cycle()
    assert after <= before + 24 * MIB, "there may be one segment more where the outputs of others are in the way"


def test_dropping_a_model_gives_its_memory_back() -> None:
    subject = prepare(INFERENCE["squeezenet1_1"], 8, GPU, torch.float16)

    def cycle() -> tuple[int, int]:
        """With two signatures, whose graphs have one pool."""
        (images,) = subject.args
        with torch.no_grad():
            fast = autostream.optimize(subject.model, subject.args, kernels="inductor")
            fast(images)
            fast(images[:1])
        del fast
        return reserved(), torch.cuda.memory_allocated()

    first = cycle()
    for _ in range(3):
        assert cycle() <= first


def test_what_measuring_takes_is_given_back() -> None:
    """PyTorch's allocator keeps no more for nobody than the rest of the blocks that are in use."""
    subject = prepare(INFERENCE["resnet50"], 32, GPU, torch.float16)
    torch.cuda.empty_cache()
    fast = autostream.optimize(subject.model, subject.args)
    with torch.no_grad():
        fast(*subject.args)
    held = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert held <= torch.cuda.memory_reserved() + 64 * MIB


@pytest.mark.slow
def test_a_thousand_models_leave_nothing_behind() -> None:
    """A small model of ATen ops, optimized and dropped: neither the device's memory nor the graphs' pools grow."""
    x = torch.randn(8, 64, device=GPU)

    def cycle() -> int:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda().eval()
        with torch.no_grad():
            autostream.optimize(model, (x,), kernels="eager", costs="roofline")(x)
        del model
        return reserved()

    for _ in range(5):
        before = cycle()
    for _ in range(995):
        after = cycle()
    assert after <= before
