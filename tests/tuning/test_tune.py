"""Tuning: with a capture or without, with the faster kernels, and with choices of earlier processes."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autostream import store as stores
from autostream.errors import CaptureError, FusionError
from autostream.frontend.trace import trace
from autostream.ir import Candidate, Decision, Limit, Program, Schedule
from autostream.options import Options
from autostream.tuning import choices
from autostream.tuning import tune as tuning
from autostream.tuning.pricing import Priced
from autostream.tuning.select import Selection
from autostream.tuning.tune import Task, Tuned, tune
from autostream.utils.stopwatch import Stopwatch


def program(device: str = "cpu") -> Program:
    return trace(nn.ReLU(), [torch.ones(2, 4)], device=device).program


def tuned(**options: Any) -> Tuned:
    return tune(program(), [torch.ones(2, 4)], [False], Options(**options), Stopwatch())


# Captures


class Device:
    """A fake GPU: records whether programs are captured, and may fail to capture."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        refusals: tuple[Decision, ...] = (),
        fails: bool = False,
        measured_us: float | None = None,
    ) -> None:
        self.captures: list[bool] = []
        real_price, real_candidates = tuning.price_program, tuning.candidates_for

        def price(*args: Any, **kwargs: Any) -> Priced:
            priced = real_price(*args, **kwargs)
            return replace(priced, graph=replace(priced.graph, device="cuda:0"), refusals=refusals)

        def candidates(priced: Priced, options: Options, capture: bool, stopwatch: Any) -> tuple[Candidate, ...]:
            self.captures.append(capture)
            return real_candidates(priced, options, capture, stopwatch)

        def select(
            program: Any,
            graph: Any,
            candidates: Any,
            tensors: Any,
            bound: Any,
            restore: Any,
            seconds: float = math.inf,
            variants: Any = lambda candidate: (),
            peers: Any = None,
        ) -> Selection:
            self.variants = list(variants(candidates[-1]))
            if fails and candidates[0].captured:
                raise CaptureError("this op cannot be captured")
            chosen, *others = (replace(candidate, measured_us=measured_us) for candidate in candidates)
            return Selection(program.module.forward, chosen, (chosen, *others))

        monkeypatch.setattr(tuning, "price_program", price)
        monkeypatch.setattr(tuning, "candidates_for", candidates)
        monkeypatch.setattr(tuning, "select", select)


UNCAPTURABLE = Decision("relu", "not captured", "it waits for the device")


@torch.no_grad()
@pytest.mark.parametrize(
    ("refusals", "fails", "cuda_graph", "captures", "reasons"),
    [
        ((), False, "auto", [True], []),
        ((UNCAPTURABLE,), False, "auto", [False], [UNCAPTURABLE.reason]),
        ((), True, "auto", [True, False], ["this op cannot be captured"]),
        ((UNCAPTURABLE,), False, False, [False], []),
    ],
    ids=["captured", "uncapturable", "fails", "not asked for"],
)
def test_a_program_is_captured_if_possible_and_else_the_reason_is_reported(
    refusals: tuple[Decision, ...], fails: bool, cuda_graph: Any, captures: list[bool], reasons: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    device = Device(monkeypatch, refusals, fails)
    result = tuned(cuda_graph=cuda_graph)
    assert device.captures == captures
    assert [refusal.reason for refusal in result.refusals] == reasons
    assert result.selection.chosen.captured == captures[-1]
    assert all(variant.captured == captures[-1] for variant in device.variants)


class Written(nn.Module):
    """Two branches, behind which the input is written."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x @ x, x @ x.t()
        x.add_(1.0)
        return left @ left + right @ right


@torch.no_grad()
def test_variants_are_measured_also_of_a_program_that_writes_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    device, x = Device(monkeypatch), torch.ones(512, 512)
    tune(trace(Written(), [x]).program, [x], [False], Options(), Stopwatch())
    assert device.variants


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({}, []),
        ({"cuda_graph": False}, []),
        ({"kernels": "inductor"}, ['this program runs on the CPU: use kernels="eager"; ops stay those of ATen']),
        ({"inductor_options": {"max_autotune": True}}, ["leave them out, or move the model to a GPU"]),
    ],
)
def test_on_the_cpu_nothing_is_captured_or_fused_and_what_was_asked_for_is_reported(
    options: dict[str, Any], reasons: list[str]
) -> None:
    result = tuned(**options)
    assert (result.program.level, result.selection.chosen.captured) == ("aten", False)
    assert len(result.refusals) == len(reasons)
    assert all(refusal.reason.endswith(end) for refusal, end in zip(result.refusals, reasons, strict=True))


# Kernels


INDUCTOR, ATEN, SEQUENTIAL = [("inductor", "auto")], [("aten", "auto")], [("aten", "sequential")]
ALL = [*INDUCTOR, *SEQUENTIAL, *ATEN]
SLOW = {"inductor": 105.0, "sequential": 100.0}
FAILED = "TorchInductor's kernels do not run: RuntimeError: inductor does not run"


class Levels:
    """A fake Inductor and GPU: fuses any program, and has a time for each level and for ATen on one stream, µs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **times: float) -> None:
        self.planned: list[tuple[str, str]] = []

        def fuse(
            program: Program, settings: Mapping[str, Any], tensors: object, stopwatch: object
        ) -> tuple[Program, tuple[Decision, ...]]:
            frozen = frozenset({0}) if settings.get("freezing") else frozenset()
            return replace(program, level="inductor", frozen=frozen), ()

        def planned(task: Task, peers: object) -> Tuned:
            program, policy = task.program, task.options.policy
            self.planned.append((program.level, policy))
            name = "sequential" if policy == "sequential" else program.level
            name = "frozen" if program.frozen else name
            if name not in times:
                raise RuntimeError(f"{name} does not run")
            chosen = Candidate(Schedule("mine", 1, ()), captured=True, predicted_us=1.0, measured_us=times[name])
            nothing: Any = None
            return Tuned(program, nothing, Selection(nothing, chosen, (chosen,)), ())

        monkeypatch.setattr(tuning, "fused_here", fuse)
        monkeypatch.setattr(tuning, "_planned", planned)


