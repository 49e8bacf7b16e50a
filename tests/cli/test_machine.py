"""Measuring a GPU, and telling what is here."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autostream import cli
from autostream.cli import machine
from autostream.costs.device import profile_named
from autostream.costs.records import Context
from autostream.ir import Decision, DeviceProfile
from tests.cli.calls import error_of


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> DeviceProfile:
    measured = replace(profile_named("h200"), name="NVIDIA H300", source="measured")
    monkeypatch.setattr(machine, "parse_device", lambda text: torch.device("cuda", 0))
    monkeypatch.setattr(machine, "profile_of", lambda device: measured)
    monkeypatch.setattr(
        machine, "profile_anew", lambda device: (measured, (Decision("", "not kept", "the disk is full"),))
    )
    return measured


def test_a_gpu_is_measured_for_others(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    planned: SimpleNamespace,
    gpu: DeviceProfile,
) -> None:
    monkeypatch.setattr(
        machine,
        "context_of",
        lambda device, profile, method: Context(profile.name, profile.multiprocessors, {"method": f"{method}"}),
    )
    assert cli.main(["profile", "--out", "mine.json"]) == 0
    assert cli.main(["schedule", model, "--device", "mine.json"]) == 0
    assert planned.profile == gpu
    capsys.readouterr()
    assert cli.main(["profile"]) == 0
    shown, said = capsys.readouterr()
    assert shown.startswith("device      NVIDIA H300: 132 SMs (measured)")
    assert said == "autostream: not kept: the disk is full\n"


@pytest.mark.usefixtures("gpu")
def test_what_cannot_be_measured_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: str) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nLong story.")

    assert error_of(capsys, "profile", "--out", "gpu.txt").startswith("--out gpu.txt: name a file that ends in .json")
    monkeypatch.setattr(machine, "profile_anew", fail)
    assert error_of(capsys, "profile") == (
        "--device cuda:0: it could not be measured: OutOfMemoryError: CUDA out of memory.; free it and try again"
    )


def test_a_processor_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, "profile", "--device", "cpu").startswith("--device cpu: a processor is not measured")


def test_env_has_a_line_for_each_fact(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "environment", dict)
    monkeypatch.setattr(machine, "_PACKAGES", ("no_such_package",))
    monkeypatch.setattr(machine, "cache_folder", lambda: Path("/no/such/folder"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    known = SimpleNamespace(name="GPU", multi_processor_count=132, total_memory=141e9, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: known)
    monkeypatch.setattr(machine, "profile_of", lambda device: profile_named("h200"))
    assert cli.main(["env"]) == 0
    shown = capsys.readouterr().out
    assert "no_such_package not installed" in shown
    assert re.search(r"^gpus +cuda:0 GPU: 132 SMs, 141.0 GB, compute 9.0 \(profile: table", shown, re.MULTILINE)
    assert re.search(r"^kept in +/no/such/folder, not made yet$", shown, re.MULTILINE)
    assert re.search(r"^set +none$", shown, re.MULTILINE)


def test_env_fills_in_the_projects_issue_template(capsys: pytest.CaptureFixture[str]) -> None:
    template = Path(cli.__file__).parents[2] / ".github" / "ISSUE_TEMPLATE" / "bug_report.md"
    assert template.read_text().endswith(f"---\n\n{machine.bug_report('')}")
    assert cli.main(["env", "--bug-report"]) == 0
    shown = capsys.readouterr().out
    assert "**What happens, and what should**" in shown
    assert f"versions    torch {torch.__version__}" in shown
