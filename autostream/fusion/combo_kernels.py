"""Makes Inductor combine small kernels that can start at the same time, by its combo kernels.

    step of one parameter     ─▶ + 1 ─▶ its corrections         steps of 16 ─▶ + 1 ─▶ corrections of 16
    step of another parameter ─▶ + 1 ─▶ its corrections   ─▶
    ...

    sums of a bucket ─┬─▶ update of a bias                sums of a bucket ─▶ updates of both
                      └─▶ update of another         ─▶

An optimizer counts the steps of each parameter, and a normalization its batches: in a step of ResNet-50 214 kernels of
one thread, which a GPU starts together with the forward. And small parameters whose gradients are summed over processes
by the same all-reduce, or scaled by the same norm, are updated by a kernel each. Only kernels that wait for the same
others are combined, as each of a group waits for what any of them waits for; those that wait for nothing, which run
early, do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch._inductor.scheduler import ForeachKernelSchedulerNode, OutputNode

FEWEST, TOGETHER = 4, 16
"""Scalars in a group. What reads one of them waits for all, so a few stay apart. Groups of equal kernels have the same
code, which is compiled once; the more of them it has, the longer that takes."""

SMALL = 1 << 16
"""Elements of a small kernel at most: less than a GPU computes at once."""


def small_together() -> AbstractContextManager[object]:
    """Make Inductor form the groups of :func:`groups`, not its own, if its setting ``combo_kernels`` is on."""
    return mock.patch.object(ForeachKernelSchedulerNode, "group_nodes_for_combo_kernels", groups)


def groups(scheduler: Any) -> list[list[Any]]:
    """Nodes of Inductor's scheduler to combine, each group of one GPU: scalars that wait for nothing, and last kernels.

    Scalars with the same numbers of inputs and outputs come together, since they are likely to be equal. Of kernels
    that nothing waits for, those come together that are small and wait for the same others.
    """
    scalars: dict[object, list[Any]] = {}
    last: dict[object, list[Any]] = {}
    for node in ForeachKernelSchedulerNode.combinable_nodes(scheduler.nodes):
        sizes: Any  # of sympy
        device, sizes = node.group
        if device.type != "cuda" or sizes[1:] != (1,) or getattr(sizes[0], "free_symbols", ()) or sizes[0] > SMALL:
            continue
        if not node.unmet_dependencies and sizes[0] == 1:
            kind = device, len(node.read_writes.reads), len(node.read_writes.writes)
            scalars.setdefault(kind, []).append(node)
        elif _is_last(node) and (waits := _waits(node, scheduler)):
            last.setdefault((device, waits), []).append(node)
    return [*_parts(scalars.values(), FEWEST), *_parts(last.values(), 2)]


def _parts(kinds: Iterable[Sequence[Any]], fewest: int) -> Iterator[list[Any]]:
    for nodes in kinds:
        for at in range(0, len(nodes), TOGETHER):
            if len(part := [*nodes[at : at + TOGETHER]]) >= fewest:
                yield part


def _is_last(node: Any) -> bool:
    """Whether no kernel waits for it."""
    own = node.get_operation_names()
    users = (user.node for output in node.get_outputs() for user in output.users)
    return all(isinstance(user, OutputNode) or user.get_operation_names() <= own for user in users)


def _waits(node: Any, scheduler: Any) -> frozenset[str]:
    """The kernels after which a node can start, without those that wait for nothing or come before another of them."""
    buffers, kernels = scheduler.name_to_buf, scheduler.name_to_fused_node
    before = {kernels[buffers[each.name].defining_op_name()] for each in node.unmet_dependencies}
    waiting = [each for each in before if each.unmet_dependencies]
    return frozenset(each.get_name() for each in waiting if not any(_precedes(each, other) for other in waiting))


def _precedes(node: Any, other: Any) -> bool:
    """Whether a node is one of those that another one waits for."""
    return node is not other and bool(node.get_operation_names() & other.ancestors)
