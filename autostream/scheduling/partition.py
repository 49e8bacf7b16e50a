"""Where to cut a chain of segments into stages of a pipeline.

    segments   a ─ b ─ c ─ d ─ e          between two cut points there is one segment
    stages     ╰─ 0 ─╯ ╰ 1 ╯ ╰ 2 ╯        a stage is a run of segments, on a device of its own

In a full pipeline every device works on another microbatch, so that a step is as fast as its slowest part. The cuts are
those of the dynamic program of PipeDream (Narayanan et al. 2019, "PipeDream: generalized pipeline parallelism for DNN
training", SOSP, §3.1), without replicated stages:

    slowest(k, j) = min over i < j of max(slowest(k - 1, i), time of the segments i … j - 1, transfer at the cut i)

It is exact. Among cuts whose slowest part takes at most 3 % longer, further passes look for those whose slowest stage
takes at most 10 % longer than the fastest, and find one wherever another cut has 8 %; of these, or of all if there are
none, they take one with the fewest bytes across, and then with the most equal times. O(K·N²) for K stages, N segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from operator import add
from typing import Any

from autostream.errors import OptionError, TargetError

BACKWARD = 2.0
"""A backward takes as long as so many forwards: for each product one for the input's gradient, one for the weight's."""

_ALIKE = 1.1
"""How many times as long as the fastest stage the slowest may take, if the model can be cut like that."""

_CEILINGS = (1.0, 1.01, 1.02, 1.03)
"""Stages may take so many times as long as the slowest has to: estimates of times are not better than the last."""

_UNBALANCED = 3.0
"""With a stage of so many times the mean, two devices in three would wait."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What runs between two neighbouring cut points, for one microbatch.

    Attributes:
        name: the submodule whose call it begins with, ``""`` for the first.
        forward_us: time of its forward, µs.
        crossing_bytes: bytes that were computed before it and are read in it or later.
        weights: the bytes that training holds for each weight and buffer that it reads.
        saved: the bytes of each activation that it keeps for the backward.
        output_bytes: bytes of the model's outputs, of the last segment.
    """

    name: str
    forward_us: float
    crossing_bytes: int
    weights: Mapping[str, int]
    saved: Mapping[str, int]
    output_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of segments.

    Attributes:
        begins: the submodule whose call it begins with, ``""`` for the first stage.
        segments: its first segment, and the first behind it.
        forward_us: time of the forward of one microbatch, µs.
        crossing_bytes: bytes of one microbatch that it gets from earlier stages; as many return as gradients.
        weight_bytes: weights, their gradients, two states of an optimizer such as Adam for each, and buffers.
        saved_bytes: activations of one microbatch that it keeps for the backward.
        leaving_bytes: bytes of one microbatch that later stages get.
        output_bytes: the model's outputs of one microbatch, of the last stage.
    """

    begins: str
    segments: tuple[int, int]
    forward_us: float
    crossing_bytes: int
    weight_bytes: int
    saved_bytes: int
    leaving_bytes: int = 0
    output_bytes: int = 0

    @property
    def backward_us(self) -> float:
        """Time of the backward of one microbatch, µs."""
        return BACKWARD * self.forward_us

    def fixed_bytes(self, microbatches: int) -> int:
        """What it holds all the time: weights, and buffers of PyTorch's for what it receives of each microbatch.

        These are its inputs, and the gradients of what it sends.
        """
        return self.weight_bytes + microbatches * (self.crossing_bytes + self.leaving_bytes)

    def memory_bytes(self, in_flight: int, microbatches: int) -> int:
        """What it holds while so many microbatches have run forward but not yet backward, without outputs."""
        return self.fixed_bytes(microbatches) + in_flight * self.saved_bytes


def stages_from(segments: Sequence[Segment], first: int) -> Iterator[Stage]:
    """The stages that begin with a segment: of one segment, of two, and so on.

    Example:
        >>> pair = [Segment("", 2.0, 0, {"w": 8}, {"x": 4}), Segment("b", 3.0, 4, {"w": 8}, {"y": 4})]
        >>> [*stages_from(pair, 0)][1]  # doctest: +ELLIPSIS
        Stage(begins='', segments=(0, 2), forward_us=5.0, crossing_bytes=0, weight_bytes=8, saved_bytes=8, ...)
    """
    begin = segments[first]
    weights: dict[str, int] = {}
    saved: dict[str, int] = {}
    forward_us, weight_bytes, saved_bytes = 0.0, 0, 0
    for end, segment in enumerate(segments[first:], first + 1):
        forward_us += segment.forward_us
        weight_bytes += _added(weights, segment.weights)
        saved_bytes += _added(saved, segment.saved)
        yield Stage(
            begins=begin.name,
            segments=(first, end),
            forward_us=forward_us,
            crossing_bytes=begin.crossing_bytes,
            weight_bytes=weight_bytes,
            saved_bytes=saved_bytes,
            leaving_bytes=segments[end].crossing_bytes if end < len(segments) else 0,
            output_bytes=segment.output_bytes,
        )


def _added(known: dict[str, int], more: Mapping[str, int]) -> int:
    """The bytes of those that were not known; they are known then."""
    new = {name: size for name, size in more.items() if name not in known}
    known.update(new)
    return sum(new.values())


