"""What a call runs: which signatures are kept, and what becomes of calls that fail."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream.dispatch.admission import FREE, IDLE, SERVED
from autostream.dispatch.dispatcher import Dispatcher
from autostream.errors import TargetError, TraceError
from autostream.options import Options
from autostream.runtime.cuda_graph import GraphPools
from autostream.tuning.tune import Tuned
from autostream.utils.locks import preparing
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
    return [record.getMessage() for record in caplog.records if record.name == "autostream.dispatch.dispatcher"]


# Which signatures are kept


@torch.no_grad()
def test_sizes_that_never_come_again_are_not_compiled_without_end(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    dispatch = dispatcher(model)
    for rows in range(1, FREE + 4):
        same(dispatch(t(rows, 4)), model(t(rows, 4)))
    assert modes(dispatch) == ["one stream"] * FREE + ["plain"]
    (message,) = messages(caplog)
    assert "pad them to a few sizes with dynamic=" in message
    same(dispatch(t(2, 4)), model(t(2, 4)))
    assert kept(dispatch)[0] == "2x4", "those that are there serve as ever"


@torch.no_grad()
def test_a_size_that_stays_is_compiled_whatever_came_before() -> None:
    dispatch = dispatcher(nn.ReLU())
    for size in range(1, FREE + 1):
        dispatch(t(size, 4))
    for _ in range(SERVED):
        assert "9x4" not in kept(dispatch)
        dispatch(t(9, 4))
    dispatch(t(9, 4))
    assert kept(dispatch)[0] == "9x4"


@torch.no_grad()
def test_a_state_that_stays_is_captured_however_many_there_were_before(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Stretched(3, 4)
    dispatch = dispatcher(net, max_signatures=2)
    for scale in (1.0, 2.0, 3.0):
        net.scale = scale
        dispatch(t(2, 3))
    assert modes(dispatch) == ["one stream", "one stream", "plain"]
    for _ in range(IDLE):
        dispatch(t(2, 3))
    monkeypatch.setattr(Dispatcher, "_dispatched", lambda *_, **__: pytest.fail("it has no replay"))
    same(dispatch(t(2, 3)), net(t(2, 3)))


class Stretched(nn.Linear):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@torch.no_grad()
def test_calls_at_which_the_model_fails_do_not_keep_later_ones_from_a_schedule() -> None:
    dispatch = dispatcher(nn.Linear(3, 4))
    for wrong in range(4, 12):
        with pytest.raises(RuntimeError):
            dispatch(t(2, wrong))
    for _ in range(SERVED + 1):
        dispatch(t(2, 3))
    assert modes(dispatch)[0] == "one stream"
    assert {*modes(dispatch)[1:]} == {"plain"}, "and it is said why those ran plainly"


@torch.no_grad()
def test_there_are_as_many_as_max_signatures_allows(caplog: pytest.LogCaptureFixture) -> None:
    dispatch = dispatcher(nn.ReLU(), max_signatures=2)
    for size in (1, 2, 3, 3):
        same(dispatch(-t(size)), torch.relu(-t(size)))
    assert kept(dispatch) == ["2", "1", "some calls"]
    (message,) = messages(caplog)
    assert "as many signatures as max_signatures allows are compiled" in message


def by_number(s: Model, x: Tensor) -> Tensor:
    return x * s.scale


@torch.no_grad()
def test_a_number_that_is_another_in_each_call_ends_plainly_and_is_named() -> None:
    model = Model(by_number, scale=0.0)
    dispatch = dispatcher(model)
    for number in range(FREE + 12):
        model.scale = float(number)
        assert dispatch(torch.ones(2)).tolist() == [number, number]
    plain = dispatch.reports[-1]
    assert plain.mode == "plain"
    assert "scale" in plain.refusals[0].reason
    with pytest.raises(TraceError, match="scale"):
        strict = dispatcher(model, strict=True)
        for number in range(FREE + 12):
            model.scale = float(number)
            strict(torch.ones(2))


@torch.no_grad()
def test_what_is_as_it_was_again_needs_no_new_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(by_number, scale=0.0)
    dispatch = dispatcher(model)
    for scale in (1.0, 2.0):
        model.scale = scale
        dispatch(t(4))
    monkeypatch.setattr("autostream.dispatch.dispatcher.capture", lambda *args: pytest.fail("captured again"))
    for scale in (1.0, 2.0, 1.0):
        model.scale = scale
        for _ in range(2):
            same(dispatch(t(4)), t(4) * scale)


def branches(s: Model, x: Tensor) -> Tensor:
    """A layer after a graph break."""
    return s.layer(x) if x.sum() < 1e9 else x


@pytest.fixture(params=["whole", "with a graph break", "plain"])
def picky(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model of four columns."""
    if request.param == "plain":
        monkeypatch.setattr("autostream.dispatch.dispatcher.names_of", lambda *args: 1 / 0)  # a fault of ours
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
    """In turn, so that the second of each is a schedule that is there; and twice, for the short way."""
    dispatch, x = dispatcher(Scaled(), policy="sequential"), torch.ones(2, requires_grad=recorded)
    for scale in (1.0, 1.0, 2.0, 2.0, 1.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        with torch.set_grad_enabled(recorded):
            assert dispatch(x).tolist() == [scale, scale]


@torch.no_grad()
def test_calls_that_fail_drop_nothing_that_works(picky: nn.Module) -> None:
    dispatch = dispatcher(picky)
    for rows in (1, 2):
        dispatch(t(rows, 4))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            dispatch(t(1, 5))
    same(dispatch(t(1, 4)), picky(t(1, 4)))
    same(dispatch(t(2, 4)), picky(t(2, 4)))


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


@torch.no_grad()
def test_all_signatures_and_pieces_of_a_model_share_pools_and_copies_of_it_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[GraphPools] = []

    def spy(tuned: Tuned, arguments: object, pools: GraphPools) -> Tuned:
        seen.append(pools)
        return tuned

    monkeypatch.setattr("autostream.dispatch.scheduled_program.pooled", spy)

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
    model, x = nn.ReLU(), t(3, 3).to_sparse()
    dispatch = dispatcher(model)
    (args, kwargs) = dispatch.static_inputs(x)
    assert args[0] is x
    assert kwargs == {}
    assert modes(dispatch) == ["plain"]
    with pytest.raises(TraceError, match="layout"):
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
    assert kept(dispatch) == ["2x4", "1x4"], "who asks for it has it, whatever max_signatures is"


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
