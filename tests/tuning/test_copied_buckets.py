"""Buckets are copied between the GPUs of one machine where the simulator says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest

from autostream.costs.interconnects import interconnect_of
from autostream.dispatch.captured_step import TracedStep
from autostream.frontend.fake_processes import fake_processes
from autostream.frontend.reduction_buckets import bucketing
from autostream.options import Options
from autostream.tuning.bucket_sizes import TRIED, best_of_tried
from tests.tuning.test_bucket_sizes import H200, chosen, traced_step


@pytest.fixture(scope="module")
def traced() -> Iterator[TracedStep]:
    """A step with 12 gradients of 4 MiB, in two processes."""
    with fake_processes(2):
        yield traced_step(12, 1024)


def test_gpus_of_one_machine_copy_large_buckets(traced: TracedStep) -> None:
    """Products beside NCCL's kernels wait for multiprocessors. Between machines no GPU copies from another."""
    assert chosen(traced, Options(), interconnect_of(H200)).endswith("copied from 4 MiB on")
    assert "copied" not in chosen(traced, Options(), interconnect_of(H200, "infiniband"))


def test_a_dry_run_has_the_copies_of_the_step(traced: TracedStep) -> None:
    program, report = traced.plan(Options(), H200)
    assert report.graph is not None
    targets = [op.target for op in report.graph.ops.values() if op.group]
    assert set(targets) == {"autostream.gather_by_copies.default"}
    assert [place.name for place in program.placeholders[: len(targets)]] == [
        f"rows_{at}" for at in range(len(targets))
    ]
    assert "copied from 4 MiB on" in report.refusals[0].reason


def test_gpus_that_cannot_copy_reduce(traced: TracedStep) -> None:
    at, _ = best_of_tried(traced.program, Options(), H200, copies=False)
    assert [copied for _, copied in bucketing(traced.program, TRIED[at])] == [0]


def test_copies_take_a_small_part_of_the_memory(traced: TracedStep) -> None:
    """They need two rows of 48 MiB, and a hundredth of the device's may be used."""
    for gigabytes, is_chosen in ((12, True), (8, False)):
        at, _ = best_of_tried(traced.program, Options(), replace(H200, memory_bytes=gigabytes << 30))
        assert (TRIED[at].copied < inf) == is_chosen
