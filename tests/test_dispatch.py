"""What a call runs: which signatures are kept and which go, and what becomes of calls that fail."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from autostream.build import Scheduled
from autostream.entries import Entry, Subject, entry_of
from autostream.tracing.functions import module_of
from torch import Tensor, nn

from autostream.dispatch import Dispatcher
from autostream.errors import TargetError, TraceError
from autostream.execution.cuda_graph import GraphPools
from autostream.frontend.signature import Signature
from autostream.options import Options
from autostream.preparing import preparing
from autostream.tuning import Tuned
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


def good(dispatch: Dispatcher) -> list[str]:
    """Those that are kept for calls with four columns."""
    return [shape for shape in kept(dispatch) if shape.endswith("x4")]


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


def by_number(s: Model, x: Tensor) -> Tensor:
    return x * s.scale


def by_layout(s: Model, x: Tensor) -> Tensor:
    return x + s.w


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Scheduled]:
    """The schedules that are made."""
    found, init = [], Scheduled.__init__

    def noted(entry: Scheduled, *args: Any) -> None:
        found.append(entry)
        init(entry, *args)

    monkeypatch.setattr(Scheduled, "__init__", noted)
    return found


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "change"),
    [
        (Model(by_number, scale=0.0), lambda model: setattr(model, "scale", model.scale + 1)),
        (Model(by_layout, w=nn.Buffer(t(4, 4))), lambda model: setattr(model.w, "data", model.w.data.t())),
    ],
    ids=["a number", "a layout"],
)
def test_what_changes_in_every_call_is_not_scheduled_anew_without_end(
    model: Any, change: Callable[[Any], object], made: list[Scheduled], caplog: pytest.LogCaptureFixture
) -> None:
    dispatch = dispatcher(model, max_signatures=2)
    for _ in range(8):
        change(model)
        same(dispatch(t(4, 4)), model(t(4, 4)))
    assert len(made) == 1 + 2
    assert modes(dispatch) == ["one stream", "plain"]
    assert "changes in call after call" in dispatch.reports[-1].refusals[0].reason
    (message,) = messages(caplog)
    assert "give the model what changes as a tensor" in message


@torch.no_grad()
def test_what_is_as_it_was_again_is_scheduled_and_so_is_another_after_many_calls(
    made: list[Scheduled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way calls take: in the plain model too, or it would never have a schedule again."""
    monkeypatch.setattr("autostream.dispatch._WORTH", 5)
    model = Model(by_number, scale=0.0)
    dispatch = dispatcher(model, max_signatures=1)

    def call(scale: float) -> int:
        model.scale = scale
        same(dispatch(t(4, 4)), t(4, 4) * scale)
        return len(made)

    assert [call(scale) for scale in (0.0, 1.0, 2.0, 3.0)] == [1, 2, 2, 2]
    assert [call(1.0) for _ in range(3)] == [2] * 3
    assert call(2.0) == 3
    assert call(3.0) == 3
    made[-1]._run = lambda arguments: pytest.fail("it is known to have changed")  # type: ignore[method-assign]
    assert call(4.0) == 3
    assert call(4.0) == 4
    assert [call(4.0) for _ in range(3)] == [4] * 3


@torch.no_grad()
def test_many_shapes_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="autostream.dispatch")
    dispatch = dispatcher(nn.ReLU(), max_signatures=2, policy="sequential")
    for rows in range(1, 6):
        dispatch(t(rows, 4))
    assert kept(dispatch) == ["5x4", "4x4"]
    dropped = [record for record in caplog.records if "dropped the schedule" in record.getMessage()]
    assert [record.levelname for record in dropped] == ["WARNING", "INFO", "INFO"]
    assert "see max_signatures and dynamic" in dropped[0].getMessage()


