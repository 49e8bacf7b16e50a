"""A call as one program: what it computes, with which tensors, and why there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autostream.errors import TraceError
from autostream.frontend.trace import trace
from autostream.ir import Role
from tests.semantics import Model


def test_it_computes_what_the_model_does_with_the_arguments_of_any_call() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    one, other = torch.randn(2, 4), torch.randn(2, 4)
    traced = trace(model, [one])
    roles = [placeholder.role for placeholder in traced.program.placeholders]
    assert roles[-1] is Role.INPUT
    assert roles.count(Role.BUFFER) == 2
    with torch.no_grad():
        for x in (one, other):
            (found,) = traced.program.module(*traced.arguments(model, [x]))
            torch.testing.assert_close(found, model(x))
        model[0].weight.zero_()
        (found,) = traced.program.module(*traced.arguments(model, [other]))
        torch.testing.assert_close(found, model(other))


def test_constants_that_a_graph_makes_are_arguments_as_well() -> None:
    model, x = Model(lambda s, x: x * torch.tensor([1.0, 2.0])), torch.ones(2)
    traced = trace(model, [x])
    assert [placeholder.role for placeholder in traced.program.placeholders] == [Role.CONSTANT, Role.INPUT]
    assert traced.program.module(*traced.arguments(model, [x]))[0].tolist() == [1.0, 2.0]


def test_nothing_is_computed_and_nothing_changes() -> None:
    def counts(s: Model, x: Tensor) -> Tensor:
        s.calls += 1
        return s.norm(x) + torch.rand(4)

    model = Model(counts, norm=nn.BatchNorm1d(4), calls=0)
    x, state = torch.randn(2, 4), torch.get_rng_state()
    trace(model, [x]).arguments(model, [x])
    assert (model.calls, model.norm.num_batches_tracked.item()) == (0, 0)
    assert torch.get_rng_state().equal(state)


def test_a_model_on_no_device_at_all_is_traced_for_another() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(4, 4), torch.empty(2, 4)
    assert trace(model, [x], device="cuda:0").program.device == "cuda:0"


def branches(s: Model, x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x


def test_what_is_no_one_graph_is_told_with_dynamos_reason_and_the_users_line() -> None:
    with pytest.raises(
        TraceError, match=r"^Model is no one graph: Data-dependent branching \(.*test_trace.py:\d+: return x"
    ):
        trace(Model(branches), [torch.ones(2)])
    with pytest.raises(TraceError, match="Model computes nothing with tensors"):
        trace(Model(lambda s, x: "text"), [torch.ones(2)])


def test_what_is_returned_beside_tensors_is_no_part_of_it() -> None:
    traced = trace(Model(lambda s, x: (x + 1, x.shape, "name")), [torch.ones(2)])
    assert len(traced.program.outputs) == 1
