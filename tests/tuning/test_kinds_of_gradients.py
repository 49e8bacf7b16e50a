"""Gradients of several types, in four processes: those of one type are a bucket, and none is copied."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autostream
from autostream.frontend.fake_processes import fake_processes
from autostream.frontend.reduction_buckets import in_buckets, sums_of
from autostream.options import Options
from autostream.tuning.best_buckets import best_buckets
from tests.tuning.test_best_buckets import H200


class Mixed(nn.Module):
    """Products in bfloat16 between norms in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(1024) for _ in range(6)])
        self.products = nn.ModuleList([nn.Linear(1024, 1024, dtype=torch.bfloat16) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for norm, product in zip(self.norms, self.products, strict=True):
            x = x + product(norm(x).bfloat16()).float()
        return x


def test_a_bucket_has_one_type_and_only_two_processes_copy() -> None:
    model = Mixed()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(64, 1024)
    for processes in (2, 4):
        with fake_processes(processes):
            step = autostream.train_step(model, sgd, nn.MSELoss(), data_parallel=dist.group.WORLD)
            program = step.traced((x, x), Options(), H200).program
            (filled,), _ = best_buckets(program, in_buckets(program), Options(), H200)
            (sums,) = sums_of(program)
        assert sorted(at for bucket in filled for at in bucket.tensors) == [*range(24)]
        types = [{sums.like[at].dtype for at in bucket.tensors} for bucket in filled]
        assert {len(each) for each in types} == {1}
        assert set.union(*types) == {torch.float32, torch.bfloat16}
        assert any(bucket.copied for bucket in filled) == (processes == 2)
