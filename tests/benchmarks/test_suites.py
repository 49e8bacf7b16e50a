"""The suites name what exists, and cover what they promise."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
import torch

from benchmarks import zoo
from benchmarks.harness.inference import Inference
from benchmarks.harness.modes import AUTOSTREAM, modes_of
from benchmarks.harness.training import Training
from benchmarks.memory import ONE_STREAM
from benchmarks.steps import STEPS
from benchmarks.suites import SUITES, Row, comparison_of
from tests.benchmarks.results import SCHEMA


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_names_what_exists_and_each_thing_once(name: str) -> None:
    suite = SUITES[name]
    training = name == "training"
    assert suite.rows
    assert len(set(suite.rows)) == len(suite.rows)
    assert len(set(suite.modes)) == len(suite.modes)
    assert {*suite.modes} <= {*suite.known}
    assert suite.baseline in suite.modes
    for row in suite.rows:
        assert row.workload in (
            zoo.TRAINING if training else {**zoo.INFERENCE, **zoo.PARALLEL, **zoo.DIFFUSION, **STEPS}
        )
        assert row.optimizer in (zoo.OPTIMIZERS if training else ("",))
        assert isinstance(getattr(torch, row.dtype), torch.dtype)


def test_inference_runs_all_modes_but_the_slow_ones_and_of_autostreams_variants_one_stream_alone() -> None:
    every = modes_of(torch.device("cuda"))
    variants = {"autostream_any_memory", *AUTOSTREAM} - {"autostream", ONE_STREAM}
    assert set(SUITES["inference"].modes) == every.keys() - {"compile_max_autotune"} - variants


def test_the_schema_has_the_suites_dtypes_and_optimizers() -> None:
    rows = [row for suite in SUITES.values() for row in suite.rows]
    properties = SCHEMA["$defs"]["row"]["properties"]
    assert SCHEMA["properties"]["suite"]["enum"] == [*SUITES]
    assert {*properties["dtype"]["enum"]} == {row.dtype for row in rows}
    assert Counter(properties["optimizer"]["enum"]) == Counter({row.optimizer for row in rows})


def test_a_contest_is_made_from_a_row_in_any_process() -> None:
    comparison = pickle.loads(pickle.dumps(comparison_of(Row("mm_small", 2, "float32"), "cpu")))()
    assert isinstance(comparison, Inference)
    assert comparison.device == torch.device("cpu")
    output = comparison.prepare("eager").call()
    assert isinstance(output, torch.Tensor)
    assert (len(output), output.dtype) == (2 * 128, torch.float32)


@pytest.mark.parametrize("name", ["ppo"])
def test_a_step_with_several_parts_is_right_as_one_graph(name: str) -> None:
    comparison = comparison_of(Row(name, 8, "float32"), "cpu")()
    assert isinstance(comparison, Training)
    prepared = comparison.prepare("autostream")
    prepared.call()
    assert prepared.error() <= comparison.allowed_error
    assert [report.mode for report in prepared.reports()] != ["plain"]


def test_a_row_with_an_optimizer_is_a_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Linear(4, 4)

    def loss(model: torch.nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (model(x) - target).float().square().mean()

    small = zoo.TrainingWorkload("small", model, lambda batch: (torch.randn(batch, 4), torch.randn(batch, 4)), loss)
    monkeypatch.setattr(zoo, "TRAINING", {"small": small})
    prepared = []
    prepare = zoo.prepare_training
    monkeypatch.setattr(zoo, "prepare_training", lambda *args: prepared.append(args) or prepare(*args))  # type: ignore[func-returns-value]
    comparison = comparison_of(Row("small", 6, "bfloat16", "adamw"), "cpu")()
    assert isinstance(comparison, Training)
    comparison.prepare("eager")
    assert {args[:-1] for args in prepared} == {(small, 6, "adamw", torch.device("cpu"))}
    assert prepared[-1][-1] == torch.bfloat16, "what is timed; it is checked in others"
