"""One process of a pipeline, as ``torchrun`` starts it: loss and gradients are those of the model that is not split.

torchrun --nproc-per-node 2 tests/distributed/pipeline_rank.py
"""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autostream

MICROBATCHES, ROWS = 4, 2


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(4)]
    return nn.Sequential(*layers).double()


def check(*, scheduled: bool) -> None:
    """A step by 1F1B; with ``scheduled``, the stage's forward and backward are scheduled graphs."""
    from torch.distributed.pipelining import Schedule1F1B, build_stage, pipeline

    rank, world = dist.get_rank(), dist.get_world_size()
    model, whole = transformer(), transformer()
    rows = MICROBATCHES * ROWS
    x, target = torch.randn(2, rows, 5, 16, dtype=torch.float64)
    expected = nn.functional.mse_loss(whole(x), target)
    expected.backward()

    cut = autostream.split(model, [x[:ROWS]], world, device="h200", microbatches=MICROBATCHES)
    pipe = pipeline(model, (x[:ROWS],), split_spec=cut.split_spec)
    module = pipe.get_stage_module(rank)
    # On a CPU, a schedule with gradients is made for those only who choose a policy.
    fast = autostream.optimize(module, policy="critical_path") if scheduled else module
    stage = build_stage(fast, rank, pipe.info(), torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    losses: list[Tensor] = []
    for _ in range(2):  # the second step replays what the first has captured
        module.zero_grad()
        losses.clear()
        last = {"target": target, "losses": losses} if rank == world - 1 else {}
        schedule.step(*([x] if rank == 0 else []), **last)
        if rank == world - 1:
            assert abs(torch.stack(losses).mean() - expected) <= 1e-12
        gradients = {name: weight.grad for name, weight in whole.named_parameters()}
        own = dict(module.named_parameters())
        assert own
        for name, weight in own.items():
            assert weight.grad is not None, name
            assert (weight.grad - gradients[name]).abs().max() <= 1e-12, name
    if scheduled:
        assert isinstance(fast, autostream.OptimizedModule)
        modes = {report.mode for report in fast.reports}
        assert modes == {"forward and backward"}, modes


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for scheduled in (False, True) if "scheduled" in sys.argv else (False,):
        check(scheduled=scheduled)
    dist.destroy_process_group()
    print("as the whole model")
