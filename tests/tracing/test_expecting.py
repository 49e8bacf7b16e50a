"""The op that expects a value: it says what it found, and stays in graphs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from autostream.tracing.expecting import OtherWay, expect


@pytest.mark.parametrize(
    ("value", "is_true"), [(1, True), (0, False), (0.0, False), (-0.5, True), (math.nan, True), (0j, False)]
)
def test_a_value_is_true_or_not_as_in_python(value: float, is_true: bool) -> None:
    given = torch.tensor([value])
    expect(given, 0, is_true)
    with pytest.raises(OtherWay) as caught:
        expect(given, 3, not is_true)
    assert (caught.value.at, caught.value.outcome) == (3, is_true)


def test_nobody_removes_it_from_a_graph_though_nothing_is_made_of_it() -> None:
    class Expecting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            expect(x.sum() > 0, 0, True)
            return x + 1

    exported = torch.export.export(Expecting(), (torch.ones(2),), strict=False)
    graph = exported.graph_module.graph
    graph.eliminate_dead_code()
    assert graph.find_nodes(op="call_function", target=expect)
    with pytest.raises(OtherWay):
        exported.module()(-torch.ones(2))
