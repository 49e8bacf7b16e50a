"""Buckets of models in which gradients differ in type, or in when they are ready."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autostream
from autostream.frontend.all_reduces import buckets
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


def test_a_bucket_has_one_type() -> None:
    model = Mixed()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(64, 1024)
    with fake_processes(4):
        step = autostream.train_step(model, sgd, nn.MSELoss(), data_parallel=dist.group.WORLD)
        program = step.traced((x, x), Options(), H200).program
        (filled,), _ = best_buckets(program, in_buckets(program), Options(), H200)
        (sums,) = sums_of(program)
    assert sorted(at for bucket in filled for at in bucket) == [*range(24)]
    types = [{sums.like[at].dtype for at in bucket} for bucket in filled]
    assert {len(each) for each in types} == {1}
    assert set.union(*types) == {torch.float32, torch.bfloat16}


def test_no_bucket_waits_for_a_small_gradient_that_is_ready_last() -> None:
    """The bias of a first projection is ready when its weight is, which ends the backward of an encoder.

    The usual buckets have it in the last but one, with gradients that were ready long before.
    """
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True), 6)
    names = [name for name, _ in model.named_parameters()]
    first = [at for at, name in enumerate(names) if name.startswith("layers.0.self_attn.in_proj")]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(16, 16, 512)
    with fake_processes(2):
        step = autostream.train_step(model, sgd, nn.MSELoss(), data_parallel=dist.group.WORLD)
        program = step.traced((x, x), Options(), H200).program
        (filled,), _ = best_buckets(program, in_buckets(program), Options(), H200)
    assert buckets(sums_of(program)[0].like)[-1] == (first[0],)
    assert set(first) <= set(filled[-1])
    assert len(filled[-1]) <= 12, "no more than a layer"
