"""The stages before the device, and dry runs, also for devices that are not available."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream import pipeline
from autostream.costs import measured
from autostream.costs.device import profile_named, profile_of
from autostream.costs.records import Record
from autostream.errors import FusionError, OptionError, TargetError
from autostream.ir import Decision, DeviceProfile, OpGraph, Program
from autostream.options import Options
from autostream.pipeline import lowered, plan, program_of
from autostream.reporting.report import Report
from autostream.tuning import candidates, pricing
from autostream.tuning.pricing import price_program
from autostream.utils import stopwatch
from autostream.utils.kernels import Kernel
from autostream.utils.stopwatch import Stopwatch
from tests.analysis.programs import Tape, aten
from tests.runtime.programs import Towers, fused_case, sample
from tests.scheduling.graphs import costs_of

H200 = profile_named("h200")
X = torch.randn(2, 8)

# Stages


@pytest.mark.parametrize(
    ("costs", "device", "tensors", "source"),
    [
        ("auto", "cpu", True, "roofline"),
        ("auto", "cuda:0", True, "measured"),
        ("auto", "cuda:0", False, "roofline"),
        ("measured", "cpu", True, "measured"),
        ("measured", "cpu", False, "roofline"),
        ("roofline", "cuda:0", True, "roofline"),
    ],
)
def test_which_costs_are_measured(
    monkeypatch: pytest.MonkeyPatch, costs: Any, device: str, tensors: bool, source: str
) -> None:
    case = sample("towers")
    program = replace(case.program, device=device)

    budgets = []

    def here(program: object, graph: OpGraph, profile: object, args: object, budget_s: float) -> Any:
        budgets.append(budget_s)
        return {name: replace(cost, source="measured") for name, cost in costs_of(graph).items()}, ()

    monkeypatch.setattr(pricing, "costs_here", here)
    args = case.args() if tensors else None
    stopwatch = Stopwatch({"trace": 20.0, "price": 3.0, "search": 4.0})
    result = price_program(program, Options(costs=costs), stopwatch, H200, args)
    assert {cost.source for cost in result.costs.values()} == {source}
    assert result.profile is H200
    assert price_program(case.program, Options(), Stopwatch()).profile == profile_of("cpu"), "by default its device's"
    assert budgets == ([3.0] if source == "measured" else []), "of ten seconds, seven are gone"


class Compiling:
    """A clock, by which the first launch of each kernel takes 40 s and all else takes none; a kernel may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caches: Path, fails: str = "") -> None:
        monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", str(caches))
        self.now, self.launched = 0.0, set[Kernel]()
        launch = Kernel.__call__

        def compiled(kernel: Kernel, *args: Any) -> None:
            if kernel.__name__ == fails:
                raise RuntimeError(f"{fails} does not compile")
            self.now += 0.0 if kernel in self.launched else 40.0
            self.launched.add(kernel)
            launch(kernel, *args)

        def timed(call: Any, *_: object) -> Record:
            call()
            return {"warm_us": 2.5}

        monkeypatch.setattr(Kernel, "__call__", compiled)
        monkeypatch.setattr(measured, "_time_calls", timed)
        for module in (measured, stopwatch):
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self) -> float:
        return self.now


def test_kernels_that_still_compile_take_nothing_from_the_time_for_tuning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case, clock, watch = fused_case(), Compiling(monkeypatch, tmp_path), Stopwatch()
    priced = price_program(case.program, Options(costs="measured"), watch, profile_of("cpu"), case.args())
    assert {cost.source for cost in priced.costs.values()} == {"measured"}
    assert watch.seconds == {"analyze": 0.0, "compile": 40.0 * len(clock.launched), "price": 0.0}
    assert len(clock.launched) == 5


def test_a_kernel_that_does_not_compile_is_reported_by_what_times_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = fused_case()
    Compiling(monkeypatch, tmp_path, fails="sin")
    priced = price_program(case.program, Options(costs="measured"), Stopwatch(), profile_of("cpu"), case.args())
    assert {cost.source for cost in priced.costs.values()} == {"roofline"}
    assert "sin does not compile" in priced.notes[0].reason


@pytest.mark.parametrize("costs", ["measured", "roofline"])
def test_problems_with_kept_measurements_are_reported_once(monkeypatch: pytest.MonkeyPatch, costs: str) -> None:
    """Profiles and costs are kept in one file, which is first read and then written."""
    guessed, kept = Decision("", "not measured", "measuring failed"), Decision("", "not cached", "the disk is full")
    monkeypatch.setattr(pricing, "profile_here", lambda device: (profile_of(device), (kept, guessed, kept)))
    monkeypatch.setattr(pricing, "costs_here", lambda program, graph, *_: (costs_of(graph), (kept,)))
    assert dry_run(Towers(), profile=None, costs=costs).refusals == (kept, guessed)


