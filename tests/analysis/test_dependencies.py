from __future__ import annotations

from collections import defaultdict

import torch
from hypothesis import given, settings
from torch.utils._pytree import tree_leaves

from autostream.analysis.dependencies import analyze
from tests.analysis.programs import Case, run, same, topological_order
from tests.analysis.random_programs import random_programs


@settings(max_examples=300, deadline=None)
@given(random_programs())
def test_every_order_that_the_graph_allows_computes_the_same(case: Case) -> None:
    graph = analyze(case.program)
    expected = run(case)
    for seed in (None, 0, 1, 2):
        found = run(case, topological_order(graph, seed))
        assert same(found.outputs, expected.outputs)
        assert same(found.arguments, expected.arguments)


@settings(max_examples=200, deadline=None)
@given(random_programs())
def test_values_that_share_memory_occupy_a_common_storage(case: Case) -> None:
    graph = analyze(case.program)
    holders = defaultdict(set)
    for storage in graph.storages.values():
        for node in storage.holders:
            holders[node].add(storage.name)
    occupants = defaultdict(set)
    for name, value in run(case).values.items():
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                occupants[leaf.untyped_storage().data_ptr()].add(name)
    for names in occupants.values():
        for a in names:
            assert all(holders[a] & holders[b] for b in names)
