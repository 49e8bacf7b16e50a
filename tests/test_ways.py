"""A graph for each way through a model that branches on data: what is taken, given up and told."""

from __future__ import annotations

import copy
import json
import pickle
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autostream import MismatchError, TargetError, TraceError, explain, optimize
from autostream.dispatch import Dispatcher
from autostream.entries import Subject
from autostream.options import Options
from autostream.reporting.report import Report
from autostream.tracing.branches import Way
from autostream.tracing.expecting import OtherWay
from autostream.frontend.signature import signature_of
from autostream.frontend.tree import flatten
from autostream.ways import ShortWays, Ways
from tests.cuts import let_be_cut
from tests.random_modules import TURNS, RandomModule, check, random_modules
from tests.semantics import Model, check_same, same, tensors_in
from tests.threads import in_threads


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> Iterator[None]:
    """Models on the CPU are cut as those on a GPU are; no gradients are recorded."""
    let_be_cut(monkeypatch, lambda op: op.chooses)
    monkeypatch.setattr(Subject, "uses_gpu", lambda *_: True)
    with torch.no_grad():
        yield


def t(*shape: int, seed: int = 0, mean: float = 0.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + mean


def halves(s: Model, x: Tensor) -> Tensor:
    """Two ways, by the sign of the sum."""
    y = (x @ s.w).sin() + x
    y = y / 2 if x.sum() > 0 else -y.exp()
    return y.cos() + y.tanh()


def in_turn(s: Model, x: Tensor) -> Tensor:
    """Four ways; the second value is asked for on each of the first two."""
    y = (x @ s.w).sin()
    y = y / 2 if x.sum() > 0 else -y.exp()
    return y.cos() if x.max() > 10 else y.tanh() + 1


def model(function: Callable[..., Any] = halves) -> Model:
    return Model(function, w=nn.Parameter(t(4, 4, seed=1)))


UP, DOWN = t(4, 4, mean=3), t(4, 4, mean=-3)


def ways_of(fast: Any) -> Ways:
    (entry,) = fast._autostream._entries.values()
    assert isinstance(entry, Ways)
    return entry


def known(fast: Any) -> list[Way]:
    return list(ways_of(fast)._known)


def reasons(report: Report) -> str:
    return "\n".join(refusal.reason for refusal in report.refusals)


def test_each_way_is_scheduled_in_the_first_call_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model()
    fast = optimize(plain)
    for x, ways in ((UP, [(True,)]), (UP, [(True,)]), (DOWN, [(True,), (False,)])):
        same(fast(x), plain(x))
        assert known(fast) == ways
    monkeypatch.setattr(Ways, "_learn", lambda *_: pytest.fail("the model was called"))
    for x in (UP, DOWN, DOWN, UP):
        same(fast(x), plain(x))


def test_a_call_begins_anew_along_the_way_that_begins_as_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """After (True, False), a call of (False, True) is at once on (False, False), which was there before."""
    plain = model(in_turn)
    fast = optimize(plain)
    calls = [(UP, False), (DOWN, False), (UP + 20, True), (DOWN, False), (UP, False)]
    for x, _ in calls:
        same(fast(x), plain(x))
    assert known(fast) == [(True, False), (False, False), (True, True)]
    mixed = DOWN.clone()
    mixed[0, 0] = 11
    begun: list[Way] = []
    for way, each in ways_of(fast)._known.items():
        each.shortcut = None
        monkeypatch.setattr(each, "scheduled", lambda xs, way=way, run=each.scheduled: (begun.append(way), run(xs))[1])
    same(fast(mixed), plain(mixed))
    assert begun == [(True, False), (False, False)]
    assert known(fast)[-1] == (False, True)


def gathered(s: Model, x: Tensor) -> Tensor:
    """Two ways, on each of which a list and a tensor are filled that the model has made itself."""
    parts, table = [], torch.zeros(4, 4)
    for scale in s.scales:
        parts.append(x @ s.w * scale)
    parts[0] = parts[0].sin() if x.sum() > 0 else parts[1].cos()
    table[0] = parts[0][1]
    return torch.cat([table, *parts])


def test_a_model_that_fills_what_it_has_made_itself_has_ways() -> None:
    plain = Model(gathered, w=nn.Parameter(t(4, 4, seed=1)), scales=[1.0, 2.0, 3.0])
    fast = optimize(plain)
    for x in (UP, DOWN, UP, UP + 1, DOWN - 1):
        same(fast(x), plain(x))
    assert known(fast) == [(True,), (False,)]


def test_calls_like_the_last_take_the_short_way_whichever_way_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model()
    fast = optimize(plain)
    for x in (UP, DOWN, DOWN):
        fast(x)
    assert isinstance(fast._autostream._shortcut, ShortWays)
    monkeypatch.setattr(Dispatcher, "_signature", lambda *_: pytest.fail("the long way"))
    for seed in range(6):
        x = t(4, 4, seed=seed, mean=(-1) ** (seed // 3))
        same(fast(x), plain(x))


def test_calls_by_name_and_nested_ones_are_right() -> None:
    plain = Model(lambda s, pair, scale: {"y": halves(s, pair[0]) * scale + pair[1]}, w=nn.Parameter(t(4, 4, seed=1)))
    fast = optimize(plain)
    for x in (UP, DOWN, UP):
        same(fast([x, DOWN], scale=UP), plain([x, DOWN], scale=UP))
        same(fast([x, DOWN], UP), plain([x, DOWN], UP))


def test_each_signature_has_ways_of_its_own() -> None:
    plain = model()
    fast = optimize(plain)
    for x in (UP, UP[:2], DOWN[:2], DOWN):
        same(fast(x), plain(x))
    assert [(report.mode, len(report.parts)) for report in fast.reports] == [("ways", 2)] * 2


def test_what_is_no_number_is_true() -> None:
    plain = model(lambda s, x: (x @ s.w).cos() if x.sum() else x.sin())
    fast = optimize(plain)
    for x in (UP, torch.full((4, 4), torch.nan), torch.zeros(4, 4)):
        same(fast(x), plain(x))
    assert known(fast) == [(True,), (False,)]


def test_nothing_is_indexed_before_it_is_known_to_be_within_bounds() -> None:
    def guarded(s: Model, i: Tensor) -> Tensor:
        y = s.w.sin() + s.w.cos()
        if i.max() < 4:
            y = y[i]
        return y.cos() + y.tanh()

    plain = model(guarded)
    fast = optimize(plain)
    for last in (3, 2, 100, 3, 100, 1):
        i = torch.tensor([0, last])
        same(fast(i), plain(i))
    assert known(fast) == [(True,), (False,)]


def test_nobody_can_tell_it_from_the_model() -> None:
    for modes in ((torch.no_grad, torch.no_grad, torch.inference_mode), (torch.inference_mode, torch.no_grad)):
        assert [report.mode for report in check_same(model(), ((UP,), {}), {}, modes).reports] == ["ways"]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.w.mul_(-2),
        lambda model: setattr(model, "w", nn.Parameter(t(4, 4, seed=9))),
        lambda model: setattr(model, "w", nn.Parameter(t(4, 4, seed=9).double().float().t())),
    ],
    ids=["in place", "another", "another layout"],
)
def test_weights_may_change_between_calls(change: Callable[[Model], Any]) -> None:
    plain = model(lambda s, x: halves(s, x + s.w.sum()))
    fast = optimize(plain)
    for x in (UP, DOWN, UP):
        same(fast(x), plain(x))
    change(plain)
    for x in (UP, DOWN, UP, DOWN):
        same(fast(x), plain(x))


def test_a_limit_that_the_model_has_may_change_between_calls() -> None:
    plain = Model(lambda s, x: halves(s, x) if x.mean() > s.limit else x.sin().cos(), w=nn.Parameter(t(4, 4)), limit=0)
    fast = optimize(plain)
    for limit in (0, 0, 9, 9, -9):
        plain.limit = limit
        for x in (UP, DOWN):
            same(fast(x), plain(x))


def counts(s: Model, x: Tensor) -> Tensor:
    s.count.add_(1)
    return halves(s, x)


@pytest.mark.parametrize(
    "function",
    [counts, lambda s, x: halves(s, x.mul_(2)), lambda s, x: nn.functional.dropout(halves(s, x), 0.5, True)],
    ids=["state", "input", "random"],
)
def test_what_could_not_be_begun_in_vain_is_split_at_graph_breaks(function: Callable[..., Any]) -> None:
    plain = Model(function, w=nn.Parameter(t(4, 4, seed=1)), count=nn.Buffer(torch.zeros(1)))
    fast = check_same(plain, ((UP,), {}), {}, (torch.no_grad,) * 3)
    (report,) = fast.reports
    assert report.mode == "graph breaks"
    assert "writes to its state or inputs, or draws random numbers" in reasons(report)


def test_what_branches_by_chance_is_split_at_graph_breaks() -> None:
    plain = model(lambda s, x: (x @ s.w).sin() if torch.rand(()) > 0.5 else x.cos())
    fast = check_same(plain, ((UP,), {}), {}, (torch.no_grad,) * 6)
    (report,) = fast.reports
    assert report.mode == "graph breaks"


def test_what_branches_by_a_number_is_split_at_graph_breaks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autostream.entries.Ways.__init__", lambda *_: pytest.fail("made"))
    plain = model(lambda s, x: (x @ s.w).sin() if x.sum().item() > 0 else x.cos())
    fast = optimize(plain)
    for x in (UP, DOWN):
        same(fast(x), plain(x))
    assert [report.mode for report in fast.reports] == ["graph breaks"]


def test_what_branches_by_a_number_too_is_split_at_graph_breaks() -> None:
    plain = model(lambda s, x: halves(s, x) if x.max().item() > 0 else x.cos())
    fast = optimize(plain)
    for x in (UP, DOWN):
        same(fast(x), plain(x))
    assert [report.mode for report in fast.reports] == ["graph breaks"]

    plain = model(lambda s, x: (y := halves(s, x)) * (2 if y.max().item() > 0 else 3))
    fast = optimize(plain)
    for x in (UP, DOWN):
        same(fast(x), plain(x))
    (report,) = fast.reports
    assert report.mode == "graph breaks"
    assert reasons(report).count("GuardOnDataDependentSymNode") == 2, "of the first branch, and along the way"


def test_there_are_so_many_ways_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(s: Model, x: Tensor) -> Tensor:
        while x.abs().max() > 1:
            x = (x / 2).clone()
        return x

    plain = model(loop)
    fast = optimize(plain)
    for power in range(8):
        x = torch.full((4,), 2.0**power)
        same(fast(x), plain(x))
    assert [len(way) for way in known(fast)] == list(range(1, 9))
    monkeypatch.setattr(ways_of(fast), "_make", lambda *_: pytest.fail("traced"))
    for power in (8, 2, 9, 8):
        x = torch.full((4,), 2.0**power)
        same(fast(x), plain(x))
    (report,) = fast.reports
    assert (report.mode, len(report.parts)) == ("ways", 8)
    assert [refusal.choice for refusal in report.refusals] == ["a graph for each way", "a way runs plainly"]
    assert report.refusals[-1].reason == "calls take more than 8 ways through it"


@pytest.mark.parametrize(("rounds", "mode"), [(31, "ways"), (32, "graph breaks")])
def test_a_loop_of_many_rounds_is_not_traced(rounds: int, mode: str) -> None:
    """The last value that is asked for ends it."""

    def loops(s: Model, x: Tensor) -> Tensor:
        while x.sum() > 0:
            x = x - 1
        return (x @ s.w).sin().exp()

    fast, x = optimize(plain := model(loops)), torch.full((4, 4), rounds - 0.5)
    for _ in range(3):
        same(fast(x), plain(x))
    (report,) = fast.reports
    assert report.mode in (mode, "plain" if mode == "graph breaks" else mode)
    assert ("it branches 33 times" in reasons(report)) is (mode != "ways")


def test_a_way_that_cannot_be_scheduled_is_left_to_the_model() -> None:
    """Its effects are those of one call, although another way is begun before."""

    def rarely(s: Model, x: Tensor) -> Tensor:
        y = halves(s, x)
        if x.max() > 10:
            s.count.add_(1)
        return y + s.count

    plain, other = (Model(rarely, w=nn.Parameter(t(4, 4, seed=1)), count=nn.Buffer(torch.zeros(1))) for _ in range(2))
    fast = optimize(plain)
    for x in (UP, DOWN, UP + 20, UP, UP + 20, DOWN):
        same(fast(x), other(x))
    assert plain.count.item() == 2
    assert known(fast) == [(True, False), (False, False)]
    assert "writes to its state or inputs" in reasons(fast.reports[0])


@pytest.mark.parametrize(("steady", "mode"), [(2, "graph breaks"), (6, "ways")])
def test_ways_that_are_left_too_often_are_given_up(steady: int, mode: str) -> None:
    """Of calls that go so often one way, then so often the other: each change is one that begins in vain.

    In all, there are more than 16 of them either way.
    """
    plain = model()
    fast = optimize(plain)
    for call in range(160):
        x = (UP, DOWN)[call // steady % 2]
        same(fast(x), plain(x))
    (report,) = fast.reports
    assert report.mode == mode
    assert ("more than 16 of 64 calls took another way" in reasons(report)) == (mode == "graph breaks")


def test_a_value_that_does_not_stay_the_same_is_not_asked_for_without_end() -> None:
    """Each way says that the other one is right; the model itself makes the call."""

    class Contrary:
        repeatable = True
        choices = ("net.py:1: if x:",)
        report = Report("Net", "s", "sections")

        def __init__(self, way: Way) -> None:
            self.way, self.tried = way, 0

        def __call__(self, tensors: Any) -> Any:
            self.tried += 1
            raise OtherWay(0, not self.way[0])

    made: list[Contrary] = []

    def make(tensors: Any, way: Way) -> Any:
        made.append(Contrary(way))
        return made[-1]

    tensors, structure = flatten(((UP,), {}))
    signature = signature_of(structure, tensors, b"", b"", ())
    ways = Ways(model(), signature, "it branches", make)
    for x in (UP, DOWN, UP):
        same(ways([x], (x,), {}), model()(x))
    assert [each.way for each in made] == [(True,), (False,)]
    assert [each.tried for each in made] == [2, 1]


def test_what_is_asked_for_twice_and_is_not_the_same_is_given_up() -> None:
    def make(tensors: Any, way: Way) -> Any:
        raise OtherWay(0, not way[0])

    tensors, structure = flatten(((UP,), {}))
    ways = Ways(model(), signature_of(structure, tensors, b"", b"", ()), "it branches", make)
    same(ways([UP], (UP,), {}), model()(UP))
    assert ways.over == "what it branches by is another value in a second call with the same inputs"
    assert [refusal.reason for refusal in ways.report.refusals] == ["it branches", ways.over]


def test_an_error_of_the_models_own_is_raised_and_calls_go_on() -> None:
    def strict(s: Model, x: Tensor) -> Tensor:
        if x.sum() < 0:
            raise ValueError("negative")
        return halves(s, x)

    plain = model(strict)
    fast = optimize(plain)
    for _ in range(2):
        same(fast(UP), plain(UP))
        with pytest.raises(ValueError, match=r"^negative$"):
            fast(DOWN)
    assert known(fast) == [(False, True)]


def test_a_check_behind_a_branch_fails_only_there() -> None:
    """A trace moves it to the number that it looks at, which the model takes before it branches."""

    def checks(s: Model, x: Tensor) -> Tensor:
        number = x.max().item()
        y = (x @ s.w).sin()
        if x.sum() > 0:
            torch._check(number < 10)
            y = y.cos() + y.exp()
        return y * number

    plain = model(checks)
    fast = optimize(plain)
    large = -UP.clone()
    large[0, 0] = 11
    assert large.sum() < 0
    for x in (UP, large, UP, large):
        same(fast(x), plain(x))
    with pytest.raises(RuntimeError):
        fast(UP + 10)


def test_prepare_makes_the_way_that_such_a_call_takes_and_leaves_all_as_it_is() -> None:
    plain = model()
    fast, x, before = optimize(plain), UP.clone(), torch.get_rng_state()
    fast.prepare(x)
    assert known(fast) == [(True,)]
    fast.prepare(DOWN)
    assert known(fast) == [(True,), (False,)]
    same(x, UP)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(TargetError, match="fails at these example inputs"):
        fast.prepare(t(3, 3))
    same(fast(x), plain(x))


def test_prepare_learns_no_way_of_a_call_that_fails_as_it_would_be_made() -> None:
    """Without gradients; with them it works, and branches once more."""

    def picky(model: Model, x: Tensor) -> Tensor:
        if x.mean() > 0 and not torch.is_grad_enabled():
            raise ValueError("for training alone")
        return x @ model.w

    fast = optimize(model(picky))
    fast.prepare(UP)
    assert known(fast) == []
    fast.prepare(DOWN)
    assert known(fast) == [(False,)]


def test_prepare_gives_ways_up_where_a_call_would() -> None:
    plain = Model(counts, w=nn.Parameter(t(4, 4, seed=1)), count=nn.Buffer(torch.zeros(1)))
    fast = optimize(plain)
    fast.prepare(UP)
    assert "draws random numbers" in reasons(fast.reports[0])
    assert plain.count.item() == 0


def test_the_code_of_a_way_can_be_read_and_nothing_is_static_or_watched() -> None:
    dispatcher = Dispatcher(model(), Options())
    for x, op in ((UP, "div"), (DOWN, "exp")):
        lowered = dispatcher.lowered(x)
        assert lowered is not None
        code = "".join(part.code for part in lowered.modules() if isinstance(part, torch.fx.GraphModule))
        assert "autostream.expect" in code
        assert f"aten.{op}" in code
    watched = dispatcher.watched(UP)
    assert watched is not None
    assert watched.refusals[-1].choice == "not watched"
    assert dispatcher.static_inputs(UP)[0][0] is UP


def test_a_report_has_each_way_with_the_users_lines() -> None:
    fast = optimize(model())
    assert ways_like(fast) == []
    for x in (UP, DOWN):
        fast(x)
    (report,) = fast.reports
    assert (report.model, report.mode) == ("Model", "ways")
    assert [(part.mode, len(part.parts)) for part in report.parts] == [("sections", 3)] * 2
    line = f"test_ways.py:{halves.__code__.co_firstlineno + 3}: y = y / 2 if x.sum() > 0 else -y.exp()"
    for part, outcome in zip(report.parts, (True, False), strict=True):
        assert part.ended.startswith(f"the model returns, after {outcome} at ")
        assert part.ended.endswith(line)
        first, *_ = part.parts
        assert first.ended.startswith("autostream.expect.default: a graph cannot hold it")
    text = explain(fast)
    assert "runs as    CUDA graphs for each way that calls take through its branches" in text
    assert line in text
    assert [part["mode"] for part in json.loads(report.to_json())["parts"]] == ["sections"] * 2
    assert "CUDA graphs for each way that calls take" in report.to_html()


def ways_like(fast: Any) -> list[str]:
    return [report.mode for report in fast.reports]


def test_where_nothing_is_captured_or_gradients_are_recorded_it_is_split_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mode(**options: Any) -> str:
        fast = optimize(model(), **options)
        same(fast(UP), model()(UP))
        return fast.reports[0].mode

    assert mode() == "ways"
    assert mode(cuda_graph=False) == "graph breaks"
    with torch.enable_grad():
        fast = optimize(model(), policy="sequential")
        same(fast(UP), model()(UP))
        assert fast.reports[0].mode == "graph breaks"
    monkeypatch.setattr(Subject, "uses_gpu", lambda *_: False)
    assert mode() == "graph breaks"


def test_where_no_part_is_worth_a_graph_it_is_split() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autostream.build.sections_of", lambda *_: None)
        fast = optimize(model())
        for _ in range(2):
            same(fast(UP), model()(UP))
    (report,) = fast.reports
    assert report.mode == "graph breaks"
    assert "nothing between its branches on values of tensors is worth a CUDA graph" in reasons(report)


def test_who_wants_no_fall_back_gets_none() -> None:
    with pytest.raises(TraceError, match="cannot trace"):
        optimize(model(), strict=True)(UP)


def test_copies_and_pickles_have_ways_of_their_own() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), Branch())
    fast = optimize(plain)
    fast(UP)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        for x in (DOWN, UP):
            same(other(x), plain(x))
        assert sorted(known(other)) == [(False,), (True,)]
    assert len(known(fast)) == 1


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.sin() + x.cos()
        return y / 2 if x.sum() > 0 else y.exp().tanh()