def of_a_gpu(**options: Any) -> Tuned:
    return tune(program("cuda:0"), [torch.ones(2, 4)], [False], Options(**options), Stopwatch())


SLOWER = "fused, it takes 105.0 µs, which is not 1% less than {} µs as it is"
ALONE = "ops as they are could not be measured beside it: RuntimeError: sequential does not run"
FREEZING = {"kernels": "inductor", "inductor_options": {"freezing": True}}
THAWED = "with weights as constants, it takes 60.0 µs, which is not 1% less than 50.0 µs with weights as they are"
CASES: dict[str, tuple[dict[str, Any], dict[str, float], str, list[tuple[str, str]], list[str]]] = {
    "fused is faster": ({}, {"inductor": 50.0, "sequential": 100.0}, "inductor", [*INDUCTOR, *SEQUENTIAL], []),
    "fused is slower": ({}, SLOW | {"aten": 90.0}, "aten", ALL, [SLOWER.format(90.0)]),
    "streams are given": ({"streams": 2}, SLOW | {"aten": 90.0}, "aten", ALL, [SLOWER.format(90.0)]),
    "a tie": ({}, SLOW | {"aten": 104.0}, "aten", ALL, [SLOWER.format(104.0)]),
    "fused is faster than all": ({}, SLOW | {"aten": 120.0}, "inductor", ALL, []),
    "fused is asked for": ({"kernels": "inductor"}, SLOW | {"aten": 1.0}, "inductor", INDUCTOR, []),
    "ATen is asked for": ({"kernels": "eager"}, {"inductor": 1.0, "aten": 2.0}, "aten", ATEN, []),
    "fused kernels fail": ({}, {"aten": 1.0}, "aten", [*INDUCTOR, *ATEN], [FAILED]),
    "fused kernels fail and are asked for": (
        {"kernels": "inductor"},
        {"aten": 1.0},
        "aten",
        [*INDUCTOR, *ATEN],
        [FAILED],
    ),
    "frozen is faster": (FREEZING, {"frozen": 40.0, "inductor": 50.0}, "inductor", INDUCTOR * 2, []),
    "frozen is slower": (FREEZING, {"frozen": 60.0, "inductor": 50.0}, "inductor", INDUCTOR * 2, [THAWED]),
    "only frozen runs": (FREEZING, {"frozen": 60.0}, "inductor", INDUCTOR * 2, []),
    "ATen fails": ({}, {"inductor": 50.0}, "inductor", [*INDUCTOR, *SEQUENTIAL], [ALONE]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_faster_kernels_are_chosen_and_the_reason_is_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ATen's schedules are only considered if ATen's ops are fast one after another."""
    options, times, level, planned, reasons = CASES[name]
    levels = Levels(monkeypatch, **times)
    result = of_a_gpu(**options)
    assert (result.program.level, levels.planned) == (level, planned)
    assert bool(result.program.frozen) == (name in ("frozen is faster", "only frozen runs"))
    assert [refusal.reason for refusal in result.refusals] == reasons


@pytest.mark.parametrize("kernels", ["auto", "inductor"])
def test_a_program_that_cannot_be_fused_runs_as_aten_ops(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise FusionError("TorchInductor cannot fuse it: too odd")

    Levels(monkeypatch, aten=1.0)
    monkeypatch.setattr(tuning, "fused_here", refuse)
    result = of_a_gpu(kernels=kernels)
    assert (result.program.level, result.refusals[0].choice) == ("aten", "not fused")
    assert result.refusals[0].reason == "TorchInductor cannot fuse it: too odd"


def test_memory_of_failed_kernels_is_freed_before_aten_ops_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    levels, graphs = Levels(monkeypatch, aten=1.0), []
    planned = tuning._planned

    class Graph:
        pass

    def holding(task: Task, *args: Any) -> Tuned:
        if task.program.level == "inductor":
            graph = Graph()
            graphs.append(weakref.ref(graph))
        else:
            assert graphs[0]() is None
        return planned(task, *args)

    monkeypatch.setattr(tuning, "_planned", holding)
    assert of_a_gpu().program.level == "aten"
    assert len(levels.planned) == 2


# Choices of earlier processes


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the choice, for any program."""
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "choice_key", lambda *_: "key")
    stores._warn_once.cache_clear()
    return tmp_path / "choices" / "key.json"


@torch.no_grad()
def test_a_choice_of_an_earlier_process_is_taken_without_a_search(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, measured_us=9.5)
    first, second = tuned(), tuned()
    assert device.captures == [True], "there was one search"
    assert first.refusals == ()
    assert first.chosen_on == ""
    assert re.fullmatch(r"....-..-.. ..:.. UTC", second.chosen_on)
    assert second.refusals == ()
    assert second.selection.chosen.schedule == first.selection.chosen.schedule
    assert len(second.selection.candidates) == 1


@torch.no_grad()
@pytest.mark.parametrize("why", ["loses", "fails", "damaged"])
def test_a_choice_that_is_slower_wrong_or_damaged_is_made_again(
    why: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    tuned()
    real = tuning.candidates_again
    if why == "loses":
        monkeypatch.setattr(tuning, "candidates_again", lambda *task: real(*task) * 2)
    elif why == "fails":
        monkeypatch.setattr(tuning, "candidates_again", lambda *task: 1 / 0)
    else:
        place.write_text(place.read_text().replace("relu", "tanh"))
    second = tuned()
    assert device.captures == [True, True]
    assert [refusal.choice for refusal in second.refusals] == (["cache rebuilt"] if why == "damaged" else [])
    monkeypatch.setattr(tuning, "candidates_again", real)
    assert (second.chosen_on, bool(tuned().chosen_on)) == ("", True)


@torch.no_grad()
def test_choices_without_a_cuda_graph_or_after_a_failure_are_not_kept(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may have been too little memory for a while."""
    with monkeypatch.context() as patch:
        Device(patch, fails=True)
        tuned()
    for times in ({"aten": 1.0}, {"inductor": 50.0}):
        Levels(monkeypatch, **times)
        of_a_gpu()
    assert not place.exists()


@torch.no_grad()
@pytest.mark.parametrize(
    ("streams", "limit", "kept"),
    [
        (1, None, True), (1, Limit.BUDGET, True), (1, Limit.DEVICE, False), (1, Limit.TIME, False),
        (2, None, True), (2, Limit.BUDGET, True), (2, Limit.DEVICE, False), (2, Limit.TIME, True),
    ],
)  # fmt: skip
def test_a_choice_that_another_process_may_make_differently_is_not_kept(
    streams: int, limit: Limit | None, kept: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU may have more free memory then, or more time to measure several streams."""
    Device(monkeypatch)
    first = tuned()
    place.unlink()
    chosen = replace(first.selection.chosen, schedule=replace(first.selection.chosen.schedule, streams=streams))
    other = replace(chosen, refusal="it did not fit", limit=limit)
    selection = replace(first.selection, chosen=chosen, candidates=(chosen, other))
    tuning._kept("key", replace(first, selection=selection))
    assert place.exists() == kept


def test_the_kernels_and_the_reason_for_them_are_part_of_the_choice(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Levels(monkeypatch, inductor=105.0, sequential=100.0, aten=90.0)
    (refusal,) = of_a_gpu().refusals
    choice, _ = choices.read("key")
    assert choice is not None
    assert (choice.level, choice.measured_us, choice.refusals) == ("aten", 90.0, (refusal,))
    Levels(monkeypatch, inductor=50.0, sequential=100.0)
    assert of_a_gpu(kernels="inductor").refusals == ()
    choice, _ = choices.read("key")
    assert choice is not None
    assert (choice.level, choice.refusals) == ("inductor", ())
