"""How much memory a schedule takes: the caching allocator keeps what one stream freed for that stream."""

from __future__ import annotations

from collections import defaultdict

from autostream.ir import OpGraph, Schedule


def peak_bytes(graph: OpGraph, schedule: Schedule) -> int:
    """The most that is allocated on each stream at a time, summed over the streams, in bytes.

    Blocks come and go in the order of the launches, each in the pool of the stream that its op is on, and no pool hands
    a block to another: so the sum of the peaks is what the run reserves, but for rounding and libraries' workspaces.

    Args:
        graph: the ops, what they allocate and how large that is.
        schedule: the launches with their releases; what is never released lives on to the end.

    Example:
        The first storage is gone when the third is made:

        >>> from autostream.ir import Launch, Op, Role, Storage
        >>> none = frozenset()
        >>> ops = {name: Op(name, "f", (name,), none, frozenset(name), frozenset(name)) for name in "abc"}
        >>> storages = {name: Storage(name, Role.INTERMEDIATE, 512, (name,)) for name in "abc"}
        >>> launches = (Launch("a", 0), Launch("b", 0, releases=("a",)), Launch("c", 0, releases=("b",)))
        >>> peak_bytes(OpGraph(ops, (), storages, (), "cuda:0"), Schedule("mine", 1, launches))
        1024
    """
    live: dict[int, int] = defaultdict(int)
    peak: dict[int, int] = defaultdict(int)
    home: dict[str, int] = {}
    for launch in schedule.launches:
        at = launch.stream
        made = [name for name in graph.ops[launch.op].allocates if name in graph.storages]
        home.update(dict.fromkeys(made, at))
        live[at] += sum(graph.storages[name].bytes for name in made)
        peak[at] = max(peak[at], live[at])
        for name in launch.releases:
            live[home[name]] -= graph.storages[name].bytes
    return sum(peak.values())
