"""Calls that must reach the plain model."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autostream.frontend.eager_only import anomalies_sought, traced_by_fx, unusual_call, unusual_tensor
from autostream.frontend.settings import numerics


class Mine(Tensor):
    """A subclass could do anything."""


def test_an_ordinary_call_is_not_unusual() -> None:
    assert unusual_call() == ""
    with torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"):
        assert unusual_call() == ""


def test_a_dispatch_mode_is_noticed_while_it_is_active() -> None:
    with TorchDispatchMode():
        assert "TorchDispatchMode" in unusual_call()
    assert unusual_call() == ""


def test_function_transforms_are_noticed() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append((unusual_call(), unusual_tensor([x])))
        return x.sum()

    torch.vmap(function)(torch.ones(2, 2))
    torch.func.grad(function)(torch.ones(2))
    assert len(seen) == 2
    assert all("transform" in call and "transform" in tensor for call, tensor in seen)


def test_anomalies_are_sought_where_values_are_looked_at() -> None:
    """Tracers themselves let autograd note lines alone, for all threads."""
    assert anomalies_sought() == ""
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        assert "looks for NaN" in anomalies_sought()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert anomalies_sought() == ""
    assert anomalies_sought() == ""


def test_forward_mode_and_batches_of_gradients_are_noticed() -> None:
    with forward_ad.dual_level():
        assert "forward-mode AD" in unusual_call()
    assert unusual_call() == ""
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(unusual_tensor([gradient])))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    assert "transform" in seen[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_jit_trace_is_noticed() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(unusual_call())
        return x + 1

    torch.jit.trace(function, torch.ones(2), check_trace=False)
    assert "torch.jit" in seen[0]


def lazily(conjugated: bool) -> Tensor:
    x = torch.ones(2, dtype=torch.complex64).conj()
    return x if conjugated else x.imag


def compressed() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # says that the layout is in beta
        return torch.eye(2).to_sparse_csr()


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(2), ""),
        (torch.ones(2).expand(3, 2), ""),
        (nn.Parameter(torch.ones(2)), ""),
        (nn.Buffer(torch.ones(2)), ""),
        (torch.ones(2, requires_grad=True) * 2, ""),
        (torch.ones(2).as_subclass(Mine), "input 1 is a Mine"),
        (torch.ones(2).to_sparse(), "input 1 has the layout torch.sparse_coo"),
        (compressed(), "input 1 has the layout torch.sparse_csr"),
        (torch.ones(2, device="meta"), "input 1 is on meta"),
        (lazily(conjugated=True), "input 1 is quantized, conjugated or negated lazily"),
        (lazily(conjugated=False), "input 1 is quantized, conjugated or negated lazily"),
    ],
)
def test_only_ordinary_strided_tensors_are_accepted(tensor: Tensor, reason: str) -> None:
    assert unusual_tensor([torch.ones(1), tensor]) == reason


def test_without_tensors_there_is_nothing_unusual() -> None:
    assert unusual_tensor([]) == ""


class _Watching(TorchFunctionMode):
    pass


def test_function_modes_would_not_see_the_calls_behind_a_graph() -> None:
    with _Watching():
        assert "TorchFunctionMode" in unusual_call()
    assert unusual_call() == ""


def test_a_default_device_is_a_mode_that_signatures_know() -> None:
    with torch.device("meta"):
        assert unusual_call() == ""
        inside = numerics()
    assert inside != numerics()


def test_a_trace_of_fx_is_noticed_in_its_own_thread() -> None:
    seen: list[bool] = []

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
