"""Many callers at once, on one device or two, and others who want the memory and spoil it.

Fewer threads, and those that race for the first call, are in ``test_on_gpu.py`` and ``test_zoo.py``.
"""

from __future__ import annotations

import itertools
import math
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
from tests.pressure import MIB, churn, limited, pressure
from tests.threads import in_threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # as errors, Inductor's own would make it fall back
]

THREADS = 24
GPU = torch.device("cuda", 0)
GPUS = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
EAGER = {"kernels": "eager", "costs": "roofline", "memory_budget": math.inf}
FUSED = {**EAGER, "kernels": "inductor"}
STREAMS = {"policy": "critical_path", "streams": 4}


@pytest.fixture(autouse=True)
def _streams_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen has several streams, if it may, and is the same each time: the clock has no say."""
    monkeypatch.setattr("autostream.tuning.select.interleaved", lambda timers, *_: [1.0, 0.5][: len(timers)])
    monkeypatch.setattr("autostream.tuning.select.VARIANTS", 0)


def subject_of(name: str, device: torch.device = GPU) -> tuple[nn.Module, list[Example]]:
    """A workload, and examples: two of batch 1, and one of batch 3."""
    one, three = (prepare(INFERENCE[name], batch, device, torch.float16) for batch in (1, 3))
    return one.model, examples_of(one.model, [one.args, one.others, three.args])


def side_streams(device: torch.device) -> list[Lane]:
    """Those that runs fork to: they share them with each other, so other runs may take memory there."""
    return [partial(torch.cuda.stream, stream) for stream in streams._pool(device.index, streams._SIDES)[:4]]


@pytest.mark.parametrize(
    ("name", "options"),
    [("towers8", FUSED), ("googlenet", EAGER), ("googlenet", {**EAGER, "cuda_graph": False})],
    ids=["fused", "eager", "uncaptured"],
)
def test_two_dozen_threads_call_one_module(name: str, options: dict[str, Any]) -> None:
    """Each on its own stream, at each moment with other inputs, of two signatures."""
    model, examples = subject_of(name)
    fast = autostream.optimize(model, **STREAMS, **options)
    check_calls(fast, examples)
    check_threads(fast, examples, lanes(GPU, THREADS))
    assert {report.mode for report in fast.reports} == {"streams" if "cuda_graph" in options else "cuda graph"}


class Ensemble(nn.Module):
    """A small model, unlike any other of another seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.members = nn.ModuleList([mlp(256, 128, 64), mlp(256, 192, 64), mlp(256, 64, 64)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([member(x) for member in self.members], -1)


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_two_dozen_threads_call_different_modules(cuda_graph: bool) -> None:
    """Their first calls race too. Each calls its neighbours' as well, so every module is called by three threads."""
    models = [Ensemble(seed).to(GPU).eval() for seed in range(THREADS)]
    inputs = [(torch.randn(32, 256, generator=torch.Generator().manual_seed(seed)).to(GPU),) for seed in range(3)]
    examples = [examples_of(model, inputs) for model in models]
    fasts = [autostream.optimize(model, cuda_graph=cuda_graph, **STREAMS, **EAGER) for model in models]
    mine = lanes(GPU, THREADS)
    torch.cuda.synchronize()

    @torch.no_grad()
    def work(at: int) -> list[tuple[Example, Any]]:
        found = []
        with mine[at]():
            for turn in range(60):
                which = (at + turn // 20) % THREADS
                example = examples[which][(at + turn) % len(inputs)]
                found.append((example, fasts[which](*example.args)))
        return found

    answers = in_threads(THREADS, work)
    torch.cuda.synchronize()
    for example, outputs in itertools.chain.from_iterable(answers):
        example.check(outputs)
    modes = {report.mode for fast in fasts for report in fast.reports}
    assert modes == {"cuda graph" if cuda_graph else "streams"}


@pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("cuda_graph", [True, False])
def test_threads_call_models_on_two_devices(cuda_graph: bool) -> None:
    """Half of them each; the current device is the other one as often as not."""
    both = [subject_of("towers8", device) for device in GPUS[:2]]
    fasts = [autostream.optimize(model, cuda_graph=cuda_graph, **STREAMS, **EAGER) for model, _ in both]
    for fast, (_, examples) in zip(fasts, both, strict=True):
        check_calls(fast, examples)
    mine = [lanes(device, THREADS // 2) for device in GPUS[:2]]
    for device in GPUS[:2]:
        torch.cuda.synchronize(device)

    @torch.no_grad()
    def work(at: int) -> list[tuple[Example, Any]]:
        which, found = at % 2, []
        with mine[which][at // 2](), torch.cuda.device(GPUS[at // 2 % 2]):
            current = torch.cuda.current_stream(GPUS[which])
            for turn in range(30):
                example = both[which][1][(at + turn) % 3]
                found.append((example, fasts[which](*example.args)))
                assert torch.cuda.current_device() == GPUS[at // 2 % 2].index
                assert torch.cuda.current_stream(GPUS[which]) == current
        return found

    answers = in_threads(THREADS, work)
    for device in GPUS[:2]:
        torch.cuda.synchronize(device)
    for example, outputs in itertools.chain.from_iterable(answers):
        example.check(outputs)


ROOM, TAKEN = 1536 * MIB, 640 * MIB
"""How much more the process may have than when it starts, and how much of that others take at most, at a time."""


@pytest.mark.parametrize(
    ("name", "options"),
    [("googlenet", EAGER), ("googlenet", {**EAGER, "cuda_graph": False}), ("moe8", {**EAGER, "cuda_graph": False})],
    ids=["captured", "uncaptured", "experts"],
)
def test_memory_that_comes_and_goes_under_pressure(name: str, options: dict[str, Any]) -> None:
    """Between its calls each thread spoils blocks on its own stream, and another thread does on the side streams."""
    model, examples = subject_of(name)
    fast = autostream.optimize(model, **STREAMS, **options)
    check_calls(fast, examples)
    mine = lanes(GPU, 4)
    with limited(GPU, ROOM), pressure(GPU, [*side_streams(GPU), *mine], TAKEN) as taken:
        answers = in_threads(len(mine), partial(_calls_and_churn, fast, examples, mine))
        torch.cuda.synchronize()
        for example, outputs in itertools.chain.from_iterable(answers):
            example.check(outputs)
    assert sum(taken) > TAKEN, "others took memory meanwhile"


Answers = list[tuple[Example, Any]]


@torch.no_grad()
def _calls_and_churn(fast: Any, examples: Sequence[Example], mine: Sequence[Lane], at: int) -> Answers:
    choose, found = random.Random(at), []
    with mine[at]():
        for turn in range(60):
            example = examples[(at + turn) % len(examples)]
            found.append((example, fast(*example.args)))
            churn(GPU, mine[at], 32 * MIB, choose)
    return found


def test_what_is_given_back_too_early_is_spoilt() -> None:
    """The proof that this would find it: a block dropped on a side stream, while another stream has yet to read it."""
    (side, *_), choose = side_streams(GPU), random.Random(0)
    caller = torch.cuda.current_stream(GPU)
    # A kernel that is launched for the first time is loaded first, for which the device may have to come to rest.
    churn(GPU, side, 64 * MIB, choose)
    torch.zeros(MIB, device=GPU).add(1).isnan().any()
    with side():
        block = torch.zeros(MIB, device=GPU)
        ready = torch.cuda.Event()
        ready.record()
    ready.wait(caller)
    torch.cuda._sleep(1_000_000_000)  # the reader is late, by half a second
    result = block.add(1)
    del block  # no event tells the side stream that it was read
    for _ in range(20):
        churn(GPU, side, 64 * MIB, choose)
    torch.cuda.synchronize()
    assert result.isnan().any()
