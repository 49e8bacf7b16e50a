"""Tensors at given places of one block."""

from __future__ import annotations

import pytest
import torch

from autostream.runtime.arena import place, reserve

DTYPES = [torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_is_where_and_what_it_is_asked_to_be(dtype: torch.dtype) -> None:
    arena = reserve("cpu", 4096)
    tensor = place(arena, 1024, (3, 4), (1, 3), dtype)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((3, 4), (1, 3), dtype)
    assert tensor.data_ptr() == arena.data_ptr() + 1024


def test_what_is_written_stays_within_its_bytes() -> None:
    arena = reserve("cpu", 1536).fill_(7)
    place(arena, 512, (10,), (1,), torch.float32).zero_()
    assert arena[:512].eq(7).all()
    assert arena[512:552].eq(0).all()
    assert arena[552:].eq(7).all()


def test_tensors_at_one_place_share_it() -> None:
    arena = reserve("cpu", 512)
    first, second = (place(arena, 0, (2, 2), (2, 1), torch.float32) for _ in range(2))
    first.fill_(3)
    assert second.eq(3).all()


def test_a_tensor_keeps_the_block() -> None:
    arena = reserve("cpu", 512)
    tensor = place(arena, 0, (4,), (1,), torch.float32)
    address = arena.data_ptr()
    del arena
    assert tensor.untyped_storage().data_ptr() == address


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_works_in_the_modes_in_which_programs_run(mode: type) -> None:
    with mode():
        assert place(reserve("cpu", 512), 0, (2,), (1,), torch.float32).fill_(2).sum() == 4


@pytest.mark.gpu
def test_blocks_of_a_gpu_are_aligned_as_kernels_expect() -> None:
    arenas = [reserve("cuda:0", size) for size in (1, 513, 100_000)]
    assert all(arena.data_ptr() % 512 == 0 for arena in arenas)
