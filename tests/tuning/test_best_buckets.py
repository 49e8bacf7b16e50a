"""Gradients are reduced together by when they are ready, for the device and what joins the processes."""

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
from autostream.frontend.fake_processes import fake_processes
from autostream.frontend.reduction_buckets import in_buckets
from autostream.options import Options
from autostream.tuning import best_buckets as module
from autostream.tuning.best_buckets import best_buckets
from autostream.tuning.interconnect import link_between

H200 = profile_named("h200")


def traced_step(layers: int, features: int, group: dist.ProcessGroup | None = None) -> TracedStep:
    model = nn.Sequential(*(nn.Linear(features, features, bias=False) for _ in range(layers)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autostream.train_step(model, sgd, nn.MSELoss(), data_parallel=group or dist.group.WORLD)
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
SLOW_TO_SEND = link(start_us=1.0, bandwidth=512e3)


def chosen(traced: TracedStep, options: Options, link: Interconnect) -> list[int]:
    """How many gradients each bucket has; none for the usual buckets."""
    filled, _ = best_buckets(traced.program, in_buckets(traced.program), options, H200, link)
    return [len(bucket) for bucket in filled[0]] if filled else []


@pytest.mark.parametrize("link", [FAST, SLOW_TO_START])
def test_few_buckets_are_best_where_they_are_fast_or_start_slowly(traced: TracedStep, link: Interconnect) -> None:
    """None has more than 25 MiB."""
    assert chosen(traced, Options(), link) == [6, 6]


def test_early_buckets_are_best_where_sending_takes_long(traced: TracedStep) -> None:
    """The last is small, as nothing is left to hide it. The report says why."""
    tensors = chosen(traced, Options(), SLOW_TO_SEND)
    assert len(tensors) > 2
    assert tensors[-1] == min(tensors) < tensors[0]
    _, report = traced.plan(Options(), H200, SLOW_TO_SEND)
    assert report.graph is not None
    assert len(report.graph.collectives) == len(tensors)
    (reason,) = (refusal.reason for refusal in report.refusals if refusal.choice == "buckets")
    assert "µs more are predicted than without a group" in reason


def test_all_reduces_are_expected_to_take_longer_beside_the_backward(
    traced: TracedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the last gradient has a bucket of its own, which would not pay if the one before took as long as alone."""
    fast = link(start_us=5.0, bandwidth=4e6)
    assert chosen(traced, Options(), fast) == [6, 5, 1]
    monkeypatch.setattr(module, "_BESIDE", 1.0)
    assert chosen(traced, Options(), fast) == [6, 6]


def test_the_usual_buckets_stay_if_others_are_hardly_better(
    traced: TracedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MARGIN", 1.0)
    assert chosen(traced, Options(), SLOW_TO_SEND) == []
    _, report = traced.plan(Options(), H200, SLOW_TO_SEND)
    assert report.graph is not None
    assert len(report.graph.collectives) == 4  # of 12 gradients the first and the last have buckets of their own
    assert "buckets" not in {refusal.choice for refusal in report.refusals}


@pytest.mark.usefixtures("traced")
def test_gradients_of_a_small_model_are_one_sum_between_many_machines() -> None:
    """8 layers of 1 MiB: the usual buckets, of which the first and the last are small, take longer to start."""
    assert chosen(traced_step(8, 512), Options(), interconnect_of(H200, "infiniband")) == [8]


@pytest.mark.parametrize("policy", ["sequential", "critical_path", "path_cover", "search"])
def test_each_policy_has_its_buckets(traced: TracedStep, policy: str) -> None:
    assert chosen(traced, Options.parse({"policy": policy}), SLOW_TO_START) == [6, 6]


def test_nothing_is_hidden_on_one_stream(traced: TracedStep) -> None:
    assert chosen(traced, Options().on_one_stream, SLOW_TO_SEND) == [6, 6]


@pytest.mark.usefixtures("traced")
def test_nothing_is_planned_where_there_is_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "price_program", None)
    assert chosen(traced_step(1, 8), Options(), SLOW_TO_START) == []


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


@pytest.mark.usefixtures("traced")
def test_in_a_group_of_one_no_gradient_waits_for_a_large_one() -> None:
    """12 gradients of 4 MiB; of 64 KiB, some are together. The report says why."""
    group = dist.new_group([0])
    assert chosen(traced_step(12, 1024, group), Options(), SLOW_TO_START) == [1] * 12
    step = traced_step(32, 128, group)
    assert 1 < len(chosen(step, Options(), SLOW_TO_START)) < 32
    _, report = step.plan(Options(), H200)
    (reason,) = (refusal.reason for refusal in report.refusals if refusal.choice == "buckets")
    assert "in a group of one process" in reason
