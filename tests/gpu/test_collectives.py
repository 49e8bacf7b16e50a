"""Collectives of NCCL in CUDA graphs, between ATen's ops and between fused kernels.

In a group of one on one GPU, and between two or four GPUs where there are so many.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import autostream
from autostream.reporting.report import Report
from autostream.runtime.capture import capture
from autostream.runtime.collectives_first import communicate_first
from autostream.runtime.graph_nodes import kernel_name, nodes_of, returned
from autostream.runtime.profiled_kernels import profiled, replays
from autostream.runtime.streams import capture_stream
from autostream.scheduling.communication import uncovered_us
from tests.distributed.processes import outcomes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:The CUDA Graph is empty"),  # Inductor's own
]

STREAMED: dict[str, Any] = {"policy": "critical_path", "streams": 3}


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """NCCL, of this process alone."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 384), nn.GELU(), nn.Linear(384, 384), nn.Tanh(), nn.Linear(384, 8)).cuda()


LEVELS = {"eager": "aten", "inductor": "inductor"}


def compared_with_ddp(rank: int, group: dist.ProcessGroup, kernels: str, **inductor_options: Any) -> Report:
    """Ten steps with clipping in one CUDA graph, beside DistributedDataParallel; their report. One bucket is best."""
    torch.manual_seed(0)
    model = mlp()
    other = DistributedDataParallel(copy.deepcopy(model), device_ids=[rank], process_group=group)
    sgds = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (model, other)]
    options: dict[str, Any] = {"max_norm": 1.0, "kernels": kernels, "inductor_options": inductor_options, **STREAMED}
    step = autostream.train_step(model, sgds[0], nn.MSELoss(), data_parallel=group, **options)
    generator = torch.Generator("cuda").manual_seed(rank)
    for _ in range(10):
        x, y = (torch.randn(32, size, device="cuda", generator=generator) for size in (64, 8))
        sgds[1].zero_grad()
        loss = F.mse_loss(other(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        sgds[1].step()
        torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-4, atol=1e-5)
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, another, rtol=1e-3, atol=1e-5)
    (report,) = step.reports
    assert (report.mode, report.level) == ("cuda graph", LEVELS[kernels]), report.refusals
    assert len(report.graph.collectives) == 1
    for schedule in (candidate.schedule for candidate in report.candidates if candidate.schedule.streams > 1):
        last = schedule.streams - 1
        assert {name for name, at in schedule.stream_of.items() if at == last} == report.graph.collectives
    assert all(candidate.measured_us for candidate in report.candidates if not candidate.refusal)
    return report


@pytest.mark.parametrize("kernels", LEVELS)
def test_a_group_of_one_trains_as_ddp_in_one_cuda_graph(kernels: str, group: dist.ProcessGroup) -> None:
    report = compared_with_ddp(0, group, kernels)
    assert {cost.source for cost in report.costs.values()} == {"measured", "roofline"}


def test_gradients_are_written_to_their_bucket(group: dist.ProcessGroup) -> None:
    """Each of the three weights' products is the last op before the sum."""
    graph = compared_with_ddp(0, group, "inductor").graph
    assert graph is not None
    last = {each.before for each in graph.dependencies if each.after in graph.collectives}
    assert sum(graph.ops[name].target == "aten.mm.out" for name in last) == 3, last


def test_small_updates_that_wait_for_the_same_share_a_kernel(group: dist.ProcessGroup) -> None:
    """All but that of the large one of six parameters; Inductor itself updates both biases of 384 by one kernel."""
    graphs = [compared_with_ddp(0, group, "inductor", **off).graph for off in ({}, {"combo_kernels": False})]
    few, many = (len(graph.ops) for graph in graphs if graph)
    assert many - few == 4 - 1


def test_a_step_with_reductions_of_its_own_is_replayed(group: dist.ProcessGroup) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    alone = copy.deepcopy(model)
    other = torch.optim.SGD(alone.parameters(), lr=0.05)

    @autostream.step(optimizers=[sgd], **STREAMED)
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        sgd.step()
        sgd.zero_grad()
        return loss

    for _ in range(5):
        x = torch.randn(16, 64, device="cuda")
        expected = alone(x).square().mean()
        expected.backward()
        other.step()
        other.zero_grad()
        torch.testing.assert_close(step(x), expected.detach(), rtol=1e-4, atol=1e-5)
    (report,) = step.reports
    assert report.mode == "cuda graph", report.refusals
    assert 0 < len(report.graph.collectives) < 6  # type: ignore[union-attr]  # joined in buckets


