"""Which share of a GPU kernels keep busy, and how a captured graph tells about them.

A driver of ours stands in for CUDA's. Its graph is a list of launches, and a handle is a position in it, from 1.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import sqrt
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autostream.costs import occupancy
from autostream.costs.occupancy import Kernel, busy_share, kernels_of

kernels = st.builds(Kernel, blocks=st.integers(0, 10**6), resident=st.integers(0, 32))


# The share


@pytest.mark.parametrize(
    ("blocks", "resident", "share"),
    [
        (100, 1, 1.0),  # one wave, and one block is all that fits
        (100, 4, 0.7 + 0.3 / 4),  # on each one block of four
        (400, 4, 1.0),
        (10**6, 4, 1.0),
        (25, 1, 0.5 * (0.7 + 0.3 / 4)),  # on a quarter of them: half of what they share
        (1, 10, 0.1 * (0.7 + 0.3 / 1000)),
    ],
)
def test_a_share_is_of_multiprocessors_with_a_block_first_then_of_blocks(
    blocks: int, resident: int, share: float
) -> None:
    assert busy_share(Kernel(blocks, resident), 100) == pytest.approx(share)


def test_what_cannot_be_but_was_launched_has_a_share() -> None:
    assert busy_share(Kernel(0, 0), 100) == busy_share(Kernel(1, 1), 100) == pytest.approx(sqrt(1 / 100) * 0.703)


@given(kernels, st.integers(1, 200))
def test_shares_stay_in_their_range(kernel: Kernel, multiprocessors: int) -> None:
    assert 0 < busy_share(kernel, multiprocessors) <= 1


@given(kernels, st.integers(1, 200))
def test_more_blocks_fill_no_less_and_more_room_no_more(kernel: Kernel, multiprocessors: int) -> None:
    share = busy_share(kernel, multiprocessors)
    assert busy_share(kernel._replace(blocks=2 * kernel.blocks), multiprocessors) >= share
    assert busy_share(kernel._replace(resident=2 * kernel.resident), multiprocessors) <= share
    assert busy_share(kernel, 2 * multiprocessors) <= share


# The driver


@dataclass(frozen=True)
class Launch:
    """A kernel's node; newer libraries launch kernels that are not yet functions."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    is_function: bool = True


COPY = None
"""A node that is no kernel."""

FUNCTIONS = 1000
"""The function of node 1 is 1001."""


class Driver:
    """Answers as CUDA's driver does, through pointers; every error is 1."""

    def __init__(self, *nodes: Launch | None, failing: str = "") -> None:
        self.nodes = nodes
        self.failing = failing
        self.asked: list[tuple[int, int, int]] = []

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
        self.asked.append((function.value, threads.value, shared_bytes.value))
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
    assert driver.asked == [(1001, 512, 0), (1003, 256, 100_000)]


def test_a_graph_of_nothing_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_driver(monkeypatch, Driver()) == ()


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
def test_what_the_driver_refuses_is_not_known(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    assert with_driver(monkeypatch, Driver(RELU, PRODUCT, failing=function)) == ()


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_driver(monkeypatch, None) == ()


def _not_kept() -> int:
    raise RuntimeError("You cannot access the raw cudaGraph_t instance unless CUDAGraph was initialized with it")


@pytest.mark.parametrize("graph", [SimpleNamespace(), SimpleNamespace(raw_cuda_graph=_not_kept)], ids=["old", "gone"])
def test_of_a_graph_that_does_not_tell_nothing_is_known(monkeypatch: pytest.MonkeyPatch, graph: Any) -> None:
    monkeypatch.setattr(occupancy, "_driver", lambda: Driver(RELU))
    assert kernels_of(graph) == ()


@pytest.mark.parametrize("library", [None, SimpleNamespace()], ids=["no driver", "old driver"])
def test_a_driver_that_lacks_what_is_asked_counts_as_none(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    def load(name: str) -> Any:
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert occupancy._driver.__wrapped__() is None


def test_parameters_lie_where_the_driver_puts_them() -> None:
    """``CUDA_KERNEL_NODE_PARAMS_v2`` of cuda.h: a pointer, seven numbers of 4 bytes, then pointers, aligned to 8."""
    places = {name: getattr(occupancy._Parameters, name).offset for name, *_ in occupancy._Parameters._fields_}
    assert (places["grid_x"], places["block_x"], places["shared_bytes"]) == (8, 20, 32)
    assert (places["arguments"], places["kernel"]) == (40, 56)
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