def partition(
    segments: Sequence[Segment],
    stages: int,
    microbatches: int,
    transfer_us: Callable[[int], float],
    limit_bytes: float = inf,
) -> tuple[Stage, ...]:
    """The best cuts.

    Args:
        segments: in the order in which they run.
        stages: how many stages.
        microbatches: of a step; stage ``k`` holds the activations of ``stages - k`` of them at most, as in 1F1B, or of
            all, as in GPipe, if they are fewer than the stages.
        transfer_us: how long so many bytes take from one device to the next, µs.
        limit_bytes: the memory of a device, which the model's outputs need not be in.

    Raises:
        OptionError: there are not so many segments.
        TargetError: the stages do not fit into the memory, or one takes most of the time however the others are cut.

    Example:
        >>> chain = [Segment(name, us, 8, {}, {}) for name, us in (("", 3.0), ("b", 1.0), ("c", 1.0), ("d", 2.0))]
        >>> [stage.segments for stage in partition(chain, 2, 8, lambda size: 0.1)]
        [(0, 1), (1, 4)]
    """
    if not 2 <= stages <= len(segments):
        instead = f"use 2 to {len(segments)} stages" if len(segments) > 1 else "it cannot be cut"
        raise OptionError(
            f"stages={stages} is not allowed: the model has {len(segments) - 1} cut points, calls of submodules that "
            f"run once and get no tensor that is written later; {instead}"
        )
    runs = [[*stages_from(segments, first)] for first in range(len(segments))]

    def slowest_us(at: int, first: int, end: int) -> float:
        stage = runs[first][end - first - 1]
        if stage.memory_bytes(stages - at if stages <= microbatches else microbatches, microbatches) > limit_bytes:
            return inf
        return max(stage.forward_us + stage.backward_us, 2 * transfer_us(stage.crossing_bytes) if first else 0.0)

    bound_us, _ = _cheapest(len(segments), stages, slowest_us, max, 0.0)
    if bound_us == inf:
        raise TargetError(
            f"no cut into {stages} stages fits into {limit_bytes / 1e9:,.1f} GB a device, with gradients and two "
            "states of an optimizer for each weight: use more stages, a smaller microbatch, or a larger device"
        )

    def cheapest_within(floor_us: float, ceiling_us: float) -> tuple[_Costs, tuple[int, ...]]:
        def cost(at: int, first: int, end: int) -> _Costs:
            time_us, stage = slowest_us(at, first, end), runs[first][end - first - 1]
            outside = time_us > ceiling_us or stage.forward_us + stage.backward_us < floor_us
            return (float(outside), float(stage.crossing_bytes), time_us**2)

        return _cheapest(len(segments), stages, cost, _summed, (0.0, 0.0, 0.0))

    ceilings = [bound_us * times for times in _CEILINGS]
    (outside, *_), ends = min(cheapest_within(ceiling_us / _ALIKE, ceiling_us) for ceiling_us in ceilings)
    if outside:
        _, ends = cheapest_within(0.0, ceilings[-1])
    cut = tuple(runs[first][end - first - 1] for first, end in pairwise((0, *ends)))
    _check_balance(cut, segments)
    return cut


_Costs = tuple[float, ...]


def _summed(one: _Costs, other: _Costs) -> _Costs:
    return tuple(map(add, one, other))


def _cheapest(
    count: int, stages: int, cost: Callable[[int, int, int], Any], joined: Callable[[Any, Any], Any], nothing: Any
) -> tuple[Any, tuple[int, ...]]:
    """The least joined cost of so many stages, and where they end.

    Args:
        count: of the segments.
        stages: how many.
        cost: of the stage with this number, from this segment up to that one.
        joined: the cost of two runs of stages together, which grows with each of them.
        nothing: the cost of no stage.
    """
    best: dict[int, tuple[Any, tuple[int, ...]]] = {0: (nothing, ())}
    for at in range(stages):
        left = stages - at - 1
        best = {
            end: min(
                (joined(before, cost(at, first, end)), (*ends, end))
                for first, (before, ends) in best.items()
                if first < end
            )
            for end in range(at + 1, count - left + 1)
            if left or end == count
        }
    return best[count]


def _check_balance(cut: Sequence[Stage], segments: Sequence[Segment]) -> None:
    """Refuse stages of which one takes many times the mean, so that the devices of the others wait.

    Raises:
        TargetError: which it is.
    """
    total_us, largest = sum(stage.forward_us for stage in cut), max(cut, key=lambda stage: stage.forward_us)
    if largest.forward_us * len(cut) > _UNBALANCED * total_us:
        first, end = largest.segments
        slow = max(segments[first:end], key=lambda segment: segment.forward_us)
        sensible = max(1, int(_UNBALANCED * total_us / largest.forward_us))
        raise TargetError(
            f"{len(cut)} stages cannot be balanced: the one that begins with {largest.begins or 'the input'} takes "
            f"{largest.forward_us / total_us:.0%} of the time, and no cut point lies inside "
            f"{slow.name or 'what runs first'}: " + (f"use {sensible} stages" if sensible > 1 else "use one device")
        )
