"""The values that travel: they do not change, they print, they hold no tensor, and what they derive is right."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from dataclasses import FrozenInstanceError, is_dataclass, replace

import networkx as nx
import pytest

from autostream import ir
from autostream.ir import FORK, Dependency, Hazard, Launch, OpGraph, Schedule, Slice, Timeline
from tests.scheduling.graphs import graph_of, op

VALUES = [value for value in vars(ir).values() if is_dataclass(value) and value.__module__ == ir.__name__]


def test_every_value_is_frozen_and_documented() -> None:
    assert len(VALUES) > 10
    assert all(value.__dataclass_params__.frozen and inspect.getdoc(value) for value in VALUES)


def test_nothing_here_imports_torch() -> None:
    """Types apart: what is computed from these values needs neither torch nor a device."""
    tree = ast.parse(inspect.getsource(ir))
    imported = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or node.names[0].name for node in imported]
    assert not [name for name in names if name.startswith("torch")]


def test_a_graph_is_a_frozen_digraph_in_program_order() -> None:
    """Program order is c, a, b, d::

    c ─▶ a ─▶ b
    └───────▶ d
    """
    digraph = graph_of("c-a a-b c-d", names="cabd").digraph
    assert list(digraph) == ["c", "a", "b", "d"]
    assert list(digraph.successors("c")) == ["a", "d"]
    with pytest.raises(nx.NetworkXError):
        digraph.add_edge("b", "d")


def test_several_hazards_between_two_ops_are_one_edge() -> None:
    graph = graph_of("a-b")
    twice = replace(graph, dependencies=(*graph.dependencies, Dependency("a", "b", Hazard.WAW, "a")))
    assert list(twice.digraph.edges) == [("a", "b")]


def test_neighbours_are_positions_in_program_order_each_once() -> None:
    """Program order is c, a, b, d::

    c ─▶ a ─▶ b
    └───────▶ d
    """
    graph = graph_of("c-d c-a a-b", names="cabd")
    twice = replace(graph, dependencies=(*graph.dependencies, Dependency("c", "a", Hazard.WAW, "c")))
    assert twice.successors == ((3, 1), (2,), (), ())
    assert twice.predecessors == ((), (0,), (1,), (0,))


def test_users_of_a_part_use_its_storage() -> None:
    graph = graph_of("a-b a-c")
    whole = replace(graph.storages["a"], parts=("a.0", "a.1"))
    reads = {"b": frozenset({"a.0"}), "c": frozenset({"a.1", "elsewhere"})}
    ops = {name: replace(op, reads=reads.get(name, op.reads)) for name, op in graph.ops.items()}
    users = replace(graph, ops=ops, storages={**graph.storages, "a": whole}).users
    assert (users["a"], users["b"]) == (("a", "b", "c"), ("b",))
    assert "elsewhere" not in users


def test_pinned_are_ops_of_other_devices_and_those_that_allocate_outputs() -> None:
    """Op c writes into what a allocated and an output keeps: only a is pinned for it."""
    graph = graph_of("a-b a-c", outputs="a")
    ops = {
        **graph.ops,
        "b": replace(graph.ops["b"], device="cpu"),
        "c": replace(graph.ops["c"], writes=frozenset({"a", "c"})),
    }
    assert replace(graph, ops=ops).pinned == {"a", "b"}


def test_an_op_without_allocations_is_not_pinned() -> None:
    graph = OpGraph({"a": op("a", allocates=frozenset())}, (), graph_of((), "a", outputs="a").storages, (), "cuda:0")
    assert graph.pinned == frozenset()


def test_a_schedule_counts_every_wait() -> None:
    schedule = Schedule("mine", 2, (Launch("a", 0), Launch("b", 1, (FORK, "a")), Launch("c", 0, ("b",))), ("b",))
    assert schedule.wait_count == 4
    assert schedule.stream_of == {"a": 0, "b": 1, "c": 0}


def test_a_timeline_knows_starts_and_ends_and_the_makespan_from_first_to_last() -> None:
    """The op that ends last need be neither the last one nor the one that starts last."""
    slices = (Slice("a", 0, 5.0, 30.0), Slice("b", 1, 3.0, 4.0), Slice("c", 1, 7.0, 9.0))
    assert Timeline(slices).makespan_us == 27.0
    assert Timeline(()).makespan_us == 0.0
    assert Timeline(slices).starts == {"a": 5.0, "b": 3.0, "c": 7.0}
    assert Timeline(slices).ends == {"a": 30.0, "b": 4.0, "c": 9.0}


def test_values_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Launch("a", 0).stream = 1  # type: ignore[misc]


def test_the_scheduler_runs_where_torch_cannot_be_imported() -> None:
    program = """
import sys
sys.modules["torch"] = None
import types
package = types.ModuleType("autostream")
package.__path__ = [{path!r}]
sys.modules["autostream"] = package
from autostream.scheduling.policies import POLICIES, verify, synchronize, releases, simulate
from autostream.ir import OpGraph, Op
graph = OpGraph({{"a": Op("a", "f", ("a",), frozenset(), frozenset({{"a"}}))}}, (), {{}}, (), "cpu")
verify.verify(graph, synchronize.synchronize(graph, POLICIES["sequential"](graph, {{}}, None, 1, frozenset())))
""".format(path=str(inspect.getfile(ir).rpartition("/")[0]))
    subprocess.run([sys.executable, "-c", program], check=True)