def entries_made(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[Signature]:
    """The signatures that an entry is made for, of this model and not of its pieces."""
    made: list[Signature] = []

    def noted(subject: Subject, *call: Any) -> Entry:
        if subject.model is model:
            made.append(call[-1])
        return entry_of(subject, *call)

    monkeypatch.setattr("autostream.dispatch.entry_of", noted)
    return made


def branches(s: Model, x: Tensor) -> Tensor:
    """A layer after a graph break."""
    return s.layer(x) if x.sum() < 1e9 else x


@pytest.fixture(params=["whole", "with a graph break", "plain"])
def picky(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model of four columns."""
    if request.param == "plain":
        monkeypatch.setattr("autostream.tracing.export._export", lambda *args: 1 / 0)  # a fault of ours
    layer = nn.Linear(4, 4)
    return layer if request.param == "whole" else Model(branches, layer=layer)


SCALE = 1.0


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scaled(x)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("model", [module_of(scaled), Scaled()], ids=["a function", "a module"])
def test_numbers_that_functions_read_elsewhere_are_part_of_a_signature(
    model: nn.Module, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turn, so that the second of each is a schedule that is there; and twice, for the short way."""
    dispatch, x = dispatcher(model, policy="sequential"), torch.ones(2, requires_grad=recorded)
    for scale in (1.0, 1.0, 2.0, 2.0, 1.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        with torch.set_grad_enabled(recorded):
            assert dispatch(x).tolist() == [scale, scale]
    assert modes(dispatch) == ["forward and backward" if recorded else "one stream"] * 2


@torch.no_grad()
def test_a_number_that_is_another_in_each_call_ends_at_the_limit_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch = dispatcher(module_of(scaled), max_signatures=2, policy="sequential")
    for number in range(5):
        monkeypatch.setitem(globals(), "SCALE", float(number))
        assert dispatch(torch.ones(2)).tolist() == [number, number]
    assert modes(dispatch) == ["one stream", "one stream", "plain"]
    assert dispatch.reports[-1].refusals[0].reason.endswith("meets another: SCALE changed")
    assert dispatch(torch.ones(3)).tolist() == [4, 4, 4]
    assert kept(dispatch)[:2] == ["3", "2"], "other shapes take the place of the oldest, as ever"


@torch.no_grad()
@pytest.mark.parametrize("use", [Dispatcher.prepare, Dispatcher.static_inputs])
def test_what_is_prepared_counts_as_well(use: Callable[..., Any], picky: nn.Module) -> None:
    dispatch = dispatcher(picky, max_signatures=2)
    for rows in (1, 2, 3):
        use(dispatch, t(rows, 4))
    assert kept(dispatch) == ["3x4", "2x4"]


@torch.no_grad()
def test_calls_that_fail_drop_nothing_that_works(picky: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    dispatch = dispatcher(picky, max_signatures=2)
    for rows in (1, 2):
        dispatch(t(rows, 4))
    for rows in (1, 2, 3):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            dispatch(t(rows, 5))
    assert good(dispatch) == ["2x4", "1x4"]
    assert len(dispatch.reports) <= 3, "the last that failed may stay"
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
    assert good(dispatch) == ["3x4", "2x4", "1x4"]
    assert len(dispatch.reports) <= 4, "the last that failed may stay"


@torch.no_grad()
def test_why_a_model_that_fails_is_not_scheduled_is_known() -> None:
    dispatch = dispatcher(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        dispatch(t(1, 5))
    (report,) = dispatch.reports
    assert "torch.export cannot trace Linear" in report.refusals[0].reason


def increments(s: Model, x: Tensor) -> Tensor:
    """Fails for inference tensors outside of inference mode, where they may be read, but not written."""
    return x.add_(1)


@torch.inference_mode()
def read_only(size: int) -> Tensor:
    return torch.ones(size)


@torch.no_grad()
def test_one_schedule_whose_calls_fail_is_kept_beyond_the_limit() -> None:
    dispatch = dispatcher(Model(increments), max_signatures=2)
    for size in (1, 2, 3, 4):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            dispatch(read_only(size))
    assert kept(dispatch) == ["4", "3", "2"]
    dispatch(t(4))
    dispatch(t(3))
    assert kept(dispatch) == ["3", "4", "2"]
    dispatch(t(2))
    assert kept(dispatch) == ["2", "3"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "works", "fails"),
    [(Model(increments), t(1), read_only(2)), (Model(branches, layer=nn.Linear(4, 4)), t(1, 4), t(1, 5))],
)
def test_what_calls_that_fail_run_is_made_once(
    model: nn.Module, works: Tensor, fails: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch = dispatcher(model, max_signatures=1)
    made = entries_made(model, monkeypatch)
    dispatch(works)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            dispatch(fails)
    dispatch(works)
    assert len(made) == 2


@torch.no_grad()
@pytest.mark.parametrize("forgets", [False, True])
def test_what_lost_its_place_in_its_first_call_gets_it_back(forgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autostream.tracing.export._export", lambda *args: 1 / 0)  # so that it runs plainly

    def calls_itself(s: Model, x: Tensor) -> Tensor:
        if len(x) == 3:
            dispatch(x[:1])
            dispatch(x[:2])
            assert kept(dispatch) == ["2x4"]
            if forgets:
                dispatch.forget()
        return x + 1

    dispatch = dispatcher(Model(calls_itself), max_signatures=1)
    dispatch(t(3, 4))
    assert kept(dispatch) == ([] if forgets else ["3x4"])


@torch.no_grad()
def test_the_call_that_ends_last_is_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autostream.tracing.export._export", lambda *args: 1 / 0)  # so that it runs plainly
    dispatch = dispatcher(Model(lambda s, x: dispatch(x[:1]) if len(x) > 1 else x + 1), max_signatures=1)
    dispatch(t(2, 4))
    assert kept(dispatch) == ["2x4"]


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


def or_else(s: Model, x: Tensor) -> Tensor:
    """What many do with matrices that nearly are positive definite."""
    try:
        return torch.linalg.cholesky(x + s.b).exp()
    except RuntimeError:
        return x * 2


@pytest.mark.usefixtures("schedules_may_fail")
@pytest.mark.parametrize("configuration", ["default", "scattered"])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("earlier", [0, 1, 3])
def test_what_the_model_catches_nobody_sees(
    earlier: int, gradients: bool, configuration: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the first call that fails; the second one takes the short way, where there is one."""
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


@torch.no_grad()
def test_strict_raises_also_what_the_model_catches() -> None:
    model = Model(or_else, b=nn.Parameter(torch.eye(4)))
    dispatch = dispatcher(model, strict=True)
    same(dispatch(torch.eye(4)), model(torch.eye(4)))
    with pytest.raises(torch.linalg.LinAlgError):
        dispatch(-torch.ones(4, 4))
    assert modes(dispatch) == ["one stream"]


# Pools of captured graphs


@torch.no_grad()
def test_all_signatures_and_pieces_of_a_model_share_pools_and_copies_of_it_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[GraphPools] = []

    def spy(tuned: Tuned, arguments: object, pools: GraphPools) -> Tuned:
        seen.append(pools)
        return tuned

    monkeypatch.setattr("autostream.build.pooled", spy)

    def pools_of(dispatch: Dispatcher, *calls: Tensor) -> list[GraphPools]:
        seen.clear()
        for x in calls:
            dispatch(x)
        return list(seen)

    whole, split = dispatcher(nn.ReLU()), dispatcher(Model(lambda s, x: x.sin() if x.sum() > 0 else x.cos()))
    ours, again = pools_of(whole, t(2), t(3))
    (copied,) = pools_of(copy.deepcopy(whole), t(2))
    pieces = pools_of(split, t(2))
    assert again is ours
    assert copied is not ours
    assert len(pieces) > 1
    assert all(piece is pieces[0] for piece in pieces)
    assert pieces[0] is not ours


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


@torch.no_grad()
def test_static_inputs_of_calls_that_go_to_the_plain_model_are_the_given_ones() -> None:
    model, x = nn.Sequential(nn.ReLU()), t(3, 4)
    model[0].register_forward_hook(lambda *args: None)
    dispatch = dispatcher(model)
    (args, kwargs) = dispatch.static_inputs(x, flag=True)
    assert args[0] is x
    assert kwargs == {"flag": True}
    assert modes(dispatch) == ["plain"]
    with pytest.raises(TraceError, match="forward hooks"):
        dispatcher(model, strict=True).static_inputs(x)


@torch.no_grad()
def test_the_graph_that_runs_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda s, x: x.sin() + x.cos() * x.exp())
    graph = dispatcher(model, **CONFIGURATIONS["scattered"](monkeypatch)).lowered(t(3))
    assert graph is not None
    assert "fork('cpu', " in graph.code
    assert dispatcher(model).lowered(t(3, 3).to_sparse()) is None


def test_nothing_is_prepared_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSTREAM_DISABLE", "1")
    dispatch = dispatcher(Model(branches, layer=nn.Linear(4, 4)), strict=True)
    x = t(3, 4)
    dispatch.prepare(x)
    (args, kwargs) = dispatch.static_inputs(x)
    assert args[0] is x
    assert kwargs == {}
    assert dispatch.reports == ()


@torch.no_grad()
def test_its_methods_can_be_pickled() -> None:
    dispatch = dispatcher(nn.Linear(4, 4), streams=2)
    dispatch(t(3, 4))
    prepare = pickle.loads(pickle.dumps(dispatch.prepare))
    prepare(t(3, 4))
    twin = prepare.__self__
    assert twin.options == dispatch.options
    assert modes(twin) == ["one stream"]
    same(twin(t(3, 4)), dispatch(t(3, 4)))


@torch.no_grad()
def test_a_trace_of_torch_fx_in_another_thread_is_none_of_ours() -> None:
    calls: list[int] = []
    called = calls.append  # a model that names the list would be refused
    dispatch = dispatcher(Model(lambda s, x: called(1) or x + 1))
    dispatch(x=t(3))
    known = len(calls)

    def traced(x: Any) -> Any:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(60)
        return x

    @torch.no_grad()
    def call() -> None:
        same(dispatch(x=t(3)), t(3) + 1)
        calls.append(0)

    torch.fx.symbolic_trace(traced)
    assert calls[known:] == [0], "the call was made, and did not run the model"


def test_inputs_that_lie_elsewhere_cannot_be_prepared_for() -> None:
    with pytest.raises(TargetError, match="example input 0 is on meta, the model on cpu"):
        dispatcher(nn.Linear(4, 4)).prepare(t(3, 4).to("meta"))


@torch.no_grad()
def test_inputs_at_which_the_model_fails_cannot_be_prepared_for_and_leave_nothing(picky: nn.Module) -> None:
    dispatch = dispatcher(picky, max_signatures=1)
    dispatch(t(1, 4))
    for prepare in (dispatch.prepare, dispatch.static_inputs):
        with pytest.raises(TargetError, match=r"itself fails at .* inputs .*shapes cannot be multiplied"):
            prepare(t(1, 5))
    assert kept(dispatch) == ["1x4"]
    dispatch.prepare(t(2, 4))
    assert kept(dispatch) == ["2x4"]


@torch.no_grad()
def test_a_model_is_tried_once_alone() -> None:
    calls: list[int] = []
    called = calls.append  # of a list that the model names, what a trial puts there is taken out
    dispatch = dispatcher(Model(lambda s, x: called(1) or branches(s, x), layer=nn.Linear(4, 4)))
    dispatch.prepare(t(3, 4))
    known = len(calls)
    dispatch.prepare(t(3, 4))
    dispatch.static_inputs(t(3, 4))
    assert len(calls) == known


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


def test_the_first_to_attend_changes_no_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch sets the order of its attention kernels then, if nobody had it do so before."""
    orders = [(1, 2, 0)]
    monkeypatch.setattr("autostream.frontend.numerics._priorities", lambda: orders[-1])
    monkeypatch.setattr("autostream.dispatch.order_attention", lambda: orders.append((3, 1, 2)))
    fast = Dispatcher(nn.ReLU(), Options())
    for _ in range(2):
        fast(torch.ones(2))
    assert len(fast.reports) == 1
    assert len(orders) == 2


head = nn.Linear(4, 4)


def with_a_head(x: Tensor) -> Tensor:
    return head(x)  # type: ignore[no-any-return]


@torch.no_grad()
def test_modules_that_are_others_in_each_call_end_at_a_limit_and_the_model_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each change takes a schedule anew, which takes seconds."""
    heads, x = [nn.Linear(4, 4) for _ in range(2)], torch.randn(2, 4)
    dispatcher = Dispatcher(module_of(with_a_head), Options(max_signatures=3))
    made = entries_made(dispatcher.model, monkeypatch)
    for number in range(12):
        monkeypatch.setitem(globals(), "head", heads[number % 2])
        torch.testing.assert_close(dispatcher(x), heads[number % 2](x))
    assert len(made) <= 4
    assert "the modules that it has or refers to" in dispatcher.reports[-1].refusals[-1].reason
    for _ in range(2):
        torch.testing.assert_close(dispatcher(x), head(x))
    assert len(made) <= 5, "it holds still now, and has a schedule"
    assert dispatcher.reports[0].mode == "one stream"
