"""A call that is one graph: its guards, what it returns, and its short way."""

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


def whole(model: nn.Module, *args: Any, **kwargs: Any) -> CapturedCall:
    """What is made for such calls of a model, after one of them."""
    dispatch = Dispatcher(model, Options())
    dispatch(*args, **kwargs)
    ((entry,),) = dispatch._admission.entries.values()
    assert isinstance(entry, CapturedCall)
    return entry


def two_ways(s: Model, x: Tensor, y: Tensor | None = None) -> dict[str, Any]:
    return {"sum": x + s.w, "given": x, "many": [x.sin(), None, 3]}


@torch.no_grad()
def test_values_are_put_together_as_the_model_does() -> None:
    model, x = Model(two_ways, w=nn.Parameter(torch.ones(2))), torch.randn(2)
    entry = whole(model, x)
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
def test_the_guards_say_which_calls_it_may_run() -> None:
    model, x = Model(lambda s, x: x * s.scale, scale=2.0), torch.ones(2)
    entry = whole(model, x)
    assert entry.guards(model, (x,), {})
    model.scale = 3.0
    assert not entry.guards(model, (x,), {})


@torch.no_grad()
def test_what_the_model_does_to_objects_is_done_in_each_call_and_has_no_short_way() -> None:
    def counts(s: Model, x: Tensor) -> Tensor:
        s.seen.append(len(s.seen))
        return x + 1

    model, x = Model(counts, seen=[]), torch.ones(2)
    entry = whole(model, x)
    assert model.seen == [0]
    assert not entry.guards(model, (x,), {}), "the list is longer now"
    model.seen.clear()
    assert entry.guards(model, (x,), {})
    same(entry(model, (x,), {}), x + 1)
    assert model.seen == [0]
    assert not entry.repeatable
    assert entry.replay(model, (x,), {}, guarded=True) is None


def test_a_call_that_records_gradients_tells_of_both_halves() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    dispatch = Dispatcher(model, Options(policy="sequential"))
    dispatch(x).sum().backward()
    ((entry,),) = dispatch._admission.entries.values()
    assert isinstance(entry, CapturedCall)
    assert entry.compiled is None
    (report,) = entry.reports("Linear")
    assert [part.half for part in report.parts] == ["forward", "backward"]
    assert entry.replay(model, (x,), {}, guarded=True) is None
