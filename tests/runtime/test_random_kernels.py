"""Random programs of kernels: they have all kinds of accesses, and every kernel affects the result."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx

from autostream.ir import Hazard, Role
from tests.runtime.programs import same
from tests.runtime.random_kernels import random_kernels

SEEDS = range(12)


def test_programs_have_all_kinds_of_accesses_and_depend_on_the_seed_alone() -> None:
    first, second = (random_kernels(7) for _ in range(2))
    assert str(first.program.module.graph) == str(second.program.module.graph)
    assert same(first.expected()[0], second.expected()[0])
    graphs = [random_kernels(seed).graph for seed in SEEDS]
    ops = [op for graph in graphs for op in graph.ops.values()]
    assert any(op.writes & op.reads for op in ops), "updates"
    assert any(op.writes & {"m", "n"} - op.reads for op in ops), "buffers that are overwritten"
    assert any(hazard.hazard is Hazard.WAW for graph in graphs for hazard in graph.dependencies)
    storages = [storage for graph in graphs for storage in graph.storages.values()]
    assert any(storage.parts for storage in storages), "matrices that are filled part by part"
    assert all(storage.placeable == (storage.role is Role.INTERMEDIATE) for storage in storages)


@pytest.mark.parametrize("seed", SEEDS)
def test_if_a_kernel_writes_other_values_so_does_the_program(seed: int) -> None:
    case = random_kernels(seed)
    results, after = case.expected()
    for name in case.graph.ops:
        args = case.args()
        assert not (same(_Spoiled(case.program.module, name).run(*args), results) and same(args, after)), name


class _Spoiled(fx.Interpreter):
    """Runs a program in which one kernel writes wrong numbers."""

    def __init__(self, module: fx.GraphModule, spoiled: str) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._spoiled = spoiled

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name == self._spoiled:
            self.env[n.args[-1]].add_(1)  # of two results, the last one is read
        return result
