"""What is reduced together is as good as the best of all ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.scheduling.merging import merged


def reduction_us(size: int) -> float:
    return 3.0 + size


def cost_us(
    groups: Sequence[Sequence[int]],
    ready: Sequence[float],
    sizes: Sequence[int],
    each_us: float,
    reduction_us: Callable[[int], float] = reduction_us,
) -> float:
    """When the last of these reductions ends, one after the other, and what each costs besides."""
    end = 0.0
    for group in groups:
        end = max(end, *(ready[at] for at in group)) + reduction_us(sum(sizes[at] for at in group))
    return end + each_us * len(groups)


def runs(places: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to divide places into runs."""
    if not places:
        yield []
    for end in range(1, len(places) + 1):
        for rest in runs(places[end:]):
            yield [[*places[:end]], *rest]


@given(
    ready=st.lists(st.integers(0, 60), min_size=1, max_size=7, unique=True),
    sizes=st.lists(st.integers(1, 20), min_size=7, max_size=7),
    start_us=st.sampled_from([0.0, 3.0]),
    each_us=st.sampled_from([0.5, 4.0, 30.0]),
    most=st.sampled_from([inf, 25]),
)
def test_no_other_way_is_better(
    ready: list[int], sizes: list[int], start_us: float, each_us: float, most: float
) -> None:
    """Of all ways to divide the tensors in the order in which they are ready."""

    def us(size: int) -> float:
        return start_us + size

    times, sizes = [float(time) for time in ready], sizes[: len(ready)]
    found = merged(times, sizes, us, each_us, most)
    assert sorted(at for group in found for at in group) == [*range(len(ready))]
    order = sorted(range(len(ready)), key=ready.__getitem__)
    allowed = [
        way for way in runs(order) if all(len(group) == 1 or sum(sizes[at] for at in group) <= most for group in way)
    ]
    best = min(cost_us(way, times, sizes, each_us, us) for way in allowed)
    assert cost_us(found, times, sizes, each_us, us) == pytest.approx(best)


def test_tensors_that_are_ready_at_once_are_reduced_at_once() -> None:
    assert merged([5.0, 5.0, 5.0], [1, 1, 1], reduction_us, 1.0) == [[2, 1, 0]]
    assert merged([5.0, 5.0, 5.0], [1, 1, 1], reduction_us, 1.0, most=2) == [[2, 1], [0]]
    assert merged([5.0, 5.0], [9, 9], reduction_us, 1.0, most=2) == [[1], [0]]
    assert merged([], [], reduction_us, 1.0) == []


def test_a_late_tensor_holds_back_no_others() -> None:
    """Nine large ones are reduced while the tenth, a small one, is computed."""
    ready = [float(10 * at) for at in range(1, 10)] + [300.0]
    groups = merged(ready, [20] * 9 + [1], reduction_us, each_us=2.0)
    assert groups[-1] == [9]
    assert cost_us(groups, ready, [20] * 9 + [1], 0.0) == 304.0


def test_many_tensors_take_no_time_to_plan() -> None:
    """Those of nearly the same time count as one."""
    ready = [0.001 * at for at in range(10_000)]
    groups = merged(ready, [1] * 10_000, lambda size: 0.01 + size / 1e4, each_us=0.001)
    assert sorted(at for group in groups for at in group) == [*range(10_000)]
