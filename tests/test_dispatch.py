"""What a call runs: which signatures are kept and which go, and what becomes of calls that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream.build import preparing
from autostream.dispatch import Dispatcher
from autostream.errors import TargetError
from autostream.options import Options
from tests.semantics import CONFIGURATIONS, Model, same

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def t(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1 + sum(shape)))


def dispatcher(model: nn.Module, **options: Any) -> Dispatcher:
    return Dispatcher(model, Options(**options))


def modes(dispatch: Dispatcher) -> list[str]:
    return [report.mode for report in dispatch.reports]


def kept(dispatch: Dispatcher) -> list[str]:
    """The shapes of the signatures, the most recently used first."""
    return [report.signature.partition(":")[0] for report in dispatch.reports]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "autostream.dispatch"]


# Which signatures are kept


@torch.no_grad()
def test_the_least_recently_used_goes_first(caplog: pytest.LogCaptureFixture) -> None:
    dispatch = dispatcher(nn.Linear(4, 4), max_signatures=2)
    for rows in (1, 2, 1):
        dispatch(t(rows, 4))
    assert not messages(caplog)
    dispatch(t(3, 4))
    assert kept(dispatch) == ["3x4", "1x4"]
    (message,) = messages(caplog)
    assert "dropped the schedule for 2x4:float32 on cpu" in message
    assert "max_signatures" in message


@torch.no_grad()
@pytest.mark.parametrize("use", [Dispatcher.prepare, Dispatcher.static_inputs])
def test_what_is_prepared_counts_as_well(use: Callable[..., Any]) -> None:
    dispatch = dispatcher(nn.Linear(4, 4), max_signatures=2)
    for rows in (1, 2, 3):
        use(dispatch, t(rows, 4))
    assert kept(dispatch) == ["3x4", "2x4"]


def branches(s: Model, x: Tensor) -> Tensor:
    """A layer after a graph break."""
    return s.layer(x) if x.sum() < 1e9 else x


@pytest.fixture(params=["whole", "with a graph break", "plain"])
def picky(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model of four columns."""
    if request.param == "plain":
        monkeypatch.setattr("autostream.build.trace", lambda *args: 1 / 0)  # a fault of ours
    layer = nn.Linear(4, 4)
    return layer if request.param == "whole" else Model(branches, layer=layer)


