"""Global settings that change what kernels compute: every change is seen, by value and by the fast check."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from autostream.frontend.settings import numerics, watch_numerics


@contextmanager
def calling(function: Callable[[Any], None], value: object, back: object) -> Iterator[None]:
    function(value)
    try:
        yield
    finally:
        function(back)


def setting(owner: object, name: str, value: object) -> AbstractContextManager[None]:
    """Not by ``monkeypatch``, which would delete attributes that are in no dictionary, because C++ has them."""
    return calling(partial(setattr, owner, name), value, getattr(owner, name))


CHANGES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "half": lambda: torch.autocast("cpu", dtype=torch.float16),
    "dtype": lambda: calling(torch.set_default_dtype, torch.float64, torch.float32),
    "device": lambda: torch.device("meta"),
    "deterministic": lambda: calling(torch.use_deterministic_algorithms, True, False),
    "matmul": lambda: setting(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "conv": lambda: setting(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "rnn": lambda: setting(torch.backends.cudnn.rnn, "fp32_precision", "ieee"),
    "fp16": lambda: setting(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "bf16": lambda: setting(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "cudnn": lambda: setting(torch.backends.cudnn, "enabled", False),
    "cudnn deterministic": lambda: setting(torch.backends.cudnn, "deterministic", True),
    "cudnn benchmark": lambda: setting(torch.backends.cudnn, "benchmark", True),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "fused attention": lambda: calling(torch.backends.mha.set_fastpath_enabled, False, True),
}


@pytest.mark.parametrize("has_guard", [True, False])
@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_a_change_and_a_change_back_are_seen(
    changed: Callable[[], Any], has_guard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a version of PyTorch without the guard of Dynamo's."""
    if not has_guard:
        monkeypatch.setattr(torch._C._dynamo, "guards", object())
    before, same = numerics(), watch_numerics()
    assert same()
    with changed():
        assert numerics() != before
        assert not same()
        same_inside = watch_numerics()
        assert same_inside()
    assert numerics() == before
    assert same()
    assert not same_inside()


def test_dtypes_of_autocast_are_distinguished() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one, same = numerics(), watch_numerics()
    with torch.autocast("cpu", dtype=torch.float16):
        assert numerics() != one
        assert not same()


@pytest.mark.gpu
def test_the_first_attention_on_a_gpu_changes_nothing() -> None:
    """In a new process: PyTorch chooses the order of attention kernels in the first one."""
    check = """
import torch
from autostream.frontend.settings import numerics

query = torch.ones(1, 1, 8, 8, device="cuda", dtype=torch.float16)
before = numerics()
torch.nn.functional.scaled_dot_product_attention(query, query, query)
assert numerics() == before
"""
    subprocess.run([sys.executable, "-c", check], check=True)
