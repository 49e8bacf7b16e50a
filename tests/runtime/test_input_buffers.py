"""InputBuffers: the same addresses again, and never while anybody can see what is there."""

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
HOME: Any = "the stream"


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """Without a collection of garbage: what nobody has is gone."""
    gc.disable()
    yield
    gc.enable()


def memory(slots: InputBuffers, *likes: Tensor, home: Any = HOME) -> list[Tensor]:
    return slots.memory(likes, CPU, home)


X = torch.zeros(3, 4)


class Holder(torch.autograd.Function):
    """Keeps its input for a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return y * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient


KEPT: dict[str, Callable[[Tensor], object]] = {
    "itself": lambda x: x,
    "a view": lambda x: x[1:],
    "a view in inference mode": torch.inference_mode()(lambda x: x[1:]),
    "detached": lambda x: x.detach(),
    "its data": lambda x: x.data,
    "its storage": lambda x: x.untyped_storage(),
    "another dtype": lambda x: x.view(torch.int32),
    "NumPy": lambda x: x.numpy(),
    "a parameter": lambda x: torch.nn.Parameter(x),
    "autograd": lambda x: Holder.apply(x, torch.ones(1, requires_grad=True)),  # type: ignore[no-untyped-call]
    "autograd, an op": lambda x: x * torch.ones(1, requires_grad=True),
}


@pytest.mark.parametrize("what", KEPT)
def test_a_slot_is_free_as_soon_as_nobody_has_anything_of_it(what: str) -> None:
    slots = InputBuffers(1, BufferTable())
    (first,) = memory(slots, X)
    address, kept = first.data_ptr(), [KEPT[what](first)]
    del first
    (second,) = memory(slots, X)
    assert second.data_ptr() != address
    kept.clear()
    (third,) = memory(slots, X)
    assert third.data_ptr() == address


DTYPES = [torch.bool, torch.int64, torch.float16, torch.float32, torch.complex64, torch.float8_e4m3fn, torch.uint16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_handed_out_is_like_any_other_tensor(dtype: torch.dtype) -> None:
    likes = [torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), torch.zeros(()), torch.zeros(0, 3)]
    slot = InputBuffer([like.to(dtype) for like in likes], CPU, HOME)
    for _ in range(2):
        handed = slot.hand_out()
        assert [(each.shape, each.stride()) for each in handed] == [(like.shape, like.stride()) for like in likes]
        assert [each.data_ptr() for each in handed if each.numel()] == slot.addresses
        assert len(set(map(storage_of, handed))) == 3
        for each in handed:
            assert each.dtype == dtype
            assert each.storage_offset() == each._version == 0
            assert not any([each._is_view(), each.requires_grad, each.is_inference()])
        handed[0].fill_(1)
        assert bool(handed[0].to(torch.complex64).eq(1).all())
        del handed, each


def test_what_lies_in_a_slot_is_found_there_and_does_not_keep_it() -> None:
    slot = InputBuffer([X, X], CPU, HOME)
    first, second = slot.hand_out()
    second.copy_(torch.arange(12.0).view(3, 4))
    for part in (second, second[:2], second.t(), second[:, 0]):
        here = slot.here(part)
        assert here is not None
        assert torch.equal(here, part)
        assert (here.data_ptr(), here.shape, here.stride()) == (part.data_ptr(), part.shape, part.stride())
    for other in (second[1:], second.view(torch.int32), X):
        assert slot.here(other) is None
    del first, second, part, other
    assert here is not None
    assert slot.is_free


def test_only_what_is_like_the_first_for_the_same_stream_comes_in_slots() -> None:
    table = BufferTable()
    slots = InputBuffers(2, table)
    (first,) = memory(slots, X)
    others = [
        *memory(slots, torch.zeros(4, 3).t()),
        *memory(slots, X[:2]),
        *memory(slots, X.int()),
        *memory(slots, X, X),
        *memory(slots, X, home="another"),
    ]
    assert first.data_ptr() in table
    assert not {other.data_ptr() for other in others} & set(table)
    (second,), (third,) = memory(slots, X), memory(slots, X)
    assert second.data_ptr() in table
    assert third.data_ptr() not in table, "there are two"


def test_all_is_given_back_with_the_slots_but_for_what_somebody_has() -> None:
    table = BufferTable()
    slots = InputBuffers(2, table)
    first, second = memory(slots, X), memory(slots, X)
    slot, owned = ref(table[first[0].data_ptr()]), ref(table[second[0].data_ptr()]._memory[0])
    first[0].fill_(3)
    del second
    assert owned() is not None
    del slots
    assert (slot(), owned(), len(table)) == (None, None, 0)
    assert bool((first[0] == 3).all())
