"""A transformer as a pipeline of two processes: autostream says where to cut, PyTorch runs it.

    torchrun --nproc-per-node 2 examples/pipeline.py

Each process has one stage and trains it with the others by 1F1B, over gloo on the CPU. The first one times the ops of
the model to find balanced stages, which also predicts the time of a step.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, build_stage, pipeline

import autostream

MICROBATCHES, ROWS, TIME, WIDTH = 8, 4, 64, 256


def transformer(layers: int = 8) -> nn.Module:
    """Encoder layers without dropout, so that two runs can be compared."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(layers))
    )


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared difference."""
    return nn.functional.mse_loss(output, target)


def main() -> None:
    """Train one stage, and print the predicted and the measured time of a step."""
    if "RANK" not in os.environ:
        raise SystemExit("a pipeline has several processes: torchrun --nproc-per-node 2 examples/pipeline.py")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, example = transformer(), torch.randn(ROWS, TIME, WIDTH)

    # All processes have to cut alike, and times differ: one decides.
    cuts: list[Any] = [None]
    if rank == 0:
        cuts = [autostream.split(model, [example], world, microbatches=MICROBATCHES, costs="measured")]
    dist.broadcast_object_list(cuts)
    (cut,) = cuts
    pipe = pipeline(model, (example,), split_spec=cut.split_spec)
    stage = build_stage(pipe.get_stage_module(rank), rank, pipe.info(), torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)

    rows = MICROBATCHES * ROWS
    x, target, losses = torch.randn(rows, TIME, WIDTH), torch.randn(rows, TIME, WIDTH), list[Tensor]()
    times_s = []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        schedule.step(*([x] if rank == 0 else []), target=target if rank == world - 1 else None, losses=losses)
        dist.barrier()
        times_s.append(time.perf_counter() - start)
        optimizer.step()
        optimizer.zero_grad()
    if rank == world - 1:
        step_us = 1e6 * statistics.median(times_s)
        print(f"{cut}\nmeasured  {step_us:,.1f} µs, loss {torch.stack(losses).mean():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
