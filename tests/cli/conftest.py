"""What tests of commands share: a model to name, and a pipeline that answers without planning."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autostream import pipeline
from autostream.reporting.report import Report
from tests.cli.calls import MODEL
from tests.reporting.reports import REPORT


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A TARGET that comes with its inputs."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    return "net.py:with_inputs"


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A pipeline that notes what it is asked for and answers with a report made by hand."""
    asked = SimpleNamespace(report=REPORT)

    def plan(model: object, args: object, kwargs: object, options: object, profile: object = None) -> Report:
        vars(asked).update(model=model, args=args, options=options, profile=profile, grad=torch.is_grad_enabled())
        return asked.report  # type: ignore[no-any-return]

    monkeypatch.setattr(pipeline, "plan", plan)
    return asked
