"""NCCL's kernels of a captured graph get the highest priority. A fake replaces the bindings of the CUDA driver."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autostream.runtime import cuda_graph
from autostream.runtime.collectives_first import communicate_first

GRAPH: Any = SimpleNamespace(raw_cuda_graph=lambda: None)


class Driver:
    """Its graph has kernels by name, launched by functions and by newer handles in turn, and one copy."""

    CUgraph = staticmethod(lambda graph: graph)
    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_KERNEL="kernel")
    CUkernelNodeAttrID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PRIORITY="priority")
    CUkernelNodeAttrValue = SimpleNamespace

    def __init__(self, *names: str, failing: str = "", after: int = 0) -> None:
        self.names, self.priorities = names, dict[str, int]()
        if failing:
            answers = iter([getattr(self, failing)] * after)
            setattr(self, failing, lambda *args: next(answers, lambda *_: (1, None, None))(*args))

    def cuGraphGetNodes(self, graph: object, count: int = 0) -> tuple[Any, ...]:  # noqa: N802
        return 0, [*range(len(self.names) + 1)][:count], len(self.names) + 1

    def cuGraphNodeGetType(self, node: int) -> tuple[Any, ...]:  # noqa: N802
        return 0, "kernel" if node < len(self.names) else "copy"

    def cuGraphKernelNodeGetParams(self, node: int) -> tuple[Any, ...]:  # noqa: N802
        return 0, SimpleNamespace(func=node + 1 if node % 2 else 0, kern=node + 1)

    def cuFuncGetName(self, function: int) -> tuple[Any, ...]:  # noqa: N802
        return 0, self.names[function - 1].encode()

    cuKernelGetName = cuFuncGetName  # noqa: N815

    def cuCtxGetStreamPriorityRange(self) -> tuple[Any, ...]:  # noqa: N802
        return 0, 0, -5

    def cuGraphKernelNodeSetAttribute(self, node: int, attribute: str, value: Any) -> tuple[Any, ...]:  # noqa: N802
        assert attribute == "priority"
        self.priorities[self.names[node]] = value.priority
        return (0,)


def found(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> int:
    for name, module in {"cuda": None, "cuda.bindings": SimpleNamespace(driver=driver)}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return communicate_first(GRAPH)


REDUCE, BROADCAST = (
    "_Z39ncclDevKernel_AllReduce_Sum_bf16_RING_LL24ncclDevKernelArgs",
    "_Z23ncclDevKernel_Broadcast4Args",
)
KERNELS = "gemm", REDUCE, BROADCAST, "update"


def test_kernels_of_nccl_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(*KERNELS)
    assert found(monkeypatch, driver) == 2
    assert driver.priorities == {REDUCE: -5, BROADCAST: -5}


@pytest.mark.parametrize("function", ["cuGraphGetNodes", "cuFuncGetName", "cuGraphKernelNodeSetAttribute"])
def test_they_stay_as_they_are_where_the_driver_refuses(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    driver = Driver(*KERNELS, failing=function)
    assert found(monkeypatch, driver) == 0
    assert driver.priorities == {}


def test_those_after_one_that_is_refused_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(*KERNELS, failing="cuGraphKernelNodeSetAttribute", after=1)
    assert found(monkeypatch, driver) == 1
    assert driver.priorities == {REDUCE: -5}


@pytest.mark.parametrize("processes", [True, False])
def test_graphs_are_instantiated_after_that_where_processes_communicate(
    monkeypatch: pytest.MonkeyPatch, processes: bool
) -> None:
    done: list[str] = []
    graph = SimpleNamespace(instantiate=lambda: done.append("instantiated"))
    pool = cuda_graph.GraphPool.__new__(cuda_graph.GraphPool)
    pool.handle, pool.failed = None, False
    monkeypatch.setattr(cuda_graph, "capture", lambda *args, **options: (graph, ()))
    monkeypatch.setattr(cuda_graph, "fill_by_kernels", lambda *args: done.append("filled"))
    monkeypatch.setattr(cuda_graph, "communicate_first", lambda captured: done.append("first"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: processes)
    pool.capture(list, SimpleNamespace(device="cuda:0"))  # type: ignore[arg-type]
    assert done == ["filled", *["first"] * processes, "instantiated"]
