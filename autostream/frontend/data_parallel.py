"""Data parallelism: gradients averaged over a process group, in a graph as in an eager step.

They are averaged where a backward ends, as by ``DistributedDataParallel``, so clipping sees averages, and what several
backwards add up is an average too. In an eager step ``dispatch/eager_averages.py`` does that, in a graph an op stands
after the gradients of each backward (``all_reduces.py``). Each bucket is reduced as soon as its gradients are there,
beside the rest of the backward. All processes have to differentiate the same parameters in each backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from autostream.errors import TargetError
from autostream.frontend.all_reduces import ALL_REDUCES, all_reduced
from autostream.options import processes_started


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
        found: list[Tensor] = ALL_REDUCES(gradients, parameters, *self._reduction)
        return found

    def averages(self, gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        """The averages of gradients over all processes, laid out like their parameters, in new memory.

        Args:
            gradients: of this process.
            parameters: of each gradient.
        """
        return all_reduced(gradients, parameters, *self._reduction)

    @property
    def _reduction(self) -> tuple[str, float, str]:
        # A term is divided before it is added, as DistributedDataParallel does: sums of float16 might overflow.
        # NCCL has a kernel for the average of one process, and none for its sum.
        averages = self.averages_itself and self.processes > 1
        return ("avg", 1.0, self.group) if averages else ("sum", 1.0 / self.processes, self.group)


_AVERAGING = {"nccl", "fake"}
"""Backends whose collectives can average, and that of dry runs, which stands for it."""

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
    return DataParallel(group.group_name, group.size(), averages_itself=dist.get_backend(group) in _AVERAGING)


def replicas(modules: nn.Module) -> list[nn.Module]:
    """The parts of a model that are in ``DistributedDataParallel``."""
    return [part for part in modules.modules() if isinstance(part, nn.parallel.DistributedDataParallel)]


def share(group: dist.ProcessGroup, tensors: Iterable[Tensor]) -> None:
    """Give all processes of a group the tensors of its first."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), group=group, group_src=0)
