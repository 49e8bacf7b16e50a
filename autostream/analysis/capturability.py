"""Which calls a CUDA graph cannot capture, and why.

Such a call synchronizes with the device, has data-dependent shapes, or accesses memory of the host or another device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autostream.analysis.values import input_tensors, nodes_in, tensors_in, value_of
from autostream.utils.operators import base_name, is_unknown

WAITS = "makes the host wait for the device"
DATA_SHAPE = "its result's shape depends on data"
GIVEN_DATA_SHAPE = "takes a tensor whose shape depends on data"
ON_CPU = "runs on the CPU"
FROM_HOST = "copies host memory that is not pinned to the device"
TO_HOST = "copies to host memory, which the host may read before the graph has run"
NUMBER = "takes a number from the CPU, which a graph would keep as it was when captured"
BRANCHES = "chooses what to run by a value on the device"

# Found by running PyTorch's own operator samples under torch.cuda.set_sync_debug_mode("error") and under stream
# capture (torch 2.11, CUDA 13). Some of them synchronize for some arguments only.
_WAITING = """
    _ctc_loss _linalg_check_errors _linalg_eigh _linalg_svd _local_scalar_dense _lu_with_info _unique _unique2 allclose
    argwhere bincount cholesky combinations corrcoef cov ctc_loss equal histc is_nonzero isin item linalg_cholesky
    linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_ldl_factor linalg_ldl_factor_ex
    linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_matrix_power linalg_matrix_rank
    linalg_pinv linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve linspace.Scalar_Tensor
    linspace.Tensor_Scalar linspace.Tensor_Tensor logspace.Scalar_Tensor logspace.Tensor_Scalar logspace.Tensor_Tensor
    masked_select matrix_exp mode nonzero nonzero_numpy normal.Tensor_Tensor normal.float_Tensor pinverse
    segment_reduce to_sparse unique_consecutive unique_dim unique_dim_consecutive where.default
