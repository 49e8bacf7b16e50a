"""Losses over many steps: what is far from eager runs, and what is not."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import losses, zoo
from benchmarks.harness.training import Step, TrainingSubject, eager
from benchmarks.losses import PARTS, PRECISIONS, in_parts, main, row

TINY = zoo.TrainingWorkload(
    "tiny",
    lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)),
    lambda batch: (torch.randn(batch, 8), torch.randn(batch, 4)),
    lambda model, x, y: F.mse_loss(model(x), y).float(),
    (16,),
)


def trained(workload: zoo.TrainingWorkload = TINY, precision: str = "float32") -> dict[str, Any]:
    return row(workload, "adamw", precision, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where bfloat16 takes long, and in fewer steps."""
    monkeypatch.setitem(losses.PRECISIONS, "float32", torch.float32)
    monkeypatch.setattr(losses, "STEPS", losses.STEPS - 10 * losses.WINDOW)


def test_losses_over_many_steps_are_as_near_to_eager_ones_as_those_to_each_other() -> None:
    """Twice as far is what chance may do: six runs do not show the most that there is."""
    found = trained()
    assert found["last"] < 0.97 * found["first"], "it trains"
    assert 0 < found["spread"] < 1e-4, "runs differ, in rounding alone"
    assert found["autostream"] <= 2 * found["spread"]


def test_a_step_that_is_wrong_is_far_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = losses.scheduled

    def wronged(subject: TrainingSubject) -> Step:
        subject.optimizer.param_groups[0]["lr"] *= 1.1
        return ours(subject)

    monkeypatch.setattr(losses, "scheduled", wronged)
    found = trained()
    assert found["autostream"] > 100 * found["spread"]


def test_a_step_over_parts_is_that_over_the_batch() -> None:
    """Two steps, for the second has the momentum of the first."""
    found = []
    for parts in PARTS:
        subject = in_parts(zoo.prepare_training(TINY, 16, "sgd", torch.device("cpu"), torch.float64), parts)
        step = eager(subject)
        found.append([step(*subject.data), step(*subject.data), *(p.detach() for p in subject.model.parameters())])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


NUMBERS = {"batch": 4, "first": 2.0, "last": 1.5, "spread": 1.2e-6, "autostream": 0.005}


def test_commands_save_after_each_row_into_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that measures a workload again replaces its rows; of another commit, it replaces all."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    now = {"date": "today", "commit": "a"}
    monkeypatch.setattr(losses, "stamp", lambda: dict(now))

    def known(workload: zoo.TrainingWorkload, optimizer: str, precision: str, _: object) -> dict[str, Any]:
        return {"workload": workload.name, "optimizer": optimizer, "precision": precision, **NUMBERS}

    monkeypatch.setattr(losses, "row", known)
    both = ["train_dlrm", "train_mlp12"]
    runs = [("a", both[:1], both[:1]), ("a", both[::-1], both), ("b", both[1:], both[1:])]
    for commit, workloads, kept in runs:
        now["commit"] = commit
        assert main(["--workloads", ",".join(workloads), "--out", str(tmp_path)]) == 0
        saved = json.loads((tmp_path / "losses.json").read_text())
        assert [(row["workload"], row["optimizer"], row["precision"]) for row in saved["rows"]] == list(
            product(kept, zoo.OPTIMIZERS, losses.PRECISIONS)
        )
    now["commit"] = "c"
    found = iter([known(zoo.TRAINING["train_mlp12"], "sgd", "bfloat16", None)])
    monkeypatch.setattr(losses, "row", lambda *how: next(found))
    with pytest.raises(StopIteration):
        main(["--out", str(tmp_path)])
    saved = json.loads((tmp_path / "losses.json").read_text())
    assert len(saved["rows"]) == 1, "what was measured before an interruption is kept"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", zoo.OPTIMIZERS)
@pytest.mark.parametrize("name", ["train_mlp12", "train_dlrm"])
def test_on_a_gpu_they_are_near_too(name: str, optimizer: str, precision: str) -> None:
    """What is computed in bfloat16 is rounded by up to 2 ** -9, elsewhere in fused kernels than in eager ones.

    Eager runs, which all round in the same places, can be nearer to each other: in DLRM with SGD, which loses most of
    its updates to rounding, by 1.5e-4 to 2.8e-4, where a step in fused kernels was 3.5e-4 to 3.9e-4 from them.
    """
    found = row(zoo.TRAINING[name], optimizer, precision, torch.device("cuda"))
    assert found["autostream"] <= max(2 * found["spread"], 2**-10)
