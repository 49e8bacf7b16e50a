"""Kernels for scalars that wait for nothing are combined by Inductor; all others stay as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor.scheduler import ExternKernelSchedulerNode, ForeachKernelSchedulerNode

from autostream.fusion.combo_kernels import FEWEST, TOGETHER, groups, scalars_together

GPU, OTHER = torch.device("cuda:0"), torch.device("cuda:1")


def node(
    *, elements: int = 1, of: int = 1, after: str = "", inputs: int = 1, outputs: int = 1, device: torch.device = GPU
) -> Any:
    """A node of Inductor's scheduler that reduces ``of`` values to each element."""
    return SimpleNamespace(
        group=(device, (elements, of)),
        unmet_dependencies={after} if after else set(),
        read_writes=SimpleNamespace(reads=set(range(inputs)), writes=set(range(outputs))),
        is_template=lambda: False,
    )


def grouped(*nodes: Any) -> list[list[int]]:
    return [[nodes.index(each) for each in group] for group in groups(SimpleNamespace(nodes=nodes))]


def test_scalars_that_wait_for_nothing_come_together() -> None:
    """Those of one kind::

    step ─▶ corrections ─▶ update      batches ─▶ + 1      step, rate ─▶ factor      x ─▶ relu      x ─▶ sum
    """
    corrections, counters, factors = (
        [node(outputs=3) for _ in "abcd"],
        [node() for _ in "abcde"],
        [node(inputs=2)] * 3,
    )
    others = node(elements=64, after="corrections"), node(elements=64), node(of=64)
    assert grouped(*corrections[:2], *others, *counters, *corrections[2:], *factors) == [
        [0, 1, 10, 11],
        [5, 6, 7, 8, 9],
    ]


def test_scalars_that_wait_stay() -> None:
    assert grouped(*(node() for _ in "abcd"), *(node(after="product") for _ in "efgh")) == [[0, 1, 2, 3]]


def test_each_device_has_its_own() -> None:
    assert grouped(*(node(device=device) for _ in "abcd" for device in (GPU, OTHER))) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_group_has_a_smallest_and_a_largest_size() -> None:
    def sizes(count: int) -> list[int]:
        return list(map(len, grouped(*(node() for _ in range(count)))))

    assert sizes(FEWEST - 1) == []
    assert sizes(FEWEST) == [FEWEST]
    assert sizes(2 * TOGETHER + 1) == [TOGETHER, TOGETHER]


def test_scalars_of_the_cpu_and_what_is_no_kernel_of_inductors_stay() -> None:
    product = ExternKernelSchedulerNode.__new__(ExternKernelSchedulerNode)
    product.node = None
    on_cpu = [node(device=torch.device("cpu")) for _ in "abcd"]
    assert grouped(*on_cpu, product, *(node() for _ in "abcd")) == [[5, 6, 7, 8]]


def test_inductor_asks_for_groups_while_a_program_is_fused_only() -> None:
    before, scheduler = (
        ForeachKernelSchedulerNode.group_nodes_for_combo_kernels,
        SimpleNamespace(nodes=[node() for _ in range(FEWEST)]),
    )
    with scalars_together():
        assert ForeachKernelSchedulerNode.group_nodes_for_combo_kernels(scheduler) == [scheduler.nodes]  # type: ignore[arg-type]
    assert ForeachKernelSchedulerNode.group_nodes_for_combo_kernels is before
