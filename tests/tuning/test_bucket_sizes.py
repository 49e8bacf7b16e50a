"""Buckets are as large as the simulator says, for the device and what joins the processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autostream
from autostream.costs.device import profile_named
from autostream.costs.interconnects import Interconnect, Protocol
from autostream.dispatch.captured_step import TracedStep
from autostream.frontend.all_reduces import BUCKET
from autostream.frontend.fake_processes import fake_processes
from autostream.options import Options
from autostream.tuning import bucket_sizes
from autostream.tuning.bucket_sizes import best_size

MIB = 1 << 20
H200 = profile_named("h200")


def traced_step(layers: int, features: int) -> TracedStep:
    model = nn.Sequential(*(nn.Linear(features, features, bias=False) for _ in range(layers)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autostream.train_step(model, sgd, nn.MSELoss(), data_parallel=dist.group.WORLD)
    return step.traced((torch.ones(256, features), torch.ones(256, features)), Options(), H200)


@pytest.fixture(scope="module")
def traced() -> Iterator[TracedStep]:
    """A step with 12 gradients of 4 MiB, in two processes."""
    with fake_processes(2):
        yield traced_step(12, 1024)


def link(start_us: float, bandwidth: float) -> Interconnect:
    return Interconnect("mine", 0.0, (Protocol(start_us, bandwidth),))


FAST = link(start_us=1.0, bandwidth=1e9)
SLOW_TO_START = link(start_us=200.0, bandwidth=1e9)
SLOW_TO_SEND = link(start_us=1.0, bandwidth=160e3)


@pytest.mark.parametrize(
    ("link", "size", "sums"),
    [
        pytest.param(FAST, BUCKET, 4, id="all are as good"),
        pytest.param(SLOW_TO_START, 50 * MIB, 3, id="few are better"),
        pytest.param(SLOW_TO_SEND, 6 * MIB, 7, id="early ones are better"),
    ],
)
def test_buckets_are_as_large_as_the_link_asks_for(
    traced: TracedStep, link: Interconnect, size: int, sums: int
) -> None:
    """Of 12 gradients the first and the last have buckets of their own."""
    assert best_size(traced.program, Options(), H200, link) == size
    _, report = traced.plan(Options(), H200, link)
    assert report.graph is not None
    assert len(report.graph.collectives) == sums


@pytest.mark.parametrize("policy", ["sequential", "critical_path", "path_cover", "search"])
def test_each_policy_has_its_buckets(traced: TracedStep, policy: str) -> None:
    assert best_size(traced.program, Options.parse({"policy": policy}), H200, SLOW_TO_START) == 50 * MIB


def test_nothing_is_hidden_on_one_stream(traced: TracedStep) -> None:
    assert best_size(traced.program, Options().on_one_stream, H200, SLOW_TO_SEND) == BUCKET


@pytest.mark.usefixtures("traced")
def test_nothing_is_planned_where_all_sizes_make_the_same_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_sizes, "price_program", None)
    small = traced_step(2, 8)
    assert best_size(small.program, Options(), H200, SLOW_TO_START) == BUCKET
