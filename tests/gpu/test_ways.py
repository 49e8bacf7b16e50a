"""A model that branches on data: each way through it is captured in sections, and calls find theirs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.reporting.pieces import captured_share
from autostream.reporting.report import Report
from autostream.ways import ShortWays, Ways
from benchmarks.partial_graphs import WIDTH, Branches
from tests.semantics import Model, check_same
from tests.threads import in_threads

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("aten_ops", "fresh_dynamo")]


def by_size(x: Tensor) -> Tensor:
    """Two ways."""
    return x / 2 if x.mean() > 1 else -x


def branches() -> Branches:
    """Four branches, a branch on data, four branches."""
    torch.manual_seed(0)
    return Branches(by_size).cuda()


def x(seed: int, *, large: bool) -> Tensor:
    """A batch that goes the one way or the other."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(1024, WIDTH, device="cuda", generator=generator) * (10 if large else 0.1)


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def captured(way: Report) -> list[Report]:
    return [part for part in way.parts if part.mode == "cuda graph"]


def test_both_ways_are_captured_and_right_while_values_alternate() -> None:
    model = branches()
    fast = autostream.optimize(model)
    with torch.no_grad():
        for call in range(24):
            given = x(call, large=bool(call // 4 % 2))
            same(fast(given), model(given))
    (report,) = fast.reports
    assert report.mode == "ways", report.refusals
    assert [len(captured(way)) for way in report.parts] == [2, 2]
    assert all("partial_graphs.py" in way.ended or "test_ways.py" in way.ended for way in report.parts)
    assert "here those for" in captured(report.parts[0])[0].ended
    assert (captured_share(report) or 0.0) >= 0.8


def test_calls_take_the_short_way_whichever_way_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    model = branches()
    fast = autostream.optimize(model)
    with torch.no_grad():
        for large in (True, False, False):
            fast(x(0, large=large))
        assert isinstance(fast._autostream._shortcut, ShortWays)
        monkeypatch.setattr(fast._autostream, "_scheduled", lambda *_: pytest.fail("the long way"))
        for seed, large in enumerate((True, False, False, True)):
            given = x(seed, large=large)
            same(fast(given), model(given))


def test_nothing_is_indexed_before_it_is_known_to_be_within_bounds() -> None:
    """Beyond the table, an index would end the process' use of the device."""

    def guarded(s: Model, i: Tensor) -> Tensor:
        table = (s.w.sin().cos().exp() + s.w.tanh()).neg()
        if i.max() < 8:
            table = table[i]
        return table.sin().cos().exp().tanh().neg()

    with torch.device("cuda"):
        model = Model(guarded, w=nn.Buffer(torch.randn(8, 64)))
    fast = autostream.optimize(model)
    with torch.no_grad():
        for last in (7, 3, 10**6, 10**6, 5, 10**6, 7):
            i = torch.tensor([0, last], device="cuda")
            same(fast(i), model(i))
    torch.cuda.synchronize()
    (report,) = fast.reports
    assert (report.mode, len(report.parts)) == ("ways", 2), report.refusals


def test_weights_that_change_or_move_are_seen_on_every_way() -> None:
    model = branches()
    fast = autostream.optimize(model)
    with torch.no_grad():
        for large in (True, False):
            fast(x(0, large=large))
        for change in range(3):
            for layer in (model.before[0], model.after[3]):
                if change == 2:
                    layer.weight = nn.Parameter(torch.randn_like(layer.weight))
                else:
                    layer.weight.mul_(1.5)
            for seed, large in enumerate((True, True, False, False, True)):
                given = x(seed, large=large)
                same(fast(given), model(given))


def test_ways_that_are_left_too_often_are_given_up_and_calls_stay_right() -> None:
    model = branches()
    fast = autostream.optimize(model, cuda_graph=True)  # so that pieces meet nobody in a contest
    with torch.no_grad():
        for call in range(80):
            given = x(call, large=bool(call % 2))
            torch.testing.assert_close(fast(given), model(given))
    (report,) = fast.reports
    assert report.mode == "graph breaks"
    assert any("took another way" in refusal.reason for refusal in report.refusals)


@pytest.mark.parametrize("in_place", [True, False])
def test_what_could_not_be_begun_in_vain_is_given_up_and_nobody_can_tell(in_place: bool) -> None:
    def changes(s: Model, x: Tensor) -> Tensor:
        y = x.mul_(2) if in_place else nn.functional.dropout(x, 0.5)
        return (y.sin() + y.cos()).exp() if x.sum() > 0 else y.tanh()

    with torch.device("cuda"):
        model, inputs = Model(changes), ((torch.randn(4, 4),), {})
    fast = check_same(model, inputs, {}, (torch.no_grad,) * 3)
    assert all(report.mode != "ways" for report in fast.reports)


def test_what_calls_begin_in_vain_is_given_back() -> None:
    """Memory after calls that change their way is what it is after calls that do not."""
    model = branches()
    fast = autostream.optimize(model)
    with torch.no_grad():
        for large in (True, False, True, False):
            fast(x(0, large=large))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for seed in range(8):
            fast(x(seed, large=bool(seed % 2)))
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_threads_and_streams_may_go_different_ways() -> None:
    model = branches()
    fast = autostream.optimize(model)
    inputs = [x(seed, large=bool(seed % 2)) for seed in range(4)]
    torch.cuda.synchronize()

    def work(number: int) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(8):
                same(fast(inputs[number]), model(inputs[number]))

    in_threads(4, work)


def test_prepare_captures_the_way_of_its_inputs() -> None:
    model = branches()
    twin, fast = copy.deepcopy(model), autostream.optimize(model)
    fast.prepare(x(0, large=True))
    (entry,) = fast._autostream._entries.values()
    assert isinstance(entry, Ways)
    assert [len(captured(way)) for way in entry.report.parts] == [2]
    same(dict(model.state_dict()), dict(twin.state_dict()))
    with torch.no_grad():
        same(fast(x(1, large=True)), model(x(1, large=True)))
