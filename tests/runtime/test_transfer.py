"""Transfers on a fake device, each of whose queues runs ahead as far as its waits allow."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from autostream.runtime.input_buffers import BufferTable, InputBuffers, Memory, new_memory
from autostream.runtime.transfer import Transfer
from tests.make_believe import GPU, Device


def x(value: float) -> Tensor:
    return torch.full((4,), value)


def read(device: Device, tensor: Tensor, seen: list[float]) -> None:
    """A kernel on the current stream that reads a tensor."""
    memory = device.alias(tensor)
    device.launch(lambda: seen.append(memory.mean().item()))


@pytest.fixture(params=["new", "buffers"])
def memory(request: pytest.FixtureRequest) -> Memory:
    return new_memory if request.param == "new" else InputBuffers(1, BufferTable()).memory


def test_copies_come_after_earlier_uses_of_their_memory_and_before_reads(
    device: Device, order: int, memory: Memory
) -> None:
    """consumer: read 1 ─ drop ─ allocate the same memory ─ …     copy stream: writes 2, but not before that read."""
    seen: list[float] = []
    for value in (1.0, 2.0, 3.0):
        (taken,) = Transfer([x(value)], GPU, memory=memory).take()
        read(device, taken, seen)
        del taken
    assert device.blocks == 1
    device.run(order)
    assert seen == [1.0, 2.0, 3.0]


def test_memory_of_a_transfer_that_was_not_taken_is_reused_after_the_copy(device: Device, order: int) -> None:
    seen: list[float] = []
    transfer = Transfer([x(1.0)], GPU)
    del transfer
    mine = device.empty_like(x(2.0))
    device.copy(mine, x(2.0))
    read(device, mine, seen)
    assert device.blocks == 1
    device.run(order)
    assert seen == [2.0]


@pytest.mark.parametrize("takes", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_buffer_is_filled_again_after_its_last_use(
    device: Device, order: int, elsewhere: bool, takes: tuple[bool, bool]
) -> None:
    """It was read on its own stream, copied on another, or not taken."""
    seen: list[float] = []
    buffers = InputBuffers(1, BufferTable())
    other = device.stream() if elsewhere else device.current
    for value, is_taken in enumerate([*takes, True]):
        transfer = Transfer([x(float(value))], GPU, memory=buffers.memory)
        if is_taken:
            with device.using(other):
                (taken,) = transfer.take()
                read(device, taken, seen)
                del taken
        del transfer
    assert device.blocks == 1 + elsewhere, "the buffer, and a copy for the other stream"
    device.run(order)
    assert seen == [float(value) for value, is_taken in enumerate([*takes, True]) if is_taken]


def test_tensors_taken_on_another_stream_are_in_memory_of_that_stream(device: Device, order: int) -> None:
    """Both streams reuse the memory that they have freed."""
    seen: list[float] = []
    transfer, other = Transfer([x(1.0)], GPU), device.stream()
    with device.using(other):
        (taken,) = transfer.take()
        read(device, taken, seen)
        del taken
        theirs = device.empty_like(x(2.0))
        device.copy(theirs, x(2.0))
    ours = device.empty_like(x(3.0))
    device.copy(ours, x(3.0))
    assert device.blocks == 2
    device.run(order)
    assert seen == [1.0]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_tensor_on_the_device_is_taken_itself_or_as_a_copy_on_another_stream(
    device: Device, order: int, elsewhere: bool
) -> None:
    """Its memory belongs to the stream that made it, which reuses it as soon as it is freed."""
    seen: list[float] = []
    made, other = device.empty_like(x(0.0)), device.stream() if elsewhere else device.current
    device.copy(made, x(1.0))
    transfer = Transfer([made], GPU)
    with device.using(other):
        (taken,) = transfer.take()
        read(device, taken, seen)
    assert (taken is made) is not elsewhere
    del made, taken, transfer
    device.copy(device.empty_like(x(2.0)), x(2.0))
    assert device.blocks == 1 + elsewhere
    device.run(order)
    assert seen == [1.0]


def test_if_a_copy_fails_memory_is_reused_after_those_that_were_started(
    device: Device, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    """The first tensor of two is being copied when the second fails."""
    seen: list[float] = []
    copy = device.copy

    def fails_at_the_second(target: Tensor, source: Tensor) -> None:
        if source.mean() == 2.0:
            raise RuntimeError("device lost")
        copy(target, source)

    monkeypatch.setattr(device, "copy", fails_at_the_second)
    with suppress(RuntimeError):  # pytest.raises would keep the traceback and its tensors alive
        pytest.fail(str(Transfer([x(1.0), x(2.0)], GPU)))
    for _ in range(2):
        again = device.empty_like(x(3.0))
        copy(again, x(3.0))
        read(device, again, seen)
    assert device.blocks == 2
    device.run(order)
    assert seen == [3.0, 3.0]


def test_pinned_tensors_are_copied_in_place_and_expanded_ones_are_made_dense(device: Device) -> None:
    pinned = device.pin(x(1.0))
    tensors = [pinned, x(2.0).requires_grad_(), torch.tensor([[1.0], [2.0]]).expand(2, 3)]
    transfer = Transfer(tensors, GPU)
    pinned.fill_(5.0)  # another pinned copy would not see this
    first, second, third = transfer.take()
    device.run(0)
    assert (first.tolist(), second.tolist()) == ([5.0] * 4, [2.0] * 4)
    assert third.tolist() == [[1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_transferred_tensors_require_gradients_as_before_in_any_mode(device: Device, mode: Any) -> None:
    with mode():
        transfer = Transfer([x(1.0).requires_grad_(), x(2.0)], GPU)
    assert [taken.requires_grad for taken in transfer.take()] == [True, False]


@pytest.mark.gpu
def test_on_a_gpu_expanded_and_trained_tensors_arrive_as_they_are() -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())
    tensors = [torch.ones(3).expand(2, 3), torch.ones(3).pin_memory().expand(2, 3), torch.ones(3, requires_grad=True)]
    for taken, tensor in zip(Transfer(tensors, gpu).take(), tensors, strict=True):
        torch.testing.assert_close(taken, tensor.to(gpu))
        assert taken.requires_grad == tensor.requires_grad