# Dry runs


class Waits(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.relu(), torch.masked_select(x, x > 0).sum()


def dry_run(model: nn.Module, profile: DeviceProfile | None = H200, **options: Any) -> Report:
    return plan(model.eval(), (X,), {}, Options(**{"kernels": "eager", "memory_budget": math.inf, **options}), profile)


def test_a_gpu_that_is_not_available_is_planned_for() -> None:
    report = dry_run(Towers(towers=8))
    assert report.graph is not None
    assert report.graph.device == "cuda:0"
    assert {op.device for op in report.graph.ops.values()} == {"cuda:0"}
    assert report.refusals == ()
    assert {candidate.captured for candidate in report.candidates} == {True}
    assert {candidate.schedule.streams for candidate in report.candidates} >= {1, 4, 8}
    assert report.profile is H200
    assert (report.mode, report.model) == ("dry run", "Towers")
    assert {"trace", "analyze", "price", "schedule", "verify"} <= report.seconds.keys()
    assert {cost.duration_us for cost in report.costs.values()} == {H200.kernel_us}, (
        "8x8 products take the shortest time"
    )


def test_the_best_by_prediction_is_chosen() -> None:
    report = dry_run(Towers())
    assert report.chosen is min(report.candidates, key=lambda candidate: candidate.predicted_us)
    assert report.timeline is not None
    assert report.timeline.makespan_us + H200.replay_us == report.chosen.predicted_us
    assert all(candidate.measured_us is None for candidate in report.candidates)


def test_schedules_over_the_memory_budget_are_not_chosen() -> None:
    report = dry_run(Towers(), memory_budget=101)
    assert report.chosen is report.candidates[0]
    assert len(report.candidates) > 1
    (told,) = report.refusals
    assert told.choice == "over budget"
    assert told.reason.startswith("one stream needs ")
    assert dry_run(Towers(), memory_budget=1.0).refusals == ()


def test_ops_that_cannot_be_captured_are_named_with_their_lines() -> None:
    report = dry_run(Waits())
    assert [refusal.choice for refusal in report.refusals] == ["not captured"] * 2
    refusal, needs_it = report.refusals
    assert needs_it.reason.startswith("aten.sum.default: takes a tensor whose shape depends on data (")
    target, _, reason = refusal.reason.partition(": ")
    assert (refusal.op, target) == ("masked_select", "aten.masked_select.default")
    assert reason.startswith("its result's shape depends on data (")
    assert reason.endswith("return x.relu(), torch.masked_select(x, x > 0).sum())")
    assert "test_pipeline.py:" in reason
    assert {candidate.captured for candidate in report.candidates} == {False}


def test_it_notes_what_a_call_would_capture_in_sections() -> None:
    """Seven ops, then relu and a comparison, and the two that depend on data."""

    class Asks(Waits):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = (x.relu() + x.sin() + x.cos()) * x.tanh()
            return super().forward(y)

    (told,) = [refusal for refusal in dry_run(Asks()).refusals if refusal.choice == "in sections"]
    assert told.reason.startswith("a call captures 9 of 11 ops, in 1 CUDA graph, and runs the others as they are")
    assert all(refusal.choice != "in sections" for refusal in dry_run(Asks(), cuda_graph=False).refusals)


def test_without_capture_outputs_are_on_stream_0() -> None:
    report = dry_run(Towers(), cuda_graph=False)
    assert report.graph is not None
    assert report.graph.pinned
    for candidate in report.candidates:
        assert not candidate.captured
        assert {candidate.schedule.stream_of[name] for name in report.graph.pinned} == {0}


@pytest.mark.parametrize("profile", [None, profile_named("cpu")])
def test_on_a_cpu_there_is_no_refusal_to_capture(profile: DeviceProfile | None) -> None:
    report = dry_run(Towers(), profile)
    assert report.graph is not None
    assert report.graph.device == "cpu"
    assert report.refusals == ()
    assert {candidate.captured for candidate in report.candidates} == {False}
    assert report.profile == profile_of("cpu")


def test_autocast_regions_are_planned_for_the_gpu() -> None:
    class Autocast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = x @ x.t()
            return y.relu()

    report = dry_run(Autocast())
    assert report.graph is not None
    assert {op.device for op in report.graph.ops.values()} == {"cuda:0"}
    assert report.refusals == ()


def test_a_dry_run_changes_nothing_and_computes_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout()).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    plan(model, (X,), {}, Options(), H200)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert {tensor.device for tensor in model.state_dict().values()} == {torch.device("cpu")}


