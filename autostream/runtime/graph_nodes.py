"""Reads and changes the nodes of a captured graph, through the CUDA driver.

With ``cuda.bindings``, which PyTorch's packages for CUDA depend on, and PyTorch's ``raw_cuda_graph``: a graph has nodes
after its capture only if that was with ``keep_graph=True``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

UNKNOWN = (ImportError, AttributeError, TypeError)
"""What another version of the bindings, or of PyTorch, raises here."""


def nodes_of(graph: torch.cuda.CUDAGraph, kind: Literal["KERNEL", "MEMSET"]) -> list[Any]:
    """The nodes of a kind, in the order in which the driver lists them.

    Raises:
        RuntimeError: the driver refuses, or the graph keeps no nodes.
        ImportError, AttributeError, TypeError: see :data:`UNKNOWN`.
    """
    driver = _driver()
    raw = driver.CUgraph(graph.raw_cuda_graph())
    _, count = returned(driver.cuGraphGetNodes(raw))
    nodes, _ = returned(driver.cuGraphGetNodes(raw, count))
    wanted = getattr(driver.CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{kind}")
    return [node for node in nodes if returned(driver.cuGraphNodeGetType(node)) == [wanted]]


def fill_of(node: Any) -> Any:
    """What a memset node fills: ``height`` rows of ``width`` elements of ``elementSize`` bytes at ``dst``."""
    (fill,) = returned(_driver().cuGraphMemsetNodeGetParams(node))
    return fill


def predecessors(node: Any) -> list[Any]:
    """The nodes that a node waits for."""
    return _neighbours(_driver().cuGraphNodeGetDependencies, node)


def successors(node: Any) -> list[Any]:
    """The nodes that wait for a node."""
    return _neighbours(_driver().cuGraphNodeGetDependentNodes, node)


def kernel_name(node: Any) -> str:
    """The name of the function that a kernel node launches, as its compiler mangled it."""
    driver = _driver()
    (launch,) = returned(driver.cuGraphKernelNodeGetParams(node))
    function = int(launch.func)  # newer libraries launch kernels by another handle
    (name,) = returned(driver.cuFuncGetName(launch.func) if function else driver.cuKernelGetName(launch.kern))
    return str(name, "utf-8")


def run_first(node: Any) -> None:
    """Give a kernel node the highest priority: blocks of others that have not started yet are started after its own."""
    driver = _driver()
    _, highest = returned(driver.cuCtxGetStreamPriorityRange())
    value = driver.CUkernelNodeAttrValue()
    value.priority = int(highest)
    returned(driver.cuGraphKernelNodeSetAttribute(node, driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY, value))


def replace_by_kernel(graph: torch.cuda.CUDAGraph, node: Any, kernel: Any) -> None:
    """Put a copy of a kernel in a node's place. The graph must not have been instantiated.

    Args:
        graph: the node's.
        node: to replace.
        kernel: a kernel node of another graph.

    Raises:
        RuntimeError: the driver refuses. The graph computes what it did.
        ImportError, AttributeError, TypeError: likewise; see :data:`UNKNOWN`.
    """
    driver = _driver()
    raw = driver.CUgraph(graph.raw_cuda_graph())
    before, after = predecessors(node), successors(node)
    (launch,) = returned(driver.cuGraphKernelNodeGetParams(kernel))
    # The bindings for CUDA 12 have two versions; those for 13 have the second only, by the name of the first.
    add = getattr(driver, "cuGraphAddDependencies_v2", None) or driver.cuGraphAddDependencies
    (new,) = returned(driver.cuGraphAddKernelNode(raw, before, len(before), launch))
    try:
        returned(driver.cuGraphKernelNodeCopyAttributes(new, kernel))  # its priority, that of what runs beside it
        returned(add(raw, [new] * len(after), after, None, len(after)))
        returned(driver.cuGraphDestroyNode(node))
    except BaseException:
        driver.cuGraphDestroyNode(new)
        raise


def _driver() -> Any:
    from cuda.bindings import driver  # type: ignore[import-not-found, unused-ignore]

    return driver


def _neighbours(get: Any, node: Any) -> list[Any]:
    *_, count = returned(get(node))
    return list(returned(get(node, count))[0]) if count else []


def returned(answer: tuple[Any, ...]) -> list[Any]:
    """What a function of the driver returns beside its status.

    Raises:
        RuntimeError: the status is an error.
    """
    status, *values = answer
    if int(status):
        raise RuntimeError(f"the CUDA driver returned {status!r}")
    return values
