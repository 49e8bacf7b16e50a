"""What was chosen, written down and read again; when there is a file, and whose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autostream
from autostream import store as keeping
from autostream.ir import Arena, Decision, Launch, Program, Schedule
from autostream.options import Options
from autostream.tuning import choices
from autostream.tuning.choices import Choice, now, place_of, read, write
from autostream.utils.stopwatch import Stopwatch
from tests.alone import alone
from tests.runtime.programs import case_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if there were a GPU, with an empty cache, in a process that has warned of nothing yet."""
    h200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", str(tmp_path))
    keeping._warn_once.cache_clear()
    return tmp_path / "choices"


def program(factor: float = 2.0) -> Program:
    return replace(case_of(lambda x: torch.relu(x * factor), torch.ones(2)).program, device="cuda:0")


def place(given: Program | None = None, **options: Any) -> Path | None:
    return place_of(given or program(), Options(**options), Stopwatch())


names, numbers = st.text(max_size=3), st.integers(0, 9)
several = st.lists(names, max_size=2).map(tuple)
decisions = st.lists(st.builds(Decision, names, names, names), max_size=2).map(tuple)
launches = st.lists(st.builds(Launch, names, numbers, several, several), max_size=3).map(tuple)
arenas = st.builds(Arena, numbers, st.dictionaries(names, numbers, max_size=2))
schedules = st.builds(Schedule, names, numbers, launches, several, decisions, arenas)


@given(st.builds(Choice, names, schedules, st.floats(0, 1e9), names, decisions))
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, choice: Choice) -> None:
    path = tmp_path_factory.mktemp("choices") / "key.json"
    assert read(path) == (None, ())
    assert write(path, choice) == ()
    assert read(path) == (choice, ())


CHOICE = Choice("aten", Schedule("sequential", 1, (Launch("relu", 0),)), 9.5, now())


@pytest.mark.parametrize(
    "damage", [lambda text: text[:-9], lambda text: text.replace("relu", "tanh"), lambda text: "[]", lambda text: ""]
)
def test_a_damaged_file_is_told_of(folder: Path, damage: Callable[[str], str]) -> None:
    path = folder / "key.json"
    write(path, CHOICE)
    path.write_text(damage(path.read_text()))
    choice, (told,) = read(path)
    assert choice is None
    assert told.choice == "cache rebuilt"
    assert "its schedule is chosen again" in told.reason


def test_what_hinders_keeping_is_told(folder: Path) -> None:
    folder.write_text("a file in the place of the folder")
    (told,) = write(folder / "key.json", CHOICE)
    assert (told.choice, told.reason[:44]) == ("not cached", "the chosen schedule cannot be kept (FileExis")


def test_a_file_belongs_to_what_decides_the_choice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program, options, settings, the device with its versions, and the code."""
    given = program()
    places = [place(given), place(given, inductor_options={"max_autotune": True})]
    eager: dict[str, Any] = {"kernels": "eager"}
    places += [place(given, **eager), place(program(3.0), **eager), place(given, **eager, streams=2)]
    for name in ("numerics", "surroundings", "code_in"):
        with monkeypatch.context() as patch:
            patch.setattr(choices, name, lambda *_: "changed")
            places.append(place(given, **eager))
    assert None not in places
    assert len(set(places)) == len(places)
    assert place(given, **eager, strict=True, max_signatures=1) == places[2]


@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graph": False},
        {"inductor_options": {"freezing": True}},
        {"inductor_options": {"force_disable_caches": True}},
    ],
)
def test_what_is_not_captured_or_not_known_by_its_key_is_not_kept(folder: Path, options: dict[str, Any]) -> None:
    assert place(**options) is None


def test_nothing_is_kept_on_the_cpu_nor_for_operators_of_the_users(folder: Path) -> None:
    assert place(replace(program(), device="cpu")) is None
    odd = program()
    next(iter(odd.module.graph.nodes)).meta["mine"] = 1
    assert place(odd) is None


class Branches(nn.Module):
    """Four chains of products."""

    def __init__(self) -> None:
        super().__init__()
        chains = ([nn.Linear(512, 512) for _ in range(4)] for _ in range(4))
        self.chains = nn.ModuleList(nn.Sequential(*chain) for chain in chains)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([chain(x) for chain in self.chains])


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["eager", "inductor", "auto"])
@alone
def test_on_a_gpu_the_second_of_two_is_not_searched_for(kernels: str) -> None:
    """Alone, since nothing is kept for who has changed Inductor, as other tests do."""
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
