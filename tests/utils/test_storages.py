"""Storages of views, of empty and fake tensors, and overlap."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from autostream.utils.storages import has_gaps, is_dense, overlaps, share_bytes, span_of, storage_of


@pytest.mark.parametrize("x", [torch.empty(4, 3), torch.empty(0, 3), torch.empty(4, 3, device="meta")])
def test_views_share_and_copies_do_not(x: Tensor) -> None:
    y = x.clone()
    assert storage_of(x) == storage_of(x.t()) == storage_of(x[:0])
    assert storage_of(x) != storage_of(y)


def test_fake_tensors_have_storages() -> None:
    with FakeTensorMode():
        x, y = torch.empty(3), torch.empty(3)
        assert storage_of(x) == storage_of(x[1:])
        assert storage_of(x) != storage_of(y)


SIZES_AND_STRIDES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3)


@given(SIZES_AND_STRIDES)
def test_overlaps_gaps_and_density_against_all_elements(layout: list[tuple[int, int]]) -> None:
    """``overlaps`` may be true for a tensor without overlaps, but not false for one with them."""
    tensor = torch.empty(82).as_strided([size for size, _ in layout], [stride for _, stride in layout])
    addresses = torch.arange(82).as_strided(tensor.shape, tensor.stride()).flatten().tolist()
    start, end = span_of(tensor)
    assert overlaps(tensor) or len(set(addresses)) == len(addresses)
    assert has_gaps(tensor) == (len(set(addresses)) < (end - start) // 4)
    assert is_dense(tensor) == (sorted(addresses) == list(range((end - start) // 4)))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=4))
def test_tensors_share_bytes_if_they_have_a_common_element(spans: list[tuple[int, int]]) -> None:
    """A copy of the same elements shares none."""
    base = torch.empty(12)
    elements = [at for start, size in spans for at in range(start, start + size)]
    tensors = [base[start : start + size] for start, size in spans]
    assert share_bytes(tensors) == (len(set(elements)) < len(elements))
    assert not share_bytes([tensor.clone() for tensor in tensors])
    assert share_bytes([base, *tensors]) == bool(elements)
