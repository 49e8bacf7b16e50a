"""Copies beside other work on a fake device, each of whose queues runs ahead as far as its waits allow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autostream.runtime.host_copies import Destination, copy_beside, mark, reserve, upload
from tests.make_believe import ORDERS, Device


def x(value: float) -> Tensor:
    return torch.full((4,), value)


def destination() -> Destination:
    return reserve("cuda:0", (4,), (1,), torch.float32)


def reading(device: Device, tensor: Tensor, seen: list[float]) -> Callable[[], None]:
    """A kernel that reads a tensor."""
    memory = device.alias(tensor)
    return lambda: seen.append(memory.mean().item())


def test_an_upload_may_run_before_work_launched_since_its_memory_was_allocated(device: Device) -> None:
    """caller: allocate ─ read ─ read       copies: upload, before the first read or after it."""
    firsts = set()
    for order in ORDERS:
        seen: list[float] = []
        taken = destination()
        device.launch(reading(device, taken.tensor, seen))
        device.launch(reading(device, upload(taken, x(1.0), True), seen))
        device.run(order)
        first, last = seen
        firsts.add(math.isnan(first))
        assert last == 1.0
        taken.tensor.fill_(math.nan)
    assert firsts == {True, False}


@pytest.mark.parametrize("non_blocking", [False, True])
def test_the_host_waits_for_a_blocking_copy(non_blocking: bool, device: Device, monkeypatch: Any) -> None:
    """Otherwise the caller could overwrite the source too early."""
    passed: list[dict[str, Any]] = []
    copies = Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda *args, **kwargs: passed.append(kwargs) or copies(*args, **kwargs))
    upload(destination(), x(1.0), non_blocking)
    assert passed == [{"non_blocking": non_blocking}]


def test_an_upload_comes_after_earlier_uses_of_its_memory_and_before_reads(device: Device, order: int) -> None:
    seen: list[float] = []
    for value in (1.0, 2.0, 3.0):
        tensor = upload(destination(), x(value), False)
        device.launch(reading(device, tensor, seen))
        del tensor
    assert device.blocks == 1
    device.run(order)
    assert seen == [1.0, 2.0, 3.0]


def test_a_download_waits_for_work_before_the_mark_only(device: Device) -> None:
    """caller: write 1 ─ mark ─ work ─ end       copies: download, before the work or after it."""
    firsts = set()
    for order in ORDERS:
        seen: list[object] = []
        tensor = device.empty_like(x(0.0))
        memory = device.alias(tensor)
        device.copy(tensor, x(1.0))
        since = mark("cuda:0")
        device.launch(lambda seen=seen: seen.append("work"))  # type: ignore[misc]

        def download(factor: float, seen: list[object] = seen, memory: Tensor = memory) -> Tensor:
            device.launch(lambda: seen.append(factor * memory.mean().item()))
            return x(0.0)

        copy_beside(since, "cuda:0", "download", download, factor=2.0)
        device.launch(lambda seen=seen: seen.append("end"))  # type: ignore[misc]
        device.run(order)
        assert set(seen) == {"work", 2.0, "end"}
        assert seen[-1] == "end", "the caller's stream waits for the copy"
        firsts.add(seen[0])
    assert firsts == {"work", 2.0}


def test_if_a_copy_fails_the_callers_stream_is_current_and_waits_for_what_was_launched(
    device: Device, order: int
) -> None:
    seen: list[str] = []
    before = device.current

    def fails() -> Tensor:
        device.launch(lambda: seen.append("begun"))
        raise RuntimeError("no way")

    with pytest.raises(RuntimeError, match="no way"):
        copy_beside(mark("cuda:0"), "cuda:0", "upload", fails)
    assert device.current is before
    device.launch(lambda: seen.append("after"))
    device.run(order)
    assert seen == ["begun", "after"]
