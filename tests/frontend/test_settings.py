"""Settings that change what kernels compute: each is seen, in full and at a quick look."""

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
    """As ``monkeypatch`` does, which deletes what is in no dictionary; of some owners, C++ keeps the settings."""
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


@pytest.fixture(params=["guard", "no guard"])
def guard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's guard, and with a version that has none."""
    if request.param == "no guard":
        monkeypatch.setattr(torch._C._dynamo, "guards", object())


@pytest.mark.usefixtures("guard")
@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen(changed: Callable[[], Any]) -> None:
    before, same = numerics(), watch_numerics()
    assert same()
    with changed():
        assert numerics() != before
        assert not same()
    assert numerics() == before
    assert same()


@pytest.mark.usefixtures("guard")
@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_every_change_back_is_seen(changed: Callable[[], Any]) -> None:
    with changed():
        same = watch_numerics()
        assert same()
    assert not same()


def test_autocast_dtypes_are_told_apart() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one, same = numerics(), watch_numerics()
    with torch.autocast("cpu", dtype=torch.float16):
        assert numerics() != one
        assert not same()


@pytest.mark.gpu
def test_attention_that_is_in_order_changes_nothing() -> None:
    """Only the first in a process might."""
    check = """
import torch
from autostream.frontend.settings import numerics

query = torch.ones(1, 1, 8, 8, device="cuda", dtype=torch.float16)
before = numerics()
torch.nn.functional.scaled_dot_product_attention(query, query, query)
assert numerics() == before
"""
    subprocess.run([sys.executable, "-c", check], check=True)
