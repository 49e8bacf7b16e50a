"""Inputs of captured graphs: roles, names, descriptions and shared memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autostream.frontend.capture import capture
from autostream.frontend.inputs import aliases_of, described, names_like, names_of
from autostream.ir import Role
from tests.semantics import Model


@torch.no_grad()
@pytest.mark.usefixtures("fresh_dynamo")
def test_weights_have_the_models_names_and_arguments_numbers() -> None:
    ones = torch.ones(2)
    model = Model(
        lambda s, x, y: s.layer(x) + s.shift + s.plain + y,
        layer=nn.Linear(2, 2, bias=False),
        shift=nn.Buffer(ones.clone()),
        plain=ones.clone(),
    )
    captured = capture(model, (torch.ones(1, 2),), {"y": ones})
    assert captured is not None
    names = names_of(captured, model)
    assert len(set(names)) == len(names) == 5
    assert {(Role.PARAMETER, "layer.weight"), (Role.BUFFER, "shift")} < set(names)
    assert [name.rpartition(".")[2] for role, name in names if role is Role.CONSTANT] == ["plain"]
    assert [role for role, _ in names_like([nn.Parameter(ones), ones, 3])] == [Role.PARAMETER, *[Role.INPUT] * 2]
    assert described([torch.ones(2, 3)], "cuda:0") == "2x3:float32 on cuda:0"
    assert described([torch.ones(2, 3)], "cpu:0") == "2x3:float32 on cpu"
    assert described([]) == "no tensors"


def test_tensors_share_memory_at_an_offset_in_bytes() -> None:
    """Pairs of tensors in a row of eight::

    apart    [. .]  elsewhere [. .]
    same     [. .]
             [. .]
    behind   [. .]
                 [. .]
    before       [. .]
             [. .]
    """
    row, a, b = torch.arange(8.0), torch.ones(2), torch.ones(2)
    assert aliases_of([row[0:2].clone(), row[0:2].clone()]) == ()
    assert aliases_of([row[0:2], row[0:2]]) == ((0, 0), (0, 0))
    assert aliases_of([row[0:2], row[2:4]]) == ((0, 0), (0, 8))
    assert aliases_of([row[2:4], row[0:2]]) == ((0, 0), (0, -8))
    assert aliases_of([row[0:2], row[1:3]]) == aliases_of([row[4:6], row[5:7]]), "where both lie does not matter"
    assert aliases_of([a, b, a]) == ((0, 0), (1, 0), (0, 0)) != aliases_of([a, a, b])
    halves = row.view(torch.float16)  # element 2 of the floats is element 4 of the halves
    assert aliases_of([row[2:4], halves[4:8]]) == aliases_of([row[0:2], halves[0:4]])
    assert aliases_of([row[2:4], halves[4:8]]) != aliases_of([row[0:2], halves[2:6]])
