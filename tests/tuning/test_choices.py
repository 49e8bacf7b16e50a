"""Chosen schedules on disk: what their key depends on, which are kept, and what a later process does with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autostream
from autostream import store as stores
from autostream.ir import Arena, Decision, Launch, Program, Schedule
from autostream.options import Options
from autostream.tuning import choices
from autostream.tuning.choices import Choice, choice_key, now, read, write
from autostream.utils.stopwatch import Stopwatch
from tests.alone import alone
from tests.runtime.programs import case_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if there were a GPU, with an empty cache, in a process that has logged no warning yet."""
    h200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", str(tmp_path))
    stores._warn_once.cache_clear()
    return tmp_path / "choices"


def program(factor: float = 2.0) -> Program:
    return replace(case_of(lambda x: torch.relu(x * factor), torch.ones(2)).program, device="cuda:0")


def key(traced: Program | None = None, **options: Any) -> str:
    return choice_key(traced or program(), Options(**options), Stopwatch())


names, numbers = st.text(max_size=3), st.integers(0, 9)
several = st.lists(names, max_size=2).map(tuple)
decisions = st.lists(st.builds(Decision, names, names, names), max_size=2).map(tuple)
launches = st.lists(st.builds(Launch, names, numbers, several, several), max_size=3).map(tuple)
arenas = st.builds(Arena, numbers, st.dictionaries(names, numbers, max_size=2))
schedules = st.builds(Schedule, names, numbers, launches, several, decisions, arenas)


@given(st.builds(Choice, names, schedules, st.floats(0, 1e9), names, decisions))
@settings(max_examples=20)
def test_a_choice_is_read_as_it_was_written(choice: Choice) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSTREAM_CACHE_DIR", folder)
        assert read("key") == (None, ())
        assert write("key", choice) == ()
        assert read("key") == (choice, ())


CHOICE = Choice("aten", Schedule("sequential", 1, (Launch("relu", 0),)), 9.5, now())


def test_a_damaged_or_unwritable_file_is_reported(folder: Path) -> None:
    write("key", CHOICE)
    path = folder / "key.json"
    path.write_text(path.read_text().replace("relu", "tanh"))
    choice, (note,) = read("key")
    assert (choice, note.choice) == (None, "cache rebuilt")
    assert note.reason.endswith("; its schedule is chosen again")
    path.mkdir()
    (note,) = write("key", CHOICE)
    assert note.choice == "not cached"
    assert note.reason.startswith("the chosen schedule cannot be kept (IsADir")


def test_the_key_depends_on_all_that_affects_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program, options, settings, the device with its versions, and the code."""
    traced = program()
    keys = [key(traced), key(traced, inductor_options={"max_autotune": True})]
    eager: dict[str, Any] = {"kernels": "eager"}
    keys += [key(traced, **eager), key(program(3.0), **eager), key(traced, **eager, streams=2)]
    for name in ("numerics", "surroundings", "code_in"):
        with monkeypatch.context() as patch:
            patch.setattr(choices, name, lambda *_: "changed")
            keys.append(key(traced, **eager))
    assert "" not in keys
    assert len(set(keys)) == len(keys)
    assert key(traced, **eager, strict=True, max_signatures=1) == keys[2]


@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graph": False},
        {"inductor_options": {"freezing": True}},
        {"inductor_options": {"force_disable_caches": True}},
    ],
)
def test_choices_without_a_cuda_graph_or_with_changing_kernels_are_not_kept(options: dict[str, Any]) -> None:
    assert key(**options) == ""


def test_choices_on_the_cpu_and_of_programs_with_unknown_metadata_are_not_kept() -> None:
    assert key(replace(program(), device="cpu")) == ""
    odd = program()
    next(iter(odd.module.graph.nodes)).meta["mine"] = 1
    assert key(odd) == ""


class Branches(nn.Module):
    """Four chains of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        chains = ([nn.Linear(512, 512) for _ in range(4)] for _ in range(4))
        self.chains = nn.ModuleList(nn.Sequential(*chain) for chain in chains)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([chain(x) for chain in self.chains])


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["eager", "inductor", "auto"])
@alone
def test_on_a_gpu_a_second_optimize_makes_no_search(kernels: str) -> None:
    """In a process of its own: other tests change Inductor, after which choices are not kept."""
    with TemporaryDirectory() as folder, torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSTREAM_CACHE_DIR", folder)
        torch.manual_seed(0)
        model, x = Branches().cuda().eval(), torch.randn(32, 512, device="cuda")
        first, second = (autostream.optimize(model, x, kernels=kernels) for _ in range(2))
        (then,), (now,) = first.reports, second.reports
        assert len(list((Path(folder) / "choices").glob("*.json"))) == 1
        assert (then.chosen_on, bool(now.chosen_on)) == ("", True)
        assert then.refusals == now.refusals
        assert "search" not in now.seconds
        assert (now.level, now.chosen.schedule) == (then.level, then.chosen.schedule)
        assert len(now.candidates) <= 2
        torch.testing.assert_close(second(x), first(x), rtol=0, atol=0)
