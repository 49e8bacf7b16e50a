"""A call that Dynamo captured as one graph: its guards, its outputs and side effects, and its fast path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream.dispatch.captured_call import CapturedCall
from autostream.dispatch.dispatcher import Dispatcher
from autostream.options import Options
from tests.semantics import Model, same

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def entry_of(model: nn.Module, *args: Any, **kwargs: Any) -> CapturedCall:
    """The entry of a model for calls like this one."""
    dispatch = Dispatcher(model, Options())
    dispatch(*args, **kwargs)
    ((entry,),) = dispatch._admission.entries.values()
    assert isinstance(entry, CapturedCall)
    return entry


def nested(s: Model, x: Tensor, y: Tensor | None = None) -> dict[str, Any]:
    return {"sum": x + s.w, "given": x, "many": [x.sin(), None, 3]}


@torch.no_grad()
def test_the_slow_and_the_fast_path_return_the_models_structure() -> None:
    model, x = Model(nested, w=nn.Parameter(torch.ones(2))), torch.randn(2)
    entry = entry_of(model, x)
    value = entry(model, (x,), {})
    same(value, model(x))
    assert value["given"] is x
    replay = entry.replay(model, (x,), {}, guarded=True)
    assert replay is not None
    other = torch.randn(2)
    tensors = replay.fits((other,), {})
    assert tensors is not None
    value = replay(tensors, (other,), {})
    same(value, model(other))
    assert value["given"] is other


@torch.no_grad()
def test_its_guards_fail_when_an_attribute_changes() -> None:
    model, x = Model(lambda s, x: x * s.scale, scale=2.0), torch.ones(2)
    entry = entry_of(model, x)
    assert entry.guards(model, (x,), {})
    model.scale = 3.0
    assert not entry.guards(model, (x,), {})


@torch.no_grad()
def test_side_effects_happen_in_each_call_and_prevent_a_fast_path() -> None:
    def counts(s: Model, x: Tensor) -> Tensor:
        s.seen.append(len(s.seen))
        return x + 1

    model, x = Model(counts, seen=[]), torch.ones(2)
    entry = entry_of(model, x)
    assert model.seen == [0]
    assert not entry.guards(model, (x,), {}), "the list is longer now"
    model.seen.clear()
    assert entry.guards(model, (x,), {})
    same(entry(model, (x,), {}), x + 1)
    assert model.seen == [0]
    assert not entry.repeatable
    assert entry.replay(model, (x,), {}, guarded=True) is None


def test_a_call_that_records_gradients_reports_both_halves() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    dispatch = Dispatcher(model, Options(policy="sequential"))
    dispatch(x).sum().backward()
    ((entry,),) = dispatch._admission.entries.values()
    assert isinstance(entry, CapturedCall)
    assert entry.compiled is None
    (report,) = entry.reports("Linear")
    assert [part.half for part in report.parts] == ["forward", "backward"]
    assert entry.replay(model, (x,), {}, guarded=True) is None
