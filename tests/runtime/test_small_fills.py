"""Small fills of a captured graph become kernels.

A fake replaces the bindings of the CUDA driver, and the capture of kernels that fill. What it computes on a GPU is in
``tests/gpu/test_small_fills.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autostream.runtime import small_fills
from autostream.runtime.small_fills import fill_by_kernels

KINDS = SimpleNamespace(CU_GRAPH_NODE_TYPE_KERNEL="kernel", CU_GRAPH_NODE_TYPE_MEMSET="fill")


class Graph:
    """Nodes by their handles, with what they do; and which waits for which."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.nodes: dict[int, Any] = {}
        self.edges: set[tuple[int, int]] = set()
        driver.graphs.append(self)

    def add(self, does: Any, *before: int) -> int:
        node = next(self.driver.handles)
        self.nodes[node] = does
        self.edges |= {(other, node) for other in before}
        return node

    def raw_cuda_graph(self) -> Graph:
        return self

    def drawn(self) -> set[tuple[object, object]]:
        """Its edges, by what nodes do."""
        return {tuple(_said(self.nodes[node]) for node in edge) for edge in self.edges}  # type: ignore[misc]


def _said(does: Any) -> object:
    return does if isinstance(does, str) else f"fill {does.dst} with {does.value}"


def fill(address: int, value: int = 0, *, size: int = 4, width: int = 1, height: int = 1) -> Any:
    return SimpleNamespace(dst=address, value=value, elementSize=size, width=width, height=height)


