"""Kernels for scalars that wait for nothing are combined by Inductor; all others stay as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor.scheduler import ExternKernelSchedulerNode, ForeachKernelSchedulerNode

from autostream.fusion.combo_kernels import TOGETHER, groups, scalars_together

GPU, OTHER = torch.device("cuda:0"), torch.device("cuda:1")


def node(*, elements: int = 1, of: int = 1, after: str = "", outputs: int = 1, device: torch.device = GPU) -> Any:
    """A node of Inductor's scheduler that reduces ``of`` values to each element."""
    return SimpleNamespace(
        group=(device, (elements, of)),
        unmet_dependencies=set(after),
        read_writes=SimpleNamespace(reads={"x"}, writes=set(range(outputs))),
        is_template=lambda: False,
    )


def grouped(*nodes: Any) -> list[list[int]]:
    return [[nodes.index(each) for each in group] for group in groups(SimpleNamespace(nodes=nodes))]


def test_scalars_that_wait_for_nothing_come_together() -> None:
    """::

    step ─▶ corrections ─▶ update      batches ─▶ + 1      x ─▶ relu      x ─▶ sum
    """
    corrections, update, counted = node(outputs=3), node(elements=64, after="corrections"), node()
    relu, total = node(elements=64), node(of=64)
    assert grouped(corrections, relu, counted, total, update, node(), node(outputs=3)) == [[0, 6], [2, 5]]


def test_scalars_that_wait_stay() -> None:
    assert grouped(node(), node(after="product"), node(after="product")) == [[0]]


def test_each_device_has_its_own() -> None:
    assert grouped(node(), node(device=OTHER), node(), node(device=OTHER)) == [[0, 2], [1, 3]]


def test_a_group_has_a_largest_size() -> None:
    assert [len(group) for group in grouped(*(node() for _ in range(2 * TOGETHER + 1)))] == [TOGETHER, TOGETHER, 1]


def test_scalars_of_the_cpu_and_what_is_no_kernel_of_inductors_stay() -> None:
    product = ExternKernelSchedulerNode.__new__(ExternKernelSchedulerNode)
    product.node = None
    assert grouped(node(device=torch.device("cpu")), product, node()) == [[2]]


def test_inductor_asks_for_groups_while_a_program_is_fused_only() -> None:
    before, scheduler = ForeachKernelSchedulerNode.group_nodes_for_combo_kernels, SimpleNamespace(nodes=[node()])
    with scalars_together():
        assert ForeachKernelSchedulerNode.group_nodes_for_combo_kernels(scheduler) == [scheduler.nodes]  # type: ignore[arg-type]
    assert ForeachKernelSchedulerNode.group_nodes_for_combo_kernels is before
