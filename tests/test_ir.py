"""The values of the intermediate representation are frozen, need no torch, and derive the right properties."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import is_dataclass, replace

import networkx as nx
import pytest

from autostream import ir
from autostream.ir import FORK, Dependency, Hazard, Launch, OpGraph, Schedule, Slice, Timeline
from tests.scheduling.graphs import graph_of, op


def test_every_value_is_frozen() -> None:
    values = [value for value in vars(ir).values() if is_dataclass(value) and value.__module__ == ir.__name__]
    assert len(values) > 10
    assert all(value.__dataclass_params__.frozen for value in values)  # type: ignore[attr-defined]


def test_a_graph_is_a_frozen_digraph_in_program_order_with_one_edge_between_two_ops() -> None:
    """Program order is c, a, b, d.

    c ─▶ a ─▶ b
    └───────▶ d
    """
    graph = graph_of("c-d c-a a-b", names="cabd")
    graph = replace(graph, dependencies=(*graph.dependencies, Dependency("c", "a", Hazard.WAW, "c")))
    assert list(graph.digraph) == ["c", "a", "b", "d"]
    assert list(graph.digraph.edges) == [("c", "d"), ("c", "a"), ("a", "b")]
    with pytest.raises(nx.NetworkXError):
        graph.digraph.add_edge("b", "d")
    assert graph.successors == ((3, 1), (2,), (), ())
    assert graph.predecessors == ((), (0,), (1,), (0,))


def test_users_of_a_part_use_its_storage() -> None:
    graph = graph_of("a-b a-c")
    whole = replace(graph.storages["a"], parts=("a.0", "a.1"))
    reads = {"b": frozenset({"a.0"}), "c": frozenset({"a.1", "unknown"})}
    ops = {name: replace(op, reads=reads.get(name, op.reads)) for name, op in graph.ops.items()}
    users = replace(graph, ops=ops, storages={**graph.storages, "a": whole}).users
    assert (users["a"], users["b"]) == (("a", "b", "c"), ("b",))
    assert "unknown" not in users


def test_ops_of_other_devices_and_those_that_allocate_outputs_are_pinned() -> None:
    """Op c writes into the output that a allocated: only a is pinned for it."""
    graph = graph_of("a-b a-c", outputs="a")
    ops = {
        **graph.ops,
        "b": replace(graph.ops["b"], device="cpu"),
        "c": replace(graph.ops["c"], writes=frozenset({"a", "c"})),
    }
    assert replace(graph, ops=ops).pinned == {"a", "b"}
    unallocated = {"a": op("a", allocates=frozenset())}
    assert OpGraph(unallocated, (), graph.storages, (), "cuda:0").pinned == frozenset()


def test_schedules_count_waits_and_timelines_span_from_the_first_start_to_the_last_end() -> None:
    """The op that ends last need be neither the last one nor the one that starts last."""
    schedule = Schedule("mine", 2, (Launch("a", 0), Launch("b", 1, (FORK, "a")), Launch("c", 0, ("b",))), ("b",))
    assert schedule.wait_count == 4
    slices = (Slice("a", 0, 5.0, 30.0), Slice("b", 1, 3.0, 4.0), Slice("c", 1, 7.0, 9.0))
    assert Timeline(slices).makespan_us == 27.0
    assert Timeline(()).makespan_us == 0.0


def test_the_scheduler_runs_where_torch_cannot_be_imported() -> None:
    program = """
import sys
sys.modules["torch"] = None
import types
package = types.ModuleType("autostream")
package.__path__ = [{path!r}]
sys.modules["autostream"] = package
from autostream.scheduling import arena, releases, simulate, synchronize, verify
from autostream.scheduling.policies import POLICIES
from autostream.ir import OpGraph, Op
graph = OpGraph({{"a": Op("a", "f", ("a",), frozenset(), frozenset({{"a"}}))}}, (), {{}}, (), "cpu")
verify.verify(graph, synchronize.synchronize(graph, POLICIES["sequential"](graph, {{}}, None, 1, frozenset())))
""".format(path=str(inspect.getfile(ir).rpartition("/")[0]))
    subprocess.run([sys.executable, "-c", program], check=True)
