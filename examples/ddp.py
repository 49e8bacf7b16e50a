"""Data parallelism: a step of which each process has a part of the batch, beside ``DistributedDataParallel``.

    torchrun --nproc-per-node 2 examples/ddp.py

``python examples/ddp.py`` runs it in one process, a group of its own.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autostream

ON_GPU = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if ON_GPU else torch.device("cpu")
WIDTH, BATCH, STEPS = 128, 16, 10


def seconds(step: Callable[[Tensor, Tensor], Tensor], batches: list[tuple[Tensor, Tensor]]) -> float:
    """How long steps take, after a few to warm up."""
    for x, y in batches[:3]:
        step(x, y)
    began = time.perf_counter()
    for x, y in batches:
        loss = step(x, y)
    loss.item()
    return time.perf_counter() - began


def main() -> None:
    """Train one model in both ways; both end with the same weights."""
    if "RANK" not in os.environ:  # without torchrun, a group of one
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(DEVICE)
    ddp = DistributedDataParallel(copy.deepcopy(model))
    sgd, eager_sgd = (torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in (model, ddp))
    loss_fn = nn.MSELoss()

    step = autostream.train_step(model, sgd, loss_fn, data_parallel=dist.group.WORLD)

    def eager(x: Tensor, y: Tensor) -> Tensor:
        eager_sgd.zero_grad()
        loss: Tensor = loss_fn(ddp(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        eager_sgd.step()
        return loss

    torch.manual_seed(1 + dist.get_rank())  # each process has a batch of its own
    batches = [(torch.randn(BATCH, WIDTH, device=DEVICE), torch.randn(BATCH, 1, device=DEVICE)) for _ in range(STEPS)]
    times = [seconds(each, batches) for each in (step, eager)]
    for one, other in zip(model.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    if dist.get_rank() == 0:
        print(autostream.explain(step))
        print(f"{STEPS / times[0]:.0f} steps/s, and with DistributedDataParallel {STEPS / times[1]:.0f} steps/s")
    del step  # NCCL waits for CUDA graphs that hold its collectives
    dist.destroy_process_group()


main()
