"""Input buffers: the same addresses again, but never while a tensor there is alive."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from autostream.runtime.input_buffers import BufferTable, InputBuffer, InputBuffers
from autostream.utils.storages import storage_of

CPU = torch.device("cpu")
STREAM: Any = "the stream"
X = torch.zeros(3, 4)


@pytest.fixture(autouse=True)
def without_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def memory(buffers: InputBuffers, *likes: Tensor, stream: Any = STREAM) -> list[Tensor]:
    return buffers.memory(likes, CPU, stream)


class Saves(torch.autograd.Function):
    """Saves its input for a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return y * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient


REFERENCES: dict[str, Callable[[Tensor], object]] = {
    "itself": lambda x: x,
    "a view": lambda x: x[1:],
    "a view in inference mode": torch.inference_mode()(lambda x: x[1:]),
    "its data": lambda x: x.data,
    "its storage": lambda x: x.untyped_storage(),
    "another dtype": lambda x: x.view(torch.int32),
    "NumPy": lambda x: x.numpy(),
    "a parameter": lambda x: torch.nn.Parameter(x),
    "autograd": lambda x: Saves.apply(x, torch.ones(1, requires_grad=True)),  # type: ignore[no-untyped-call]
    "autograd, an op": lambda x: x * torch.ones(1, requires_grad=True),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_buffer_is_used_again_as_soon_as_nothing_refers_to_its_memory(name: str) -> None:
    buffers = InputBuffers(1, BufferTable())
    first, another = memory(buffers, X, X)
    address, references = first.data_ptr(), [REFERENCES[name](first)]
    del first, another
    second = memory(buffers, X, X)
    assert second[0].data_ptr() != address
    references.clear()
    third = memory(buffers, X, X)
    assert third[0].data_ptr() == address


DTYPES = [torch.bool, torch.int64, torch.float16, torch.complex64, torch.float8_e4m3fn, torch.uint16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_a_buffer_are_like_any_others(dtype: torch.dtype) -> None:
    likes = [torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), torch.zeros(()), torch.zeros(0, 3)]
    buffer = InputBuffer([like.to(dtype) for like in likes], CPU, STREAM)
    for _ in range(2):
        tensors = buffer.hand_out()
        assert [(tensor.shape, tensor.stride()) for tensor in tensors] == [(x.shape, x.stride()) for x in likes]
        assert [tensor.data_ptr() for tensor in tensors if tensor.numel()] == buffer.addresses
        assert len(set(map(storage_of, tensors))) == 3
        for tensor in tensors:
            assert tensor.dtype == dtype
            assert tensor.storage_offset() == tensor._version == 0
            assert not any([tensor._is_view(), tensor.requires_grad, tensor.is_inference()])
        tensors[0].fill_(1)
        assert bool(tensors[0].to(torch.complex64).eq(1).all())
        del tensors, tensor


def test_aliases_of_tensors_in_a_buffer_do_not_keep_it_in_use() -> None:
    buffer = InputBuffer([X, X], CPU, STREAM)
    first, second = buffer.hand_out()
    second.copy_(torch.arange(12.0).view(3, 4))
    for part in (second, second[:2], second.t(), second[:, 0]):
        alias = buffer.here(part)
        assert alias is not None
        assert torch.equal(alias, part)
        assert (alias.data_ptr(), alias.shape, alias.stride()) == (part.data_ptr(), part.shape, part.stride())
    for other in (second[1:], second.view(torch.int32), X):
        assert buffer.here(other) is None
    del first, second, part, other
    assert alias is not None
    assert buffer.is_free


def test_buffers_are_for_tensors_like_the_first_on_its_stream_and_freed_together() -> None:
    table = BufferTable()
    buffers = InputBuffers(2, table)
    (first,) = memory(buffers, X)
    others = [
        *(*memory(buffers, torch.zeros(4, 3).t()), *memory(buffers, X[:2]), *memory(buffers, X.int())),
        *(*memory(buffers, X, X), *memory(buffers, X, stream="another")),
    ]
    assert first.data_ptr() in table
    assert not {other.data_ptr() for other in others} & set(table)
    (second,), (third,) = memory(buffers, X), memory(buffers, X)
    assert second.data_ptr() in table
    assert third.data_ptr() not in table, "there are two buffers"
    buffer, owner = ref(table[first.data_ptr()]), ref(table[second.data_ptr()]._memory[0])
    first.fill_(3)
    del second
    assert owner() is not None
    del buffers
    assert (buffer(), owner(), len(table)) == (None, None, 0)
    assert bool((first == 3).all()), "a tensor outlives its buffer"
