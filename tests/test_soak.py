"""The soak for a few rounds on the CPU: it finds wrong results, and prints how to repeat them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from autostream.api import OptimizedModule
from tests import soak
from tests.soak import KINDS, MORE_BYTES, MORE_TENSORS, Memory, Round, main

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def soaked(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the summary, which is printed and written."""
    code = main(["--device", "cpu", "--models", "cells", "--out", str(out / "soak.json"), *arguments])
    return code, json.loads((out / "soak.json").read_text())


def test_rounds_and_all_actions_find_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A random round, then each action once, on two models or three. With no time left, nothing is done."""
    code, summary = soaked(tmp_path, "--rounds", "1", "--seed", "0")
    assert json.loads(capsys.readouterr().out) == summary
    assert code == 0, summary["failures"]
    assert (summary["seed"], summary["device"], summary["rounds"], summary["failures"]) == (0, "cpu", 1, [])
    assert sum(summary["actions"].values()) == soak.ACTIONS
    assert summary["calls"] > 50
    code, summary = soaked(tmp_path, "--minutes", "0")
    assert (code, summary["rounds"], summary["calls"], summary["actions"]) == (0, 1, 0, {})
    actions = ["optimize", *KINDS]
    monkeypatch.setattr(Round, "actions", lambda self: ((action, getattr(self, action)) for action in actions))
    code, summary = soaked(tmp_path, "--rounds", "1", "--models", "cells", "learners")
    assert code == 0, summary["failures"]
    assert summary["actions"] == {**dict.fromkeys(KINDS, 1), "optimize": 2}


def test_a_wrong_result_is_found_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results are off by 1 % after some calls. The same round fails again at the same action."""

    def off(self: OptimizedModule, *args: Any) -> Any:
        calls.append(args)
        return self._autostream(*args) * (1.01 if len(calls) > 8 else 1)

    calls: list[Any] = []
    monkeypatch.setattr(soak, "ACTIONS", 4)
    monkeypatch.setattr(OptimizedModule, "__call__", off)
    code, summary = soaked(tmp_path, "--rounds", "2", "--seed", "5")
    assert code == 1
    first, second = summary["failures"]
    assert first["repeat"] == "python -m tests.soak --device cpu --seed 5 --first 0 --rounds 1 --models cells"
    assert "--first 1 " in second["repeat"]
    assert set(first["models"]) == {"cells (eager)"}
    assert "the error is" in first["error"]
    assert f"again: {first['repeat']}" in capsys.readouterr().err
    calls.clear()
    code, again = soaked(tmp_path, *first["repeat"].split()[3:])
    assert code == 1
    assert again["failures"] == [first]


def test_a_failed_schedule_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object) -> object:
        raise ZeroDivisionError

    monkeypatch.setattr("autostream.tuning.tune.candidates_for", broken)
    monkeypatch.setattr(soak, "ACTIONS", 2)
    code, summary = soaked(tmp_path, "--rounds", "1")
    assert code == 1
    assert "it cannot be scheduled" in summary["failures"][-1]["error"]


def test_uncheckable_weights_are_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def hopeless(self: Round) -> None:
        subject = self.subjects[0]
        with torch.no_grad():
            for parameter in subject.model.parameters():
                parameter.zero_()
        self._changed(subject)

    actions = [("optimize", Round.optimize), ("zero", hopeless), ("call", Round.call)]
    monkeypatch.setattr(Round, "actions", lambda self: ((name, partial(action, self)) for name, action in actions))
    code, summary = soaked(tmp_path, "--rounds", "1")
    assert code == 0
    assert summary["actions"] == {"optimize": 1, "given up": 1}


def test_memory_that_grows_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def used(size: int, tensors: int, fakes: int = 20) -> Memory:
        return Memory(size, Counter(Tensor=tensors, FakeTensor=fakes))

    first, since = used(100, 30), "more than after the first round"
    assert not first.grown(first)
    assert not used(100 + MORE_BYTES, 30 + MORE_TENSORS).grown(first)
    assert used(101 + MORE_BYTES, 30).grown(first) == f"64 MiB and 0 tensors {since}"
    assert not used(100, 30, 20 + 2 * MORE_TENSORS).grown(first)
    assert used(100, 31 + MORE_TENSORS, 24).grown(first) == f"0 MiB and 201 tensors (201 Tensor, 4 FakeTensor) {since}"

    monkeypatch.setattr(Round, "actions", lambda self: iter(()))
    tensors = [torch.ones(1)]
    count = soak.memory(torch.device("cpu")).tensors.total()
    tensors.extend(torch.ones(1) for _ in range(7))
    assert soak.memory(torch.device("cpu")).tensors.total() == count + 7
    readings = iter([first, used(100, 1000)])
    monkeypatch.setattr(soak, "memory", lambda device: next(readings))
    code, summary = soaked(tmp_path, "--rounds", "2")
    assert code == 1
    assert [failure["action"] for failure in summary["failures"]] == ["memory"]
