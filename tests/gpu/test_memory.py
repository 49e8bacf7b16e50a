"""GPU memory: arenas whose contents are invalid at first, what graphs take, and what is freed when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.ir import Candidate
from benchmarks.zoo import INFERENCE, prepare
from tests.agreement import check_calls, check_streams, check_threads, examples_of, lanes
from tests.gpu.common import EAGER, FUSED, GPU, MIB, reserved_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # as errors, Inductor's own would make it fall back
]

ONE_STREAM = {"policy": "sequential", "streams": 1}
THREE_STREAMS = {"policy": "critical_path", "streams": 3}


@pytest.mark.usefixtures("arena_wins", "several_streams_win")
@pytest.mark.parametrize(
    ("name", "streams", "level"),
    [
        ("squeezenet1_1", ONE_STREAM, FUSED),
        ("googlenet", THREE_STREAMS, FUSED),
        ("moe8", THREE_STREAMS, FUSED),
        ("bert_base", ONE_STREAM, FUSED),
        ("bert_base", THREE_STREAMS, EAGER),
        ("towers8", THREE_STREAMS, EAGER),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_signatures_that_share_a_memory_pool_compute_what_the_model_does(
    name: str, streams: dict[str, Any], level: dict[str, Any], poisoned: list[int]
) -> None:
    """In turn on one stream, on two streams, and in four threads; again after the weights have moved.

    Each replay starts with an arena of NaN, so nothing is read in it that was not written.
    """
    one, eight = (prepare(INFERENCE[name], batch, GPU, torch.float16) for batch in (1, 8))
    examples = examples_of(eight.model, [eight.args, one.args, eight.others, one.others])
    fast = autostream.optimize(eight.model, **streams, **level)
    check_calls(fast, examples)
    check_streams(fast, examples, lanes(GPU, 2))
    check_threads(fast, examples, lanes(GPU, 4))
    assert [report.mode for report in fast.reports] == ["cuda graph"] * 2
    if level is FUSED:  # ATen ops allocate their outputs
        for report in fast.reports:
            assert report.graph is not None
            assert report.chosen is not None
            arena = report.chosen.schedule.arena
            assert arena.bytes in poisoned
            inner = [s for s in report.graph.storages.values() if s.role.value == "intermediate" and not s.escapes]
            assert name != "googlenet" or {s.name for s in inner if s.bytes} == arena.offsets.keys()
    for parameter in eight.model.parameters():
        parameter.data = parameter.data.clone()
    check_calls(fast, examples)
    check_streams(fast, examples, lanes(GPU, 2))


def captured_bytes(
    model: nn.Module, *examples: tuple[Tensor, ...], **options: Any
) -> tuple[int, tuple[Candidate, ...]]:
    """The GPU memory that captured schedules for these arguments take, and the schedules, the last first."""
    before = reserved_bytes()
    fast = autostream.optimize(model, **options)
    for args in examples:
        fast.prepare(*args)
    chosen = tuple(report.chosen for report in fast.reports if report.chosen is not None)
    assert [candidate.captured for candidate in chosen] == [True] * len(examples)
    return reserved_bytes() - before, chosen


@pytest.mark.parametrize("streams", [ONE_STREAM, THREE_STREAMS], ids=["one stream", "three streams"])
def test_a_graph_takes_about_the_memory_that_its_report_says(streams: dict[str, Any]) -> None:
    """Workspaces, segments of the allocator, and copies of inputs and outputs are added."""
    subject = prepare(INFERENCE["googlenet"], 32, GPU, torch.float16)
    taken, (chosen,) = captured_bytes(subject.model, subject.args, **streams, **FUSED)
    inputs = sum(tensor.nbytes for tensor in subject.args)
    assert taken <= chosen.memory_bytes + inputs + 34 * MIB * chosen.schedule.streams + 32 * MIB


@pytest.mark.usefixtures("arena_wins", "several_streams_win")
@pytest.mark.parametrize(
    ("streams", "batch", "smaller"), [(ONE_STREAM, 8, 1), (THREE_STREAMS, 64, 48)], ids=["one stream", "three streams"]
)
def test_two_signatures_take_little_more_memory_than_the_larger_alone(
    streams: dict[str, Any], batch: int, smaller: int
) -> None:
    """All intermediate tensors of the smaller one are where the larger one's are.

    In addition come static inputs, and for each stream a block that fits into none of the larger one's: a workspace
    of at most 32 MiB or a segment of 20, and 2 MiB for small blocks.
    """
    subject = prepare(INFERENCE["googlenet"], batch, GPU, torch.float16)
    large, small = subject.args, prepare(INFERENCE["googlenet"], smaller, GPU, torch.float16).args
    large_bytes, _ = captured_bytes(subject.model, large, **streams, **FUSED)
    small_bytes, _ = captured_bytes(subject.model, small, **streams, **FUSED)
    both_bytes, chosen = captured_bytes(subject.model, large, small, **streams, **FUSED)
    more = 34 * MIB * max(candidate.schedule.streams for candidate in chosen) + sum(x.nbytes for x in small)
    sizes = [round(size / MIB) for size in (large_bytes, small_bytes, both_bytes)]
    assert both_bytes <= large_bytes + more, sizes
    assert both_bytes < large_bytes + small_bytes, sizes
    if streams is ONE_STREAM:
        # A graph's memory does not move, so the larger one takes new memory if it comes last, at most its own.
        both_bytes, _ = captured_bytes(subject.model, small, large, **streams, **FUSED)
        assert both_bytes <= small_bytes + large_bytes, (*sizes, round(both_bytes / MIB))


class Convolutions(nn.Module):
    """Two branches whose outputs are as large as their intermediate tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Conv2d(64, 64, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.left(x).relu(), self.right(x).relu()
        return self.right(left) + right, self.left(right) - left


def test_signatures_that_replace_each_other_compute_the_same_in_memory_that_does_not_grow() -> None:
    """Two of three sizes are cached: one is freed while replays of it and of others may still run on other streams."""
    torch.manual_seed(0)
    model = Convolutions().to(GPU, torch.float16).eval()
    inputs = [torch.randn(size, 64, 64, 64).to(GPU, torch.float16) for size in (16, 8, 24) for _ in range(2)]
    examples = examples_of(model, [(x,) for x in inputs])
    fast = autostream.optimize(model, max_signatures=2, **ONE_STREAM, **EAGER)

    def cycle() -> int:
        check_calls(fast, examples)
        return reserved_bytes()

    check_streams(fast, examples, lanes(GPU, 2))
    before = cycle()
    for _ in range(3):
        after = cycle()
    assert after <= before + 24 * MIB, "the allocator may need one more segment where outputs lie between"


def test_dropping_a_model_frees_its_memory() -> None:
    """With two signatures, whose graphs share a memory pool."""
    subject = prepare(INFERENCE["squeezenet1_1"], 8, GPU, torch.float16)

    def cycle() -> tuple[int, int]:
        (images,) = subject.args
        with torch.no_grad():
            fast = autostream.optimize(subject.model, subject.args, kernels="inductor")
            fast(images)
            fast(images[:1])
        del fast
        return reserved_bytes(), torch.cuda.memory_allocated()

    first = cycle()
    for _ in range(3):
        assert cycle() <= first


def test_memory_for_measuring_is_returned_to_the_driver() -> None:
    """The allocator caches only the rest of the segments that are in use."""
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
    """A small model of ATen ops, optimized and dropped: neither the GPU's memory nor the graphs' pools grow."""
    x = torch.randn(8, 64, device=GPU)

    def cycle() -> int:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda().eval()
        with torch.no_grad():
            autostream.optimize(model, (x,), kernels="eager", costs="roofline")(x)
        del model
        return reserved_bytes()

    for _ in range(5):
        before = cycle()
    for _ in range(995):
        after = cycle()
    assert after <= before
