"""Many threads that call models on one GPU or two, and other code that takes the memory and fills it with NaN."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.runtime import streams
from benchmarks.nets import mlp
from benchmarks.zoo import INFERENCE, prepare
from tests.agreement import Example, Lane, check_calls, check_threads, examples_of, lanes
from tests.gpu.common import EAGER, FUSED, GPU, MIB, STREAMS
from tests.pressure import churn, limited, pressure
from tests.threads import in_threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("several_streams_win"),
    pytest.mark.filterwarnings("default"),  # as errors, Inductor's own would make it fall back
]

THREADS = 24
GPUS = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
UNCAPTURED = {**EAGER, "cuda_graph": False}


def subject_of(name: str, device: torch.device = GPU) -> tuple[nn.Module, list[Example]]:
    """A benchmark, and examples: two of batch 1, and one of batch 3."""
    one, three = (prepare(INFERENCE[name], batch, device, torch.float16) for batch in (1, 3))
    return one.model, examples_of(one.model, [one.args, one.others, three.args])


def side_streams(device: torch.device) -> list[Lane]:
    """The streams that all runs fork to, on which other runs may allocate memory."""
    return [partial(torch.cuda.stream, stream) for stream in streams._pool(device.index, streams._SIDES)[:4]]


def check_answers(answers: Sequence[Sequence[tuple[Example, Any]]], devices: Sequence[torch.device] = (GPU,)) -> None:
    """Compare the outputs of all threads with those of eager."""
    for device in devices:
        torch.cuda.synchronize(device)
    for example, outputs in itertools.chain.from_iterable(answers):
        example.check(outputs)


@pytest.mark.parametrize(
    ("name", "options"),
    [("towers8", FUSED), ("googlenet", EAGER), ("googlenet", UNCAPTURED)],
    ids=["fused", "eager", "uncaptured"],
)
def test_two_dozen_threads_call_one_model(name: str, options: dict[str, Any]) -> None:
    """Each on its own stream, at each moment with other inputs, of two signatures."""
    model, examples = subject_of(name)
    fast = autostream.optimize(model, **STREAMS, **options)
    check_calls(fast, examples)
    check_threads(fast, examples, lanes(GPU, THREADS))
    assert {report.mode for report in fast.reports} == {"streams" if "cuda_graph" in options else "cuda graph"}


class Ensemble(nn.Module):
    """A small model, different for each seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.members = nn.ModuleList([mlp(256, 128, 64), mlp(256, 192, 64), mlp(256, 64, 64)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([member(x) for member in self.members], -1)


@pytest.mark.parametrize("options", [{**EAGER, "costs": "measured"}, UNCAPTURED], ids=["captured", "uncaptured"])
def test_two_dozen_threads_call_two_dozen_models(options: dict[str, Any]) -> None:
    """Each model is called by four threads, whose first calls race."""
    models = [Ensemble(seed).to(GPU).eval() for seed in range(THREADS)]
    inputs = [(torch.randn(32, 256, generator=torch.Generator().manual_seed(seed)).to(GPU),) for seed in range(3)]
    # Before all calls: the eager model may not run while it is traced.
    examples = [examples_of(model, inputs) for model in models]
    fasts = [autostream.optimize(model, **STREAMS, **options) for model in models]
    contexts = lanes(GPU, THREADS)
    torch.cuda.synchronize()

    @torch.no_grad()
    def work(at: int) -> list[tuple[Example, Any]]:
        answers = []
        with contexts[at]():
            for turn in range(60):
                which = at // 4 * 4 + turn // 15
                example = examples[which][(at + turn) % len(inputs)]
                answers.append((example, fasts[which](*example.args)))
        return answers

    check_answers(in_threads(THREADS, work))
    modes = [report.mode for fast in fasts for report in fast.reports]
    assert modes == ["streams" if "cuda_graph" in options else "cuda graph"] * THREADS


@pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("options", [EAGER, UNCAPTURED], ids=["captured", "uncaptured"])
def test_two_dozen_threads_call_models_on_two_devices(options: dict[str, Any]) -> None:
    """Half of the threads for each device; in half of the calls, the other one is current, before and after."""
    both = [subject_of("towers8", device) for device in GPUS[:2]]
    fasts = [autostream.optimize(model, **STREAMS, **options) for model, _ in both]
    for fast, (_, examples) in zip(fasts, both, strict=True):
        check_calls(fast, examples)
    contexts = [lanes(device, THREADS // 2) for device in GPUS[:2]]
    for device in GPUS[:2]:
        torch.cuda.synchronize(device)

    @torch.no_grad()
    def work(at: int) -> list[tuple[Example, Any]]:
        which, answers = at % 2, []
        with contexts[which][at // 2](), torch.cuda.device(GPUS[at // 2 % 2]):
            current = torch.cuda.current_stream(GPUS[which])
            for turn in range(30):
                example = both[which][1][(at + turn) % 3]
                answers.append((example, fasts[which](*example.args)))
                assert torch.cuda.current_device() == GPUS[at // 2 % 2].index
                assert torch.cuda.current_stream(GPUS[which]) == current
        return answers

    check_answers(in_threads(THREADS, work), GPUS[:2])


ROOM, TAKEN = 1536 * MIB, 640 * MIB
"""How much more memory the process may take than at the start, and how much of that other code takes at a time."""


@pytest.mark.parametrize(
    ("name", "options"),
    [("googlenet", EAGER), ("googlenet", UNCAPTURED), ("moe8", UNCAPTURED)],
    ids=["captured", "uncaptured", "experts"],
)
def test_memory_is_reused_by_other_code_under_pressure(name: str, options: dict[str, Any]) -> None:
    """Each thread fills blocks with NaN between its calls on its stream, and another thread on the side streams."""
    model, examples = subject_of(name)
    fast = autostream.optimize(model, **STREAMS, **options)
    check_calls(fast, examples)
    contexts = lanes(GPU, 4)

    @torch.no_grad()
    def work(at: int) -> list[tuple[Example, Any]]:
        choose, answers = random.Random(at), []
        with contexts[at]():
            for turn in range(60):
                example = examples[(at + turn) % len(examples)]
                answers.append((example, fast(*example.args)))
                churn(GPU, contexts[at], 32 * MIB, choose)
        return answers

    with limited(GPU, ROOM), pressure(GPU, [*side_streams(GPU), *contexts], TAKEN) as taken:
        check_answers(in_threads(len(contexts), work))
    assert sum(taken) > TAKEN, "other code took no memory meanwhile"


def test_memory_that_is_freed_too_early_is_found() -> None:
    """A block is freed on a side stream while another stream has yet to read it: the reader gets NaN."""
    (side, *_), choose = side_streams(GPU), random.Random(0)
    caller = torch.cuda.current_stream(GPU)
    # A kernel that is launched for the first time is loaded first, for which the device may have to be idle.
    churn(GPU, side, 64 * MIB, choose)
    torch.zeros(MIB, device=GPU).add(1).isnan().any()
    with side():
        block = torch.zeros(MIB, device=GPU)
        ready = torch.cuda.Event()
        ready.record()
    ready.wait(caller)
    torch.cuda._sleep(1_000_000_000)  # the reader is half a second late
    result = block.add(1)
    del block  # no event tells the side stream that it was read
    for _ in range(20):
        churn(GPU, side, 64 * MIB, choose)
    torch.cuda.synchronize()
    assert result.isnan().any()
