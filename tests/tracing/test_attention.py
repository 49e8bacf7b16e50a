"""Attention modules fuse in a trace where they fuse without one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import activation
from torch.overrides import BaseTorchFunctionMode

import autostream
from autostream.reporting.report import Report
from autostream.tracing import attention
from autostream.tracing.attention import fused_attention

X = torch.randn(2, 5, 8)
PADDING = torch.arange(5).expand(2, 5) >= torch.tensor([[3], [5]])

ATTENTION, ENCODER = "aten._native_multi_head_attention.default", "aten._transformer_encoder_layer_fwd.default"


class SelfAttention(nn.Module):
    """With weights or without, with padding or without."""

    def __init__(self, heads: int = 2, **options: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, heads, batch_first=True)
        self._options = options

    def forward(self, x: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        attended, weights = self.attention(x, x, x, key_padding_mask=padding, **self._options)
        return attended, weights


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


def run(model: nn.Module, *args: Tensor) -> list[str]:
    """The ops that a model is made of once it is optimized, which must not change its outputs by a bit."""
    fast = autostream.optimize(model, kernels="eager")
    with torch.no_grad():
        torch.testing.assert_close(fast(*args), model(*args), rtol=0, atol=0)
    (report,) = fast.reports
    return ops(report)


def ops(report: Report) -> list[str]:
    assert report.graph
    return [op.target for op in report.graph.ops.values()]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (SelfAttention, [ATTENTION]),
        (lambda: SelfAttention(need_weights=False), [ATTENTION]),
        (layer, [ENCODER]),
        (lambda: nn.TransformerEncoder(layer(), 2), [ENCODER, ENCODER]),
    ],
    ids=["attention", "without weights", "layer", "encoder"],
)
def test_eval_mode_fuses_as_it_does_without_a_trace(
    make: Callable[[], nn.Module], expected: list[str], device: str
) -> None:
    assert run(make().eval().to(device), X.to(device)) == expected


def test_a_mask_is_told_to_the_fused_op() -> None:
    assert ATTENTION in run(SelfAttention().eval(), X, PADDING)


@pytest.mark.parametrize("model", [SelfAttention(heads=1).eval(), SelfAttention().train()], ids=["odd heads", "train"])
def test_what_does_not_fuse_without_a_trace_does_not_in_one(model: nn.Module) -> None:
    assert ATTENTION not in run(model, X)


def test_who_turned_fusion_off_has_it_off() -> None:
    model = SelfAttention().eval()
    fast = autostream.optimize(model, kernels="eager")
    with torch.no_grad():
        fast(X)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            torch.testing.assert_close(fast(X), model(X), rtol=0, atol=0)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert [ATTENTION in ops(report) for report in fast.reports] == [False, True]


def test_other_threads_and_other_callers_are_told_the_truth() -> None:
    answers: list[bool] = []

    class Overriding(Tensor):
        @classmethod
        def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            raise NotImplementedError

    tensors = (torch.ones(1).as_subclass(Overriding),)
    ask = eval("lambda: torch.overrides.has_torch_function(tensors)", {"torch": torch, "tensors": tensors})
    ask_as_attention = eval(
        "lambda: torch.overrides.has_torch_function(tensors)",
        {"torch": torch, "tensors": tensors, "__name__": activation.__name__},
    )
    with fused_attention():
        assert ask()
        assert not ask_as_attention()
        other = threading.Thread(target=lambda: answers.extend([ask(), ask_as_attention()]))
        other.start()
        other.join()
    assert answers == [True, True]
    assert ask_as_attention()


def test_threads_may_be_inside_at_a_time_and_the_last_puts_back() -> None:
    """The first to enter leaves first; what the second is told does not change by it."""
    before = torch.overrides.has_torch_function, activation._is_make_fx_tracing
    ask = eval("lambda: torch.overrides.has_torch_function([])", {"torch": torch, "__name__": activation.__name__})
    entered, left = threading.Event(), threading.Event()
    answers: list[bool] = []

    def second() -> None:
        with fused_attention(), BaseTorchFunctionMode():
            entered.set()
            left.wait()
            answers.append(ask())

    thread = threading.Thread(target=second)
    with fused_attention():
        thread.start()
        entered.wait()
    left.set()
    thread.join()
    assert answers == [False]
    assert (torch.overrides.has_torch_function, activation._is_make_fx_tracing) == before


def test_everything_is_put_back_when_a_trace_fails() -> None:
    before = torch.overrides.has_torch_function, activation._is_make_fx_tracing
    with pytest.raises(ZeroDivisionError), fused_attention():
        assert torch.overrides.has_torch_function is not before[0]
        raise ZeroDivisionError
    assert (torch.overrides.has_torch_function, activation._is_make_fx_tracing) == before


def test_who_imports_them_meanwhile_is_told_the_truth_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_is_make_fx_tracing", lambda: True)
    with fused_attention():
        names = {"asks": torch.overrides.has_torch_function, "__name__": activation.__name__}
        ask_as_attention = eval("lambda *tensors: asks(tensors)", names)
        is_make_fx_tracing = activation._is_make_fx_tracing
        with BaseTorchFunctionMode():
            assert (ask_as_attention(X), is_make_fx_tracing()) == (False, False)
    with BaseTorchFunctionMode():
        assert (ask_as_attention(X), is_make_fx_tracing()) == (True, True)


def test_a_torch_without_what_this_needs_traces_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_supported", lambda: False)
    model = SelfAttention().eval()
    fast = autostream.optimize(model, kernels="eager")
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))
    assert ATTENTION not in ops(fast.reports[0])
