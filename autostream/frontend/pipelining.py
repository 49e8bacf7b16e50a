"""What is used of ``torch.distributed.pipelining``: its split points, stages, and the orders of its schedules.

``_schedule_visualizer`` is private to PyTorch (seen in 2.11 and 2.13). It tells what each device does in which order,
without a process group.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from autostream.errors import TargetError, first_line
from autostream.scheduling.microbatches import Action, Orders


def split_spec(begins: Sequence[str]) -> dict[str, Any]:
    """What ``pipeline(split_spec=...)`` takes for stages that begin with the calls of these submodules.

    Example:
        >>> split_spec(["layers.3"])
        {'layers.3': <SplitPoint.BEGINNING: 1>}
    """
    from torch.distributed.pipelining import SplitPoint

    return dict.fromkeys(begins, SplitPoint.BEGINNING)


def one_stage(model: nn.Module, args: Sequence[object]) -> nn.Module:
    """A copy of the model as ``torch.distributed.pipelining`` traces stages, which takes longer than the model itself.

    Args:
        model: stays as it is.
        args: of a call.

    Raises:
        Exception: whatever PyTorch raises where it cannot trace the model.

    Example:
        >>> import torch
        >>> len([*one_stage(nn.Linear(2, 2), [torch.ones(1, 2)]).parameters()])
        2
    """
    from torch.distributed.pipelining import pipeline

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of what PyTorch itself calls there
        return pipeline(copy.deepcopy(model), tuple(copy.deepcopy(args)))


def orders(schedule: str, devices: int, microbatches: int) -> Orders:
    """The actions of each device in a schedule of two stages on each device.

    Args:
        schedule: ``"Interleaved1F1B"``, ``"InterleavedZeroBubble"`` or ``"ZBVZeroBubble"``, as in
            ``torch.distributed.pipelining.schedules.get_schedule_class``.
        devices: how many.
        microbatches: of a step.

    Raises:
        TargetError: the schedule does not take so many, or this version of PyTorch does not tell.

    Example:
        >>> [str(action.stage) + action.kind for action in orders("Interleaved1F1B", 2, 2)[0]]
        ['0F', '0F', '2F', '2F', '2B', '2B', '0B', '0B']
    """
    try:
        from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

        found = get_schedule_ops(schedule, devices, microbatches, 2)
        return [
            [
                Action(each.stage_index, kind, each.microbatch_index)
                for each in order
                if each is not None
                for kind in ("F", "B", "I", "W")
                if each.computation_type.value == kind and each.microbatch_index is not None
            ]
            for order in found
        ]
    except (ImportError, AttributeError) as error:
        raise TargetError(f"this version of PyTorch does not tell its order: {first_line(error)}") from error
    except (ValueError, AssertionError) as error:
        raise TargetError(f"PyTorch refuses {microbatches} microbatches: {first_line(error)}") from error
