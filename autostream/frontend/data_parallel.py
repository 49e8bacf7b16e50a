"""Data parallelism: gradients averaged over a process group, in a graph as in an eager step.

    gradients of one backward ──▶ buckets ──▶ one tensor each ──▶ all_reduce_ ──▶ wait_tensor ──▶ views: the averages

They are averaged where a backward ends, as by ``DistributedDataParallel``, so clipping sees averages, and what several
backwards add up is an average too. In an eager step ``dispatch/eager_averages.py`` does that. A graph has one op for
the averages of each backward, until ``tuning/bucket_sizes.py`` knows how large buckets should be. Each bucket is
reduced as soon as its gradients are there, beside the rest of the backward.

Buckets are like those of ``DistributedDataParallel``: in reverse order of parameters, the first of 1 MiB, others of 25
MiB in an eager step. But the last 256 KiB, which nothing is left to hide, are a bucket of their own.
All processes have to differentiate the same parameters in each backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autostream.errors import TargetError
from autostream.options import processes_started

_FIRST_BUCKET = 1 << 20
"""Bytes that fill the first bucket, so that sums begin early."""

_LAST_BUCKET = 1 << 18
"""Bytes that fill the last, so that they end soon."""

BUCKET = 25 << 20
"""Bytes that fill another one, as those of ``DistributedDataParallel``."""

_LIBRARY = torch.library.Library("autostream", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "averages(Tensor[] gradients, Tensor[] parameters, str group, int processes, bool averages_itself) -> Tensor[]"
)
"""Stands for the averages of a backward in a graph; it is never run."""


def _laid_out(gradients: Sequence[Tensor], parameters: Sequence[Tensor], *_: object) -> list[Tensor]:
    pairs = zip(gradients, parameters, strict=True)
    return [_like(gradient.new_empty(gradient.numel()), parameter) for gradient, parameter in pairs]


torch.library.register_fake("autostream::averages", _laid_out)

AVERAGES = torch.ops.autostream.averages.default


@dataclass(frozen=True)
class DataParallel:
    """The group over which gradients are averaged.

    Attributes:
        group: its name, as ops of a graph have it.
        processes: how many it has.
        averages_itself: whether the group's collectives can average: nothing else has to divide.
    """

    group: str
    processes: int
    averages_itself: bool = False

    def in_graph(self, gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        """The same as :meth:`averages` in a graph that is traced, as one op whose buckets are chosen later."""
        found: list[Tensor] = AVERAGES(gradients, parameters, self.group, self.processes, self.averages_itself)
        return found

    def averages(self, gradients: Sequence[Tensor], parameters: Sequence[Tensor], size: int = BUCKET) -> list[Tensor]:
        """The averages of gradients over all processes, laid out like their parameters, in new memory.

        Args:
            gradients: of this process.
            parameters: of each gradient.
            size: of buckets, as for :func:`buckets`.
        """
        filled, sums = buckets(parameters, size), []
        for bucket in filled:
            flat = torch.cat([_flat(gradients[at], parameters[at]) for at in bucket])
            if not self.averages_itself:
                # A term is divided before it is added, as DistributedDataParallel does: sums of float16 might overflow.
                flat.mul_(1.0 / self.processes)
            reduction = "avg" if self.averages_itself else "sum"
            sums.append(torch.ops._c10d_functional.all_reduce_(flat, reduction, self.group))
        found: dict[int, Tensor] = {}
        for bucket, summed in zip(filled, sums, strict=True):
            parts = torch.ops._c10d_functional.wait_tensor(summed).split([parameters[at].numel() for at in bucket])
            found |= {at: _like(part, parameters[at]) for at, part in zip(bucket, parts, strict=True)}
        return [found[at] for at in range(len(gradients))]


NOT_OF_A_BACKWARD = (
    "data_parallel averages the gradients that backward() computes, once for each step of their optimizer, and an "
    "optimizer steps with another one: call backward() instead of setting .grad"
)


def data_parallel_of(group: object) -> DataParallel | None:
    """Data parallelism over a process group of ``torch.distributed``; ``None`` for ``False``, and in a single process.

    Raises:
        TargetError: it is no process group, or this process is not in it, or it is ``None`` in one of several
            processes.
    """
    if group is False:
        return None
    if group is None:
        if (processes := processes_started()) == 1:
            return None
        raise TargetError(
            f"data_parallel is None in one of {processes} processes, each of which would train alone: "
            "torch.distributed.group.WORLD is None until init_process_group is called, so call that first; give "
            "data_parallel=False to average nothing"
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise TargetError(
            f"data_parallel takes a process group in which this process is, and rank {dist.get_rank()} is not in this "
            "one (new_group returns GroupMember.NON_GROUP_MEMBER to it): make the step in processes of the group only"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TargetError(
            f"data_parallel takes a process group of torch.distributed, not {group!r}: call "
            "torch.distributed.init_process_group and give torch.distributed.group.WORLD"
        )
    return DataParallel(group.group_name, group.size(), averages_itself=dist.get_backend(group) == "nccl")


def replicas(modules: nn.Module) -> list[nn.Module]:
    """The parts of a model that are in ``DistributedDataParallel``."""
    return [part for part in modules.modules() if isinstance(part, nn.parallel.DistributedDataParallel)]


def share(group: dist.ProcessGroup, tensors: Iterable[Tensor]) -> None:
    """Give all processes of a group the tensors of its first."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), group=group, group_src=0)


