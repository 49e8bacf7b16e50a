"""What tensors are like, and which of them share memory: a part of what tells calls apart."""

from __future__ import annotations

import torch

from autostream.frontend.signature import aliases_of, described


def test_which_tensors_share_memory_and_where_they_lie_in_it() -> None:
    """Four pairs, drawn::

    apart    [. .]  elsewhere [. .]
    same     [. .]
             [. .]
    behind   [. .]
                 [. .]
    before       [. .]
             [. .]
    """
    row = torch.arange(8.0)
    assert aliases_of([row[0:2].clone(), row[0:2].clone()]) == ()
    assert aliases_of([row[0:2], row[0:2]]) == ((0, 0), (0, 0))
    assert aliases_of([row[0:2], row[2:4]]) == ((0, 0), (0, 8))
    assert aliases_of([row[2:4], row[0:2]]) == ((0, 0), (0, -8))


def test_where_both_lie_in_memory_does_not_matter() -> None:
    row = torch.arange(8.0)
    assert aliases_of([row[0:2], row[1:3]]) == aliases_of([row[4:6], row[5:7]])


def test_distances_are_in_bytes_whatever_the_dtypes() -> None:
    """Half a float is two bytes: element 2 of the floats is element 4 of the halves."""
    row = torch.arange(8.0)
    halves = row.view(torch.float16)
    assert aliases_of([row[2:4], halves[4:8]]) == aliases_of([row[0:2], halves[0:4]])
    assert aliases_of([row[2:4], halves[4:8]]) != aliases_of([row[0:2], halves[2:6]])


def test_who_shares_with_whom_matters() -> None:
    a, b = torch.ones(2), torch.ones(2)
    assert aliases_of([a, a, b]) != aliases_of([a, b, b])
    assert aliases_of([a, b, a]) == ((0, 0), (1, 0), (0, 0))


def test_tensors_may_be_said_to_be_elsewhere() -> None:
    assert described([torch.ones(2, 3)], "cuda:0") == "2x3:float32 on cuda:0"
    assert described([]) == "no tensors"