def test_threads_may_go_different_ways() -> None:
    plain = model(in_turn)
    fast = optimize(plain)
    inputs = [UP, DOWN, UP + 20, t(4, 4, seed=5, mean=-1)]

    def work(number: int) -> None:
        with torch.no_grad():
            for _ in range(8):
                same(fast(inputs[number]), plain(inputs[number]))

    in_threads(len(inputs), work)


def test_it_goes_with_the_model_at_once() -> None:
    fast = optimize(model())
    fast(UP)
    gone = weakref.ref(next(iter(ways_of(fast)._known.values())).scheduled)
    del fast
    assert gone() is None


def test_paranoid_calls_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSTREAM_VERIFY", "paranoid")
    plain = model()
    fast = optimize(plain)
    for x in (UP, DOWN, UP):
        same(fast(x), plain(x))
    assert known(fast) == [(True,), (False,)]


class Forked(nn.Module):
    """A module behind a branch on what it is given, and before one on what it returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = next(tensors_in((args, kwargs))).sin()
        begun = given.cos() + 1 if given.sum() > 0 else given.exp()
        result = self.inner(*args, **kwargs)
        for tensor in tensors_in(result):
            if tensor.float().sum() > 0:
                begun = begun * 2
        return result, begun


@settings(max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck))
@given(module=random_modules(), turns=st.sampled_from(list(TURNS)), one_in=st.sampled_from([2, 3, 9]))
def test_random_modules_are_the_same_whichever_way_they_go(module: RandomModule, turns: str, one_in: int) -> None:
    torch._dynamo.reset()
    net, inputs = module()
    with pytest.MonkeyPatch.context() as patch:
        let_be_cut(patch, lambda op: op.chooses or sum(op.name.encode()) % one_in == 0)
        check(lambda: Forked(net()), inputs, {}, TURNS[turns])


def test_what_autostream_itself_finds_wrong_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a section that is compared, and computes something else than its ops do."""
    fast = optimize(model())
    fast.prepare(UP)
    (each,) = ways_of(fast)._known.values()

    def wrong(*_: Any) -> Any:
        raise MismatchError("off by 1")

    monkeypatch.setattr(each, "scheduled", wrong)
    with pytest.raises(MismatchError):
        fast(UP)


def test_with_too_little_memory_for_a_way_the_model_makes_the_call_and_it_is_split() -> None:
    plain = model()
    fast = optimize(plain)
    fast(UP)

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    (each,) = ways_of(fast)._known.values()
    assert each.shortcut is not None
    each.shortcut._run = SimpleNamespace(guess=fails)
    same(fast(UP), plain(UP))
    for x in (DOWN, UP):
        same(fast(x), plain(x))
    (report,) = fast.reports
    assert report.mode == "graph breaks"
    assert "too little memory to run a way (OutOfMemoryError: no memory)" in reasons(report)


def test_what_the_model_itself_has_too_little_memory_for_is_called_once() -> None:
    calls: list[bool] = []

    def hungry(s: Model, x: Tensor) -> Tensor:
        if x.sum() < 0:
            if type(x) is Tensor:
                calls.append(True)
            raise torch.OutOfMemoryError("no memory")
        return halves(s, x)

    fast = optimize(model(hungry))
    fast(UP)
    fast(UP)
    with pytest.raises(torch.OutOfMemoryError):
        fast(DOWN)
    assert calls == [True]
