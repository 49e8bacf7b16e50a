"""What processes of one group do, and what has to come out of it: see ``test_data_parallel.py``."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import operator
import os
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, cast

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import autostream
from autostream.analysis.dependencies import analyze
from autostream.backend import autostream as autostream_backend
from autostream.costs.collectives import all_reduce_us
from autostream.costs.device import profile_named, profile_of
from autostream.costs.interconnects import MeasuredInterconnect
from autostream.costs.measured_collectives import LONGEST_US, SIZES, time_all_reduce
from autostream.costs.roofline import price
from autostream.errors import CaptureError, FusionError, GroupError, ScheduleError, TargetError
from autostream.frontend.all_reduces import Sizes, buckets
from autostream.frontend.reduction_buckets import gathered, in_buckets, sums_of
from autostream.fusion import inductor
from autostream.ir import Assignment, Candidate, Decision, Program, Role
from autostream.options import Options
from autostream.runtime.emulator import ThreadedProgram
from autostream.runtime.lower import lower
from autostream.runtime.runs import uncaptured
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.releases import place_releases
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from autostream.tuning import agreement, best_buckets, interconnect
from autostream.tuning import select as selection
from autostream.tuning import tune as tuning
from autostream.tuning.agreement import Peers
from autostream.tuning.best_buckets import Filled
from autostream.tuning.candidates import variants_of
from autostream.tuning.interconnect import link_of
from autostream.utils.stopwatch import Stopwatch
from tests.analysis.programs import Tape, aten

Scenario = Callable[[int, int, dist.ProcessGroup], None]

STREAMED: dict[str, Any] = {"policy": "critical_path", "streams": 2}
c10d = torch.ops._c10d_functional


class Net(nn.Module):
    """Linear layers and a convolution with channels last; the first bucket is full before the last gradients come."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.layers = nn.Sequential(nn.Linear(48, 400), nn.ReLU(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(self.convolution(x).flatten(1))
        return found


def net(rank: int) -> nn.Module:
    """A net that begins differently in each process."""
    torch.manual_seed(rank)
    return Net().double()


def twin(group: dist.ProcessGroup) -> nn.Module:
    """The net of the first process in DistributedDataParallel."""
    torch.manual_seed(0)
    return DistributedDataParallel(Net().double(), process_group=group)


def batches(rank: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches that are others in each process."""
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        made = (torch.randn(4, *size, generator=generator, dtype=torch.float64) for size in ((2, 4, 4), (4,)))
        yield tuple(made)  # type: ignore[misc]


def assert_alike(model: nn.Module, other: nn.Module, tolerance: float = 1e-12) -> None:
    """The same parameters, and the same gradients if there are any."""
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, another, rtol=tolerance, atol=tolerance)


def assert_in_graphs(step: Any, collectives: int) -> None:
    """All steps but the first ran as one graph, and collectives are on a stream of their own."""
    (report,) = step.reports
    assert report.mode == "threads", report.refusals
    reduced = report.graph.collectives
    assert len(reduced) == collectives
    assert {name for name, at in report.chosen.schedule.stream_of.items() if at == 1} == reduced


def assert_no_copies(step: Any) -> None:
    """No gradient was copied to memory of its parameter's."""
    assert not [name for name in step.reports[0].graph.ops if name.startswith("empty_like")]


PLAIN_SGD = partial(torch.optim.SGD, lr=0.1)


def trained_as_ddp(
    rank: int,
    group: dist.ProcessGroup,
    optimizer: Any = PLAIN_SGD,
    steps: int = 3,
    loss_fn: Any = F.mse_loss,
    **options: Any,
) -> Any:
    """A ``train_step`` that has run beside the eager step of DistributedDataParallel, with the same results."""
    model, ddp = net(rank), twin(group)
    own, other = (optimizer(each.parameters()) for each in (model, ddp))
    step = autostream.train_step(model, own, loss_fn, data_parallel=group, **{**STREAMED, **options})
    for x, y in batches(rank, steps):
        other.zero_grad()
        loss = F.mse_loss(ddp(x), y)
        loss.backward()
        if "max_norm" in options:
            nn.utils.clip_grad_norm_(ddp.parameters(), options["max_norm"])
        other.step()
        torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-12, atol=1e-12)
        assert_alike(model, ddp)
    return step