def tensor_parallel(kernels: str, rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Calls with gradients and without, between steps of an optimizer; a mesh of one device needs no collectives."""
    mesh = init_device_mesh("cuda", (processes,))
    torch.manual_seed(0)
    model = mlp()
    whole = copy.deepcopy(model)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fast = autostream.optimize(model, kernels=kernels, **STREAMED)
    sgds = [torch.optim.SGD(each.parameters(), lr=0.05, foreach=False) for each in (model, whole)]
    for _ in range(4):
        x = torch.randn(32, 64, device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(fast(x), whole(x), rtol=1e-4, atol=1e-5)
        for run, sgd in zip((fast, whole), sgds, strict=True):
            sgd.zero_grad()
            run(x).square().mean().backward()
            sgd.step()
    for one, another in zip(model.parameters(), whole.parameters(), strict=True):
        local = one.full_tensor() if isinstance(one, DTensor) else one
        torch.testing.assert_close(local, another, rtol=1e-3, atol=1e-5)
    alone = next(report for report in fast.reports if not report.parts)
    assert (alone.mode, alone.level) == ("cuda graph", LEVELS[kernels]), alone.refusals
    assert alone.graph is not None
    assert len(alone.graph.collectives) == (processes > 1)


@pytest.mark.parametrize("kernels", LEVELS)
def test_a_tensor_parallel_model_is_one_cuda_graph(kernels: str, group: dist.ProcessGroup) -> None:
    tensor_parallel(kernels, 0, 1, group)


def tensor_parallel_step(kernels: str, rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Forward, backward, clipping and AdamW in one CUDA graph, with the collectives of all of them."""
    mesh = init_device_mesh("cuda", (processes,))
    torch.manual_seed(0)
    model = mlp()
    whole = copy.deepcopy(model)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel()})
    adams = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, whole)]
    step = autostream.train_step(
        model, adams[0], lambda model, x: gathered(model(x), mesh), max_norm=1.0, kernels=kernels, **STREAMED
    )
    for _ in range(8):
        x = torch.randn(32, 64, device="cuda")
        adams[1].zero_grad()
        loss = whole(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        adams[1].step()
        torch.testing.assert_close(step(x), loss.detach(), rtol=1e-4, atol=1e-5)
    for one, another in zip(model.parameters(), whole.parameters(), strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor(), another, rtol=1e-3, atol=1e-4)
    (report,) = step.reports
    assert (report.mode, report.level) == ("cuda graph", LEVELS[kernels]), report.refusals
    assert report.graph is not None
    assert bool(report.graph.collectives) == (processes > 1)


def gathered(local: Tensor, mesh: DeviceMesh) -> Tensor:
    """The mean square of what several processes have columns of."""
    return DTensor.from_local(local, mesh, [Shard(1)]).full_tensor().square().mean()


@pytest.mark.parametrize("kernels", LEVELS)
def test_a_tensor_parallel_step_is_one_cuda_graph(kernels: str, group: dist.ProcessGroup) -> None:
    tensor_parallel_step(kernels, 0, 1, group)


def on_gpus(kernels: str, rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """All choose the same schedule, by the same times."""
    report = compared_with_ddp(rank, group, kernels)
    chosen: list[object] = [None] * processes
    dist.all_gather_object(chosen, (report.chosen, report.costs), group=group)
    assert all(each == chosen[0] for each in chosen)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize(
    "scenario",
    [on_gpus, tensor_parallel, tensor_parallel_step],
    ids=["train as DDP", "share the weights of a model", "train shares of its weights"],
)
def test_gpus(scenario: Callable[..., None], processes: int) -> None:
    if torch.cuda.device_count() < processes:
        pytest.skip(f"there are not {processes} GPUs")
    found = outcomes({kernels: partial(scenario, kernels) for kernels in LEVELS}, processes, backend="nccl")
    failed = {name: texts for name, texts in found.items() if any(texts)}
    assert not failed, "\n".join(f"{name}: {text}" for name, texts in failed.items() for text in texts)


def on_gpus_first(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Sums are NCCL's kernels, which come first, and a graph computes them again in each replay."""
    from cuda.bindings import driver

    x = torch.ones(1 << 16, device=f"cuda:{rank}")
    dist.all_reduce(x, group=group)  # makes the communicator, which a capture cannot
    graph, _ = capture(lambda: dist.all_reduce(x, group=group), capture_stream(x.device), keep_nodes=True)
    assert communicate_first(graph) == 1
    (kernel,) = (node for node in nodes_of(graph, "KERNEL") if "nccl" in kernel_name(node))
    (attribute,) = returned(
        driver.cuGraphKernelNodeGetAttribute(kernel, driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY)
    )
    assert attribute.priority == min(returned(driver.cuCtxGetStreamPriorityRange()))
    for _ in range(2):
        graph.replay()
    assert set(x.tolist()) == {processes**3}


@pytest.mark.parametrize("processes", [2, 4])
def test_sums_of_a_cuda_graph_come_first(processes: int) -> None:
    if torch.cuda.device_count() < processes:
        pytest.skip(f"there are not {processes} GPUs")
    found = outcomes({"sum": on_gpus_first}, processes, backend="nccl")
    assert not any(found["sum"]), found["sum"]


def on_gpus_beside(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Sums of the layers that are differentiated first run while those before them are differentiated."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12))).cuda()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = autostream.train_step(model, sgd, nn.MSELoss(), data_parallel=group, kernels="eager")
    x = torch.randn(512, 2048, device="cuda")
    for _ in range(3):
        step(x, x)
    (report,) = step.reports
    assert report.mode == "cuda graph", report.refusals
    run = replays(profiled(lambda: [step(x, x) for _ in range(5)], f"cuda:{rank}"))[-1]
    sums, others = (
        [(each.start_us, each.end_us) for each in run if str(each.key[0]).startswith("nccl") == of_nccl]
        for of_nccl in (True, False)
    )
    assert uncovered_us(sums, others) < 0.5 * uncovered_us(sums, []), (sums, others)


@pytest.mark.parametrize("processes", [2, 4])
def test_sums_run_beside_the_backward(processes: int) -> None:
    if torch.cuda.device_count() < processes:
        pytest.skip(f"there are not {processes} GPUs")
    found = outcomes({"beside": on_gpus_beside}, processes, backend="nccl")
    assert not any(found["beside"]), found["beside"]
