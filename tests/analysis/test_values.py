from __future__ import annotations

import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autostream.analysis.values import concrete, storages_in, tensors_in


def test_symbolic_sizes_as_numbers() -> None:
    env = ShapeEnv()
    symbol = env.create_symbol(7, ConstantSource("batch"))
    assert concrete(env.create_symintnode(symbol, hint=7) * 2) == 14
    assert concrete(env.create_unbacked_symint()) == 1


def test_views_have_the_storage_of_their_base_and_sparse_tensors_none() -> None:
    x, y, sparse = torch.ones(4), torch.ones(4), torch.eye(2).to_sparse()
    assert storages_in((x, [x[1:], None])) == storages_in(x.view(2, 2))
    assert storages_in(x).isdisjoint(storages_in(y))
    assert tensors_in([sparse, 3]) == [sparse]
    assert storages_in(sparse) == set()
