"""What TorchInductor's kernels depend on, as a key: a program of ATen ops, settings, device, and versions.

Two programs with one key are fused into the same kernels. What is not surely in the key has none: constants that the
program holds on to, graphs within graphs, sizes that only data tells, operators that are not PyTorch's own, notes that
nobody here knows on a node, settings that are Python functions, lowerings of the user's. So it is with Inductor's own
key (``FxGraphHashDetails``), but that is of a later graph, which takes long to make, and is made by pickling.

Not in the key are lines of source code, since no kernel depends on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor

from autostream.frontend.settings import numerics
from autostream.fusion.kernel_json import Json, Unwritable, argument_to_json, operator_to_json
from autostream.ir import Program
from autostream.store import code_in, key_of
from autostream.utils.storages import storage_of
from autostream.version import VERSION

_NAMESPACES = {"aten", "prims"}
"""Of operators that mean the same in every process with this PyTorch."""

_NOTES = {
    *("val", "tensor_meta", "stack_trace", "nn_module_stack", "source_fn_stack"),
    *("torch_fn", "original_aten", "from_node", "seq_nr", "custom"),
}
"""What tracing notes on nodes. Kernels depend on ``val``, and may on ``custom``; the others give them names at most."""


def fingerprint(program: Program) -> str:
    """The key of what Inductor makes of a program with its settings as they are now.

    Args:
        program: of ATen ops, on a CUDA device.

    Raises:
        Unwritable: there is no key for some of it.
        TypeError: likewise, for a setting.
    """
    return key_of(content_of(program), settings(), surroundings(program.device))


def content_of(program: Program) -> Json:
    """A program by value, but for its lines.

    Raises:
        Unwritable: no form is known for some of it.
    """
    storages: dict[int, int] = {}
    placeholders = [[item.name, item.role.value, item.storage] for item in program.placeholders]
    return [placeholders, [_node(node, storages) for node in program.module.graph.nodes]]


def _node(node: fx.Node, storages: dict[int, int]) -> Json:
    if unknown := node.meta.keys() - _NOTES:
        raise Unwritable(f"{node.name}, which has a note on {min(unknown)}")
    if node.op not in ("placeholder", "call_function", "output"):
        raise Unwritable(f"{node.name}, a {node.op}")
    called = operator_to_json(node) if node.op == "call_function" else ""
    if called not in ("", "getitem") and called.partition(".")[0] not in _NAMESPACES:
        raise Unwritable(f"{called}, which is not PyTorch's own")
    return [
        node.op,
        node.name,
        called,
        argument_to_json(node.args),
        argument_to_json(node.kwargs),
        _value(node.meta.get("val"), storages),
        argument_to_json(node.meta.get("custom")),
    ]


def _value(value: object, storages: dict[int, int]) -> Json:
    """What Inductor sees of a value; of its storage, the number among all of the program, and the bytes."""
    if isinstance(value, list | tuple):
        return [_value(item, storages) for item in value]
    if not isinstance(value, Tensor):
        return argument_to_json(value)
    if not isinstance(value, FakeTensor) or value.layout != torch.strided:
        raise Unwritable(f"a value that is a {type(value).__name__} of layout {value.layout}")
    storage = storages.setdefault(storage_of(value), len(storages))
    layout = (tuple(value.shape), value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
    marks = (value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference())
    return argument_to_json((value.dtype, value.device, storage, *layout, *marks))


def settings() -> Json:
    """All that Inductor and what leads to it can be set to, as it is set now.

    Raises:
        Unwritable: what the user has put in lowers or rewrites graphs too.
    """
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor
    from torch._inductor.codegen.common import custom_backend_codegen_configs, custom_backend_passes
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings

    for table in (select_decomp_table(), lowerings):
        if foreign := next(_foreign(table), ""):
            raise Unwritable(f"{foreign}, which is not PyTorch's own")
    if any((*custom_backend_passes.values(), *custom_backend_codegen_configs.values())):
        raise Unwritable("a backend of Inductor's that is not its own")
    return [
        inductor.get_config_copy(),
        functorch.get_config_copy(),
        repr(numerics()),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    ]


def _foreign(table: Mapping[Any, Any]) -> Iterator[str]:
    """Functions that are of neither PyTorch nor Python."""
    for function in table.values():
        function = getattr(function, "func", function)  # of a partial one
        module = getattr(function, "__module__", None) or type(function).__module__
        if module.partition(".")[0] not in ("torch", "functools", "_operator"):
            yield f"{module}.{getattr(function, '__name__', type(function).__name__)}"


def surroundings(device: str) -> Json:
    """The device, and versions of all that has a part in writing kernels for it."""
    properties = torch.cuda.get_device_properties(device)
    names = ("name", "major", "minor", "multi_processor_count", "total_memory")
    return [
        [getattr(properties, name) for name in names],
        [str(torch.__version__), torch.version.git_version, torch.version.cuda],
        torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        [_version(package) for package in ("triton", "pytorch-triton")],
        [VERSION, code_in(Path(__file__).parent)],
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
