"""Tensors at fixed offsets of one memory block."""

from __future__ import annotations

import pytest
import torch

from autostream.runtime.arena import place, reserve


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64])
def test_a_tensor_has_the_offset_layout_and_dtype_of_its_placement(dtype: torch.dtype) -> None:
    arena = reserve("cpu", 4096)
    tensor = place(arena, 1024, (3, 4), (1, 3), dtype)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((3, 4), (1, 3), dtype)
    assert tensor.data_ptr() == arena.data_ptr() + 1024


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes_stay_within_a_tensor_and_are_seen_by_others_there(mode: type) -> None:
    with mode():
        arena = reserve("cpu", 1536).fill_(7)
        first, second = (place(arena, 512, (10,), (1,), torch.float32) for _ in range(2))
        first.zero_()
    assert second.eq(0).all()
    assert arena[:512].eq(7).all()
    assert arena[552:].eq(7).all()


def test_a_tensor_keeps_the_block_alive() -> None:
    arena = reserve("cpu", 512)
    tensor = place(arena, 0, (4,), (1,), torch.float32)
    address = arena.data_ptr()
    del arena
    assert tensor.untyped_storage().data_ptr() == address


@pytest.mark.gpu
def test_blocks_of_a_gpu_are_aligned_as_kernels_expect() -> None:
    arenas = [reserve("cuda:0", size) for size in (1, 513, 100_000)]
    assert all(arena.data_ptr() % 512 == 0 for arena in arenas)
