"""The dispatcher: which signatures are compiled, and what happens when a call fails."""

from __future__ import annotations

import logging
import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.dispatch.admission import COMPILATION_CALLS, FREE_COMPILATIONS, HITS_PER_COMPILATION
from autostream.dispatch.captured_call import CapturedCall
from autostream.dispatch.dispatcher import Dispatcher
from autostream.errors import TargetError, TraceError
from autostream.frontend.capture import capture
from autostream.options import Options
from autostream.utils.locks import preparing
from tests.semantics import CONFIGURATIONS, Model, same, t

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def dispatcher(model: nn.Module, **options: Any) -> Dispatcher:
    return Dispatcher(model, Options(**options))


def modes(dispatch: Dispatcher) -> list[str]:
    return [report.mode for report in dispatch.reports]


def kept(dispatch: Dispatcher) -> list[str]:
    """The shapes of the signatures, the most recently used first."""
    return [report.signature.partition(":")[0] for report in dispatch.reports]


# Which signatures are compiled


class Multiplied(nn.Module):
    """Multiplies by a number of its own, and by one of the call."""

    own = 1

    def forward(self, x: Tensor, times: float = 1, *, name: str = "") -> Tensor:
        return x * self.own * times


@pytest.mark.parametrize("which", ["an argument", "an argument by name", "an attribute"])
@torch.no_grad()
def test_a_number_that_changes_is_named_once_with_what_to_do(which: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Multiplied()
    dispatch = dispatcher(model)
    for number in range(FREE_COMPILATIONS + 4):
        x = t(2, 4)
        if which == "an attribute":
            model.own = number
            same(dispatch(x), x * number)
        else:
            same(dispatch(x, number) if which == "an argument" else dispatch(x, times=number), x * number)
    line = re.escape("dispatch/test_dispatcher.py")
    attribute = rf"own has another value now: keep it in a tensor, or pass .* \(.*{line}:\d+: return x \* self.own"
    argument = "a number in times changes: pass it as a tensor, or as a flag what Python decides by it"
    assert len(re.findall(attribute if which == "an attribute" else argument, caplog.text)) == 1
    assert caplog.text.count("runs plainly") == 1


@torch.no_grad()
def test_new_sizes_are_compiled_until_they_recur_too_rarely(caplog: pytest.LogCaptureFixture) -> None:
    """Four at once; after that, a size is compiled once it was called 16 times."""
    model = nn.Linear(4, 4)
    dispatch = dispatcher(model)
    for rows in range(1, FREE_COMPILATIONS + 4):
        same(dispatch(t(rows, 4)), model(t(rows, 4)))
    assert modes(dispatch) == ["one stream"] * FREE_COMPILATIONS + ["plain"]
    assert caplog.text.count("pad them to a few sizes with dynamic=") == 1, "the reason is logged once"
    same(dispatch(t(2, 4)), model(t(2, 4)))
    assert kept(dispatch)[0] == "2x4", "compiled ones are still used"
    for _ in range(HITS_PER_COMPILATION):
        assert "9x4" not in kept(dispatch)
        dispatch(t(9, 4))
    dispatch(t(9, 4))
    assert kept(dispatch)[0] == "9x4"
    dispatch.forget()
    same(dispatch(t(9, 4)), model(t(9, 4)))
    assert kept(dispatch) == ["9x4", "some calls"]


@torch.no_grad()
def test_max_signatures_limits_what_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    dispatch = dispatcher(nn.ReLU(), max_signatures=2)
    for size in (1, 2, 3, 3):
        same(dispatch(-t(size)), torch.relu(-t(size)))
    assert kept(dispatch) == ["2", "1", "some calls"]
    assert caplog.text.count("as many signatures as max_signatures allows are compiled") == 1


@torch.no_grad()
def test_a_number_is_captured_after_a_thousand_calls_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: where as many others as allowed were captured before, it ran eagerly for ever."""
    captures: list[object] = []
    monkeypatch.setattr("autostream.dispatch.entries.capture", lambda *call: (captures.append(call), capture(*call))[1])
    model = Model(by_number, scale=0.0)
    dispatch = dispatcher(model, max_signatures=2)
    for scale in (1.0, 2.0, 1.0, 2.0, 3.0):
        model.scale = scale
        same(dispatch(t(2)), t(2) * scale)
    assert modes(dispatch) == ["one stream", "one stream", "plain"]
    assert len(captures) == 2, "earlier numbers need no new capture"
    for _ in range(COMPILATION_CALLS):
        dispatch(t(2))
    same(dispatch(t(2)), t(2) * 3.0)
    assert len(captures) == 3
    assert modes(dispatch) == ["one stream", "one stream", "plain"]


def by_number(s: Model, x: Tensor) -> Tensor:
    return x * s.scale


@torch.no_grad()
def test_an_integer_that_no_code_reads_is_no_part_of_a_signature() -> None:
    """Such as the number of a batch. One that is only returned is that of the call; one that is read has a graph."""

    def model(x: Tensor, index: int, times: int = 2, *, returned: int = 0) -> tuple[Tensor, int]:
        return x * times, returned

    dispatch = autostream.optimize(model, policy="sequential")
    for at in range(3 * FREE_COMPILATIONS):
        same(dispatch(t(2), at, returned=at), model(t(2), at, returned=at))
    assert [report.mode for report in dispatch.reports] == ["one stream"]
    for at in range(6):
        same(dispatch(t(2), at, 3 + at % 2), model(t(2), at, 3 + at % 2))
    assert [report.mode for report in dispatch.reports] == ["one stream"] * 3


@torch.no_grad()
def test_calls_that_differ_in_an_integer_that_no_code_reads_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not those with another integer or a number of another type, which is guarded or not known to be unread."""

    def model(x: Tensor, index: int, sizes: dict[str, int]) -> Tensor:
        return x * sizes["times"]

    dispatch = autostream.optimize(model, policy="sequential")
    for index in range(2):
        same(dispatch(t(2), index, {"times": 2}), t(2) * 2)
    with monkeypatch.context() as patch:
        patch.delattr("autostream.dispatch.dispatcher.Dispatcher._dispatch")
        same(dispatch(t(2), 7, {"times": 2}), t(2) * 2)
        with pytest.raises(AttributeError):
            dispatch(t(2), 7, {"times": 3})
        with pytest.raises(AttributeError):
            dispatch(t(2), True, {"times": 2})
    same(dispatch(t(2), 8, {"times": 3}), t(2) * 3)
    same(dispatch(t(2), 9, {"times": 2}), t(2) * 2)


@torch.no_grad()
def test_an_integer_that_a_model_keeps_is_that_of_the_call() -> None:
    model = Model(keeping, index=-1)
    dispatch = dispatcher(model)
    for index in (0, 1, 2, 1, 0, 2, 3):
        dispatch(t(2), index)
        assert model.index == index


def keeping(s: Model, x: Tensor, index: int) -> Tensor:
    s.index = index
    return x + 1


@torch.no_grad()
def test_an_integer_that_a_split_call_reads_does_not_compile_without_end() -> None:
    def model(x: Tensor, times: int) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * times

    dispatch = autostream.optimize(model, policy="sequential")
    for times in range(3 * FREE_COMPILATIONS):
        same(dispatch(t(2), times), model(t(2), times))
    assert [report.mode for report in dispatch.reports] == [*["graph breaks"] * FREE_COMPILATIONS, "plain"]


@torch.no_grad()
def test_a_number_that_differs_in_each_call_runs_eagerly_and_is_named() -> None:
    model = Model(by_number, scale=0.0)
    dispatch = dispatcher(model)
    for number in range(FREE_COMPILATIONS + 12):
        model.scale = float(number)
        assert dispatch(torch.ones(2)).tolist() == [number, number]
    plain = dispatch.reports[-1]
    assert plain.mode == "plain"
    assert "scale" in plain.refusals[0].reason
    with pytest.raises(TraceError, match="scale"):
        strict = dispatcher(model, strict=True)
        for number in range(FREE_COMPILATIONS + 12):
            model.scale = float(number)
            strict(torch.ones(2))


def branches(s: Model, x: Tensor) -> Tensor:
    return s.layer(x) if x.sum() < 1e9 else x


@pytest.fixture(params=["whole", "with a graph break", "plain"])
def picky(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    if request.param == "plain":
        monkeypatch.setattr("autostream.dispatch.entries.names_of", lambda *args: 1 / 0)  # a fault of ours
    layer = nn.Linear(4, 4)
    return layer if request.param == "whole" else Model(branches, layer=layer)


SCALE = 1.0


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scaled(x)


@pytest.mark.parametrize("recorded", [False, True])
def test_numbers_that_functions_read_elsewhere_are_guarded(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Back and forth, so that an entry is found again; and twice each, for the fast path."""
    dispatch, x = dispatcher(Scaled(), policy="sequential"), torch.ones(2, requires_grad=recorded)
    for scale in (1.0, 1.0, 2.0, 2.0, 1.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        with torch.set_grad_enabled(recorded):
            assert dispatch(x).tolist() == [scale, scale]


@torch.no_grad()
def test_calls_like_an_earlier_one_take_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda s, x: {"sum": x + s.w, "given": x, "many": [x.sin(), None]}, w=nn.Parameter(t(2)))
    dispatch = dispatcher(model)
    dispatch(t(2))
    monkeypatch.setattr(CapturedCall, "__call__", lambda *_: pytest.fail("the slow path"))
    x = t(2) * 2
    value = dispatch(x)
    same(value, model(x))
    assert value["given"] is x


# Calls that fail


@torch.no_grad()
def test_calls_that_fail_leave_nothing_and_drop_nothing(picky: nn.Module) -> None:
    dispatch = dispatcher(picky, max_signatures=2)
    dispatch(t(1, 4))
    for prepare in (dispatch.prepare, dispatch.static_inputs):
        with pytest.raises(TargetError, match=r"itself fails at .* inputs .*shapes cannot be multiplied"):
            prepare(t(1, 5))
    assert kept(dispatch) == ["1x4"]
    dispatch(t(2, 4))
    for wrong in range(5, 13):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            dispatch(t(1, wrong))
    for rows in (1, 2):
        same(dispatch(t(rows, 4)), picky(t(rows, 4)))
    dispatch.prepare(t(3, 4))
    assert {"3x4", "2x4", "1x4"} <= {*kept(dispatch)}, "prepare compiles beyond max_signatures"


@torch.no_grad()
def test_calls_that_fail_do_not_count_as_signatures_and_have_no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: four mistakes in a notebook, and the right call was not scheduled."""
    dispatch = dispatcher(nn.Linear(3, 4))
    for wrong in [*range(4, 12), *[4] * 8]:
        with pytest.raises(RuntimeError):
            dispatch(t(2, wrong))
    dispatch(t(2, 3))
    assert modes(dispatch)[0] == "one stream"
    assert {*modes(dispatch)[1:]} == {"plain"}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], "the model's errors suffice"


@torch.no_grad()
@pytest.mark.parametrize("configuration", ["default", "scattered"])
@pytest.mark.parametrize("first", ["good", "bad"])
def test_an_input_that_fails_does_not_make_others_run_eagerly(
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


def or_else(s: Model, x: Tensor) -> Tensor:
    try:
        return torch.linalg.cholesky(x + s.b).exp()
    except RuntimeError:
        return x * 2


@pytest.mark.usefixtures("schedules_may_fail")
@pytest.mark.parametrize("configuration", ["default", "scattered"])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("earlier", [0, 1, 3])
def test_errors_that_the_model_catches_are_not_raised(
    earlier: int, gradients: bool, configuration: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The schedule fails, so the model runs eagerly from then on; after an earlier call the fast path has failed."""
    model = Model(or_else, b=nn.Parameter(torch.eye(4), requires_grad=gradients))
    dispatch = dispatcher(model, **CONFIGURATIONS[configuration](monkeypatch))
    good, bad = torch.eye(4) * 5, -torch.ones(4, 4)
    with torch.set_grad_enabled(gradients):
        for x in [good] * earlier + [bad, good, bad]:
            ours, theirs = dispatch(x), model(x)
            same(ours, theirs)
            assert ours.requires_grad == theirs.requires_grad
    assert modes(dispatch) == ["plain"]
    if earlier and not (gradients and configuration == "default"):  # which is left to the model on a CPU
        (refusal,) = dispatch.reports[0].refusals
        assert "its schedule fails at some inputs (_LinAlgError: linalg.cholesky" in refusal.reason
        assert refusal.reason in caplog.text
        with torch.set_grad_enabled(gradients), pytest.raises(torch.linalg.LinAlgError):
            dispatcher(model, strict=True)(bad)


# What else it does


@torch.no_grad()
def test_sparse_inputs_run_eagerly_and_static_inputs_without_a_capture_are_the_arguments(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dispatch, sparse = dispatcher(nn.ReLU()), t(3, 3).to_sparse()
    for x in (t(3, 4), sparse):
        args, kwargs = dispatch.static_inputs(input=x)
        assert args == ()
        assert kwargs["input"] is x
    dispatch(sparse)
    assert modes(dispatch) == ["one stream", "plain"]
    assert caplog.text.count("ReLU runs plainly: input 0 has the layout torch.sparse_coo") == 1
    assert dispatch.lowered(sparse) is None
    with pytest.raises(TraceError, match="layout"):
        dispatcher(nn.ReLU(), strict=True).static_inputs(sparse)


@torch.inference_mode()
def test_flags_that_a_trace_in_another_thread_sets_do_not_compile_another_signature() -> None:
    """``torch.export`` turns cuDNN off while it traces; a call in another thread waits, and checks again."""
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


def test_the_first_attention_does_not_compile_another_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch sets the order of its attention kernels in the first call."""
    orders = [(1, 2, 0)]
    monkeypatch.setattr("autostream.frontend.settings._priorities", lambda: orders[-1])

    def order() -> None:
        if len(orders) < 2:
            orders.append((3, 1, 2))

    monkeypatch.setattr("autostream.frontend.settings._order_attention", order)
    fast = Dispatcher(nn.Linear(2, 2), Options.parse({"policy": "sequential"}))
    for _ in range(2):
        fast(torch.ones(2))  # whose gradients are recorded
    assert len(fast.reports) == 1
    assert len(orders) == 2
