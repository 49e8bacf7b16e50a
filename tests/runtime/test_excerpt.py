"""Parts of fx graphs."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from autostream.runtime.excerpt import excerpt


def test_a_part_computes_what_it_does_in_the_whole_and_keeps_what_is_known_of_it() -> None:
    """X ──▶ add ──▶ mul ──▶ …; the part is what comes after add."""
    whole = fx.symbolic_trace(lambda x: ((x + 1) * 2).relu()).graph
    x, plus, times, relu, _ = whole.nodes
    for node in whole.nodes:
        node.meta["line"] = f"of {node.name}"
    part = excerpt(fx.Graph(), [plus], [times, relu], [relu, plus])
    assert [(node.op, node.name) for node in part.nodes][:1] == [("placeholder", "add")]
    assert [node.meta.get("line") for node in part.nodes] == ["of add", "of mul", "of relu", None]
    results = fx.GraphModule(nn.Module(), part)(torch.tensor([-1.0, 2.0]))
    assert [result.tolist() for result in results] == [[0.0, 4.0], [-1.0, 2.0]]
    assert [node.name for node in whole.nodes] == [x.name, "add", "mul", "relu", "output"], "the whole stays"


def test_what_is_neither_given_nor_computed_is_missed() -> None:
    whole = fx.symbolic_trace(lambda x: (x + 1) * 2).graph
    _, _, times, _ = whole.nodes
    with pytest.raises(KeyError):
        excerpt(fx.Graph(), [], [times], [times])
