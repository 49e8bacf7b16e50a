"""The comparison with eager, on the CPU: correct outputs pass, and each kind of mistake is found."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import autostream
from benchmarks.zoo import INFERENCE, prepare
from tests.agreement import Call, Example, check_calls, check_streams, check_threads, examples_of, lanes

CPU = torch.device("cpu")
CHECKS = {
    "calls": check_calls,
    "streams": lambda call, examples: check_streams(call, examples, lanes(CPU, 2)),
    "threads": lambda call, examples: check_threads(call, examples, lanes(CPU, 3)),
}


class Scaled(nn.Module):
    """A model that depends on all of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).exp()


@pytest.fixture
def examples() -> list[Example]:
    return examples_of(Scaled(), [(torch.linspace(0, 1, 1000) + shift,) for shift in range(3)])


def static_output() -> Call:
    """Returns the same tensor each time."""
    output = torch.empty(1000)
    return lambda x: output.copy_(Scaled()(x))


def first_inputs() -> Call:
    """Computes with the inputs of its first call."""
    first: list[Tensor] = []

    def call(x: Tensor) -> Tensor:
        first.append(x)
        return Scaled()(first[0])

    return call


def shared_input() -> Call:
    """Has one static input, which threads overwrite."""
    static, all_in = torch.empty(1000), threading.Barrier(3, timeout=30)

    def call(x: Tensor) -> Tensor:
        static.copy_(x)
        all_in.wait()
        output = Scaled()(static)
        all_in.wait()
        return output

    return call


def a_little_off() -> Call:
    return lambda x: Scaled()(x) * 1.0001


def nothing() -> Call:
    return lambda x: ()


@pytest.mark.parametrize("name", CHECKS)
def test_the_model_itself_passes(name: str, examples: Sequence[Example]) -> None:
    CHECKS[name](Scaled(), examples)


@pytest.mark.parametrize("mistaken", [static_output, first_inputs, a_little_off, nothing])
@pytest.mark.parametrize("name", CHECKS)
def test_mistakes_show(name: str, mistaken: Callable[[], Call], examples: Sequence[Example]) -> None:
    with pytest.raises(AssertionError, match=r"the error is .*, and .* is allowed"):
        CHECKS[name](mistaken(), examples)


def test_threads_that_share_memory_show(examples: Sequence[Example]) -> None:
    with pytest.raises(AssertionError, match="the error is"):
        check_threads(shared_input(), examples, lanes(CPU, 3))


def test_at_most_half_of_the_distance_to_other_outputs_is_allowed() -> None:
    """Eight roundings of half precision would be 0.008."""
    ones = torch.ones(1000, dtype=torch.float16)
    near, far = (
        [example.allowed for example in examples_of(nn.Identity(), [(ones,), (other,)])]
        for other in (ones * 1.01, ones * 2)
    )
    assert near == pytest.approx([0.005, 0.005], rel=0.1)
    assert far == [0.0078125] * 2


def test_examples_that_look_alike_are_refused() -> None:
    x = torch.ones(3)
    with pytest.raises(AssertionError, match="would pass for another's"):
        examples_of(Scaled(), [(x,), (x.clone(),)])


def test_a_model_that_gets_itself_wrong_is_refused() -> None:
    class Random(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return torch.rand_like(super().forward(x))

    with pytest.raises(AssertionError, match="the error is"):
        examples_of(Random(), [(torch.ones(1000),), (torch.zeros(1000),)])


@pytest.mark.parametrize("name", ["dlrm"])
def test_optimized_workloads_agree(name: str) -> None:
    subject = prepare(INFERENCE[name], 1, CPU, torch.float32)
    examples = examples_of(subject.model, [subject.args, subject.others])
    fast = autostream.optimize(
        subject.model, kernels="eager", policy="critical_path", streams=2, memory_budget=math.inf
    )
    for check in CHECKS.values():
        check(fast, examples)
    (report,) = fast.reports
    assert not report.refusals
