"""Buckets are as large as the simulator says, for the device and what joins the processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autostream
from autostream.costs.device import profile_named
from autostream.costs.interconnects import Interconnect, Protocol, interconnect_of
from autostream.dispatch.captured_step import TracedStep
from autostream.frontend.all_reduces import USUAL
from autostream.frontend.fake_processes import fake_processes
from autostream.options import Options
from autostream.tuning import bucket_sizes
from autostream.tuning.bucket_sizes import TRIED, best_of_tried
from autostream.tuning.pricing import link_between

H200 = profile_named("h200")


def traced_step(layers: int, features: int) -> TracedStep:
    model = nn.Sequential(*(nn.Linear(features, features, bias=False) for _ in range(layers)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autostream.train_step(model, sgd, nn.MSELoss(), data_parallel=dist.group.WORLD)
    return step.traced((torch.ones(256, features), torch.ones(256, features)), Options(), H200)


@pytest.fixture(scope="module")
def traced() -> Iterator[TracedStep]:
    """A step with 12 gradients of 4 MiB, in 64 processes."""
    with fake_processes(64):
        yield traced_step(12, 1024)


def link(start_us: float, bandwidth: float) -> Interconnect:
    return Interconnect("mine", 0.0, (Protocol(start_us, bandwidth),))


FAST = link(start_us=1.0, bandwidth=1e9)
SLOW_TO_START = link(start_us=200.0, bandwidth=1e9)
SLOW_TO_SEND = link(start_us=1.0, bandwidth=320e3)


def chosen(traced: TracedStep, options: Options, link: Interconnect) -> str:
    at, _ = best_of_tried(traced.program, options, H200, link)
    return str(TRIED[at])


@pytest.mark.parametrize(
    ("link", "sizes", "sums"),
    [
        pytest.param(FAST, str(USUAL), 4, id="all are as good"),
        pytest.param(SLOW_TO_START, "all in one", 1, id="few are better"),
        pytest.param(SLOW_TO_SEND, "1 MiB, then 6 MiB, 0.25 MiB at last", 7, id="early ones are better"),
    ],
)
def test_buckets_are_as_large_as_the_link_asks_for(
    traced: TracedStep, link: Interconnect, sizes: str, sums: int
) -> None:
    """Of 12 gradients the first and the last have buckets of their own, if there are several. The report says why."""
    assert chosen(traced, Options(), link) == sizes
    _, report = traced.plan(Options(), H200, link)
    assert report.graph is not None
    assert len(report.graph.collectives) == sums
    said = [refusal.reason.partition(":")[0] for refusal in report.refusals if refusal.choice == "buckets"]
    assert said == ([] if sizes == str(USUAL) else [sizes])


@pytest.mark.usefixtures("traced")
def test_gradients_of_a_small_model_are_one_sum_between_many_machines() -> None:
    """8 layers of 1 MiB: the usual buckets, of which the first and the last are small, take longer to start."""
    small = traced_step(8, 512)
    assert chosen(small, Options(), interconnect_of(H200, "infiniband")) == "all in one"
    assert chosen(small, Options(), interconnect_of(H200)) == "all in one"


@pytest.mark.parametrize("policy", ["sequential", "critical_path", "path_cover", "search"])
def test_each_policy_has_its_buckets(traced: TracedStep, policy: str) -> None:
    assert chosen(traced, Options.parse({"policy": policy}), SLOW_TO_START) == "all in one"


def test_nothing_is_hidden_on_one_stream(traced: TracedStep) -> None:
    assert "6 MiB" not in chosen(traced, Options().on_one_stream, SLOW_TO_SEND)


def test_few_are_tried_where_there_is_little_time(traced: TracedStep) -> None:
    assert best_of_tried(traced.program, Options(), H200, SLOW_TO_START, seconds=0.0) == (0, ())


@pytest.mark.usefixtures("traced")
def test_nothing_is_planned_where_there_is_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_sizes, "price_program", None)
    assert chosen(traced_step(1, 8), Options(), SLOW_TO_START) == str(USUAL)


@pytest.mark.parametrize(
    ("machines", "device", "link"),
    [
        (["here", "here"], "cuda:0", None),
        (["here", "there"], "cuda:0", "infiniband"),
        (["here", "there"], "cpu", None),
    ],
)
def test_processes_on_several_machines_have_a_network_between_their_gpus(
    machines: list[str], device: str, link: str | None
) -> None:
    """Of CPUs nothing is known, on one machine or on several."""
    found = link_between(machines, device, H200)
    assert (found and found.name) == link
