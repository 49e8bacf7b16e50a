"""Which calls stay eager: modes, transforms, tracers and unusual tensors."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autostream.frontend.eager_only import anomaly_detection, traced_by_fx, unusual_call, unusual_tensor


class Subclass(Tensor):
    """May do anything."""


class Watching(TorchFunctionMode):
    pass


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        (nullcontext, ""),
        (torch.no_grad, ""),
        (torch.inference_mode, ""),
        (lambda: torch.autocast("cpu"), ""),
        (lambda: torch.device("meta"), ""),  # a function mode, but guarded
        (TorchDispatchMode, "TorchDispatchMode"),
        (Watching, "TorchFunctionMode"),
        (forward_ad.dual_level, "forward-mode AD"),
    ],
)
def test_modes_that_observe_ops(mode: Callable[[], Any], reason: str) -> None:
    with mode():
        inside = unusual_call()
    assert (reason in inside) if reason else inside == ""
    assert unusual_call() == ""


def test_function_transforms_and_batched_gradients() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append((unusual_call(), unusual_tensor([x])))
        return x.sum()

    torch.vmap(function)(torch.ones(2, 2))
    torch.func.grad(function)(torch.ones(2))
    assert len(seen) == 2
    assert all("transform" in call and "transform" in tensor for call, tensor in seen)
    batched = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: batched.append(unusual_tensor([gradient])))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    assert "transform" in batched[0]


def test_anomaly_detection_counts_where_it_checks_values() -> None:
    """Tracers themselves set it without, visibly for all threads."""
    assert anomaly_detection() == ""
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert anomaly_detection() == ""
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        assert "looks for NaN" in anomaly_detection()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traces_of_torchscript_and_of_fx_in_its_own_thread() -> None:
    seen: list[Any] = []

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: seen.append(traced_by_fx()))
            thread.start()
            thread.join(60)
            seen.append(traced_by_fx())
            return x

    torch.fx.symbolic_trace(Asking())
    Asking()(torch.ones(1))
    assert seen == [False, True, False, False]

    def function(x: Tensor) -> Tensor:
        seen.append(unusual_call())
        return x + 1

    torch.jit.trace(function, torch.ones(2), check_trace=False)
    assert "torch.jit" in seen[4]


def conjugated() -> Tensor:
    return torch.ones(2, dtype=torch.complex64).conj()


def compressed() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the layout is in beta
        return torch.eye(2).to_sparse_csr()


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(2), ""),
        (torch.ones(2).expand(3, 2), ""),
        (nn.Parameter(torch.ones(2)), ""),
        (nn.Buffer(torch.ones(2)), ""),
        (torch.ones(2, requires_grad=True) * 2, ""),
        (torch.ones(2).as_subclass(Subclass), "input 1 is a Subclass"),
        (torch.ones(2).to_sparse(), "input 1 has the layout torch.sparse_coo"),
        (compressed(), "input 1 has the layout torch.sparse_csr"),
        (torch.ones(2, device="meta"), "input 1 is on meta"),
        (conjugated(), "input 1 is quantized, conjugated or negated lazily"),
        (conjugated().imag, "input 1 is quantized, conjugated or negated lazily"),
    ],
)
def test_only_ordinary_strided_tensors_are_accepted(tensor: Tensor, reason: str) -> None:
    assert unusual_tensor([torch.ones(1), tensor]) == reason
    assert unusual_tensor([]) == ""
