"""Whether many training steps end within the spread of eager runs, which differ by rounding alone.

    eager run 1 … eager run k ──▶ distances of each two ──▶ the largest ┐
    our run ──▶ distances to each eager run ──▶ the smallest            ┴─▶ no larger than that?

All runs begin with weights that differ in their last bits, each in its own way, are moved by one more such rounding
after each step, as other kernels would round anew each time, and get the same batches. Were ours one more eager run, it
would be the one that lies farthest from all others in one of ``k + 1`` cases at most; and where the distances of runs
are about alike, as in many dimensions, the smallest of its ``k`` would be larger than all others in one of
C(k(k + 1)/2, k): for five eager runs, 3,003.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.steps import StepSubject
from benchmarks.steps import STEPS, prepare_step

EAGER_RUNS = 5
OTHER_ROUNDING = 1e-6
"""By so much weights differ at first: about what another order of additions makes of a sum."""

End = Mapping[str, Tensor]
"""All that a run has trained, followed or counted, by name."""


def trained(
    name: str,
    as_run: Callable[[StepSubject], Callable[..., Any]],
    seed: int,
    device: torch.device,
    batch: int,
    count: int,
) -> End:
    """The end of a run of so many steps on the same sequence of batches, from weights that depend on a seed."""
    subject = prepare_step(STEPS[name], batch, device, torch.float32, random=True)
    rounding = torch.Generator(device).manual_seed(seed)
    _round_otherwise(subject, OTHER_ROUNDING, rounding)
    run, numbers = as_run(subject), torch.Generator(device).manual_seed(1)
    torch.manual_seed(2)
    for _ in range(count):
        order = torch.randperm(batch, device=device, generator=numbers)
        run(*(tensor[order[: len(tensor)]] for tensor in subject.data))
        _round_otherwise(subject, torch.finfo(torch.float32).eps, rounding)
    return {name: value.detach().double().cpu() for name, value in subject.modules.state_dict().items()}


def _round_otherwise(subject: StepSubject, share: float, generator: torch.Generator) -> None:
    with torch.no_grad():
        for parameter in subject.modules.parameters():
            noise = torch.randn(parameter.shape, device=parameter.device, generator=generator)
            parameter.mul_(1 + share * noise)


def excess(ours: End, eager: Sequence[End]) -> float:
    """The smallest distance of our run from an eager one, as a share of the largest distance of two eager ones.

    Each tensor counts alike: its distances are divided by the largest of eager runs. Tensors that are the same in all
    eager runs, such as counters, have to be so in ours.

    Example:
        >>> ends = [{"weight": torch.tensor([value])} for value in (0.0, 2.0, 3.0)]
        >>> excess({"weight": torch.tensor([5.0])}, ends)
        0.6666666666666666
    """
    pairs = [*combinations(eager, 2)]
    scales = {name: max(_norm(one[name] - other[name]) for one, other in pairs) for name in ours}
    assert all(torch.equal(ours[name], eager[0][name]) for name, scale in scales.items() if scale == 0)

    def distance(one: End, other: End) -> float:
        shares = [_norm(one[name] - other[name]) / scale for name, scale in scales.items() if scale > 0]
        return sum(share**2 for share in shares) ** 0.5

    return min(distance(ours, end) for end in eager) / max(distance(*pair) for pair in pairs)


def _norm(difference: Tensor) -> float:
    return float(difference.norm())
