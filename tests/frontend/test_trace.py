"""A call as one program: what it computes, with which arguments, and why there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autostream.errors import TraceError
from autostream.frontend.trace import trace
from autostream.ir import Role
from tests.semantics import Model


def test_a_program_computes_what_the_model_does_with_the_arguments_of_any_call() -> None:
    def function(s: Model, x: Tensor) -> tuple[Tensor, torch.Size]:
        s.calls += 1
        y = s.layer(s.norm(x)) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return y, y.shape

    model = Model(function, norm=nn.BatchNorm1d(4), layer=nn.Linear(4, 4), calls=0)
    one, other = torch.randn(2, 4), torch.randn(2, 4)
    traced = trace(model, [one])
    assert (model.calls, model.norm.num_batches_tracked.item()) == (0, 0), "nothing has run"
    roles = [placeholder.role for placeholder in traced.program.placeholders]
    assert (roles[-2:], roles.count(Role.BUFFER)) == ([Role.CONSTANT, Role.INPUT], 3)
    with torch.no_grad():
        for x in (one, other):
            (output,) = traced.program.module(*traced.arguments(model, [x]))
            torch.testing.assert_close(output, model(x)[0])
        model.layer.weight.zero_()
        (output,) = traced.program.module(*traced.arguments(model, [other]))
        torch.testing.assert_close(output, model(other)[0])


def test_a_model_on_the_meta_device_is_traced_for_another() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(4, 4), torch.empty(2, 4)
    assert trace(model, [x], device="cuda:0").program.device == "cuda:0"


def branches(s: Model, x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x


def test_a_model_that_is_not_one_graph_is_refused_with_dynamos_reason_and_the_users_line() -> None:
    with pytest.raises(
        TraceError, match=r"^Model is no one graph: Python branches on .* \(.*test_trace.py:\d+: return x"
    ):
        trace(Model(branches), [torch.ones(2)])
    with pytest.raises(TraceError, match="Model computes nothing with tensors"):
        trace(Model(lambda s, x: "text"), [torch.ones(2)])
