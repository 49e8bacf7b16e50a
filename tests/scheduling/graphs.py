"""Small op graphs for the tests: built from edges, drawn by name, or drawn at random by hypothesis.

In all of them op ``x`` allocates and writes storage ``x`` and reads the storages of its predecessors, so every
dependency is a read after a write; ops without predecessors read the input ``x_in``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from autostream import ir
from autostream.ir import Assignment, DeviceProfile, Hazard, Op, OpCost, OpGraph, Role, Schedule, Storage
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.structure import bottom_levels
from autostream.scheduling.synchronize import synchronize

Edge = tuple[str, str]

INPUT = Storage("x_in", Role.INPUT, bytes=1024, holders=("x_in",))


def op(name: str, reads: Iterable[str] = (), **fields: Any) -> Op:
    """An op that allocates and writes the storage of its own name; ``fields`` are those of :class:`Op`."""
    own = frozenset({name})
    accesses = {"reads": frozenset(reads) or frozenset({INPUT.name}), "writes": own, "allocates": own}
    return Op(name, "aten.relu.default", (name,), **{**accesses, **fields})


def graph_of(edges: Iterable[Edge] | str, names: Iterable[str] = (), outputs: Iterable[str] = ()) -> OpGraph:
    """A graph of these edges, given as pairs or as ``"a-b b-c a-d"``.

    Program order is that of ``names``, then of the first mention in ``edges``. What the ops in ``outputs`` write
    escapes.

    Example:
        >>> graph = graph_of("a-b a-c b-d c-d", outputs="d")
        >>> sorted(graph.ops["d"].reads), sorted(graph.pinned)
        (['b', 'c'], ['d'])
    """
    pairs = _pairs(edges)
    order = list(dict.fromkeys([*names, *(name for pair in pairs for name in pair)]))
    position = {name: at for at, name in enumerate(order)}
    backwards = [pair for pair in pairs if position[pair[0]] >= position[pair[1]]]
    assert not backwards, f"program order must be topological; mention the producer first in {backwards}"
    reads: dict[str, list[str]] = {name: [] for name in order}
    for before, after in pairs:
        reads[after].append(before)
    escaping = frozenset(outputs)
    return OpGraph(
        ops={name: op(name, reads[name]) for name in order},
        dependencies=tuple(ir.Dependency(before, after, Hazard.RAW, before) for before, after in pairs),
        storages={INPUT.name: INPUT}
        | {name: Storage(name, Role.INTERMEDIATE, 1024, (name,), escapes=name in escaping) for name in order},
        prelude=(),
        device="cuda:0",
    )


def profile_with(**fields: Any) -> DeviceProfile:
    """A device whose edges, forks and joins cost nothing, except for ``fields``."""
    free = {"same_stream_edge_us": 0.0, "cross_stream_edge_us": 0.0, "fork_us": 0.0, "join_us": 0.0}
    plain = {"name": "test", "multiprocessors": 100, "bandwidth": 1e6, "flops": {"float16": 1e6}, "kernel_us": 1.0}
    return DeviceProfile(**{**plain, "source": "table", **free, **fields})


FREE = profile_with()
PRICED = profile_with(same_stream_edge_us=0.5, cross_stream_edge_us=2.0, fork_us=1.0, join_us=1.0)


def critical_path_us(graph: OpGraph, costs: Mapping[str, OpCost]) -> float:
    """The length of the longest path, µs: no schedule of any number of streams is shorter."""
    return max(bottom_levels(graph, costs).values(), default=0.0)


def costs_of(
    graph: OpGraph, durations: Mapping[str, float] | float = 1.0, sm_share: float = 0.1, bandwidth_share: float = 0.0
) -> Mapping[str, OpCost]:
    """A cost for every op: its duration in µs (by default 1, or one number for all) and the same shares for all."""
    by_name = durations if isinstance(durations, Mapping) else dict.fromkeys(graph.ops, durations)
    return {name: OpCost(by_name.get(name, 1.0), sm_share, bandwidth_share, "roofline") for name in graph.ops}


@st.composite
def random_graphs(draw: st.DrawFn, max_ops: int = 12, max_reads: int = 3) -> OpGraph:
    """Graphs of 1 to ``max_ops`` ops ``n0``, ``n1``, …, each reading up to ``max_reads`` earlier ones."""
    names = [f"n{at}" for at in range(draw(st.integers(1, max_ops)))]
    edges: list[Edge] = []
    for at, name in enumerate(names[1:], start=1):
        reads = draw(st.sets(st.integers(0, at - 1), max_size=max_reads))
        edges += [(names[before], name) for before in sorted(reads)]
    outputs = draw(st.sets(st.sampled_from(names), max_size=3))
    return graph_of(edges, names, outputs)


@st.composite
def random_costs(draw: st.DrawFn, graph: OpGraph, shares: bool = True) -> Mapping[str, OpCost]:
    """Durations of 0 to 20 whole µs; with ``shares``, any share of the SMs and of the bandwidth, else tiny ones."""
    share = st.sampled_from([0.01, 0.25, 0.5, 1.0]) if shares else st.just(0.001)
    return {name: OpCost(float(draw(st.integers(0, 20))), draw(share), draw(share), "roofline") for name in graph.ops}


@st.composite
def planned(draw: st.DrawFn, shares: bool = True) -> tuple[OpGraph, Mapping[str, OpCost], Schedule]:
    """A random graph with costs and a schedule of one to four streams on the device ``PRICED``."""
    graph = draw(random_graphs())
    costs = draw(random_costs(graph, shares))
    policy = POLICIES[draw(st.sampled_from(["critical_path", "path_cover"]))]
    return graph, costs, synchronize(graph, policy(graph, costs, PRICED, draw(st.integers(1, 4)), frozenset()))


def check_assignment(graph: OpGraph, assignment: Assignment, streams: int, pinned: Iterable[str] = ()) -> None:
    """Assert that each op is there once, after all it depends on, on a stream in range, and pinned ones on stream 0."""
    assert sorted(assignment.order) == sorted(graph.ops) == sorted(assignment.stream)
    position = {name: at for at, name in enumerate(assignment.order)}
    assert all(position[dependency.before] < position[dependency.after] for dependency in graph.dependencies)
    assert set(assignment.stream.values()) <= set(range(assignment.streams))
    assert 1 <= assignment.streams <= streams
    assert all(assignment.stream[name] == 0 for name in pinned)


def _pairs(edges: Iterable[Edge] | str) -> Sequence[Edge]:
    if isinstance(edges, str):
        return [(before, after) for before, after in (edge.split("-") for edge in edges.split())]
    return list(edges)
