"""Random modules do the same when they are optimized; so do those with which a fault was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autostream.ir import Assignment, OpGraph, Schedule
from autostream.scheduling.synchronize import synchronize
from autostream.tuning import candidates
from tests.random_modules import (
    CALL_SEQUENCES,
    TOLERANCE,
    RandomModule,
    check,
    hostile_streams,
    random_modules,
    runs_on,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FOUND: Mapping[str, RandomModule] = {
    name: RandomModule(source)
    for name, source in {
        "a dropout that returns its argument, read on another stream than it was written on": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.s0 = nn.Buffer(torch.zeros(4))

    def forward(self, x0):
        v0 = self.s0.sin()
        v1 = F.dropout(self.s0, 0.5, False)
        v2 = self.s0.sin()
        v3 = self.s0.add_(self.s0)
        v4 = self.s0.sin()
        v5 = v1[0]
        return self.s0


def inputs():
    return [torch.randn(4)], {}
""",
        "a view of a dropout that returns its argument, which is written later": """
class Net(nn.Module):
    def forward(self, x0):
        v0 = F.dropout(x0, 0.5, False)
        v1 = v0[0]
        v2 = v1.sin()
        v3 = x0.sin()
        x0.add_(x0)
        v4 = v1[0]
        v5 = x0.sin()
        return x0, v2, v3, v4, v5


def inputs():
    return [torch.randn(4, 4)], {}
""",
        "an input that is a view of a later input: sizes were unknown": """
class Net(nn.Module):
    def forward(self, x0, x1):
        v0 = x1.max(0)
        return x0


def inputs():
    x1 = torch.randn(4, 4)
    return [x1[1:], x1], {}
""",
        "a view of a reshape whose base is written later: its memory was released too early": """
class Net(nn.Module):
    def forward(self, x0):
        v0 = x0.relu_()
        v1 = v0.reshape(-1)
        v2 = x0.sin()
        torch.cat([x0[1:].clone(), x0[:1].clone()], out=x0)
        v3 = v1[0]
        return x0, v2


def inputs():
    return [torch.randn(4)], {}
""",
    }.items()
}
"""Shrunk modules that failed once, by what was wrong."""

BRANCHES = RandomModule("""
class Net(nn.Module):
    def forward(self, x0):
        v0 = x0.sin()
        v1 = x0.cos()
        v2 = v0 + v1
        v1.zero_()
        return v2, v1


def inputs():
    return [torch.randn(4)], {}
""")


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    """Options and patches with which ops change the stream each time, in the most harmful orders."""
    with pytest.MonkeyPatch.context() as patch:
        yield hostile_streams(patch)


@settings(max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(module=random_modules(), calls=st.sampled_from(list(CALL_SEQUENCES)))
def test_a_random_module_does_the_same(options: dict[str, Any], module: RandomModule, calls: str) -> None:
    check(module, options, CALL_SEQUENCES[calls])


@pytest.mark.parametrize("name", FOUND)
def test_a_module_that_failed_once_does_the_same(options: dict[str, Any], name: str) -> None:
    assert "threads" in check(FOUND[name], options)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", TOLERANCE)
def test_a_random_module_does_the_same_on_a_gpu(options: dict[str, Any], kernels: str) -> None:
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(module=random_modules(), calls=st.sampled_from(list(CALL_SEQUENCES)))
    def run(module: RandomModule, calls: str) -> None:
        assume(runs_on("cuda", *module()))
        check(module, {**options, "kernels": kernels}, CALL_SEQUENCES[calls], "cuda", TOLERANCE[kernels])

    run()


def test_a_missing_wait_is_found(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def without_waits(graph: OpGraph, assignment: Assignment) -> Schedule:
        schedule = synchronize(graph, assignment)
        return replace(schedule, launches=tuple(replace(launch, waits=()) for launch in schedule.launches))

    assert "threads" in check(BRANCHES, options)
    monkeypatch.setattr(candidates, "synchronize", without_waits)
    monkeypatch.setattr(candidates, "verify", lambda *args, **kwargs: None)
    with pytest.raises(AssertionError):
        check(BRANCHES, options)
