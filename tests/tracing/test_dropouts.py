"""Dropouts with nothing to do are no ops of a traced program; all others are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autostream.tracing.dropouts import IdleDropouts
from autostream.tracing.export import trace
from autostream.frontend.tree import flatten
from tests.semantics import Model

X = torch.ones(3, 4)

Dropout = Callable[[Tensor], Tensor]

IDLE: dict[str, Dropout] = {
    "in eval mode": lambda x: F.dropout(x, training=False),
    "in eval mode, in place": lambda x: F.dropout(x, 0.5, False, True),
    "of nothing": lambda x: F.dropout(x, 0.0),
    "by name": lambda x: F.dropout(input=x, p=0.0),
    "torch's": lambda x: torch.dropout(x, 0.5, False),
    "torch's, by name": lambda x: torch.dropout(x, p=0.5, train=False),
}


@pytest.mark.parametrize("name", IDLE)
def test_it_is_its_argument_and_what_follows_looks_at_that(name: str) -> None:
    tensors, structure = flatten(((X[:, ::2],), {}))
    program = trace(Model(lambda s, x: IDLE[name](x)[0].add_(1)), tensors, structure).program
    placeholder, select, add = (node for node in program.module.graph.nodes if node.op != "output")
    assert (select.target, add.target) == (torch.ops.aten.select.int, torch.ops.aten.add_.Tensor)
    storages = {node.meta["val"].untyped_storage()._cdata for node in (placeholder, select, add)}
    assert len(storages) == 1
    assert select.meta["val"].stride() == (2,)


@pytest.mark.parametrize("dropout", [lambda x: F.dropout(x), lambda x: torch.dropout(x, 0.5, True), torch.relu])
def test_what_does_something_is_called(dropout: Dropout) -> None:
    with IdleDropouts():
        assert dropout(X) is not X


def test_a_share_that_is_none_is_refused_as_in_eager_mode() -> None:
    with IdleDropouts(), pytest.raises(ValueError, match="between 0 and 1"):
        F.dropout(X, 2.0, training=False)
