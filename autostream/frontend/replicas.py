"""Models in ``DistributedDataParallel``, whose gradients a step averages in its graph.

    train_step(ddp, ...)    ddp(x) ──▶ x on its device ──▶ buffers of the first process ──▶ ddp.module(x)
                            ... backward ──▶ averages over ddp.process_group ──▶ update

``DistributedDataParallel`` averages by hooks of autograd, which no graph calls, and Dynamo does not capture its own
forward. So a step calls the model as a :class:`Replica`. Its calls elsewhere are not changed.

Private to PyTorch (seen in 2.11 and 2.13): ``_comm_hooks``, ``_delay_all_reduce_params``, ``_use_python_reducer`` and
``_join_config`` of ``DistributedDataParallel``. Where one is missing, its steps run as they are written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from autostream.errors import TargetError


class Replica(DistributedDataParallel):
    """A model in ``DistributedDataParallel`` that averages no gradients; it shares all attributes with another one."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        object.__setattr__(self, "__dict__", vars(ddp))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model in it returns.

        Raises:
            TargetError: not all processes would take part in the averages.
        """
        if not self.require_backward_grad_sync or self._join_config.enable:
            raise TargetError(
                "train_step averages the gradients of a model in DistributedDataParallel itself, in every step of all "
                "processes: call it outside of no_sync() and join()"
            )
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        if self.broadcast_buffers:
            _share([*self.module.buffers()], self.process_group.group_name)
        return self.module(*args, **kwargs)


def _share(buffers: list[Tensor], group: str) -> None:
    """Give all processes the buffers of the first, those of a dtype and device in one message."""
    for kind in dict.fromkeys((buffer.dtype, buffer.device) for buffer in buffers):
        alike = [buffer.detach() for buffer in buffers if (buffer.dtype, buffer.device) == kind]
        mine = torch.cat([buffer.reshape(-1) for buffer in alike])
        first = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.broadcast(mine, 0, group))
        for buffer, part in zip(alike, first.split([buffer.numel() for buffer in alike]), strict=True):
            buffer.copy_(part.view_as(buffer))


def replicas(modules: nn.Module) -> list[DistributedDataParallel]:
    """The parts of a model that are in ``DistributedDataParallel``, which averages their gradients."""
    parts = (part for part in modules.modules() if isinstance(part, DistributedDataParallel))
    return [part for part in parts if not isinstance(part, Replica)]


def replica_of(model: object) -> Replica | None:
    """A model in ``DistributedDataParallel`` whose step averages gradients in its place, if that does nothing else."""
    if not isinstance(model, DistributedDataParallel) or isinstance(model, Replica) or unusual_replica(model):
        return None
    return Replica(model)


def unusual_replica(ddp: DistributedDataParallel) -> str:
    """What ``DistributedDataParallel`` does besides averaging the gradients of a model, in words."""
    unusual = {
        "a communication hook": getattr(ddp, "_comm_hooks", True),
        "a hook for buffers": hasattr(ddp, "buffer_hook"),
        "mixed_precision": ddp.mixed_precision,
        "find_unused_parameters": ddp.find_unused_parameters,
        "parameters that it ignores": ddp.parameters_to_ignore,
        "parameters that are averaged at the end": getattr(ddp, "_delay_all_reduce_params", True),
        "a reducer in Python": getattr(ddp, "_use_python_reducer", True),
        "uneven inputs": not hasattr(ddp, "_join_config"),
        "sparse gradients": any(getattr(module, "sparse", False) is True for module in ddp.modules()),
    }
    return ", ".join(name for name, used in unusual.items() if used)