def test_measuring_and_fusing_need_the_device() -> None:
    assert {cost.source for cost in dry_run(nn.ReLU(), None, costs="measured").costs.values()} == {"measured"}
    with pytest.raises(OptionError, match="needs the device itself: leave out the profile"):
        dry_run(Towers(), H200, costs="measured")
    with pytest.raises(OptionError, match='kernels="inductor" needs the device itself: leave out the profile'):
        dry_run(Towers(), H200, kernels="inductor")
    with pytest.raises(OptionError, match=r'kernels="inductor" is not to be had: .* runs on the CPU'):
        dry_run(Towers(), None, kernels="inductor")


def test_a_dry_run_for_a_gpu_plans_aten_ops_and_notes_it() -> None:
    report = dry_run(Towers(), kernels="auto")
    assert report.level == "aten"
    assert report.refusals == (
        Decision("", "not fused", 'a dry run plans ATen ops; where the GPU is, kernels="inductor" plans fused ones'),
    )
    assert dry_run(Towers(), None, kernels="auto").refusals == (), "on the CPU nothing is ever fused"


def test_fused_kernels_are_planned_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def fuse(
        program: Program, options: Mapping[str, Any], tensors: list[Tensor], stopwatch: Stopwatch
    ) -> tuple[Program, tuple[Decision, ...]]:
        given.append((options, [tensor.shape for tensor in tensors]))
        with stopwatch("fuse"):
            return replace(program, level="inductor"), ()

    monkeypatch.setattr(pipeline, "obstacle", lambda device: "")
    monkeypatch.setattr(pipeline, "fused_here", fuse)
    settings = {"max_autotune": True}
    report = dry_run(nn.Linear(8, 3), None, kernels="inductor", inductor_options=settings)
    assert (report.level, report.refusals) == ("inductor", ())
    assert given == [(settings, [(3, 8), (3,), (2, 8)])], "Inductor may look at the weights"
    assert "fuse" in report.seconds

    def fail(*_: object) -> Program:
        raise FusionError("it draws random numbers")

    monkeypatch.setattr(pipeline, "fused_here", fail)
    report = dry_run(Towers(), None, kernels="inductor")
    assert report.level == "aten"
    assert report.refusals == (Decision("", "not fused", "it draws random numbers"),)


def test_keyword_arguments_are_planned_with() -> None:
    class Takes(nn.Module):
        def forward(self, x: Tensor, *, scale: Tensor, twice: bool) -> Tensor:
            return x * scale * (2 if twice else 1)

    arguments = {"scale": torch.ones(8), "twice": False}
    report = plan(Takes(), (X,), arguments, Options(), H200)
    assert report.graph is not None
    assert len(report.graph.ops) == 2
    assert "2x8:float32 on cuda:0, 8:float32 on cuda:0" in report.signature, "where it is planned for"


def test_a_copy_from_the_host_overlaps_with_independent_ops() -> None:
    """54 MB cross the link in 1 ms, and the product takes 2.8 ms::

    x (host) ──▶ copied ─┐
    y ──▶ product ───────┴▶ sum
    """
    tape = Tape("cuda:0")
    x, copied, y = tape.input(3680, 3680, device="cpu"), tape.input(3680, 3680), tape.input(3680, 3680)
    copy, product = tape.call(aten.copy_.default, copied, x, True), tape.call(aten.mm.default, y, y)
    program = tape.case([tape.call(aten.add.Tensor, copy, product)]).program
    options = Options(streams=2, policy="critical_path", memory_budget=math.inf)
    priced = price_program(program, options, Stopwatch(), H200)
    one, two = candidates.candidates_for(priced, options, False, Stopwatch())
    assert two.schedule.stream_of[copy.name] != two.schedule.stream_of[product.name]
    copying_us = priced.costs[copy.name].duration_us
    assert copying_us == pytest.approx(4 * 3680**2 / H200.link_bandwidth, rel=0.01)
    assert one.predicted_us - two.predicted_us == pytest.approx(copying_us, rel=0.05), "all of it is hidden"


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x).relu() + self.right(x).sigmoid()


def test_the_graph_of_a_dry_run_can_be_read() -> None:
    model, x = TwoBranches(), torch.ones(2, 64)
    report = plan(model, (x,), {}, Options(policy="path_cover", streams=2), H200)
    over_two = next(candidate for candidate in report.candidates if candidate.schedule.streams == 2)
    code = lowered(program_of(model, (x,), {}, report), replace(report, chosen=over_two)).code
    assert "fork('cuda:0', 2)" in code
    assert all(f"{launch.op} = " in code for launch in over_two.schedule.launches)
    assert code.count("_wait(lanes, ") >= over_two.schedule.wait_count > 0
    with pytest.raises(TargetError, match="no schedule of ATen's ops to show"):
        program_of(model, (x,), {}, replace(report, level="inductor"))
