"""On a CPU a schedule is measured beside the model itself, and the faster one runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.tuning import beside_model
from tests.semantics import force_streams, same

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Clock = Callable[[float, float], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets what a call takes as it is and as scheduled, µs; both run, as they do to be timed."""

    def shows(*times_us: float) -> None:
        def interleaved(timers: Sequence[Callable[[], float]]) -> list[float]:
            return [time_us for time_us, timer in zip(times_us, timers, strict=True) if timer()]

        monkeypatch.setattr("autostream.tuning.beside_model.interleaved", interleaved)

    monkeypatch.setattr("autostream.dispatch.entries.is_contested", beside_model.is_contested)
    shows(10.0, 20.0)
    return shows


class Net(nn.Module):
    """Counts in Python how often it runs, once it is in a state where that is asked for."""

    def __init__(self, forward: Callable[[Net, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dropout, self.norm = nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.runs = 0
        self.seen: list[int] = []
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x) if self._forward else self.linear(x)


def x(rows: int = 3) -> Tensor:
    return torch.arange(4.0 * rows).reshape(rows, 4) % 5 - 2


def reason(model: Any) -> str:
    return str(model.reports[0].refusals[0].reason)


@torch.no_grad()
def test_the_model_itself_runs_where_its_schedule_is_not_faster(clock: Clock) -> None:
    model = Net()
    fast = autostream.optimize(model)
    for _ in range(3):
        same(fast(x()), model(x()))
    (report,) = fast.reports
    assert report.mode == "plain"
    assert report.refusals[0].reason == "a call takes 20.0 µs as scheduled, which is not 5% less than 10.0 µs as it is"
    assert report.chosen is not None, "what it was measured beside is told, too"
    text = autostream.explain(fast)
    assert "runs as      the plain model" in text
    assert "20.0 µs as scheduled" in text


@torch.no_grad()
def test_a_schedule_runs_where_it_is_faster(clock: Clock) -> None:
    clock(20.0, 10.0)
    model = Net()
    fast = autostream.optimize(model)
    for _ in range(3):
        same(fast(x()), model(x()))
    (report,) = fast.reports
    assert report.mode == "one stream"
    assert "a call takes 10.0 µs as scheduled, and 20.0 µs as it is" in autostream.explain(fast)


@torch.no_grad()
def test_each_signature_is_measured(clock: Clock) -> None:
    fast = autostream.optimize(Net(lambda net, x: net.dropout(x)))
    fast(x())
    clock(20.0, 10.0)
    fast(x(5))
    fast.eval()(x())
    assert [report.mode for report in fast.reports] == ["one stream", "one stream", "plain"]
    fast.train()(x())
    assert [report.mode for report in fast.reports] == ["plain", "one stream", "one stream"]


@torch.no_grad()
@pytest.mark.parametrize("options", [{"policy": "sequential"}, {"policy": "critical_path"}, {"strict": True}])
def test_an_option_that_asks_for_a_schedule_keeps_it(clock: Clock, options: dict[str, Any]) -> None:
    fast = autostream.optimize(Net(), **options)
    fast(x())
    assert fast.reports[0].mode == "one stream"


def draws(net: Net, x: Tensor) -> Tensor:
    return net.norm(net.dropout(net.linear(x)))


def counts(net: Net, x: Tensor) -> Tensor:
    net.runs += 1
    return net.linear(x) * net.runs


def only_counts(net: Net, x: Tensor) -> Tensor:
    """No guard fails afterwards."""
    net.runs += 1
    return net.linear(x)


def appends(net: Net, x: Tensor) -> Tensor:
    net.seen.append(len(x))
    return net.linear(x)


def prints(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x)
    print(len(net.seen))
    net.seen.append(len(y))
    return torch.relu(y)


def writes_its_input(net: Net, x: Tensor) -> Tensor:
    return net.linear(x.add_(1))


@torch.no_grad()
@pytest.mark.parametrize("times", [(10.0, 20.0), (20.0, 10.0)])
@pytest.mark.parametrize(
    ("forward", "timed"),
    [(draws, True), (counts, False), (only_counts, False), (appends, False), (prints, False), (writes_its_input, True)],
)
def test_no_run_too_many_is_seen(
    clock: Clock, times: tuple[float, float], forward: Any, timed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither in state and random numbers, nor in what Python does: what would show a run more runs as it is."""
    clock(*times)

    def run(call: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], str]:
        torch.manual_seed(1)
        values = [x().clone() for _ in range(3)]
        outputs = [call(value) for value in values]
        return [*outputs, *values, torch.rand(2)], capsys.readouterr().out

    plain, model = Net(forward), Net(forward)
    expected, printed = run(plain)
    fast = autostream.optimize(model)
    outputs, also_printed = run(fast)
    for output, value in zip(outputs, expected, strict=True):
        same(output, value)
    for name, value in plain.state_dict().items():
        same(model.state_dict()[name], value)
    assert (model.runs, model.seen, also_printed) == (plain.runs, plain.seen, printed)
    assert fast.reports[0].mode == ("one stream" if timed and times[0] > times[1] else "plain")
    assert timed != reason(fast).endswith("on one stream there is nothing to gain on a CPU")


@torch.no_grad()
def test_a_model_that_is_split_runs_over_streams_where_these_were_faster_than_one(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def splits(net: Net, x: Tensor) -> Tensor:
        y = net.linear(x).relu() + net.linear(-x).tanh()
        print()
        return y

    over_streams = {**force_streams(monkeypatch), "policy": "auto"}
    fast = autostream.optimize(Net(splits), **over_streams)
    same(fast(x()), Net(splits)(x()))
    assert fast.reports[0].mode == "graph breaks"
    assert reason(fast).endswith("several streams are faster than one")
    assert "several streams are faster than one" in autostream.explain(fast)


def counts_if_not_compiled(net: Net, x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        net.runs += 1
    return net.linear(x)


def logs(net: Net, x: Tensor) -> Tensor:
    note(net)
    return net.linear(x)


def note(net: Net) -> None:
    net.runs += 1


@torch.no_grad()
@pytest.mark.parametrize("forward", [counts_if_not_compiled, logs])
def test_what_a_model_does_only_where_it_is_not_compiled_is_done_once_a_call_at_most(
    clock: Clock, forward: Any
) -> None:
    """Dynamo does not see it: the model asks whether it is compiled, or Dynamo was told to leave a function out."""
    model = Net(forward)
    fast = autostream.optimize(model)
    config: Any = torch._dynamo.config
    with config.patch(ignore_logging_functions={note} if forward is logs else set()):
        for calls in range(1, 4):
            same(fast(x()), Net()(x()))
            assert model.runs <= calls


@torch.no_grad()
def test_a_warning_is_given_once_a_call_at_most(clock: Clock) -> None:
    """Dynamo leaves out those that PyTorch's own functions give."""
    fast = autostream.optimize(Net(lambda net, x: nn.functional.softmax(x)))
    with warnings.catch_warnings(record=True, action="always") as given:
        for calls in range(1, 4):
            fast(x())
            assert len(given) <= calls
    assert {str(each.message)[:25] for each in given} == {"Implicit dimension choice"}


@torch.no_grad()
def test_a_schedule_stays_where_the_model_can_run_once_only(clock: Clock) -> None:
    """As a cache that is full after the call."""

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("left", torch.ones(1, dtype=torch.long))
            self.register_buffer("table", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            self.left.sub_(1)
            return x + self.table.index_select(0, self.left)

    model = Once()
    fast = autostream.optimize(model)
    same(fast(torch.ones(1)), torch.full((1,), 2.0))
    assert fast.reports[0].mode == "one stream"
    assert "it cannot be timed beside the model itself: " in reason(fast)
    assert model.left.item() == 0


@torch.no_grad()
def test_errors_are_the_models(clock: Clock) -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor, positive: bool) -> Tensor:
            if not positive:
                raise ValueError("negative")
            return x + 1

    fast = autostream.optimize(Picky())
    for _ in range(2):
        same(fast(x(), True), x() + 1)
        with pytest.raises(ValueError, match="negative"):
            fast(x(), False)
    assert {report.mode for report in fast.reports} == {"plain"}


@torch.no_grad()
def test_an_error_of_the_model_costs_no_choice(clock: Clock) -> None:
    class Moody(nn.Module):
        broken = False

        def forward(self, x: Tensor) -> Tensor:
            if self.broken:
                raise ValueError("broken")
            return x + 1

    model = Moody()
    fast = autostream.optimize(model)
    fast(x())
    clock(20.0, 10.0)
    model.broken = True
    for _ in range(3):
        with pytest.raises(ValueError, match="broken"):
            fast(x())
    model.broken = False
    same(fast(x()), x() + 1)
    assert [report.mode for report in fast.reports] == ["plain"]


def test_gradients_are_the_models(clock: Clock) -> None:
    """Calls with gradients run as they are on a CPU, however often their shapes and modes change."""
    plain, model = Net(draws), Net(draws)
    fast = autostream.optimize(model, max_signatures=1)
    for call in (plain, fast):
        torch.manual_seed(1)
        for rows in (3, 5, 3, 5):
            call(x(rows)).square().sum().backward()
        call.eval()
        call(x()).sum().backward()
        with torch.no_grad():
            call(x())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        same(ours.grad, theirs.grad)
    for name, value in plain.state_dict().items():
        same(model.state_dict()[name], value)
