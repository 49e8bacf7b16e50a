"""Inputs of captured graphs: roles, names, descriptions and shared memory."""

from __future__ import annotations

import pytest
import torch

from autostream.frontend.inputs import aliases_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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