@torch.no_grad()
def test_calls_that_fail_drop_nothing_that_works(picky: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    dispatch = dispatcher(picky, max_signatures=2)
    for rows in (1, 2):
        dispatch(t(rows, 4))
    for rows in (1, 2, 3):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            dispatch(t(rows, 5))
    assert kept(dispatch) == ["2x4", "1x4"]
    assert not [message for message in messages(caplog) if "dropped" in message]
    same(dispatch(t(1, 4)), picky(t(1, 4)))


@torch.no_grad()
def test_what_never_worked_goes_before_what_did(picky: nn.Module) -> None:
    dispatch = dispatcher(picky, max_signatures=3)
    dispatch(t(1, 4))
    for rows in (1, 2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            dispatch(t(rows, 5))
    for rows in (2, 3):
        dispatch(t(rows, 4))
    assert kept(dispatch) == ["3x4", "2x4", "1x4"]


@torch.no_grad()
def test_why_a_model_that_fails_is_not_scheduled_is_known() -> None:
    dispatch = dispatcher(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        dispatch(t(1, 5))
    (report,) = dispatch.reports
    assert "torch.export cannot trace Linear" in report.refusals[0].reason


@torch.no_grad()
def test_preparing_what_fails_drops_nothing_that_works() -> None:
    dispatch = dispatcher(nn.Linear(4, 4), max_signatures=2)
    for shape in ((1, 4), (1, 5), (2, 5)):
        dispatch.prepare(t(*shape))
    assert kept(dispatch) == ["1x5", "1x4"], "there is no room for another"
    dispatch.prepare(t(2, 4))
    assert kept(dispatch) == ["2x4", "1x4"]


@torch.no_grad()
def test_a_schedule_stays_when_a_call_of_it_fails_unless_there_is_no_room() -> None:
    """An inference tensor may be read outside of inference mode, but not written."""
    dispatch = dispatcher(Model(lambda s, x: x.add_(1)), max_signatures=2)
    with torch.inference_mode():
        frozen = {rows: torch.ones(rows) for rows in (1, 2, 3)}
    for rows in (1, 2, 3):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            dispatch(frozen[rows])
    assert kept(dispatch) == ["2", "1"]
    dispatch(t(3))
    assert kept(dispatch) == ["3", "2"]


@torch.no_grad()
def test_calls_for_which_a_schedule_is_unsuitable_keep_to_the_limit() -> None:
    """Inputs in memory that the model writes."""

    def writes(s: Model, x: Tensor) -> Tensor:
        s.b.add_(1)
        return x * 2

    model = Model(writes, b=nn.Buffer(torch.zeros(4)))
    dispatch = dispatcher(model, max_signatures=2)
    for size in (1, 2, 3):
        dispatch(model.b[:size])
    assert modes(dispatch) == ["one stream", "one stream", "plain"]


@torch.no_grad()
@pytest.mark.parametrize("configuration", ["default", "scattered"])
@pytest.mark.parametrize("first", ["good", "bad"])
def test_an_input_that_fails_is_no_reason_to_run_others_plainly(
    first: str, configuration: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(lambda s, x: s.layer(s.table(x).sin()).cos(), table=nn.Embedding(4, 3), layer=nn.Linear(3, 3))
    dispatch = dispatcher(model, **CONFIGURATIONS[configuration](monkeypatch))
    good, bad = torch.tensor([1, 2]), torch.tensor([1, 7])
    for index in (good, bad, good) if first == "good" else (bad, good, bad):
        if index is bad:
            with pytest.raises(IndexError, match="index out of range in self"):
                dispatch(index)
        else:
            same(dispatch(index), model(index))
    assert modes(dispatch) == ["one stream" if configuration == "default" else "threads"]


# What else becomes of calls


@torch.no_grad()
def test_why_it_runs_plainly_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    dispatch = dispatcher(Model(lambda s, x: x))
    for _ in range(3):
        dispatch(t(3, 3).to_sparse())
    assert messages(caplog) == ["Model runs plainly: input 0 has the layout torch.sparse_coo"]
    assert modes(dispatch) == ["plain"]


@torch.no_grad()
def test_static_inputs_without_a_captured_graph_are_the_given_ones() -> None:
    x = t(3, 4)
    (args, kwargs) = dispatcher(nn.ReLU()).static_inputs(input=x)
    assert args == ()
    assert kwargs["input"] is x


def test_inputs_that_lie_elsewhere_cannot_be_prepared_for() -> None:
    with pytest.raises(TargetError, match="example input 0 is on meta, the model on cpu"):
        dispatcher(nn.Linear(4, 4)).prepare(t(3, 4).to("meta"))


@torch.no_grad()
def test_what_is_forgotten_is_made_again() -> None:
    dispatch = dispatcher(nn.Linear(4, 4))
    dispatch(t(3, 4))
    dispatch.forget()
    assert dispatch.reports == ()
    dispatch(t(3, 4))
    assert modes(dispatch) == ["one stream"]


@torch.inference_mode()
def test_flags_that_a_trace_in_another_thread_sets_make_no_entry() -> None:
    """``torch.export`` turns cuDNN off while it traces; who calls meanwhile waits, and looks again."""
    dispatch = dispatcher(nn.Linear(4, 4))
    dispatch.prepare(t(3, 4))

    def call() -> None:
        with torch.inference_mode():
            dispatch(t(3, 4))

    thread = threading.Thread(target=call)
    with preparing, torch.backends.cudnn.flags(enabled=False):
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join()
    assert len(dispatch.reports) == 1
