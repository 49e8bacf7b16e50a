"""The share of a GPU that kernels keep busy, and the kernels of a captured graph.

A stand-in reoffsets the CUDA driver. Its graph is a list of launches, and a handle is a position in it, from 1.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.costs import occupancy
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
    """Answers through pointers as the CUDA driver does; every error is 1."""

    def __init__(self, *nodes: Launch | None, failing: str = "") -> None:
        self.nodes = nodes
        self.failing = failing
        self.queries: list[tuple[int, int, int]] = []

    def answer(self, name: str) -> int:
        return int(name == self.failing)

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:  # noqa: N802 - the driver's name
        assert graph.value == 77
        if nodes is None:
            count._obj.value = len(self.nodes)
        else:
            assert count._obj.value == len(nodes) == len(self.nodes)
            nodes[:] = [ctypes.c_void_p(at) for at in range(1, len(nodes) + 1)]
        return self.answer("cuGraphGetNodes")

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:  # noqa: N802
        kind._obj.value = 0 if self.nodes[node.value - 1] else 1
        return self.answer("cuGraphNodeGetType")

    def cuGraphKernelNodeGetParams_v2(self, node: Any, parameters: Any) -> int:  # noqa: N802
        launch, filled = self.nodes[node.value - 1], parameters._obj
        assert launch is not None
        if launch.is_function:
            filled.function = FUNCTIONS + node.value
        else:
            filled.kernel = node.value
        filled.grid_x, filled.grid_y, filled.grid_z = launch.grid
        filled.block_x, filled.block_y, filled.block_z = launch.block
        filled.shared_bytes = launch.shared_bytes
        return self.answer("cuGraphKernelNodeGetParams_v2")

    def cuKernelGetFunction(self, function: Any, kernel: Any) -> int:  # noqa: N802
        function._obj.value = FUNCTIONS + kernel.value
        return self.answer("cuKernelGetFunction")

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(  # noqa: N802
        self, resident: Any, function: Any, threads: Any, shared_bytes: Any
    ) -> int:
        self.queries.append((function.value, threads.value, shared_bytes.value))
        resident._obj.value = 2048 // threads.value
        return self.answer("cuOccupancyMaxActiveBlocksPerMultiprocessor")


GRAPH: Any = SimpleNamespace(raw_cuda_graph=lambda: 77)
RELU = Launch((66, 1, 1), (512, 1, 1))
PRODUCT = Launch((8, 4, 2), (16, 8, 2), shared_bytes=100_000, is_function=False)


def with_driver(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> tuple[Kernel, ...]:
    monkeypatch.setattr(occupancy, "_driver", lambda: driver)
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
        "cuGraphKernelNodeGetParams_v2",
        "cuKernelGetFunction",
        "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    ],
)
def test_kernels_are_unknown_if_the_driver_fails_or_is_missing(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    assert with_driver(monkeypatch, Driver(RELU, PRODUCT, failing=function)) == ()
    assert with_driver(monkeypatch, Driver()) == with_driver(monkeypatch, None) == ()


def _not_kept() -> int:
    raise RuntimeError("You cannot access the raw cudaGraph_t instance unless CUDAGraph was initialized with it")


@pytest.mark.parametrize("graph", [SimpleNamespace(), SimpleNamespace(raw_cuda_graph=_not_kept)], ids=["old", "gone"])
def test_kernels_are_unknown_if_the_graph_cannot_be_read(monkeypatch: pytest.MonkeyPatch, graph: Any) -> None:
    monkeypatch.setattr(occupancy, "_driver", lambda: Driver(RELU))
    assert kernels_of(graph) == ()


@pytest.mark.parametrize("library", [None, SimpleNamespace()], ids=["no driver", "old driver"])
def test_a_missing_or_old_driver_is_none(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    def load(name: str) -> Any:
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert occupancy._driver.__wrapped__() is None


def test_the_parameters_have_the_layout_of_the_drivers_struct() -> None:
    """``CUDA_KERNEL_NODE_PARAMS_v2`` of cuda.h: a pointer, seven numbers of 4 bytes, then pointers, aligned to 8."""
    offsets = {name: getattr(occupancy._Parameters, name).offset for name, *_ in occupancy._Parameters._fields_}
    assert (offsets["grid_x"], offsets["block_x"], offsets["shared_bytes"]) == (8, 20, 32)
    assert (offsets["arguments"], offsets["kernel"]) == (40, 56)
    assert ctypes.sizeof(occupancy._Parameters) == 72


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
