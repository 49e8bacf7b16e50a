"""The benchmark of pipelines over two GPUs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import autostream
from benchmarks.two_devices import CASES, Halves, busy_together, eager, encoder_layer, loss_fn, made


def test_microbatches_train_as_the_whole_batch() -> None:
    case = dataclasses.replace(CASES["encoder"], layers=lambda: encoder_layer(128), count=2, shape=(8, 4, 128))
    ways = []
    for count in (0, 2):
        model, optimizer, batch = made(case, ("cpu", "cpu"), torch.float64)
        assert isinstance(model, Halves)
        step = autostream.train_step(model, optimizer, loss_fn, microbatches=count) if count else None
        losses = [step(*batch) if step else eager(model, optimizer, *batch) for _ in range(3)]
        ways.append([*losses, *model.parameters()])
    torch.testing.assert_close(*ways)


@pytest.mark.parametrize(
    ("intervals", "share"),
    [
        ([], 0.0),
        ([(0, 0.0, 1.0), (1, 1.0, 2.0)], 0.0),
        ([(0, 0.0, 2.0), (1, 0.0, 2.0)], 1.0),
        ([(0, 0.0, 2.0), (0, 1.0, 3.0), (1, 2.0, 4.0), (1, 6.0, 7.0)], 0.2),
    ],
)
def test_both_are_busy_where_each_runs_something(intervals: list[tuple[int, float, float]], share: float) -> None:
    assert busy_together(intervals) == pytest.approx(share)