def buckets(parameters: Sequence[Tensor], size: int = BUCKET) -> list[list[int]]:
    """The positions of the parameters whose gradients are averaged together, the last parameters first.

    Args:
        parameters: in the order in which a forward uses them, as a rule.
        size: bytes that fill a bucket between the first and the last.

    Example:
        >>> small, large = torch.empty(8), torch.empty(1 << 20)
        >>> buckets([small, large, small, small.double(), small])
        [[3], [4, 2, 1], [0]]
        >>> buckets([small, large, large, large, large, small])
        [[5, 4], [3, 2], [1, 0]]
        >>> buckets([small, large, large, large, large, small], 4 << 20)
        [[5, 4], [3], [2], [1, 0]]
    """
    kinds = [(parameter.dtype, parameter.device) for parameter in parameters]
    sizes = [parameter.numel() * parameter.itemsize for parameter in parameters]
    last: dict[Any, int] = {}  # of the parameters that fill the last bucket, by kind
    before = dict.fromkeys(kinds, 0)
    for at, kind in enumerate(kinds):
        if before[kind] < _LAST_BUCKET:
            last[kind] = at
        before[kind] += sizes[at]
    done: list[list[int]] = []
    filling: dict[Any, list[int]] = {kind: [] for kind in kinds}
    filled, limits = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, _FIRST_BUCKET)
    for at in reversed(range(len(parameters))):
        kind = kinds[at]
        if filled[kind] >= (_LAST_BUCKET if at == last[kind] else limits[kind]):
            done.append(filling[kind])
            filling[kind], filled[kind], limits[kind] = [], 0, size
        filling[kind].append(at)
        filled[kind] += sizes[at]
    done += filter(None, filling.values())
    return sorted(done, key=lambda bucket: -bucket[-1])  # as they fill


def _dimensions(tensor: Tensor) -> list[int]:
    """The dimensions in the order in which they lie in memory, the longest stride first."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda at: -strides[at])


def _flat(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The elements of a gradient in the order of its parameter's memory."""
    return gradient.permute(_dimensions(parameter)).reshape(-1)


def _like(flat: Tensor, parameter: Tensor) -> Tensor:
    """Elements in the order of a parameter's memory as a tensor of its shape."""
    order = _dimensions(parameter)
    back = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([parameter.size(at) for at in order]).permute(back)
