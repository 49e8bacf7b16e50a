"""Cuts of chains of segments, compared with all other cuts.

a ─ b ─ c ─ d          3 cut points; 2 stages: a | b c d, a b | c d or a b c | d
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from autostream.errors import OptionError, TargetError
from autostream.scheduling.partition import Segment, Stage, partition, stages_from


def chain(*times_us: float) -> list[Segment]:
    return [Segment(f"s{at}" if at else "", us, 100, {f"w{at}": 8}, {f"x{at}": 4}) for at, us in enumerate(times_us)]


def ends(stages: tuple[Stage, ...]) -> list[int]:
    return [stage.segments[1] for stage in stages]


def test_equal_segments_become_equal_stages() -> None:
    cut = partition(chain(*[1.0] * 12), 4, 8, lambda size: 0.0)
    assert ends(cut) == [3, 6, 9, 12]
    assert [stage.begins for stage in cut] == ["", "s3", "s6", "s9"]


def test_what_is_left_over_is_spread() -> None:
    """Five stages of twelve segments: the slowest has three, and nothing is gained by one of a single segment."""
    cut = partition(chain(*[1.0] * 12), 5, 8, lambda size: 0.0)
    assert sorted(end - first for first, end in (stage.segments for stage in cut)) == [2, 2, 2, 3, 3]


def test_of_cuts_as_fast_the_one_with_fewer_bytes_is_taken() -> None:
    """A cut in the middle of three small segments costs 1 % of the time and a hundredth of the bytes."""
    segments = chain(100.0, 1.0, 1.0, 100.0)
    segments[2] = replace(segments[2], crossing_bytes=1000)
    segments[3] = replace(segments[3], crossing_bytes=1)
    assert ends(partition(segments, 2, 8, lambda size: 0.0)) == [3, 4]


def test_a_slow_transfer_is_avoided() -> None:
    segments = chain(2.0, 2.0, 1.0, 3.0)
    segments[2] = replace(segments[2], crossing_bytes=10_000)
    assert ends(partition(segments, 2, 8, lambda size: 0.0)) == [2, 4]
    assert ends(partition(segments, 2, 8, lambda size: size / 100)) == [3, 4]


def test_weights_and_activations_of_a_stage_count_once() -> None:
    segments = [Segment(name, 1.0, 0, {"tied": 8}, {"x": 4}) for name in ("", "b", "c")]
    assert [(stage.weight_bytes, stage.saved_bytes) for stage in stages_from(segments, 0)] == [(8, 4)] * 3


def test_stages_fit_into_the_memory_of_a_device() -> None:
    """In 1F1B, the first of two stages holds two microbatches and the second one: the cut moves to the left."""
    segments = [Segment(str(at), 1.0, 0, {}, {f"x{at}": 10}) for at in range(6)]
    assert ends(partition(segments, 2, 8, lambda size: 0.0, limit_bytes=40)) == [2, 6]
    assert ends(partition(segments, 2, 8, lambda size: 0.0)) == [3, 6]
    with pytest.raises(TargetError, match=r"no cut into 2 stages fits into 0\.0 GB a device.*use more stages"):
        partition(segments, 2, 8, lambda size: 0.0, limit_bytes=30)


@pytest.mark.parametrize("stages", [1, 4])
def test_more_stages_than_cut_points_are_refused(stages: int) -> None:
    with pytest.raises(OptionError, match=f"stages={stages} is not allowed: the model has 2 cut points.*use 2 to 3"):
        partition(chain(1.0, 1.0, 1.0), stages, 8, lambda size: 0.0)


def test_stages_that_cannot_be_balanced_are_refused() -> None:
    with pytest.raises(TargetError, match=r"begins with s4 takes 87% .* lies inside s4: use 3 stages"):
        partition(chain(1.0, 1.0, 1.0, 1.0, 40.0, 1.0, 1.0), 5, 8, lambda size: 0.0)


def test_stages_that_are_alike_come_before_fewer_bytes() -> None:
    """A cut behind the third segment costs 3 % of the time and has fewer bytes, but then one stage waits for another.

    a 0.5 ─ b 98 ─│ 1000 bytes │─ c 2.5 ─│ 10 bytes │─ d 88: 98.5 and 90.5 µs, or 101 and 88 µs; with d 97, 99.5.
    """
    segments = chain(0.5, 98.0, 2.5, 88.0)
    segments[2] = replace(segments[2], crossing_bytes=1000)
    segments[3] = replace(segments[3], crossing_bytes=10)
    assert ends(partition(segments, 2, 8, lambda size: 0.0)) == [2, 4]
    segments[3] = replace(segments[3], forward_us=97.0)
    assert ends(partition(segments, 2, 8, lambda size: 0.0)) == [3, 4]


@pytest.mark.parametrize("seed", range(40))
def test_no_other_cut_has_a_faster_slowest_part(seed: int) -> None:
    """Of those as fast, stages are alike where they can be, and then the fewest bytes cross."""
    chance = random.Random(seed)
    segments = [
        Segment(str(at), chance.uniform(1, 3), chance.randrange(1, 9), {}, {f"x{at}": chance.randrange(9)})
        for at in range(chance.randint(3, 12))
    ]
    stages = chance.randint(2, min(5, len(segments)))
    whole = [[*stages_from(segments, first)] for first in range(len(segments))]
    limit = chance.choice([float("inf"), 60.0])

    def slowest(cut: tuple[Stage, ...]) -> float:
        if any(stage.memory_bytes(min(8, stages - at), 8) > limit for at, stage in enumerate(cut)):
            return float("inf")
        times = [stage.forward_us + stage.backward_us for stage in cut]
        return max(*times, *(2 * stage.crossing_bytes for stage in cut[1:]))

    def ratio(cut: tuple[Stage, ...]) -> float:
        return slowest(cut) / min(stage.forward_us + stage.backward_us for stage in cut)

    def crossing(cut: tuple[Stage, ...]) -> int:
        return sum(stage.crossing_bytes for stage in cut)

    every = []
    for inner in combinations(range(1, len(segments)), stages - 1):
        every.append(tuple(whole[first][end - first - 1] for first, end in pairwise((0, *inner, len(segments)))))
    least = min(map(slowest, every))
    if least == float("inf"):
        with pytest.raises(TargetError, match="fits into"):
            partition(segments, stages, 8, float, limit)
        return
    found = partition(segments, stages, 8, float, limit)
    assert slowest(found) <= 1.03 * least
    as_fast = [cut for cut in every if slowest(cut) <= 1.03 * least]
    alike = [cut for cut in as_fast if ratio(cut) <= 1.08]
    if alike:
        assert ratio(found) <= 1.1
        assert crossing(found) <= min(map(crossing, alike))
    elif ratio(found) > 1.1:
        assert crossing(found) == min(map(crossing, as_fast))
