"""Suites: their rows and modes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks import steps, zoo
from benchmarks.harness import modes
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.inference import Inference
from benchmarks.harness.steps import step_modes_of
from benchmarks.harness.training import Training, training_modes_of
from benchmarks.memory import ONE_STREAM


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a result: a workload with its settings.

    Attributes:
        workload: a name from :data:`benchmarks.zoo.INFERENCE`, ``PARALLEL``, ``DIFFUSION`` or ``SMALLEST``, or from
            :data:`benchmarks.steps.STEPS`; with an optimizer, from ``TRAINING``.
        batch: samples.
        dtype: e.g. ``"float16"``.
        optimizer: of a training step.
    """

    workload: str
    batch: int
    dtype: str
    optimizer: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    """Rows, their device, the modes, and the baseline of ratios."""

    device: str
    rows: tuple[Row, ...]
    modes: tuple[str, ...]
    baseline: str

    @property
    def known(self) -> Collection[str]:
        """All modes that its rows can be measured in."""
        row, device = self.rows[0], torch.device(self.device)
        if row.workload in steps.STEPS:
            return step_modes_of(device)
        return training_modes_of(device) if row.optimizer else modes.modes_of(device)


def comparison_of(row: Row, device: str) -> Callable[[], Comparison]:
    """A picklable function that makes a row's comparison."""
    return partial(_comparison, row, device)


def _comparison(row: Row, device: str) -> Comparison:
    place, dtype = torch.device(device), getattr(torch, row.dtype)
    if row.optimizer:
        return Training(
            partial(zoo.prepare_training, zoo.TRAINING[row.workload], row.batch, row.optimizer, place), dtype
        )
    if row.workload in steps.STEPS:
        make = partial(steps.prepare_step, steps.STEPS[row.workload], row.batch, place)
        return Training(make, dtype, partial(make, random=True))
    workload = {**zoo.INFERENCE, **zoo.PARALLEL, **zoo.DIFFUSION, **zoo.SMALLEST}[row.workload]
    comparison = Inference(zoo.prepare(workload, row.batch, place, dtype))
    comparison.require_checkable()
    return comparison


_COMPILED = ("compile_default", "compile_reduce_overhead", "compile_captured")
_MODES = ("eager", "cuda_graph", *_COMPILED, "autostream", ONE_STREAM, "make_graphed_callables")
_QUICK = ("eager", "cuda_graph", "compile_reduce_overhead", "autostream")

SUITES: Mapping[str, Suite] = {
    "inference": Suite(
        "cuda",
        tuple(
            Row(workload.name, batch, "float16")
            for batch in zoo.ALL_BATCHES
            for workload in zoo.INFERENCE.values()
            if batch in workload.batches
        ),
        _MODES,
        "cuda_graph",
    ),
    "training": Suite(
        "cuda",
        tuple(
            Row(workload.name, batch, "bfloat16", optimizer)
            for workload in zoo.TRAINING.values()
            for batch in workload.batches
            for optimizer in zoo.OPTIMIZERS
        ),
        ("eager", "cuda_graph", *_COMPILED, "autostream", ONE_STREAM),
        "cuda_graph",
    ),
    "steps": Suite(
        "cuda",
        tuple(Row(workload.name, workload.batch, workload.dtype) for workload in steps.STEPS.values()),
        (
            *("eager", "cuda_graph", "compile_reduce_overhead", "compile_captured", "cuda_graph_module"),
            "autostream",
        ),
        "compile_captured",
    ),
    "quick": Suite(
        "cuda",
        tuple(Row(name, 1, "float16") for name in ("googlenet", "squeezenet1_1", "mm_medium", "towers8", "dlrm")),
        _QUICK,
        "cuda_graph",
    ),
    "parallel": Suite(
        "cuda",
        tuple(
            Row(f"{kind}_{size}", 1, "float16") for size in ("small", "medium", "large") for kind in ("mm", "parallel")
        ),
        _QUICK,
        "cuda_graph",
    ),
    "diffusion": Suite(
        "cuda",
        tuple(Row(workload.name, workload.batches[0], "float16") for workload in zoo.DIFFUSION.values()),
        ("cuda_graph", "compile_reduce_overhead", "compile_captured", "autostream"),
        "compile_reduce_overhead",
    ),
    "cpu": Suite(
        "cpu",
        (Row("mm_small", 1, "float32"), Row("towers8", 1, "float32")),
        tuple(modes.CPU),
        "eager",
    ),
}
"""Suites by name."""
