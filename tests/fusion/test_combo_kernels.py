"""Small kernels that can start at the same time are combined by Inductor; all others stay as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import sympy
import torch
from torch._inductor.scheduler import ExternKernelSchedulerNode, ForeachKernelSchedulerNode, OutputNode

from autostream.fusion.combo_kernels import FEWEST, SMALL, TOGETHER, groups, small_together

GPU, OTHER = torch.device("cuda:0"), torch.device("cuda:1")


class Node(SimpleNamespace):
    """A node of Inductor's scheduler that reduces ``of`` values to each element, and has one output.

    It is made of two: the second reads the output of the first, so it is a user and an ancestor of itself.

    Attributes:
        after: the nodes that it waits for.
    """

    def __init__(
        self,
        *after: Node,
        elements: Any = 1,
        of: int = 1,
        inputs: int = 1,
        outputs: int = 1,
        device: torch.device = GPU,
        returned: bool = False,
    ) -> None:
        self.name = f"op{id(self)}"
        users = [SimpleNamespace(node=self)]
        users += [SimpleNamespace(node=OutputNode.__new__(OutputNode))] if returned else []
        super().__init__(
            group=(device, (elements, of)),
            after=after,
            unmet_dependencies=[SimpleNamespace(name=each.name) for each in after],
            ancestors={self.name}.union(*({each.name, *each.ancestors} for each in after)),
            read_writes=SimpleNamespace(reads=set(range(inputs)), writes=set(range(outputs))),
            output=SimpleNamespace(users=users, defining_op_name=lambda: self.name),
        )
        for each in after:
            each.output.users.append(SimpleNamespace(node=self))

    __hash__ = object.__hash__

    def get_name(self) -> str:
        return self.name

    def get_operation_names(self) -> set[str]:
        return {self.name}

    def get_outputs(self) -> list[Any]:
        return [self.output]

    def is_template(self) -> bool:
        return False


def grouped(*nodes: Any) -> list[list[int]]:
    """The groups of a scheduler's nodes, which know those that they wait for, by their positions."""
    known: dict[str, Any] = {}
    left = [each for each in nodes if isinstance(each, Node)]
    while left:
        each = left.pop()
        known[each.name] = each
        left += each.after
    scheduler = SimpleNamespace(
        nodes=nodes, name_to_buf={name: each.output for name, each in known.items()}, name_to_fused_node=known
    )
    return [[nodes.index(each) for each in group] for group in groups(scheduler)]


def test_scalars_that_wait_for_nothing_come_together() -> None:
    """Those of one kind::

    step ─▶ corrections ─▶ update      batches ─▶ + 1      step, rate ─▶ factor      x ─▶ relu      x ─▶ sum
    """
    corrections = [Node(outputs=3) for _ in "abcd"]
    counters, factors = [Node() for _ in "abcde"], [Node(inputs=2)] * 3
    others = Node(corrections[0], elements=64), Node(elements=64), Node(of=64)
    assert grouped(*corrections[:2], *others, *counters, *corrections[2:], *factors) == [
        [0, 1, 10, 11],
        [5, 6, 7, 8, 9],
    ]


def test_scalars_whose_users_wait_stay() -> None:
    product = Node(Node(), elements=64)
    scalars = [Node(product) for _ in "efgh"]
    updates = [Node(scalar, product, elements=SMALL + 1) for scalar in scalars]
    assert grouped(*(Node() for _ in "abcd"), *scalars, *updates) == [[0, 1, 2, 3]]


def test_small_updates_that_wait_for_the_same_sums_come_together() -> None:
    """Also with other inputs, if these are there before::

    gradients ─▶ copy ─▶ sums of a bucket ─┬───────▶ update of a bias
            step ─▶ corrections ───────────│───┬───▶
                    forward ─▶ copy        ├───┴───▶ update of a weight, which the forward reads
                                           └───────▶ update of a large weight
    """
    step, forward = Node(), Node(Node(), elements=SMALL)
    copied = Node(forward, elements=64)
    sums, others = Node(copied, elements=64), Node(copied, elements=64)
    bias, weight = Node(sums, returned=True, elements=64), Node(sums, step, forward, returned=True, elements=SMALL)
    large, of_others = Node(sums, elements=SMALL + 1), Node(others, elements=64)
    assert grouped(bias, large, of_others, weight) == [[0, 3]]
    assert grouped(bias, Node(sums, others, elements=64), weight) == [[0, 2]]  # waits for more
    assert grouped(bias, of_others) == []
    assert grouped(bias, Node(sums, elements=64, device=OTHER)) == []
    assert grouped(Node(sums, others, elements=8), Node(others, sums, elements=9)) == [[0, 1]]


def test_what_others_wait_for_stays() -> None:
    """What reads one of two combined kernels would wait for both::

    product ─┬─▶ relu ─▶ product
             └─▶ tanh
    """
    product = Node(Node(), elements=64)
    relu, tanh = (Node(product, elements=64) for _ in "ab")
    assert grouped(relu, tanh) == [[0, 1]]
    Node(relu, elements=64)
    assert grouped(relu, tanh) == []


def test_kernels_whose_size_depends_on_data_stay() -> None:
    product = Node(Node(), elements=64)
    sized = [Node(product, elements=sympy.Symbol("u0")) for _ in "ab"]
    assert grouped(*sized, *(Node(product, elements=sympy.Integer(8)) for _ in "cd")) == [[2, 3]]


def test_updates_of_a_large_bucket_are_several_kernels() -> None:
    sums = Node(Node(), elements=64)
    updates = [Node(sums, elements=64) for _ in range(TOGETHER + 2)]
    assert [*map(len, grouped(*updates))] == [TOGETHER, 2]
    assert [*map(len, grouped(*updates[: TOGETHER + 1]))] == [TOGETHER]


def test_each_device_has_its_own() -> None:
    assert grouped(*(Node(device=device) for _ in "abcd" for device in (GPU, OTHER))) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_group_of_scalars_has_a_smallest_and_a_largest_size() -> None:
    def sizes(count: int) -> list[int]:
        return list(map(len, grouped(*(Node() for _ in range(count)))))

    assert sizes(FEWEST - 1) == []
    assert sizes(FEWEST) == [FEWEST]
    assert sizes(2 * TOGETHER + 1) == [TOGETHER, TOGETHER]


def test_kernels_of_the_cpu_and_what_is_no_kernel_of_inductors_stay() -> None:
    product = ExternKernelSchedulerNode.__new__(ExternKernelSchedulerNode)
    product.node = None
    on_cpu = [Node(device=torch.device("cpu")) for _ in "abcd"]
    assert grouped(*on_cpu, product, *(Node() for _ in "abcd")) == [[5, 6, 7, 8]]


def test_inductor_asks_for_groups_while_a_program_is_fused_only() -> None:
    before, scheduler = (
        ForeachKernelSchedulerNode.group_nodes_for_combo_kernels,
        SimpleNamespace(nodes=[Node() for _ in range(FEWEST)], name_to_buf={}, name_to_fused_node={}),
    )
    with small_together():
        assert ForeachKernelSchedulerNode.group_nodes_for_combo_kernels(scheduler) == [scheduler.nodes]  # type: ignore[arg-type]
    assert ForeachKernelSchedulerNode.group_nodes_for_combo_kernels is before