"""
_WAITS = frozenset(_WAITING.split())

_FILLS = frozenset({"masked_fill.Tensor", "masked_fill_.Tensor", "index_fill.int_Tensor", "index_fill_.int_Tensor"})
_INDEX_PUTS = frozenset({"index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"})
_INDEXES = _INDEX_PUTS | {"index", "_unsafe_index"}

# Kernels take a zero-dimensional CPU tensor by value, except for these operators, which copy it.
_COPIES = frozenset({"to", "_to_copy", "copy", "copy_"})
_COPIES_NUMBERS = _COPIES | _INDEX_PUTS | {"where"}


def refusal_of(node: fx.Node, target: OpOverload, arguments: dict[str, Any]) -> str:
    """Say why a CUDA graph cannot hold a call of an operator, or ``""`` if it can.

    Args:
        node: the call.
        target: the operator.
        arguments: the call's arguments by name.
    """
    inputs, results = input_tensors(node), tensors_in(value_of(node))
    reason = _placement_refusal(inputs, results)
    if reason or not inputs + results or _fills_by_mask(target, arguments):
        return reason
    return WAITS if _waits(target, arguments) else _copy_refusal(target, inputs, results, arguments)


def opaque_refusal_of(node: fx.Node) -> str:
    """Say why a CUDA graph cannot hold a call without a schema, as far as its tensors and name tell, or ``""``."""
    reason = _placement_refusal(input_tensors(node), tensors_in(value_of(node)))
    return reason or (BRANCHES if str(node.target) in ("cond", "while_loop") else "")


def dependence_of(node: fx.Node) -> str:
    """Say why a CUDA graph cannot hold a call because of its inputs, which are known only at run time, or ``""``.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> x.meta["val"] = torch.empty(2)
        >>> dependence_of(graph.call_function(torch.ops.aten.mul.Tensor, (x, 2.0)))
        ''
    """
    if any(is_unknown(value_of(source)) for source in node.all_input_nodes):
        return NUMBER
    return GIVEN_DATA_SHAPE if any(map(_depends_on_data, input_tensors(node))) else ""


def copy_direction(node: fx.Node) -> str:
    """The direction of a copy between devices: ``"upload"``, ``"download"`` or ``"peer"``; ``""`` for other calls.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> moved = graph.call_function(torch.ops.aten.to.device, (x, torch.device("meta"), torch.float32))
        >>> x.meta["val"], moved.meta["val"] = torch.empty(2), torch.empty(2, device="meta")
        >>> copy_direction(moved)
        'upload'
    """
    if not isinstance(node.target, OpOverload) or base_name(node.target) not in _COPIES:
        return ""
    results = tensors_in(value_of(node))
    devices = {tensor.device for tensor in input_tensors(node) + results}
    if len(devices) < 2:
        return ""
    if all(device.type != "cpu" for device in devices):
        return "peer"
    return "download" if any(tensor.device.type == "cpu" for tensor in results) else "upload"


def _placement_refusal(inputs: list[torch.Tensor], results: list[torch.Tensor]) -> str:
    if not _on_device(inputs + results):
        return ON_CPU if inputs or results else ""
    return _peers_refusal(inputs, results) or (DATA_SHAPE if any(map(_depends_on_data, results)) else "")


def _peers_refusal(inputs: list[torch.Tensor], results: list[torch.Tensor]) -> str:
    sources, targets = ({str(tensor.device) for tensor in tensors} - {"cpu", "meta"} for tensors in (inputs, results))
    if len(sources | targets) < 2:
        return ""
    start, end = (" and ".join(sorted(devices)) for devices in (sources - targets, targets))
    return f"copies from {start} to {end}" if start and end else f"uses tensors on {start or end}"


def _depends_on_data(result: torch.Tensor) -> bool:
    if not any(map(is_unknown, result.shape)):
        return False
    # Imported late: it imports sympy, which takes half as long as importing torch.
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(result))


def _fills_by_mask(target: OpOverload, arguments: dict[str, Any]) -> bool:
    """Whether a call is ``x[mask] = number``, which ATen runs as ``masked_fill``, without synchronizing."""
    if base_name(target) not in _INDEX_PUTS or arguments["accumulate"]:
        return False
    number = value_of(arguments["values"])
    one_mask = [_is_mask(index) for index in nodes_in(arguments["indices"])] == [True]
    return one_mask and number.dim() == 0 and not _on_device([number])


def _waits(target: OpOverload, arguments: dict[str, Any]) -> bool:
    name = base_name(target)
    full_name = f"{name}.{target._overloadname}"
    if name in _INDEXES:
        return any(_is_mask(index) for index in nodes_in(arguments["indices"]))
    if full_name in _FILLS:
        return _on_device(tensors_in(value_of(arguments["value"])))
    if name == "repeat_interleave":
        return arguments.get("output_size") is None and isinstance(arguments["repeats"], fx.Node)
    if name == "one_hot":
        return bool(arguments["num_classes"] == -1)
    if name == "linalg_matrix_norm":
        return arguments["ord"] in ("nuc", 2, -2)
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(target.tags):
        return True
    return name in _WAITS or full_name in _WAITS


def _copy_refusal(
    target: OpOverload, inputs: list[torch.Tensor], results: list[torch.Tensor], arguments: dict[str, Any]
) -> str:
    name = base_name(target)
    if results and not _on_device(results):
        return TO_HOST if name in ("to", "_to_copy") and arguments["non_blocking"] is True else WAITS
    on_host = [tensor for tensor in inputs if tensor.device.type == "cpu"]
    return FROM_HOST if any(tensor.dim() > 0 or name in _COPIES_NUMBERS for tensor in on_host) else ""


def _is_mask(index: fx.Node) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(value_of(index)))


def _on_device(tensors: Iterable[torch.Tensor]) -> bool:
    return any(tensor.device.type != "cpu" for tensor in tensors)