class Driver:
    """Answers as ``cuda.bindings.driver`` does: a status, then values. One call fails."""

    CUgraph = staticmethod(lambda graph: graph)
    CUgraphNodeType = KINDS

    def __init__(self, failing: str = "", at: int = 0) -> None:
        self.handles: Iterator[int] = iter(range(1, 10_000))
        self.graphs: list[Graph] = []
        self.failing, self.left = failing, at
        self.with_attributes: list[tuple[str, str]] = []

    def __getattribute__(self, name: str) -> Any:
        function = super().__getattribute__(name)
        if name.startswith("cuGraph") and name == self.failing:
            self.left -= 1
            if self.left == -1:
                return lambda *args: (1, *[None] * 3)
        return function

    def _of(self, node: int) -> Graph:
        return next(graph for graph in self.graphs if node in graph.nodes)

    def cuGraphGetNodes(self, graph: Graph, count: int = 0) -> tuple[Any, ...]:  # noqa: N802
        return 0, [*reversed(graph.nodes)][:count], len(graph.nodes)

    def cuGraphNodeGetType(self, node: int) -> tuple[Any, ...]:  # noqa: N802
        return 0, "kernel" if isinstance(self._of(node).nodes[node], str) else "fill"

    def cuGraphMemsetNodeGetParams(self, node: int) -> tuple[Any, ...]:  # noqa: N802
        return 0, self._of(node).nodes[node]

    def cuGraphKernelNodeGetParams(self, node: int) -> tuple[Any, ...]:  # noqa: N802
        return 0, self._of(node).nodes[node]

    def cuGraphNodeGetDependencies(self, node: int, count: int = 0) -> tuple[Any, ...]:  # noqa: N802
        found = sorted(one for one, other in self._of(node).edges if other == node)
        return 0, found[:count], [None] * count, len(found)

    def cuGraphNodeGetDependentNodes(self, node: int, count: int = 0) -> tuple[Any, ...]:  # noqa: N802
        found = sorted(other for one, other in self._of(node).edges if one == node)
        return 0, found[:count], [None] * count, len(found)

    def cuGraphAddKernelNode(self, graph: Graph, before: list[int], count: int, does: str) -> tuple[Any, ...]:  # noqa: N802
        assert len(before) == count
        return 0, graph.add(does, *before)

    def cuGraphKernelNodeCopyAttributes(self, node: int, source: int) -> tuple[Any, ...]:  # noqa: N802
        self.with_attributes.append((self._of(node).nodes[node], self._of(source).nodes[source]))
        return (0,)

    def cuGraphAddDependencies(  # noqa: N802
        self, graph: Graph, ones: list[int], others: list[int], data: None, count: int
    ) -> tuple[Any, ...]:
        assert len(ones) == len(others) == count
        graph.edges |= set(zip(ones, others, strict=True))
        return (0,)

    def cuGraphDestroyNode(self, node: int) -> tuple[Any, ...]:  # noqa: N802
        graph = self._of(node)
        del graph.nodes[node]
        graph.edges = {edge for edge in graph.edges if node not in edge}
        return (0,)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the bindings, and the capture of kernels that fill."""

    class Memory:
        def __init__(self, memory: Any, driver: Driver, graph: Graph) -> None:
            self.what, self.graph = memory.__cuda_array_interface__, graph

        def fill_(self, value: int) -> None:
            does = f"kernel fills {self.what['data'][0]} with {value} as {self.what['typestr']}"
            self.graph.add(does, *[*self.graph.nodes][-1:])

    def installed(driver: Driver) -> Driver:
        def capture(run: Any, stream: Any, *, keep_nodes: bool) -> tuple[Graph, None]:
            assert keep_nodes
            template = Graph(driver)
            monkeypatch.setattr(torch, "as_tensor", lambda memory, device: Memory(memory, driver, template))
            run()
            return template, None

        monkeypatch.setattr(small_fills, "capture", capture)
        for name, module in {"cuda": None, "cuda.bindings": SimpleNamespace(driver=driver)}.items():
            monkeypatch.setitem(sys.modules, name, module)
        return driver

    return installed


STREAM: Any = SimpleNamespace(device="cuda:0")


def drawn(driver: Driver, *fills: Any) -> tuple[int, set[tuple[object, object]]]:
    """What becomes of a graph in which each fill is between two kernels of its own."""
    graph: Any = Graph(driver)
    for number, each in enumerate(fills):
        graph.add(f"after {number}", graph.add(each, graph.add(f"before {number}")))
    return fill_by_kernels(graph, STREAM), graph.drawn()


def test_a_kernel_takes_the_place_of_each_small_fill(install: Any) -> None:
    """
    Before 0 ─▶ fill 16 ─▶ after 0                 before 0 ─▶ kernel fills 16 ─▶ after 0
    before 1 ─▶ fill 32 ─▶ after 1        ─▶       before 1 ─▶ kernel fills 32 ─▶ after 1
    before 2 ─▶ fill 64 of 1 MiB ─▶ after 2        before 2 ─▶ fill 64 of 1 MiB ─▶ after 2
    """
    fills = fill(16), fill(32, 0xFFFFFF01, size=1, width=3), fill(64, width=1 << 18), fill(80, height=2)
    replaced, edges = drawn(driver := install(Driver()), *fills)
    kernels = "kernel fills 16 with 0 as <u4", "kernel fills 32 with 1 as |u1", "fill 64 with 0", "fill 80 with 0"
    assert replaced == 2
    assert sorted(driver.with_attributes) == [(does, does) for does in kernels[:2]]
    assert edges == {
        pair for at, does in enumerate(kernels) for pair in ((f"before {at}", does), (does, f"after {at}"))
    }


@pytest.mark.parametrize(
    "function",
    [
        "cuGraphGetNodes",
        "cuGraphNodeGetType",
        "cuGraphMemsetNodeGetParams",
        "cuGraphKernelNodeGetParams",
        "cuGraphNodeGetDependencies",
        "cuGraphNodeGetDependentNodes",
        "cuGraphAddKernelNode",
        "cuGraphKernelNodeCopyAttributes",
        "cuGraphAddDependencies",
        "cuGraphDestroyNode",
    ],
)
def test_a_graph_still_fills_once_where_the_driver_refuses(function: str, install: Any) -> None:
    """Whichever call fails first, each memory is filled by one node that runs between the same two others."""
    refusals = 0
    for at in range(40):
        replaced, edges = drawn(driver := install(Driver(function, at)), fill(16), fill(32))
        refusals += driver.left < 0
        between = [(one, other) for one, other in edges if "16" in str(one) or "32" in str(one)]
        assert (replaced == 2) == (driver.left >= 0)
        assert sorted(str(other) for _, other in between) == ["after 0", "after 1"]
        assert len(edges) == 4
    assert refusals


def test_fills_stay_without_the_bindings(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(Driver())
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert drawn(driver, fill(16))[0] == 0


def test_fills_stay_where_pytorch_fills_without_kernels(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(Driver())
    monkeypatch.setattr(small_fills, "capture", lambda run, stream, keep_nodes: (Graph(driver), None))
    assert drawn(driver, fill(16)) == (0, {("before 0", "fill 16 with 0"), ("fill 16 with 0", "after 0")})
