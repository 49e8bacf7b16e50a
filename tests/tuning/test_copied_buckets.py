"""Buckets are copied between the GPUs of one machine where the simulator says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autostream
from autostream.costs.interconnects import Interconnect, interconnect_of
from autostream.dispatch.captured_step import TracedStep
from autostream.frontend.all_reduces import buckets
from autostream.frontend.fake_processes import fake_processes
from autostream.frontend.reduction_buckets import in_buckets, sums_of
from autostream.ir import DeviceProfile
from autostream.options import Options
from autostream.tuning.best_buckets import best_buckets
from tests.tuning.test_best_buckets import H200, traced_step


@pytest.fixture(scope="module")
def traced() -> Iterator[TracedStep]:
    """A step with 12 gradients of 4 MiB, in two processes."""
    with fake_processes(2):
        yield traced_step(12, 1024)


def copied(traced: TracedStep, profile: DeviceProfile, *link: Interconnect, copies: bool = True) -> list[bool]:
    """Of each bucket, whether it is copied; none for the usual ones."""
    filled, _ = best_buckets(traced.program, in_buckets(traced.program), Options(), profile, *link, copies=copies)
    return [bucket.copied for bucket in filled[0]] if filled else []


def test_gpus_of_one_machine_copy_large_buckets(traced: TracedStep) -> None:
    """Products beside NCCL's kernels wait for multiprocessors. Between machines no GPU copies from another."""
    assert copied(traced, H200) == [True, True, True]
    assert not any(copied(traced, H200, interconnect_of(H200, "infiniband")))
    assert not any(copied(traced, H200, copies=False))


def test_a_dry_run_has_the_copies_of_the_step(traced: TracedStep) -> None:
    program, report = traced.plan(Options(), H200)
    assert report.graph is not None
    targets = [op.target for op in report.graph.ops.values() if op.group]
    assert targets == ["autostream.gather_by_copies.default"] * 3
    assert [place.name for place in program.placeholders[:3]] == ["rows_0", "rows_1", "rows_2"]
    assert "(3 copied)" in report.refusals[0].reason


@pytest.mark.usefixtures("traced")
def test_no_bucket_waits_for_a_small_gradient_that_is_ready_last() -> None:
    """The bias of a first projection is ready when its weight is, which ends the backward of an encoder.

    The usual buckets have it in the last but one, with gradients that were ready long before.
    """
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True), 6)
    names = [name for name, _ in model.named_parameters()]
    first = [at for at, name in enumerate(names) if name.startswith("layers.0.self_attn.in_proj")]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autostream.train_step(model, sgd, nn.MSELoss(), data_parallel=dist.group.WORLD)
    x = torch.ones(16, 16, 512)
    program = step.traced((x, x), Options(), H200).program
    assert buckets(sums_of(program)[0].like)[-1].tensors == (first[0],)
    for copies in (False, True):
        (filled,), notes = best_buckets(program, in_buckets(program), Options(), H200, copies=copies)
        assert set(first) <= set(filled[-1].tensors)
        assert len(filled[-1].tensors) <= 12, "no more than a layer"
        assert any(bucket.copied for bucket in filled) == copies
        assert ("copied" in notes[0].reason) == copies


def test_copies_take_a_small_part_of_the_memory(traced: TracedStep) -> None:
    """They need two rows of 48 MiB, and a hundredth of the device's may be used."""
    for gigabytes, is_copied in ((12, True), (8, False)):
        assert any(copied(traced, replace(H200, memory_bytes=gigabytes << 30))) == is_copied
