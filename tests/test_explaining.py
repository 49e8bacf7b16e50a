"""``autostream.explain``: all reports as text, or what to do to get one."""

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
    monkeypatch.setattr("autostream.explaining.reports_of", lambda optimized: (REPORT, PLAIN))
    return autostream.optimize(nn.ReLU())


def test_without_a_report_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = "nothing is known yet: call it once, or give optimize() example inputs"
    methods = ". Methods of the model, such as generate, call the model itself: schedule those calls with optimize_"
    assert explain(autostream.optimize(nn.ReLU())) == nothing + methods
    assert explain(autostream.optimize_(nn.ReLU())) == nothing
    monkeypatch.setenv("AUTOSTREAM_DISABLE", "1")
    fast = autostream.optimize(nn.ReLU(), torch.ones(2))
    assert explain(fast) == "it runs plainly: AUTOSTREAM_DISABLE was set when it was optimized"
    with pytest.raises(autostream.TargetError, match="not a ReLU"):
        explain(nn.ReLU())  # type: ignore[arg-type]


@pytest.mark.parametrize("ops", [10, 1, None])
def test_it_has_all_reports_with_so_many_ops_each(optimized: autostream.OptimizedModule, ops: int | None) -> None:
    shown = Selection(ops=ops)
    assert explain(optimized, ops=ops) == f"{answers(REPORT, shown)}\n\n\n{answers(PLAIN, shown)}"
    assert explain(optimized) == explain(optimized, ops=10)


def test_the_signature_that_was_called_last_comes_first() -> None:
    fast = autostream.optimize(nn.ReLU())
    with torch.no_grad():
        for size in (3, 5, 3):
            fast(torch.ones(size))
    text = explain(fast)
    assert text.index("3:float32") < text.index("5:float32")