def step_as_ddp(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Two backwards that add up, then clipping: as in DistributedDataParallel, eager and in a graph."""
    model = net(rank)
    ddp = twin(group)
    adam, other = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, ddp))

    def written(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
        def update(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
                loss = F.mse_loss(net(part), target)
                loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            return loss

        return update

    step = autostream.step(optimizers=[adam], data_parallel=group, **STREAMED)(written(model, adam))
    eager = written(ddp, other)
    for x, y in batches(rank, 4):
        torch.testing.assert_close(step(x, y), eager(x, y).detach(), rtol=1e-12, atol=1e-12)
        assert_alike(model, ddp)
        for one, another in zip(model.parameters(), ddp.parameters(), strict=True):
            torch.testing.assert_close(one.grad, another.grad, rtol=1e-12, atol=1e-12)
            assert one.grad is not None
            assert one.grad.stride() == one.stride()
    assert_in_graphs(step, collectives=2 * 2)
    assert_no_copies(step)


def train_step_as_ddp(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """``train_step`` with parts of a batch and clipping."""
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    step = trained_as_ddp(rank, group, momentum, steps=4, microbatches=2, max_norm=0.5)
    assert_in_graphs(step, collectives=2)


def eager_optimizers_as_ddp(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """An optimizer that is in no graph runs after one of forward, backward and reductions."""
    step = trained_as_ddp(rank, group, partial(torch.optim.Adamax, lr=0.01))
    assert_in_graphs(step, collectives=2)


def steps_that_no_graph_holds_as_ddp(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """A loss that reads a number leaves the model's calls in graphs, or nothing."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        return loss if loss.item() >= 0 else -loss

    for options in (STREAMED, {"policy": "auto"}):
        step = trained_as_ddp(rank, group, loss_fn=loss_fn, **options)
        assert {report.mode for report in step.reports} <= {"plain", "forward and backward"}


def two_optimizers_as_ddp(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """A critic that an actor's loss goes through: its gradients of that are averaged and cleared."""
    torch.manual_seed(rank)
    nets = [nn.Linear(6, 6).double(), nn.Linear(6, 1).double()]
    torch.manual_seed(0)
    twins = [nn.Linear(6, 6).double(), nn.Linear(6, 1).double()]
    wrapped = [DistributedDataParallel(each, process_group=group) for each in twins]

    def written(actor: nn.Module, critic: nn.Module, parts: list[nn.Module]) -> tuple[Any, list[Any]]:
        first, second = optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in parts]

        def update(x: Tensor) -> tuple[Tensor, Tensor]:
            critic_loss = (critic(x) - 1).square().mean()
            second.zero_grad()
            critic_loss.backward()
            second.step()
            actor_loss = -critic(actor(x)).mean()
            first.zero_grad()
            actor_loss.backward()
            first.step()
            first.zero_grad()
            second.zero_grad()
            return critic_loss, actor_loss

        return update, optimizers

    update, optimizers = written(nets[0], nets[1], nets)
    eager, _ = written(wrapped[0], wrapped[1], twins)
    step = autostream.step(optimizers=optimizers, data_parallel=group, **STREAMED)(update)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
        for one, another in zip(step(x), eager(x), strict=True):
            torch.testing.assert_close(one, another.detach(), rtol=1e-12, atol=1e-12)
        for model, other in zip(nets, twins, strict=True):
            assert_alike(model, other)
    assert_in_graphs(step, collectives=3 - 1)


def reductions_of_the_user(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Reductions that the step itself has in it, in a group that is not the default one: they are one."""
    model = nn.Linear(4, 2).double()
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.0)
    other = copy.deepcopy(model)

    def written(net: nn.Module) -> tuple[Callable[..., Tensor], torch.optim.Optimizer]:
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)

        def update(x: Tensor) -> Tensor:
            loss = net(x).square().mean()
            loss.backward()
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad, group=group)
            sgd.step()
            sgd.zero_grad()
            return loss

        return update, sgd

    update, sgd = written(model)
    step = autostream.step(optimizers=[sgd], **STREAMED)(update)
    eager, _ = written(other)
    for count in range(3):
        x = torch.full((3, 4), 1.0 + rank + count, dtype=torch.float64)
        torch.testing.assert_close(step(x), eager(x).detach(), rtol=1e-12, atol=1e-12)
        assert_alike(model, other)
    assert_in_graphs(step, collectives=1)
    assert_no_copies(step)


def reduced_one_by_one(rank: int, group: dist.ProcessGroup, change: Callable[[list[nn.Parameter], int], None]) -> Any:
    """A step that reduces six gradients, and changes some before each, which has run beside the eager one."""
    weights = [nn.Parameter(torch.full((4,), 1.0 + at, dtype=torch.float64)) for at in range(6)]
    others = copy.deepcopy(weights)

    def written(given: list[nn.Parameter]) -> tuple[Callable[..., None], torch.optim.Optimizer]:
        sgd = torch.optim.SGD(given, lr=0.1)

        def update(x: Tensor) -> None:
            sum((each * x).square().sum() for each in given).backward()
            for at, each in enumerate(given):
                change(given, at)
                dist.all_reduce(each.grad, group=group)
            sgd.step()
            sgd.zero_grad()

        return update, sgd

    update, sgd = written(weights)
    step = autostream.step(optimizers=[sgd], **STREAMED)(update)
    eager, _ = written(others)
    for count in range(3):
        x = torch.full((4,), 0.1 + rank + count, dtype=torch.float64)
        step(x)
        eager(x)
        for one, another in zip(weights, others, strict=True):
            torch.testing.assert_close(one, another, rtol=1e-12, atol=1e-12)
    return step


def reductions_that_one_process_cannot_join(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """It changes each gradient just before its reduction: all reduce them one by one, as written."""

    def change(given: list[nn.Parameter], at: int) -> None:
        if rank == 1:
            given[at].grad.mul_(2.0)

    (report,) = reduced_one_by_one(rank, group, change).reports
    assert report.mode == "plain"
    assert "on rank 1" in report.refusals[0].reason


def reductions_that_are_joined_otherwise_elsewhere(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Each process changes another gradient in between, so each could join others: the numbers are right."""

    def change(given: list[nn.Parameter], at: int) -> None:
        if at == 1:
            given[2 + 2 * rank].grad.mul_(2.0)

    reduced_one_by_one(rank, group, change)


def _squares(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """A step of a model, or of one in a slot."""

    def update(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model if isinstance(model, nn.Module) else model.net)(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return update


def ddp_inside_runs_as_written(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """A step with DistributedDataParallel in it, seen or hidden, is eager, and right."""

    class Hidden:
        __slots__ = ("net",)

    for hide in (False, True):
        layer = nn.Linear(4, 2).double()
        models = [DistributedDataParallel(copy.deepcopy(layer), process_group=group) for _ in range(2)]
        holder = Hidden()
        holder.net = models[0]  # type: ignore[attr-defined]
        sgds = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
        step = autostream.step(optimizers=sgds[:1], **STREAMED)(_squares(holder if hide else models[0], sgds[0]))
        for count in range(3):
            x = torch.full((3, 4), 1.0 + rank + count, dtype=torch.float64)
            step(x)
            sgds[1].zero_grad()
            models[1](x).square().mean().backward()
            sgds[1].step()
            assert_alike(models[0], models[1])
        (report,) = step.reports
        assert report.mode == "plain"
        assert "data_parallel=process_group" in report.refusals[0].reason


def what_data_parallel_does_not_take(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Gradients that would not be averaged, or twice, or not as often in each process."""
    model = nn.Linear(4, 2).double()
    sgd, lbfgs = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.LBFGS(model.parameters())
    wrapped = DistributedDataParallel(model, process_group=group)
    of_first = dist.new_group([0])

    def make(optimizer: torch.optim.Optimizer, given: Any, net: nn.Module = model) -> None:
        autostream.train_step(net, optimizer, nn.MSELoss(), data_parallel=given)

    def decorate(optimizer: torch.optim.Optimizer, given: Any, net: nn.Module = model) -> None:
        autostream.step(optimizers=[optimizer], data_parallel=given)(_squares(net, optimizer))

    for entry in (make, decorate):
        with pytest.raises(TargetError, match=r"not 'world': .*init_process_group"):
            entry(sgd, "world")
        with pytest.raises(TargetError, match="DistributedDataParallel averages"):
            entry(sgd, group, wrapped)
        with pytest.raises(TargetError, match=r"LBFGS takes a closure.* in one process"):
            entry(lbfgs, group)
        entry(sgd, False)
        if rank:
            with pytest.raises(TargetError, match="rank 1 is not in this one"):
                entry(sgd, of_first)
        else:
            entry(sgd, of_first)
    teacher = DistributedDataParallel(nn.Linear(4, 2).double(), process_group=group)
    autostream.step(optimizers=[sgd], data_parallel=group)(_squares(nn.ModuleList([model, teacher]), sgd))


def gradients_that_no_backward_computed(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """They would not be averaged: an error, whether the step is eager or could be in a graph."""
    model = nn.Linear(4, 2).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    @autostream.step(optimizers=[sgd], data_parallel=group, **STREAMED)
    def step(x: Tensor, by_hand: bool) -> Tensor:
        loss = model(x).square().mean()
        if by_hand:
            for parameter, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                parameter.grad = gradient
        else:
            loss.backward()
        sgd.step()
        sgd.zero_grad()
        return loss

    with pytest.raises(TargetError, match="backward"):
        step(torch.ones(3, 4, dtype=torch.float64), True)
    sgd.zero_grad()
    for _ in range(2):
        step(torch.ones(3, 4, dtype=torch.float64), False)
    with pytest.raises(TargetError, match="backward"):
        step(torch.ones(3, 4, dtype=torch.float64), True)


def other_collectives_are_refused(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """The second process would reduce once more: both say so before anything is launched, and go on."""
    model = nn.Linear(4, 2).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    @autostream.step(optimizers=[sgd], data_parallel=group, **STREAMED)
    def step(x: Tensor, more: bool) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if more:
            dist.all_reduce(model.weight.grad, group=group)
        sgd.step()
        sgd.zero_grad()
        return loss

    x = torch.ones(3, 4, dtype=torch.float64)
    for _ in range(2):
        step(x, False)
    before = copy.deepcopy(model)
    said = r"number 2 is nothing on rank 0 and all_reduce.* on rank 1"
    with pytest.raises(GroupError, match=rf"ranks 0 and 1 of process group .* {said}"):
        step(x.repeat(2, 1), rank == 1)
    assert_alike(model, before, 0.0)
    step(x, False)
    with pytest.raises(GroupError, match=r"number 1 is a tensor of \(2, 4\) .* on rank 0 and .* \(2, 5\) .* on rank 1"):
        autostream.train_step(
            wrong := nn.Linear(4 + rank, 2), torch.optim.SGD(wrong.parameters()), nn.MSELoss(), data_parallel=group
        )
    turned = nn.Linear(4, 4)
    if rank == 1:
        turned.weight.data = turned.weight.data.t()
    with pytest.raises(GroupError, match=r"with strides \(4, 1\) on rank 0 and .*, with strides \(1, 4\) on rank 1"):
        autostream.train_step(turned, torch.optim.SGD(turned.parameters()), nn.MSELoss(), data_parallel=group)
    model.weight.requires_grad_(rank == 0)  # the first step, which is eager, would average other gradients
    with pytest.raises(
        GroupError, match=r"number 1 is a tensor .* trained, .* on rank 0 and .*, not trained, .* on rank 1"
    ):
        autostream.train_step(model, sgd, nn.MSELoss(), data_parallel=group)


def optimized_calls_with_other_collectives_are_refused(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Not run as they are, which would add up the wrong tensors, or wait for ever."""
    other = dist.new_group()
    one, two = (rf"in process group {each.group_name!r}" for each in (group, other))
    twice, either = [group] * (1 + rank), [group, other] if rank == 0 else [other, group]
    reduce, scatter = functional.all_reduce, functional.reduce_scatter_tensor
    cases: dict[str, Callable[[Tensor], list[Tensor]]] = {
        "number 2 is nothing on rank 0 and all_reduce": lambda x: [reduce(x, "sum", each) for each in twice],
        "sum.* on rank 0 and .*max.* on rank 1": lambda x: [reduce(x, ("sum", "max")[rank], group)],
        "avg.* on rank 0 and .*sum.* on rank 1": lambda x: [scatter(x, ("avg", "sum")[rank], 0, group)],
        "src=0.* on rank 0 and .*src=1.* on rank 1": lambda x: [functional.broadcast(x, rank, group)],
        f"{one} on rank 0 and .* {two} on rank 1": lambda x: [reduce(x, "sum", each) for each in either],
        "sends 12 bytes from rank 0 to rank 1, which takes 4": lambda x: [
            functional.all_to_all_single(x, [1, 3], [1, 3] if rank == 0 else [3, 1], group)
        ],
    }
    for said, call in cases.items():
        optimized = autostream.optimize(call, **STREAMED)
        for count in range(2):
            with pytest.raises(GroupError, match=said):
                optimized(torch.full((4,), float(count)))


def parts_of_any_size_are_exchanged(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """What one process sends is what the other takes, and neither need be what that one sends."""
    sends, takes = ([1, 3], [1, 2]) if rank == 0 else ([2, 5], [3, 5])

    def model(x: Tensor) -> Tensor:
        return functional.all_to_all_single(x * 2, takes, sends, group) + 1

    optimized = autostream.optimize(model, **STREAMED)
    x = torch.arange(2.0 * sum(sends)).reshape(-1, 2) + 100 * rank
    for _ in range(2):
        torch.testing.assert_close(optimized(x), model(x))
    assert [len(report.graph.collectives) for report in optimized.reports] == [1]


def what_async_collectives_are_written_as_is_said(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """They run as they are, with the advice to leave the order to the schedule."""

    def model(x: Tensor) -> Tensor:
        y = x * 2
        work = dist.all_reduce(y, group=group, async_op=True)
        assert work is not None
        work.wait()
        return y

    optimized = autostream.optimize(model, **STREAMED)
    assert optimized(torch.ones(2)).tolist() == [2.0 * processes] * 2
    reasons = [refusal.reason for report in optimized.reports for refusal in report.refusals]
    assert any("a collective with async_op=True: leave that out" in reason for reason in reasons), reasons


def averages_begin_alike(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """The average of weights that are others in each process is that of the first process's weights in all."""
    model = net(rank)
    average, expected = copy.deepcopy(model), net(0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autostream.train_step(model, sgd, nn.MSELoss(), data_parallel=group, average=average, decay=0.5, **STREAMED)
    for x, y in batches(rank, 3):
        step(x, y)
        for one, another in zip(expected.parameters(), model.parameters(), strict=True):
            one.data.lerp_(another.detach(), 0.5)
        assert_alike(average, expected)


def penalties_of_gradients_are_in_the_graph(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """What ``autograd.grad`` returns is not averaged; it may be asked for by one tensor, or by name."""

    def written(model: nn.Module, sgd: torch.optim.Optimizer, named: bool) -> Callable[[Tensor], Tensor]:
        weight = next(model.parameters())

        def update(x: Tensor) -> Tensor:
            score = model(x).tanh().sum()
            how: Any = {"outputs": score, "inputs": weight} if named else {}
            (slope,) = torch.autograd.grad(*(() if named else (score, weight)), **how, create_graph=True)
            (score + slope.square().mean()).backward()
            sgd.step()
            sgd.zero_grad()
            return slope.detach()

        return update

    for named in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 1).double()
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        sgds = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, ddp)]
        eager = written(ddp, sgds[1], named)
        step = autostream.step(optimizers=[sgds[0]], data_parallel=group, **STREAMED)(written(model, sgds[0], named))
        for x, _ in batches(rank, 3):
            torch.testing.assert_close(step(x[:, 0, 0]), eager(x[:, 0, 0]), rtol=1e-12, atol=1e-12)
            assert_alike(model, ddp)
        assert_in_graphs(step, collectives=1)


def other_gradients_are_refused_in_eager_steps(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """The second process does not use a layer, or uses another one of the same shape, or has a backward more.

    Both say so before a reduction, and go on.
    """
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)]).double()
    adam = torch.optim.Adam(layers.parameters())

    @autostream.step(optimizers=[adam], data_parallel=group, **STREAMED)
    def step(x: Tensor, used: int, backwards: int) -> None:
        adam.zero_grad()
        for _ in range(backwards):
            hidden = x
            for layer in layers[:used]:  # type: ignore[union-attr]
                hidden = layer(hidden)
            hidden.square().mean().backward()
        adam.step()

    x, before = torch.ones(3, 4, dtype=torch.float64), copy.deepcopy(layers)
    with pytest.raises(GroupError, match=r"is a gradient of \(2, 4\) .* on rank 0 and nothing on rank 1"):
        step(x, 2 - rank, 1)
    assert_alike(layers, before, 0.0)
    twins = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)]).double()
    sgd = torch.optim.SGD(twins.parameters(), lr=0.1)

    @autostream.step(optimizers=[sgd], data_parallel=group, **STREAMED)
    def step_of_one(x: Tensor, which: int) -> None:
        sgd.zero_grad()
        twins[which](x).square().mean().backward()
        sgd.step()

    with pytest.raises(GroupError, match=r"of parameter 0, .* on rank 0 and .* of parameter 2, .* on rank 1"):
        step_of_one(x, rank)
    with pytest.raises(GroupError, match=r"on rank 0 and a gradient of .* after backward 2 of an eager step on rank 1"):
        for _ in range(2):  # the first process compiles its second step, while the other is in its first
            step(x, 2, 1 + rank)


def a_step_that_one_process_cannot_capture_is_refused(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """The second process would run it as it is written, where the first has a graph."""
    model = nn.Linear(4, 2).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    @autostream.step(optimizers=[sgd], data_parallel=group, **STREAMED)
    def step(x: Tensor, branches: bool) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if not branches or loss.item() > 0:
            sgd.step()
        sgd.zero_grad()
        return loss

    x = torch.ones(3, 4, dtype=torch.float64)
    for _ in range(2):
        step(x, False)
    with pytest.raises(GroupError, match="on rank 0 and the step as it is written on rank 1"):
        step(x.repeat(2, 1), rank == 1)


def another_process_is_not_there(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """The first process compiles a step that the second does not run, since it has got fewer rows."""
    step, x, y = linear_step(group)
    for _ in range(2):
        step(x, y)
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agreement, "LIMIT_S", 1.0)
            with pytest.raises(GroupError, match=r"rank 1 of .* within 1 s.* compiled for 2x4:.*, after 3x4:.* same"):
                step(x[:2], y[:2])


def a_process_is_late(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """The second process has not come to a step in the time that the group allows, and has not ended."""
    hasty = dist.new_group(timeout=timedelta(seconds=2))
    step, x, y = linear_step(hasty)
    for _ in range(2):
        step(x, y)
    of_all(group, None)
    if rank == 0:
        with pytest.raises(GroupError, match=r"^rank 1 of process group .* has ended, or was late beyond"):
            step(x, y)
    of_all(group, None)


def subgroups_as_ddp(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Four processes in two groups of two, each with models of its own."""
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    torch.manual_seed(rank)
    model = nn.Linear(4, 2).double()
    torch.manual_seed(rank // 2 * 2)
    other = DistributedDataParallel(nn.Linear(4, 2).double(), process_group=mine)
    sgds = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    step = autostream.train_step(model, sgds[0], nn.MSELoss(), data_parallel=mine, **STREAMED)
    for count in range(3):
        x = torch.full((3, 4), 1.0 + rank + count, dtype=torch.float64)
        y = torch.zeros(3, 2, dtype=torch.float64)
        step(x, y)
        sgds[1].zero_grad()
        F.mse_loss(other(x), y).backward()
        sgds[1].step()
        assert_alike(model, other)
    assert_in_graphs(step, collectives=1)


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).double()


def _tensor_parallel(model: nn.Module, mesh: Any) -> None:
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def sharded_models_run_as_they_are(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """FSDP2: it is right, and the report says why it is in no graph."""
    model, whole = _mlp(), _mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (processes,)))
    fast = autostream.optimize(model, **STREAMED)
    sgds = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole)]
    step = autostream.train_step(model, sgds[0], nn.MSELoss(), max_norm=0.5, **STREAMED)
    for x, y in _batches(3):
        with torch.no_grad():
            torch.testing.assert_close(fast(x), whole(x))
        torch.testing.assert_close(step(x, y), _trained(whole, sgds[1], x, y))
    for report in (*fast.reports, *step.reports):
        assert any("fully_shard" in each.reason for each in report.refusals), report
    with pytest.raises(TargetError, match=r"no gradients of DTensors: leave it out; fully_shard averages them itself"):
        autostream.train_step(model, sgds[0], F.mse_loss, data_parallel=group)


def _batches(number: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same in all processes."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(number):
        x, y = torch.randn(2, 4, 8, generator=generator, dtype=torch.float64)
        yield x, y


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The loss of an eager step."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tensor_parallel_steps_are_graphs(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Updates and clipping are those of the whole model, whatever becomes of weights and state between two steps."""
    mesh = init_device_mesh("cpu", (processes,))
    optimizers: list[Callable[[Any], torch.optim.Optimizer]] = [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.AdamW, lr=0.01),
    ]
    for make in optimizers:
        model, whole = _mlp(), _mlp()
        _tensor_parallel(model, mesh)
        own, other = make(model.parameters()), make(whole.parameters())
        step = autostream.train_step(model, own, nn.MSELoss(), max_norm=0.5, **STREAMED)
        for at, (x, y) in enumerate(_batches(8)):
            if at == 4:
                with torch.no_grad():
                    model[0].weight.mul_(2), whole[0].weight.mul_(2)
            if at == 5:  # the parameter is the same, its local tensor is not
                model[2].bias._local_tensor = model[2].bias._local_tensor * 2
                with torch.no_grad():
                    whole[2].bias.mul_(2)
            if at == 6:  # its state is not
                own.load_state_dict(copy.deepcopy(own.state_dict()))
            torch.testing.assert_close(step(x, y), _trained(whole, other, x, y))
        for one, another in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(_whole(one), another)
        reports = [report for report in step.reports if report.graph is not None]
        assert len(reports) == len(step.reports), [report.refusals for report in step.reports]
        assert {len(report.graph.collectives) for report in reports if report.graph} == {2}  # one for the norm


def steps_of_partly_parallel_models_are_graphs(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Some parameters are no DTensors, and conversions swap those that are; state in another place is in no graph."""
    mesh = init_device_mesh("cpu", (processes,))
    model, whole = (nn.Sequential(nn.LayerNorm(8).double(), _mlp()) for _ in range(2))
    parallelize_module(model[1], mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    own, other = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, whole))
    step = autostream.train_step(model, own, nn.MSELoss(), **STREAMED)
    for at, (x, y) in enumerate(_batches(9)):
        if at == 3:
            for each in (model, whole):
                each.float().double()
        if at == 6:
            weight = model[1][0].weight
            own.state[weight]["momentum_buffer"] = own.state[weight]["momentum_buffer"].redistribute(
                placements=[Replicate()]
            )
        other.zero_grad()
        loss = F.mse_loss(whole(x), y)
        loss.backward()
        other.step()
        torch.testing.assert_close(step(x, y), loss.detach())
    for one, another in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(_whole(one), another)
    reports = [report for report in step.reports if report.mode != "forward and backward"]
    assert len(reports) >= 2, step.reports
    assert all(report.graph is not None for report in reports)
    reasons = [each.reason for report in step.reports for each in report.refusals]
    assert any("momentum_buffer of an optimizer's state is placed in a mesh otherwise" in each for each in reasons)


def sequence_parallel_steps_are_graphs(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Each process has a part of the sequence; gradients of its norm are sums that are still to be made."""
    mesh = init_device_mesh("cpu", (processes,))
    model, whole = (nn.Sequential(nn.LayerNorm(8).double(), *_mlp()) for _ in range(2))
    up = ColwiseParallel(input_layouts=Shard(1))
    plan = {"0": SequenceParallel(), "1": up, "3": RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(model, mesh, plan)
    own, other = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, whole))

    @autostream.step(optimizers=[own], **STREAMED)
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        own.step()
        own.zero_grad()
        return loss

    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        x = torch.randn(2, 2 * processes, 8, generator=generator, dtype=torch.float64)
        loss = step(x.chunk(processes, 1)[rank].contiguous())
        dist.all_reduce(loss, group=group)
        expected = whole(x).square().sum()
        expected.backward()
        other.step()
        other.zero_grad()
        torch.testing.assert_close(loss, expected.detach())
    for one, another in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(_whole(one), another)
    (report,) = step.reports
    assert report.graph is not None, report.refusals


def a_written_step_returns_dtensors(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """The gradients that it leaves are DTensors, too."""
    mesh = init_device_mesh("cpu", (processes,))
    model, whole = _mlp(), _mlp()
    layout = RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": layout})
    own, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole))

    def written(model: nn.Module, sgd: torch.optim.Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
        sgd.zero_grad()
        y = model(x)
        loss = y.square().mean()
        loss.backward()
        sgd.step()
        return y, loss

    step = autostream.step(optimizers=[own], **STREAMED)(partial(written, model, own))
    for x, _ in _batches(4):
        found, expected = step(x), written(whole, other, x)
        assert all(isinstance(each, DTensor) for each in found)
        for one, another in zip(found, expected, strict=True):
            torch.testing.assert_close(_whole(one), another.detach())
        for one, another in zip(model.parameters(), whole.parameters(), strict=True):
            assert isinstance(one.grad, DTensor)
            torch.testing.assert_close(one.grad.full_tensor(), another.grad)
    (report,) = step.reports
    assert report.graph is not None, report.refusals


def tensor_parallel_calls_are_graphs(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Calls of a tensor parallel model, with gradients and without, whatever becomes of its weights."""
    mesh = init_device_mesh("cpu", (processes,))
    model, whole = _mlp(), _mlp()
    _tensor_parallel(model, mesh)
    fast = autostream.optimize(model, **STREAMED)
    sgds = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole)]
    generator = torch.Generator().manual_seed(0)

    def check(rows: int = 4) -> None:
        x = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), whole(x))
        given = [x.clone().requires_grad_() for _ in sgds]
        for run, each in zip((fast, whole), given, strict=True):
            run(each).square().sum().backward()
        torch.testing.assert_close(given[0].grad, given[1].grad)
        for own, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), other.grad)

    for rows in (4, 4, 4, 6):
        check(rows)
        for sgd in sgds:
            sgd.step()
            sgd.zero_grad()
    for report in fast.reports:
        first = report.parts[0] if report.parts else report
        assert len(first.graph.collectives) == 1, report.mode
    for double in (_swap, _replace):
        with torch.no_grad():
            double(model[0])
            whole[0].weight.mul_(2)
        for each in (model, whole):
            each.zero_grad()
        check()


def _swap(linear: nn.Module) -> None:
    torch.utils.swap_tensors(linear.weight, nn.Parameter(linear.weight * 2))


def _replace(linear: nn.Module) -> None:
    linear.weight = nn.Parameter(linear.weight * 2)


def dtensors_that_no_graph_has(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Calls that take a DTensor, or draw random numbers for one, run as they are; the report says why."""
    mesh = init_device_mesh("cpu", (processes,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout()).double()
    whole = copy.deepcopy(model)
    parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False)})
    x = torch.randn(4, 8, dtype=torch.float64)
    copies = distribute_tensor(x, mesh, [Replicate()])
    fast = autostream.optimize(model, **STREAMED)
    with torch.no_grad():
        fast(x)
        model.eval(), whole.eval()
        for given in (x, copies):
            torch.testing.assert_close(fast(given).full_tensor(), whole(x))
    fast(x).full_tensor().sum().backward()
    whole(x).sum().backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), whole[0].weight.grad)
    reasons = [each.reason for report in fast.reports for each in report.refusals]
    for reason in ("it draws random numbers for a DTensor", "input 0 is a DTensor"):
        assert any(reason in each for each in reasons), reasons


def calls_that_return_dtensors_are_graphs(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Without gradients, as with them."""
    mesh = init_device_mesh("cpu", (processes,))
    model, whole = _mlp()[:2], _mlp()[:2]
    parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False)})
    fast = autostream.optimize(model, **STREAMED)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(4, 8, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(fast(x).full_tensor(), whole(x))
        for run in (fast, whole):
            y = run(x)
            (y.full_tensor() if run is fast else y).square().sum().backward()
        torch.testing.assert_close(model[0].weight.grad.full_tensor(), whole[0].weight.grad)
    recorded, alone = sorted(fast.reports, key=lambda report: report.mode)
    assert [part.half for part in recorded.parts] == ["forward", "backward"]
    assert [report.level for report in (alone, *recorded.parts)] == ["aten"] * 3


def the_backend_takes_tensor_parallel_models(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """``torch.compile(backend="autostream")``, with gradients and without."""
    mesh = init_device_mesh("cpu", (processes,))
    model, whole = _mlp(), _mlp()
    _tensor_parallel(model, mesh)
    graphs = []

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(autostream_backend(module, inputs, options=STREAMED))
        return graphs[-1]

    fast = torch.compile(model, backend=backend)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(4, 8, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), whole(x))
        for run in (fast, whole):
            run(x).square().sum().backward()
        torch.testing.assert_close(model[2].weight.grad.full_tensor(), whole[2].weight.grad)
    alone, recorded = ([part for each in graph.reports for part in (each.parts or [each])] for graph in graphs)
    assert [len(part.graph.collectives) for part in (*alone, *recorded)] == [1, 1, 0]


def dtensors_that_differ_between_processes(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """A process that prints has no graph, and shards of other sizes have other ops: then none has a graph."""
    mesh = init_device_mesh("cpu", (processes,))

    class Printing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.net(x)
            if rank == 0 and self.training:
                print(end=str(y.norm().item())[:0])
            return y * 2

    printing, uneven = Printing(), nn.Linear(8, 33).double()
    wholes = [copy.deepcopy(each) for each in (printing, uneven)]
    _tensor_parallel(printing.net, mesh)
    parallelize_module(uneven, mesh, ColwiseParallel(output_layouts=Replicate()))
    x = torch.ones(4, 8, dtype=torch.float64)
    said = "on rank 0 of process group", "its processes would run other ops: number"
    for model, whole, reason in zip((printing, uneven), wholes, said, strict=True):
        fast = autostream.optimize(model, **STREAMED)
        for gradients in (False, False, True, True):
            with torch.set_grad_enabled(gradients):
                torch.testing.assert_close(fast(x), whole(x))
        reasons = [each.reason for report in fast.reports for each in report.refusals]
        assert any(reason in each for each in reasons), reasons
        sgds = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole)]
        step = autostream.train_step(model, sgds[0], lambda m, x: m(x).square().mean(), **STREAMED)
        for _ in range(3):
            loss = whole(x).square().mean()
            loss.backward()
            sgds[1].step()
            sgds[1].zero_grad()
            torch.testing.assert_close(step(x), loss.detach())
        reasons = [each.reason for report in step.reports for each in report.refusals]
        assert any(reason in each for each in reasons), reasons


def tensor_parallel_runs_are_compared_with_eager_ones(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """``AUTOSTREAM_VERIFY=paranoid`` compares each call and each step."""
    model, whole = _mlp(), _mlp()
    _tensor_parallel(model, init_device_mesh("cpu", (processes,)))
    sgds = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("AUTOSTREAM_VERIFY", "paranoid")
        fast = autostream.optimize(model, **STREAMED)
        step = autostream.train_step(model, sgds[0], nn.MSELoss(), max_norm=0.5, **STREAMED)
        for x, y in _batches(3):
            with torch.no_grad():
                torch.testing.assert_close(fast(x), whole(x))
            torch.testing.assert_close(step(x, y), _trained(whole, sgds[1], x, y))
    assert all(report.graph is not None for report in (*fast.reports, *step.reports))


def a_process_that_fails_alone_says_why(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """The others do not come to hear of it, as they replay what it has to capture."""

    def fails() -> None:
        raise ValueError("mine")

    if rank == 0:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(agreement, "LIMIT_S", 0.5)
            with pytest.raises(GroupError, match=r"has not come as far .*; here it has failed: ValueError: mine"):
                agreement.everywhere([group.group_name], "the capture of a step", fails)
    dist.barrier(group)


def replaced_dtensors_are_freed(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """No replay of a call keeps the shard of a weight that the model has no more."""
    model = _mlp()
    _tensor_parallel(model, init_device_mesh("cpu", (processes,)))
    fast = autostream.optimize(model, **STREAMED)
    x = torch.ones(4, 8, dtype=torch.float64)
    with torch.no_grad():
        fast(x)
        shard = weakref.ref(model[0].weight._local_tensor)
        for _ in range(2):
            _replace(model[0])
            fast(x)
    gc.collect()
    assert shard() is None


def rows_and_columns(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Sums over two groups, neither of which has all processes: right, by estimates, and the report says why."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    row, column = groups[rank // 2], groups[2 + rank % 2]
    model = nn.Linear(4, 2).double()
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    @autostream.step(optimizers=[sgd], **STREAMED)
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        for each in (row, column):
            dist.all_reduce(model.weight.grad, group=each)
        sgd.step()
        sgd.zero_grad()
        return loss

    for count in range(3):
        expected = [torch.full((3, 4), 1.0 + other + count, dtype=torch.float64) for other in range(processes)]
        before = model.weight.detach().clone()
        gradients = [torch.autograd.grad(model(x).square().mean(), model.weight)[0] for x in expected]
        step(expected[rank])
        torch.testing.assert_close(model.weight.detach(), before - 0.1 * torch.stack(gradients).sum(0))
        dist.broadcast(model.bias.detach(), 0)
    (report,) = step.reports
    assert any(each.choice == "not measured" and "several process groups" in each.reason for each in report.refusals)
    assert len(report.graph.collectives) == 2


def a_process_dies(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """The last process ends; the others name it, in a call that is compiled and where a step waits for the store."""
    step, x, y = linear_step(group)
    step(x, y)
    call = autostream.optimize(lambda x: functional.all_reduce(x, "sum", group) + 1, **STREAMED)
    call(x)
    if rank == processes - 1:
        os._exit(3)
    for _ in range(2):
        with pytest.raises(GroupError, match=f"^rank {processes - 1} of process group .* has ended"):
            call(x)
    with pytest.raises(GroupError, match=f"^rank {processes - 1} of process group .* has ended"):
        step(x, y)


def a_process_dies_in_a_step(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """The last process ends where the others have a graph; those that wait for its neighbours name it, too."""
    step, x, y = linear_step(group)
    for _ in range(2):
        step(x, y)
    if rank == processes - 1:
        os._exit(3)
    with pytest.raises(GroupError, match=f"^rank {processes - 1} of process group .* has ended: look"):
        step(x, y)


# Processes that measure together


def a_clock(times_us: Callable[[bool], float]) -> Any:
    """A clock for runs of steps: runs them, and takes the time for several streams, or for one, from a function."""

    def clock(run: Any, runs: int, restore: Callable[[], None] = lambda: None) -> float:
        for _ in range(runs):
            restore()
            run()
        return times_us(isinstance(inspect.unwrap(getattr(run, "func", run)), ThreadedProgram))

    return clock


def with_fast_streams(scenario: Scenario, rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Run a scenario by a clock on which several streams are faster than one, in each process by another factor."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_host_us", "_host_us_alone"):
            patch.setattr(selection, name, a_clock(lambda streams: 5.0 + rank if streams else 20.0))
        patch.setattr(selection, "_MAX_RUNS", 2)  # its times do not depend on how often something runs
        scenario(rank, processes, group)


def linear_step(group: dist.ProcessGroup, **options: Any) -> Any:
    """A step of a small model, and what it takes."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autostream.train_step(model, sgd, nn.MSELoss(), data_parallel=group, **{**STREAMED, **options})
    return step, torch.ones(3, 4, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)


def of_all(group: dist.ProcessGroup, value: object) -> list[object]:
    """The value of each process."""
    values: list[object] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def processes_that_measure_other_times_choose_the_same(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """The last is slow with several streams, where the others are fast: all wait for it, so one stream is faster."""
    clock = a_clock(lambda streams: (1.0 if rank < processes - 1 else 90.0) if streams else 20.0 + rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_host_us_alone", clock)
        patch.setattr(selection, "_host_us", clock)
        step, x, y = linear_step(group)
        for _ in range(2):
            step(x, y)
    (report,) = step.reports
    measured = [candidate.measured_us for candidate in report.candidates]
    assert measured == [20.0 + processes - 1, 90.0]
    assert report.chosen.schedule.streams == 1
    assert len({repr(each) for each in of_all(group, (report.chosen, report.candidates, report.costs))}) == 1


def variants_of_the_best_schedule_are_those_of_the_first(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """The others make none, and measure and choose what the first has made. Here each counts as faster."""

    def made(*arguments: Any) -> Iterator[Candidate]:
        assert rank == 0
        yield from variants_of(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "variants_of", made)
        patch.setattr(selection, "VARIANTS", 3)
        patch.setattr(selection, "_GAIN", -1.0)
        step = trained_as_ddp(rank, group, policy="search", streams=3)
    (report,) = step.reports
    reasons = [decision.reason for each in report.candidates for decision in each.schedule.decisions]
    assert sum("with a few changes" in reason for reason in reasons) == 3
    assert report.chosen == report.candidates[-1]
    assert len({repr(each) for each in of_all(group, (report.chosen, report.candidates))}) == 1


def costs_that_the_first_has_measured(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """They are those of all. Collectives are measured by all processes together."""
    step = trained_as_ddp(rank, group, costs="measured")
    (report,) = step.reports
    sources = {name: cost.source for name, cost in report.costs.items()}
    assert {sources[name] for name in report.graph.collectives} == {"measured"}
    assert {"measured", "roofline"} == set(sources.values())
    assert len({repr(each) for each in of_all(group, (report.profile, report.costs))}) == 1


def all_reduces_that_are_measured_once(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """From 4 KiB to 32 MiB. The first process keeps the times of the slowest, and all have them."""
    sizes = list[int]()

    def timed(its_group: dist.ProcessGroup, summands: Tensor) -> float:
        assert its_group == group
        assert time_all_reduce(its_group, summands) > 0
        sizes.append(summands.nbytes)
        return summands.nbytes / 1e5 + (1e3 if rank == len(sizes) % processes else 0)

    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setenv("AUTOSTREAM_CACHE_DIR", folder)
        patch.setattr(interconnect, "time_all_reduce", timed)
        first, again = (link_between_all(group) for _ in range(2))
        patch.setenv("NCCL_PROTO", "LL")
        other = link_between_all(group)
    assert sizes == [*SIZES, *SIZES]
    assert first == again == other
    for size in (SIZES[0], 1 << 20, SIZES[-1]):
        assert all_reduce_us(size, processes, first) == pytest.approx(size / 1e5 + 1e3)
    assert len({repr(each) for each in of_all(group, first)}) == 1


def link_between_all(group: dist.ProcessGroup) -> MeasuredInterconnect:
    """What was measured between the processes of a group, which all say so."""
    link, notes = link_of([group.group_name], "cpu", Peers(group.group_name), measure=True)
    found = link(profile_of("cpu"))
    assert not notes
    assert isinstance(found, MeasuredInterconnect)
    return found


def no_larger_all_reduce_than_there_is_time_for(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Over a slow network larger ones are measured no more; they take as many times as long as they have bytes."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setenv("AUTOSTREAM_CACHE_DIR", folder)
        patch.setattr(interconnect, "time_all_reduce", lambda _, summands: float(summands.nbytes))
        link = link_between_all(group)
    last = next(size for size in SIZES if size > LONGEST_US)
    assert all_reduce_us(last, processes, link) == pytest.approx(last)
    assert all_reduce_us(10 * last, processes, link) == pytest.approx(10 * last)
    assert len(link.times) == SIZES.index(last) + 1
    of_all(group, link)


def all_reduces_that_cannot_be_measured(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """They are estimated, and all processes say why, once: one was stopped before it measured, or cannot name NCCL."""

    def failing(*_: object) -> float:
        if rank == processes - 1:
            raise RuntimeError("the clock has stopped")
        return 1.0

    def unknown(*_: object) -> str:
        raise RuntimeError("no such library")

    last = f"rank {processes - 1} of process group '{group.group_name}': RuntimeError: the clock has stopped"
    first = f"rank 0 of process group '{group.group_name}': RuntimeError: no such library"
    for name, broken, who in (("time_all_reduce", failing, last), ("_key", unknown, first)):
        with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
            patch.setenv("AUTOSTREAM_CACHE_DIR", folder)
            patch.setattr(interconnect, name, broken)
            step = trained_as_ddp(rank, group, costs="measured")
        (report,) = step.reports
        assert {report.costs[op].source for op in report.graph.collectives} == {"roofline"}
        reasons = [refusal.reason for refusal in report.refusals]
        assert reasons == [f"times of collectives are estimates, for measuring failed: on {who}"], reasons


def who_failed_first_is_named(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """It has launched fewer collectives than those that fail as they wait for it."""

    def failing() -> None:
        raise RuntimeError(f"of {rank}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "launched_in", lambda _: processes - rank)
        with pytest.raises(GroupError, match=f"on rank {processes - 1} .* of {processes - 1}, with other collectives"):
            Peers(group.group_name).each("something", failing)
    of_all(group, rank)


def groups_that_are_not_measured(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Collectives are estimated where one process has a group of fewer, too."""
    pair = dist.new_group([processes - 2, processes - 1])
    names = [group.group_name, *([pair.group_name] if rank >= processes - 2 else [])]
    link, notes = link_of(names, "cpu", Peers(group.group_name), measure=True)
    assert of_all(group, (link(profile_of("cpu")), notes)) == [(None, ())] * processes


def processes_of_which_one_measures(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """None does."""
    link, notes = link_of([group.group_name], "cpu", Peers(group.group_name), measure=rank == 0)
    assert of_all(group, (link(profile_of("cpu")), notes)) == [(None, ())] * processes


def buckets_by_what_was_measured(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """The first process plans buckets for the link between all."""
    links = list[object]()

    def planned(*arguments: object) -> tuple[Filled, tuple[Decision, ...]]:
        links.append(arguments[-1])
        return (), ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_buckets, "best_buckets", planned)
        trained_as_ddp(rank, group, costs="measured")
    assert [type(link) for link in links] == [MeasuredInterconnect] * (rank == 0), links


def buckets_that_the_first_has_chosen(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """They are those of all, here one for each gradient; the others do not even look for sizes."""

    def chosen(program: Program, *_: object) -> tuple[Filled, tuple[Decision, ...]]:
        assert rank == 0
        (sums,) = sums_of(program)
        return (tuple(buckets(sums.like, Sizes(1, 1, 1))),), (Decision("", "buckets", "as they were chosen"),)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_buckets, "best_buckets", chosen)
        step = trained_as_ddp(rank, group, max_norm=0.1)
    assert_in_graphs(step, collectives=8)
    assert [refusal.reason for refusal in step.reports[0].refusals] == ["as they were chosen"]


def buckets_that_cannot_be_planned(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """The usual ones are used, and the report says why."""

    def fails(*_: object) -> tuple[Filled, tuple[Decision, ...]]:
        raise ScheduleError("a schedule of theirs is wrong")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_buckets, "best_buckets", fails)
        step = trained_as_ddp(rank, group)
    assert_in_graphs(step, collectives=2)
    assert "a schedule of theirs is wrong" in step.reports[0].refusals[0].reason


def a_candidate_that_one_process_cannot_build(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """None takes it, and the report names that process."""
    build = selection.build

    def fails(program: Any, graph: Any, candidate: Any, *rest: Any) -> Any:
        if rank == 1 and candidate.schedule.streams > 1:
            raise CaptureError("there is no room")
        return build(program, graph, candidate, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "build", fails)
        step = trained_as_ddp(rank, group)
    (report,) = step.reports
    assert report.chosen.schedule.streams == 1
    (refused,) = (candidate.refusal for candidate in report.candidates if candidate.schedule.streams > 1)
    assert "on rank 1 of process group" in refused
    assert "there is no room" in refused


def a_candidate_that_fails_between_collectives(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """One process has launched a collective more than the other when it fails: nothing can be right any more."""
    build = selection.build

    def fails(program: Any, graph: Any, candidate: Any, *rest: Any) -> Any:
        if rank == 1 and candidate.schedule.streams > 1:
            dist.all_reduce(torch.ones(1), group=group, async_op=True)
            raise CaptureError("there is no room")
        return build(program, graph, candidate, *rest)

    step, x, y = linear_step(group)
    step(x, y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "build", fails)
        with pytest.raises(GroupError, match=r"on rank 1 of process group .* there is no room, with other"):
            step(x, y)


def kernels_that_one_process_cannot_make(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """One fails to fuse, or makes other kernels: all run ATen's ops, and say why."""
    tape = Tape()
    given = tape.input(6, 4)
    flat = tape.call(aten.mul.Tensor, tape.call(aten.sin.default, given), 1.0 / processes)
    summed = tape.call(c10d.all_reduce_.default, flat, "sum", group.group_name)
    program = tape.case([tape.call(c10d.wait_tensor.default, summed)]).program
    expected = torch.stack([torch.full((6, 4), 1.0 + other).sin() for other in range(processes)]).mean(0)
    x = torch.full((6, 4), 1.0 + rank)
    for fails in (True, False):

        def fuse(program: Program, *_: Any) -> tuple[Program, tuple[()]]:
            if rank == 1 and fails:  # noqa: B023
                raise FusionError("no compiler")
            module = copy.deepcopy(program.module)
            if rank == 1:
                next(node for node in module.graph.nodes if node.op == "call_function").name = "another"
            return replace(program, module=module), ()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuning, "fused_here", fuse)
            tuned = tuning.tune(program, [x], [False], Options(kernels="inductor"), Stopwatch())
        (result,) = tuned.selection.execution(x)
        torch.testing.assert_close(result, expected)
        assert ("no compiler" if fails else "other kernels on rank 1") in tuned.refusals[0].reason


def collectives_in_a_functional_graph(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """What TorchInductor gets computes the same, with collectives that are not in place."""
    tape = Tape()
    weight, x = tape.input(6, 4, role=Role.PARAMETER), tape.input(24)
    flat = tape.call(aten.mul_.Tensor, tape.call(aten.cat.default, [x, x]), 1.0 / processes)
    summed = tape.call(c10d.all_reduce_.default, flat, "sum", group.group_name)
    mean = tape.call(c10d.wait_tensor.default, summed)
    half = tape.call(operator.getitem, tape.call(aten.split_with_sizes.default, mean, [24, 24]), 1)
    tape.call(aten.sub_.Tensor, weight, tape.call(aten.view.default, half, [6, 4]))
    in_place = tape.call(c10d.all_reduce_.default, x, "sum", group.group_name)
    tape.call(c10d.wait_tensor.default, in_place)
    program = tape.case([tape.call(aten.add.Tensor, flat, 1.0)]).program
    module = inductor._functional(program)
    targets = [str(node.target) for node in module.graph.nodes]
    assert targets.count("_c10d_functional.all_reduce.default") == 2
    assert "_c10d_functional.all_reduce_.default" not in targets
    given = [torch.ones(6, 4), torch.arange(24.0) + rank]
    ours, theirs = ([tensor.clone() for tensor in given] for _ in range(2))
    torch.testing.assert_close(module(*ours), program.module(*theirs))
    torch.testing.assert_close(ours, theirs)


def a_process_dies_while_it_measures(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """The others, which wait for its part of a sum, name it."""
    runs = itertools.count()

    def clock(run: Any, runs_: int, restore: Any) -> float:
        if rank == processes - 1 and next(runs) == 2:
            os._exit(3)
        return a_clock(lambda streams: 1.0)(run, runs_, restore)  # type: ignore[no-any-return]

    step, x, y = linear_step(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_host_us_alone", clock)
        with pytest.raises(GroupError, match=f"rank {processes - 1} of process group"):
            for _ in range(2):
                step(x, y)


# Split models, run by ``torch.distributed.pipelining``


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(4)]
    return nn.Sequential(*layers).double()


def stages_as_the_whole_model(
    rank: int, processes: int, group: dist.ProcessGroup, *, order: str = "1F1B", scheduled: bool = False
) -> None:
    """Loss and gradients of two steps; with ``scheduled``, a stage's forward and backward are in graphs."""
    from torch.distributed.pipelining import build_stage, pipeline
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    microbatches, rows = 4, 2
    model, whole = transformer(), transformer()
    x, target = torch.randn(2, microbatches * rows, 5, 16, dtype=torch.float64)
    expected = F.mse_loss(whole(x), target)
    expected.backward()

    kind = get_schedule_class(order)
    stages = processes if issubclass(kind, PipelineScheduleSingle) else 2 * processes
    cut = autostream.split(model, [x[:rows]], stages, device="h200", microbatches=microbatches)
    pipe = pipeline(model, (x[:rows],), split_spec=cut.split_spec)
    modules = {at: pipe.get_stage_module(at) for at in range(rank, stages, processes)}
    # On a CPU, a schedule with gradients is made for those only who choose a policy.
    fast = {
        at: autostream.optimize(each, policy="critical_path") if scheduled else each for at, each in modules.items()
    }
    own = [build_stage(each, at, pipe.info(), torch.device("cpu"), group) for at, each in fast.items()]
    schedule: Any = kind(own if stages > processes else own[0], microbatches, loss_fn=F.mse_loss)  # type: ignore[arg-type]
    losses: list[Tensor] = []
    for _ in range(2):  # the second step replays what the first has captured
        for module in modules.values():
            module.zero_grad()
        losses.clear()
        last = {"target": target, "losses": losses} if rank == processes - 1 else {}
        schedule.step(*([x] if rank == 0 else []), **last)
        if rank == processes - 1:
            assert abs(torch.stack(losses).mean() - expected) <= 1e-12
        gradients = {name: weight.grad for name, weight in whole.named_parameters()}
        for module in modules.values():
            weights = dict(module.named_parameters())
            assert weights
            for name, weight in weights.items():
                assert weight.grad is not None, name
                assert (weight.grad - gradients[name]).abs().max() <= 1e-12, name
    if scheduled:
        modes = {report.mode for each in fast.values() for report in cast(autostream.OptimizedModule, each).reports}
        assert modes == {"forward and backward"}, modes


def stages_by_each_schedule(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Two stages in each process where the schedule interleaves them.

    By zero bubble, gradients of weights come later than those of inputs: 2.11 cannot do that with compiled stages.
    """
    for order, scheduled in {
        "GPipe": False,
        "1F1B": True,
        "Interleaved1F1B": False,
        "InterleavedZeroBubble": torch.__version__ >= (2, 13),
    }.items():
        stages_as_the_whole_model(rank, processes, group, order=order, scheduled=scheduled)


# Random programs with collectives


def random_programs(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Each is what it is one op after another, by every policy, with waits anywhere, all-reduces joined in buckets.

    Over two groups, both processes have the same schedule; over one, each has any other, which must not matter.
    """
    groups, joined = [group.group_name, dist.new_group().group_name], 0
    for seed in range(100):
        over_two = seed % 2 == 0
        case, graph_inputs = _program(random.Random(seed), processes, groups if over_two else groups[:1])
        inputs = [torch.full_like(torch.empty(each.shape), 1.0 + rank + at) for at, each in enumerate(graph_inputs)]
        expected = case.program.module(*[each.clone() for each in inputs])
        program = gathered(case.program)
        joined += program is not case.program
        program = in_buckets(program, [buckets(sums.like, Sizes(1, 1, 1)) for sums in sums_of(program) if seed % 3])
        graph = analyze(program)
        profile = profile_named("h200")
        for name in POLICIES if seed % 10 == 0 else ("critical_path", "path_cover"):
            if over_two:
                assignment = POLICIES[name](graph, price(graph, profile), profile, 2 + seed % 4 // 2, frozenset())
            else:
                dice = random.Random(f"{seed}, {name}, {rank}")
                rank_of = {op: dice.random() for op in graph.ops}
                order = tuple(nx.lexicographical_topological_sort(graph.digraph, key=rank_of.__getitem__))
                assignment = Assignment("any", 3, order, {op: dice.randrange(3) for op in order})
            schedule = place_releases(graph, synchronize(graph, assignment))
            verify(graph, schedule)
            agreement.agree_on(graph, [launch.op for launch in schedule.launches])
            run = uncaptured(lower(program, graph, schedule), "cpu", schedule.streams)
            found = run(*[each.clone() for each in inputs])
            for one, another in zip(found, expected, strict=True):
                assert isinstance(one, Tensor)
                torch.testing.assert_close(one, another, msg=lambda text: f"seed {seed}, {name}: {text}")  # noqa: B023
    assert joined > 20, joined


def _program(random: random.Random, processes: int, groups: list[str]) -> tuple[Any, list[Tensor]]:
    """Ops on vectors of 8, collectives among them; each result of these is waited for before it is used, or at last."""
    tape = Tape()
    values = [tape.input(8) for _ in range(3)]
    inputs = [node.meta["val"] for node in values]
    pending: list[tuple[fx.Node, str]] = []
    taken: dict[fx.Node, int] = {}  # what a pending collective reads must not be written before the wait

    def wait(at: int) -> None:
        reduced, which = pending.pop(at)
        waited = tape.call(c10d.wait_tensor.default, reduced)
        for source in reduced.all_input_nodes:
            taken[source] -= 1
        if which == "scatter":  # back to 8 elements
            waited = tape.call(aten.cat.default, [waited] * processes)
        elif which == "gather":
            waited = tape.call(aten.slice.Tensor, waited, 0, 0, 8)
        values.append(waited)

    for _ in range(random.randint(8, 16)):
        kind = random.choice(["unary", "binary", "in place", "collective", "collective", "wait"])
        one, other = random.choices(values, k=2)
        if kind == "unary":
            values.append(tape.call(random.choice([aten.sin.default, aten.relu.default]), one))
        elif kind == "binary":
            values.append(tape.call(aten.add.Tensor, one, other))
        elif kind == "in place" and not taken.get(one):
            tape.call(aten.mul_.Tensor, one, 0.5)
        elif kind == "collective":
            name = random.choice(groups)
            which = random.choice([*["reduce", "reduce in place"] * 2, "scatter", "gather", "exchange"])
            if which == "reduce in place" and not taken.get(one):
                own = tape.call(aten.clone.default, one)
                started = tape.call(c10d.all_reduce_.default, own, "sum", name)
            elif which == "scatter":
                started = tape.call(c10d.reduce_scatter_tensor.default, one, "sum", processes, name)
            elif which == "gather":
                started = tape.call(c10d.all_gather_into_tensor.default, one, processes, name)
            elif which == "exchange":
                parts = [8 // processes] * processes
                started = tape.call(c10d.all_to_all_single.default, one, parts, parts, name)
            else:
                started = tape.call(c10d.all_reduce.default, one, "sum", name)
            for source in started.all_input_nodes:
                taken[source] = taken.get(source, 0) + 1
            pending.append((started, which))
        elif kind == "wait" and pending:
            wait(random.randrange(len(pending)))
    while pending:
        wait(0)
    return tape.case([tape.call(aten.neg.default, value) for value in values[3:]]), inputs


IN_TWO: dict[str, Scenario] = {
    each.__name__: partial(with_fast_streams, each)
    for each in (
        random_programs,
        step_as_ddp,
        train_step_as_ddp,
        eager_optimizers_as_ddp,
        steps_that_no_graph_holds_as_ddp,
        two_optimizers_as_ddp,
        reductions_of_the_user,
        reductions_that_one_process_cannot_join,
        reductions_that_are_joined_otherwise_elsewhere,
        ddp_inside_runs_as_written,
        what_data_parallel_does_not_take,
        gradients_that_no_backward_computed,
        other_collectives_are_refused,
        optimized_calls_with_other_collectives_are_refused,
        parts_of_any_size_are_exchanged,
        what_async_collectives_are_written_as_is_said,
        averages_begin_alike,
        penalties_of_gradients_are_in_the_graph,
        a_process_is_late,
        other_gradients_are_refused_in_eager_steps,
        a_step_that_one_process_cannot_capture_is_refused,
        another_process_is_not_there,
        processes_that_measure_other_times_choose_the_same,
        variants_of_the_best_schedule_are_those_of_the_first,
        costs_that_the_first_has_measured,
        all_reduces_that_are_measured_once,
        no_larger_all_reduce_than_there_is_time_for,
        all_reduces_that_cannot_be_measured,
        who_failed_first_is_named,
        processes_of_which_one_measures,
        buckets_by_what_was_measured,
        buckets_that_the_first_has_chosen,
        buckets_that_cannot_be_planned,
        a_candidate_that_one_process_cannot_build,
        a_candidate_that_fails_between_collectives,
        kernels_that_one_process_cannot_make,
        collectives_in_a_functional_graph,
        sharded_models_run_as_they_are,
        tensor_parallel_steps_are_graphs,
        steps_of_partly_parallel_models_are_graphs,
        sequence_parallel_steps_are_graphs,
        tensor_parallel_runs_are_compared_with_eager_ones,
        a_process_that_fails_alone_says_why,
        a_written_step_returns_dtensors,
        tensor_parallel_calls_are_graphs,
        dtensors_that_no_graph_has,
        calls_that_return_dtensors_are_graphs,
        the_backend_takes_tensor_parallel_models,
        dtensors_that_differ_between_processes,
        replaced_dtensors_are_freed,
        stages_by_each_schedule,
        a_process_dies,
    )
}
IN_FOUR: dict[str, Scenario] = {
    each.__name__: partial(with_fast_streams, each)
    for each in (
        train_step_as_ddp,
        subgroups_as_ddp,
        rows_and_columns,
        stages_as_the_whole_model,
        processes_that_measure_other_times_choose_the_same,
        groups_that_are_not_measured,
        a_process_dies_in_a_step,
    )
}
IN_THREE: dict[str, Scenario] = {"a_process_dies_while_it_measures": a_process_dies_while_it_measures}
