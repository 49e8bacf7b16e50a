"""Self-attention in inference is one op, as in eager code, and to the bit what eager code computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream

FAST = "aten._native_multi_head_attention.default"


class Attends(nn.Module):
    """A residual around attention."""

    def __init__(self, heads: int = 2, *, keys: str = "x", call: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, heads, **{"batch_first": True, **options})
        self.keys, self.call = keys, call or {}

    def forward(self, x: Tensor) -> Any:
        keys = x if self.keys == "x" else x.flip(1)
        found, weights = self.attention(x, keys, keys, **self.call)
        return x + found, weights


def same_in_both(model: nn.Module, x: Tensor) -> bool:
    """Compare with eager code, to the bit; returns whether attention was one op."""
    optimized = autostream.optimize(model, policy="sequential")
    for each in (x, x + 1):
        found, weights = optimized(each)
        expected, expected_weights = model(each)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
        assert (weights is None) == (expected_weights is None)
        assert weights is None or torch.equal(weights, expected_weights)
    (report,) = optimized.reports
    assert report.graph is not None
    return FAST in {op.target for op in report.graph.ops.values()}


@pytest.mark.parametrize("call", [{}, {"need_weights": False}, {"average_attn_weights": False}])
def test_self_attention_in_inference_is_one_op(call: dict[str, Any]) -> None:
    with torch.no_grad():
        assert same_in_both(Attends(call=call).eval(), torch.randn(3, 5, 8))


@pytest.mark.parametrize(
    "model",
    [
        Attends(keys="others"),
        Attends(call={"attn_mask": torch.eye(5, dtype=torch.bool).logical_not()}),
        Attends(call={"key_padding_mask": torch.arange(15).view(3, 5) % 5 == 4}),
        Attends(batch_first=False),
        Attends(bias=False),
        Attends(add_bias_kv=True),
        Attends(add_zero_attn=True),
        Attends(heads=1),
    ],
    ids=["others", "mask", "padding", "batch_second", "no_bias", "bias_kv", "zero", "odd"],
)
def test_other_attention_stays_as_it_is_written(model: nn.Module) -> None:
    with torch.no_grad():
        optimized, x = autostream.optimize(model.eval()), torch.randn(3, 5, 8)
        torch.testing.assert_close(optimized(x), model(x))
    (report,) = optimized.reports
    assert report.graph is not None
    assert FAST not in {op.target for op in report.graph.ops.values()}


def test_it_is_one_op_only_where_eager_code_runs_that_op() -> None:
    model, x = Attends().eval(), torch.randn(3, 5, 8)
    optimized = autostream.optimize(model, policy="sequential")
    with torch.no_grad():
        optimized(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            torch.testing.assert_close(optimized(x), model(x))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    found = optimized(x)[0]
    found.sum().backward()
    torch.testing.assert_close(found, model(x)[0])
    assert model.attention.in_proj_weight.grad is not None
    targets = [{op.target for op in report.graph.ops.values()} for report in optimized.reports if report.graph]
    assert [FAST in each for each in targets].count(True) == 1
    assert len(targets) > 1
