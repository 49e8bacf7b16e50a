"""Sharing of memory: views, empty and fake tensors."""

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


def test_fake_tensors_have_storages_of_their_own() -> None:
    with FakeTensorMode():
        x, y = torch.empty(3), torch.empty(3)
        assert storage_of(x) == storage_of(x[1:])
        assert storage_of(x) != storage_of(y)


SIZES_AND_STRIDES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3)


@given(SIZES_AND_STRIDES)
def test_what_fills_its_span_once_is_dense(layout: list[tuple[int, int]]) -> None:
    """Against the places of all elements, one by one. Overlaps may be suspected, but not be missed."""
    tensor = torch.empty(64).as_strided([size for size, _ in layout], [stride for _, stride in layout])
    places = torch.arange(64).as_strided(tensor.shape, tensor.stride()).flatten().tolist()
    start, end = span_of(tensor)
    assert overlaps(tensor) or len(set(places)) == len(places)
    assert has_gaps(tensor) == (len(set(places)) < (end - start) // 4)
    assert is_dense(tensor) == (sorted(places) == list(range((end - start) // 4)))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=4))
def test_bytes_are_shared_where_two_tensors_have_the_same_element(spans: list[tuple[int, int]]) -> None:
    """Against the elements of each, one by one; a copy of the same elements shares none."""
    base = torch.empty(12)
    elements = [at for start, size in spans for at in range(start, start + size)]
    tensors = [base[start : start + size] for start, size in spans]
    assert share_bytes(tensors) == (len(set(elements)) < len(elements))
    assert not share_bytes([tensor.clone() for tensor in tensors])
    assert share_bytes([base, *tensors]) == bool(elements)
