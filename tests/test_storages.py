"""Sharing of memory: views, empty and fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from autostream.storages import storage_of


@pytest.mark.parametrize("x", [torch.empty(4, 3), torch.empty(0, 3), torch.empty(4, 3, device="meta")])
def test_views_share_and_copies_do_not(x: Tensor) -> None:
    y = x.clone()
    assert storage_of(x) == storage_of(x.t()) == storage_of(x[:0])
    assert storage_of(x) != storage_of(y)


def test_fake_tensors_have_storages_of_their_own() -> None:
    with FakeTensorMode():
        x, y = torch.empty(3), torch.empty(3)
        assert storage_of(x) == storage_of(x[1:])
        assert storage_of(x) != storage_of(y)
