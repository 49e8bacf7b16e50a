"""From a traced program to what runs it: with a capture or without, in the kernels that are faster."""

from __future__ import annotations

import math
import re
import weakref
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
from autostream.tuning.candidates import Priced
from autostream.tuning.select import Selection
from autostream.tuning.tune import Tuned, tune
from autostream.utils.stopwatch import Stopwatch


def program(device: str = "cpu") -> Program:
    return trace(nn.ReLU(), [torch.ones(2, 4)], device=device).program


def tuned(**options: Any) -> Tuned:
    return tune(program(), [torch.ones(2, 4)], [False], Options(**options), Stopwatch())


# With a capture or without


class Device:
    """Stands in for a GPU: what is captured, and whether that fails."""

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
        ) -> Selection:
            self.seconds = seconds
            self.variants = list(variants(candidates[-1]))
            if fails and candidates[0].captured:
                raise CaptureError("this op cannot be captured")
            chosen, *others = (replace(candidate, measured_us=measured_us) for candidate in candidates)
            return Selection(program.module.forward, chosen, (chosen, *others))

        monkeypatch.setattr(tuning, "price_program", price)
        monkeypatch.setattr(tuning, "candidates_for", candidates)
        monkeypatch.setattr(tuning, "select", select)


@torch.no_grad()
def test_where_a_graph_can_be_captured_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    result = tuned()
    assert device.captures == [True]
    assert (result.selection.chosen.captured, result.refusals) == (True, ())
    assert all(variant.captured for variant in device.variants)


@torch.no_grad()
def test_a_program_that_writes_has_no_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    monkeypatch.setattr(tuning, "variants_of", lambda *_: iter("ab"))
    tuned()
    assert device.variants == ["a", "b"]
    monkeypatch.setattr(tuning, "written", lambda program, graph: (True,))
    tuned()
    assert device.variants == []


@torch.no_grad()
def test_what_is_known_to_be_uncapturable_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = (Decision("relu", "not captured", "it waits for the device"),)
    device = Device(monkeypatch, refusals)
    result = tuned()
    assert device.captures == [False]
    assert (result.selection.chosen.captured, result.refusals) == (False, refusals)


@torch.no_grad()
def test_after_a_failed_capture_there_is_a_run_without_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, fails=True)
    result = tuned()
    assert device.captures == [True, False]
    assert not result.selection.chosen.captured
    assert [refusal.reason for refusal in result.refusals] == ["this op cannot be captured"]


@torch.no_grad()
def test_nothing_is_captured_that_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, (Decision("relu", "not captured", "it waits for the device"),))
    result = tuned(cuda_graph=False)
    assert device.captures == [False]
    assert result.refusals == ()


@torch.no_grad()
@pytest.mark.parametrize(("asked", "said"), [("auto", []), (False, []), (True, ["not captured"])])
def test_that_the_cpu_has_no_graphs_is_said_where_one_was_asked_for(asked: Any, said: list[str]) -> None:
    result = tuned(cuda_graph=asked)
    assert [refusal.choice for refusal in result.refusals] == said
    assert not result.selection.chosen.captured


@torch.no_grad()
def test_measuring_gets_the_seconds_that_other_stages_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing and compiling are not tuning."""
    device, stopwatch = Device(monkeypatch), Stopwatch({"trace": 50.0, "fuse": 70.0, "search": 4.0, "select": 3.0})
    tune(program(), [torch.ones(2, 4)], [False], Options(tuning_seconds=20.0), stopwatch)
    assert 20.0 - 7.0 - 2.0 < device.seconds <= 20.0 - 7.0
    tune(program(), [torch.ones(2, 4)], [False], Options(tuning_seconds=5.0), stopwatch)
    assert device.seconds == 0.0


# In which kernels


class Levels:
    """Stands in for Inductor and a GPU: fuses any program, and gives each level, and one stream of ATen, a time, µs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **times: float) -> None:
        self.settings: list[object] = []
        self.planned: list[tuple[str, str]] = []
        self.remarks: tuple[Decision, ...] = ()

        def fuse(
            program: Program, settings: object, tensors: object, stopwatch: object
        ) -> tuple[Program, tuple[Decision, ...]]:
            self.settings.append(settings)
            return replace(program, level="inductor"), self.remarks

        def planned(program: Program, arguments: Any, bound: Any, options: Options, stopwatch: Any) -> Tuned:
            self.planned.append((program.level, options.policy))
            name = "sequential" if options.policy == "sequential" else program.level
            if name not in times:
                raise RuntimeError(f"{name} does not run")
            chosen = Candidate(Schedule("mine", 1, ()), captured=True, predicted_us=1.0, measured_us=times[name])
            nothing: Any = None
            return Tuned(program, nothing, Selection(nothing, chosen, (chosen,)), ())

        monkeypatch.setattr(tuning, "fused_here", fuse)
        monkeypatch.setattr(tuning, "_planned", planned)


