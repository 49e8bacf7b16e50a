"""Which tensors are reduced together over processes, by when each is ready.

    backward     ─ d ─────── c ── b ───────── a ─       a reduction starts when the last of its tensors is ready,
    reductions           └─ d ─┘  └─ c, b ─┘   └ a ┘    and the one before it is over

Tensors that wait for a late one, of which the reduction is not hidden any more, make a step longer; each reduction more
costs its start. Merged-gradient wait-free backpropagation finds the best of both (Shi, Chu & Li 2019, "MG-WFBP:
Efficient data communication for distributed synchronous SGD algorithms"): here by dynamic programming over the tensors
in the order in which they are ready, for each number of reductions. O(B·S²) for B reductions and S slots of time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

_SLOTS = 128
"""Tensors that are ready within such a part of the time of all are together: no schedule is predicted that well."""


def merged(
    ready_us: Sequence[float],
    sizes: Sequence[int],
    reduction_us: Callable[[int], float],
    each_us: float,
    most: float = inf,
) -> list[list[int]]:
    """The positions of the tensors that are reduced together, in the order of the reductions.

    Args:
        ready_us: when each tensor is ready, µs after the begin.
        sizes: of each, bytes.
        reduction_us: how long the reduction of so many bytes takes, µs.
        each_us: what a reduction costs besides, µs: one more must end all reductions earlier by as much.
        most: bytes of a reduction, but for single tensors: what uses early ones, and frees them, should not wait long.

    Example:
        A reduction takes 5 us, and 1 us for each byte. The last tensor is reduced alone: another byte would be late.

        >>> merged([10.0, 20.0, 40.0], [5, 5, 1], lambda size: 5.0 + size, each_us=2.0)
        [[0, 1], [2]]
        >>> merged([10.0, 20.0, 40.0], [5, 5, 1], lambda size: 5.0 + size, each_us=20.0)
        [[0, 1, 2]]
    """
    slots = _slots(ready_us, sizes, most)
    ready = [max(ready_us[at] for at in slot) for slot in slots]
    before = [0, *accumulate(sum(sizes[at] for at in slot) for slot in slots)]
    ends = [0.0] + [inf] * len(slots)  # of the reductions of the first slots, of which there are as many as cuts
    best_us, best, cuts = inf, 0, list[list[int]]()
    while len(cuts) < len(slots) and (len(cuts) + 1) * each_us + ready[-1] < best_us:
        later, cut = [inf] * len(ends), [0] * len(ends)
        for to in range(1, len(ends)):
            for at in reversed(range(to)):
                size = before[to] - before[at]
                if size > most and at < to - 1:
                    break
                end = max(ends[at], ready[to - 1]) + reduction_us(size)
                if end < later[to]:
                    later[to], cut[to] = end, at
        ends = later
        cuts.append(cut)
        if ends[-1] + len(cuts) * each_us < best_us:
            best_us, best = ends[-1] + len(cuts) * each_us, len(cuts)
    groups: list[list[int]] = []
    to = len(slots)
    for cut in reversed(cuts[:best]):
        groups.append([at for slot in slots[cut[to] : to] for at in slot])
        to = cut[to]
    return groups[::-1]


def _slots(ready_us: Sequence[float], sizes: Sequence[int], most: float) -> list[list[int]]:
    """The positions of tensors in the order in which they are ready, together if there is hardly any time between."""
    order = sorted(range(len(ready_us)), key=lambda at: (ready_us[at], -at))
    width = (ready_us[order[-1]] - ready_us[order[0]]) / _SLOTS if order else 0.0
    slots: list[list[int]] = []
    since, size = -inf, 0
    for at in order:
        size += sizes[at]
        if ready_us[at] - since > width or size > most:
            slots.append([])
            since, size = ready_us[at], sizes[at]
        slots[-1].append(at)
    return slots
