"""Makes Inductor combine kernels for scalars that depend on nothing, by its combo kernels.

    step of one parameter     ─▶ + 1 ─▶ its corrections         steps of 16 ─▶ + 1 ─▶ corrections of 16
    step of another parameter ─▶ + 1 ─▶ its corrections   ─▶
    ...

An optimizer counts the steps of each parameter, and a normalization its batches: in a step of ResNet-50 214 kernels of
one thread, which a GPU starts together with the forward. Only kernels that wait for no other are combined: the others
of a group would all wait for what the last of them waits for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch._inductor.scheduler import ForeachKernelSchedulerNode

FEWEST, TOGETHER = 4, 16
"""Kernels in a group. What reads one of them waits for all, so a few stay apart. Groups of equal kernels have the same
code, which is compiled once; the more of them it has, the longer that takes."""


def scalars_together() -> AbstractContextManager[object]:
    """Make Inductor form the groups of :func:`groups`, not its own, if its setting ``combo_kernels`` is on."""
    return mock.patch.object(ForeachKernelSchedulerNode, "group_nodes_for_combo_kernels", groups)


def groups(scheduler: Any) -> list[list[Any]]:
    """Nodes of Inductor's scheduler for scalars that depend on no other node, in groups of one GPU.

    Nodes with the same numbers of inputs and outputs come together, since they are likely to be equal.
    """
    kinds: dict[object, list[Any]] = {}
    for node in ForeachKernelSchedulerNode.combinable_nodes(scheduler.nodes):
        sizes: Any  # of sympy
        device, sizes = node.group
        if sizes == (1, 1) and device.type == "cuda" and not node.unmet_dependencies:
            kind = device, len(node.read_writes.reads), len(node.read_writes.writes)
            kinds.setdefault(kind, []).append(node)
    parts = [nodes[at : at + TOGETHER] for nodes in kinds.values() for at in range(0, len(nodes), TOGETHER)]
    return [part for part in parts if len(part) >= FEWEST]
