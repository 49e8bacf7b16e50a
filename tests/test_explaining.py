"""``autostream.explain``: one report after another, or what to do to get one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autostream
from autostream.explaining import explain
from autostream.reporting.ops import Selection
from autostream.reporting.text import answers
from tests.reporting.reports import PLAIN, REPORT


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> autostream.OptimizedModule:
    """A module of which two signatures are known."""
    monkeypatch.setattr("autostream.explaining.reports_of", lambda optimized: (REPORT, PLAIN))
    return autostream.optimize(nn.ReLU())


def test_before_the_first_call_it_says_what_to_do() -> None:
    assert explain(autostream.optimize(nn.ReLU())) == (
        "nothing is known yet: call it once, or give optimize() example inputs"
    )


def test_where_it_was_switched_off_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSTREAM_DISABLE", "1")
    fast = autostream.optimize(nn.ReLU(), torch.ones(2))
    assert explain(fast) == "it runs plainly: AUTOSTREAM_DISABLE was set when it was optimized"


def test_reports_follow_each_other_in_their_order(optimized: autostream.OptimizedModule) -> None:
    assert explain(optimized) == f"{answers(REPORT, Selection(ops=10))}\n\n\n{answers(PLAIN, Selection(ops=10))}"


@pytest.mark.parametrize("ops", [0, 1, None])
def test_every_report_shows_so_many_ops(optimized: autostream.OptimizedModule, ops: int | None) -> None:
    shown = Selection(ops=ops)
    assert explain(optimized, ops=ops) == f"{answers(REPORT, shown)}\n\n\n{answers(PLAIN, shown)}"
    assert (answers(REPORT, shown) == answers(REPORT)) == (ops is None)


def test_what_is_not_optimized_cannot_be_explained() -> None:
    with pytest.raises(autostream.TargetError, match="not a ReLU"):
        explain(nn.ReLU())  # type: ignore[arg-type]


def test_the_signature_that_was_called_last_comes_first() -> None:
    fast = autostream.optimize(nn.ReLU())
    with torch.no_grad():
        for size in (3, 5, 3):
            fast(torch.ones(size))
    text = explain(fast)
    assert text.index("3:float32") < text.index("5:float32")