def of_a_gpu(**options: Any) -> Tuned:
    return tune(program("cuda:0"), [torch.ones(2, 4)], [False], Options(**options), Stopwatch())


def test_fused_kernels_that_are_faster_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = Levels(monkeypatch, inductor=50.0, sequential=100.0)
    result = of_a_gpu(inductor_options={"max_autotune": True})
    assert (result.program.level, result.refusals) == ("inductor", ())
    assert levels.settings == [{"max_autotune": True}]
    assert levels.planned == [("inductor", "auto"), ("aten", "sequential")], "ATen's schedules need no look"


def test_what_was_wrong_with_keeping_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = Levels(monkeypatch, inductor=50.0, sequential=100.0)
    levels.remarks = (Decision("", "cache rebuilt", "damaged"),)
    assert of_a_gpu().refusals == levels.remarks


@pytest.mark.parametrize(("aten", "level"), [(90.0, "aten"), (104.0, "aten"), (120.0, "inductor")])
def test_fused_kernels_that_are_slower_meet_all_of_atens_schedules(
    aten: float, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = Levels(monkeypatch, inductor=105.0, sequential=100.0, aten=aten)
    result = of_a_gpu()
    assert result.program.level == level
    assert levels.planned[-1] == ("aten", "auto")
    if level == "aten":
        (refusal,) = result.refusals
        assert (refusal.choice, refusal.reason) == (
            "not fused",
            f"fused, it takes 105.0 µs, which is not 1% less than {aten} µs as it is",
        )


def test_fused_kernels_that_are_asked_for_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = Levels(monkeypatch, inductor=500.0, sequential=1.0, aten=1.0)
    assert of_a_gpu(kernels="inductor").program.level == "inductor"
    assert levels.planned == [("inductor", "auto")]


def test_atens_ops_that_are_asked_for_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = Levels(monkeypatch, inductor=1.0, aten=2.0)
    assert of_a_gpu(kernels="eager").program.level == "aten"
    assert levels.settings == []


@pytest.mark.parametrize("kernels", ["auto", "inductor"])
def test_what_cannot_be_fused_stays_as_it_is_for_a_reason(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise FusionError("TorchInductor cannot fuse it: too odd")

    Levels(monkeypatch, aten=1.0)
    monkeypatch.setattr(tuning, "fused_here", refuse)
    result = of_a_gpu(kernels=kernels)
    assert result.program.level == "aten"
    (refusal,) = result.refusals
    assert (refusal.choice, refusal.reason) == ("not fused", "TorchInductor cannot fuse it: too odd")


@pytest.mark.parametrize("kernels", ["auto", "inductor"])
def test_kernels_that_fail_are_left_for_a_reason(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Levels(monkeypatch, aten=1.0)
    result = of_a_gpu(kernels=kernels)
    assert result.program.level == "aten"
    (refusal,) = result.refusals
    assert refusal.reason == "TorchInductor's kernels do not run: RuntimeError: inductor does not run"


def test_fused_kernels_that_run_are_kept_where_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """As out of memory: several graphs are alive while levels are compared."""
    Levels(monkeypatch, inductor=50.0)
    result = of_a_gpu()
    assert result.program.level == "inductor"
    (refusal,) = result.refusals
    assert refusal.reason == "ops as they are could not be measured beside it: RuntimeError: sequential does not run"


def test_what_failed_is_forgotten_before_anything_else_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold the memory that the other needs."""
    levels, seen = Levels(monkeypatch, aten=1.0), []
    planned = tuning._planned

    class Graph:
        pass

    def holding(program: Program, *args: Any) -> Tuned:
        if program.level == "inductor":
            graph = Graph()
            seen.append(weakref.ref(graph))
        else:
            assert seen[0]() is None
        return planned(program, *args)

    monkeypatch.setattr(tuning, "_planned", holding)
    assert of_a_gpu().program.level == "aten"
    assert len(levels.planned) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, []),
        ({"kernels": "inductor"}, ['this program runs on the CPU: use kernels="eager"; ops stay those of ATen']),
        ({"inductor_options": {"max_autotune": True}}, ["leave them out, or move the model to a GPU"]),
    ],
)
def test_on_the_cpu_nothing_is_fused_and_where_that_was_asked_for_the_reason_is_told(
    options: dict[str, Any], said: list[str]
) -> None:
    result = tuned(**options)
    assert result.program.level == "aten"
    assert [refusal.choice for refusal in result.refusals] == ["not fused"] * len(said)
    assert all(refusal.reason.endswith(end) for refusal, end in zip(result.refusals, said, strict=True))


# Chosen before


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the choice, for any program."""
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "choice_key", lambda *_: "key")
    stores._warn_once.cache_clear()
    return tmp_path / "choices" / "key.json"


@torch.no_grad()
def test_what_was_chosen_is_chosen_again_without_a_search(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, measured_us=9.5)
    first, second = tuned(), tuned()
    assert device.captures == [True], "candidates were looked for once"
    assert first.refusals == ()
    assert first.chosen_on == ""
    assert re.fullmatch(r"....-..-.. ..:.. UTC", second.chosen_on)
    assert second.refusals == ()
    assert second.selection.chosen.schedule == first.selection.chosen.schedule
    assert len(second.selection.candidates) == 1


@torch.no_grad()
@pytest.mark.parametrize("why", ["loses", "fails", "damaged"])
def test_what_is_not_chosen_again_is_chosen_anew(why: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    tuned()
    real = tuning.candidates_again
    if why == "loses":
        monkeypatch.setattr(tuning, "candidates_again", lambda *given: real(*given) * 2)
    elif why == "fails":
        monkeypatch.setattr(tuning, "candidates_again", lambda *given: 1 / 0)
    else:
        place.write_text(place.read_text().replace("relu", "tanh"))
    second = tuned()
    assert device.captures == [True, True]
    assert [refusal.choice for refusal in second.refusals] == (["cache rebuilt"] if why == "damaged" else [])
    monkeypatch.setattr(tuning, "candidates_again", real)
    assert (second.chosen_on, bool(tuned().chosen_on)) == ("", True)


@torch.no_grad()
def test_what_is_not_captured_is_not_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch, fails=True)
    tuned()
    assert not place.exists()


@torch.no_grad()
@pytest.mark.parametrize(
    ("streams", "limit", "kept"),
    [
        (1, None, True), (1, Limit.BUDGET, True), (1, Limit.DEVICE, False), (1, Limit.TIME, False),
        (2, None, True), (2, Limit.BUDGET, True), (2, Limit.DEVICE, False), (2, Limit.TIME, True),
    ],
)  # fmt: skip
def test_what_may_win_another_time_keeps_a_choice_from_being_kept(
    streams: int, limit: Limit | None, kept: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that was busy is free again; and nobody would look for more than one stream any more."""
    Device(monkeypatch)
    first = tuned()
    place.unlink()
    chosen = replace(first.selection.chosen, schedule=replace(first.selection.chosen.schedule, streams=streams))
    rival = replace(chosen, refusal="it did not fit", limit=limit)
    selection = replace(first.selection, chosen=chosen, candidates=(chosen, rival))
    tuning._kept("key", replace(first, selection=selection))
    assert place.exists() == kept


def test_the_kernels_are_part_of_the_choice(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is why they are not others."""
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


@pytest.mark.parametrize("times", [{"aten": 1.0}, {"inductor": 50.0}], ids=["kernels fail", "ops fail"])
def test_nothing_is_kept_where_something_failed(
    times: dict[str, float], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may have been too little memory for a while."""
    Levels(monkeypatch, **times)
    of_a_gpu()
    assert not place.exists()
