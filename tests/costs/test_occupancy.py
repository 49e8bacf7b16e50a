"""The share of a GPU that kernels keep busy, and the kernels of a captured graph.

A fake replaces the bindings of the CUDA driver. Its graph is a list of launches; a handle is its position, from 1.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.costs.occupancy import Kernel, busy_share, kernels_of

kernels = st.builds(Kernel, blocks=st.integers(0, 10**6), resident=st.integers(0, 32))


# The share


@pytest.mark.parametrize(
    ("blocks", "resident", "share"),
    [
        (100, 1, 1.0),  # one wave, and one block is all that fits
        (100, 4, 0.7 + 0.3 / 4),  # one block of four on each
        (400, 4, 1.0),
        (10**6, 4, 1.0),
        (25, 1, 0.5 * (0.7 + 0.3 / 4)),  # on a quarter of them
        (1, 10, 0.1 * (0.7 + 0.3 / 1000)),
        (0, 0, 0.1 * 0.703),
    ],
)
def test_the_share_depends_on_multiprocessors_with_a_block_and_on_waves(
    blocks: int, resident: int, share: float
) -> None:
    assert busy_share(Kernel(blocks, resident), 100) == pytest.approx(share)


@given(kernels, st.integers(1, 200))
@settings(max_examples=50)
def test_shares_are_in_range_and_monotonic(kernel: Kernel, multiprocessors: int) -> None:
    share = busy_share(kernel, multiprocessors)
    assert 0 < share <= 1
    assert busy_share(kernel._replace(blocks=2 * kernel.blocks), multiprocessors) >= share
    assert busy_share(kernel._replace(resident=2 * kernel.resident), multiprocessors) <= share
    assert busy_share(kernel, 2 * multiprocessors) <= share


# The driver


@dataclass(frozen=True)
class Launch:
    """A kernel node; newer libraries launch kernels by another handle than functions."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    is_function: bool = True


COPY = None
"""A node that is not a kernel."""

FUNCTIONS = 1000
"""The function of node 1 is 1001."""


class Driver:
    """Answers as ``cuda.bindings.driver`` does: a status, then values. Every error is 1."""

    CUgraph, CUgraphNodeType = int, SimpleNamespace(CU_GRAPH_NODE_TYPE_KERNEL=0)

    def __init__(self, *nodes: Launch | None, failing: str = "") -> None:
        self.nodes = nodes
        self.failing = failing
        self.queries: list[tuple[int, int, int]] = []

    def answer(self, name: str, *values: Any) -> tuple[Any, ...]:
        return int(name == self.failing), *values

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> tuple[Any, ...]:  # noqa: N802 - the driver's name
        assert graph == 77
        return self.answer("cuGraphGetNodes", [*range(1, count + 1)], len(self.nodes))

    def cuGraphNodeGetType(self, node: int) -> tuple[Any, ...]:  # noqa: N802
        return self.answer("cuGraphNodeGetType", 0 if self.nodes[node - 1] else 1)

    def cuGraphKernelNodeGetParams(self, node: int) -> tuple[Any, ...]:  # noqa: N802
        launch = self.nodes[node - 1]
        assert launch is not None
        extents = {
            f"{what}Dim{axis}": size
            for what, sizes in (("grid", launch.grid), ("block", launch.block))
            for axis, size in zip("XYZ", sizes, strict=True)
        }
        function, kernel = (FUNCTIONS + node, 0) if launch.is_function else (0, node)
        parameters = SimpleNamespace(func=function, kern=kernel, sharedMemBytes=launch.shared_bytes, **extents)
        return self.answer("cuGraphKernelNodeGetParams", parameters)

    def cuKernelGetFunction(self, kernel: int) -> tuple[Any, ...]:  # noqa: N802
        return self.answer("cuKernelGetFunction", FUNCTIONS + kernel)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(  # noqa: N802
        self, function: int, threads: int, shared_bytes: int
    ) -> tuple[Any, ...]:
        self.queries.append((function, threads, shared_bytes))
        return self.answer("cuOccupancyMaxActiveBlocksPerMultiprocessor", 2048 // threads)


GRAPH: Any = SimpleNamespace(raw_cuda_graph=lambda: 77)
RELU = Launch((66, 1, 1), (512, 1, 1))
PRODUCT = Launch((8, 4, 2), (16, 8, 2), shared_bytes=100_000, is_function=False)


def with_driver(monkeypatch: pytest.MonkeyPatch, driver: Any) -> tuple[Kernel, ...]:
    for name, module in {"cuda": None, "cuda.bindings": SimpleNamespace(driver=driver)}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return kernels_of(GRAPH)


def test_the_kernels_of_a_graph_are_read_from_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(RELU, COPY, PRODUCT)
    assert with_driver(monkeypatch, driver) == (Kernel(66, 4), Kernel(64, 8))
    assert driver.queries == [(1001, 512, 0), (1003, 256, 100_000)]


@pytest.mark.parametrize(
    "function",
    [
        "cuGraphGetNodes",
        "cuGraphNodeGetType",
        "cuGraphKernelNodeGetParams",
        "cuKernelGetFunction",
        "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    ],
)
def test_kernels_are_unknown_if_the_driver_fails(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    assert with_driver(monkeypatch, Driver(RELU, PRODUCT, failing=function)) == ()


def test_kernels_are_unknown_without_bindings_or_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(*args: object) -> None:
        raise RuntimeError("Ensure the NVIDIA display driver is installed.")

    assert with_driver(monkeypatch, SimpleNamespace(CUgraph=int, cuGraphGetNodes=no_driver)) == ()
    assert with_driver(monkeypatch, SimpleNamespace()) == ()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert kernels_of(GRAPH) == ()


def _not_kept() -> int:
    raise RuntimeError("You cannot access the raw cudaGraph_t instance unless CUDAGraph was initialized with it")


@pytest.mark.parametrize("graph", [SimpleNamespace(), SimpleNamespace(raw_cuda_graph=_not_kept)], ids=["old", "gone"])
def test_kernels_are_unknown_if_the_graph_cannot_be_read(monkeypatch: pytest.MonkeyPatch, graph: Any) -> None:
    assert with_driver(monkeypatch, Driver(RELU)) != ()
    assert kernels_of(graph) == ()


@pytest.mark.gpu
def test_the_grid_of_a_relu_is_read_on_the_gpu() -> None:
    x = torch.ones(1 << 20, device="cuda:0")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        x.relu_()
    (kernel,) = kernels_of(graph)
    assert kernel.blocks * 128 <= 1 << 20, "each thread takes several elements"
    assert kernel.blocks >= 128
    assert 1 <= kernel.resident <= 32
