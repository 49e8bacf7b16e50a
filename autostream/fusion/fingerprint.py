"""Computes the key of a program in the cache of fused kernels, from its ops, Inductor's settings, device and versions.

Programs with the same key are fused into the same kernels. A program has no key if its kernels depend on anything that
cannot be part of one: baked-in constants, nested graphs, data-dependent sizes, operators that are not PyTorch's own,
unknown metadata of nodes, settings that are Python functions, lowerings registered by the user. Inductor's own key
(``FxGraphHashDetails``) has the same limits, but it is computed from a later graph, which takes long to make, and by
pickling.

Lines of source code are not part of the key: kernels do not depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor

from autostream.errors import a_type
from autostream.frontend.settings import numerics
from autostream.fusion.kernel_json import NotSerializable, argument_to_json, operator_to_json
from autostream.ir import Program
from autostream.store import code_in, key_of
from autostream.utils.data import Json
from autostream.utils.storages import storage_of
from autostream.version import VERSION

_NAMESPACES = {"aten", "prims", "_c10d_functional"}
"""Namespaces of operators that are the same in every process with this version of PyTorch."""

_KNOWN_META = {
    *("val", "tensor_meta", "stack_trace", "nn_module_stack", "source_fn_stack"),
    *("torch_fn", "original_aten", "from_node", "seq_nr", "custom", "eager_input_vals"),
}
"""Keys of ``node.meta`` that tracing sets. Kernels depend on ``val``, and may on ``custom``; the others follow from
these, or only contribute to names of kernels."""


def fingerprint(program: Program) -> str:
    """The cache key of a program's fused kernels, with Inductor's settings as they are now.

    Args:
        program: a program of ATen ops, on a CUDA device.

    Raises:
        NotSerializable: some part of it cannot be part of a key.
        TypeError: a setting cannot be part of a key.
    """
    return key_of(content_of(program), settings(), surroundings(program.device))


def content_of(program: Program) -> Json:
    """A program as JSON, without its lines of source code.

    Raises:
        NotSerializable: some part of it has no JSON form.
    """
    storages: dict[int, int] = {}
    placeholders = [[item.name, item.role.value, item.storage] for item in program.placeholders]
    return [placeholders, [_node(node, storages) for node in program.module.graph.nodes]]


def _node(node: fx.Node, storages: dict[int, int]) -> Json:
    if unknown := node.meta.keys() - _KNOWN_META:
        raise NotSerializable(f"{node.name}, which has a note on {min(unknown)}")
    if node.op not in ("placeholder", "call_function", "output"):
        raise NotSerializable(f"{node.name}, a {node.op}")
    called = operator_to_json(node) if node.op == "call_function" else ""
    if called not in ("", "getitem") and called.partition(".")[0] not in _NAMESPACES:
        raise NotSerializable(f"{called}, which is not PyTorch's own")
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
    """The properties of a value that Inductor sees; its storage is a number in order of appearance, and its bytes."""
    if isinstance(value, list | tuple):
        return [_value(item, storages) for item in value]
    if not isinstance(value, Tensor):
        return argument_to_json(value)
    if not isinstance(value, FakeTensor) or value.layout != torch.strided:
        raise NotSerializable(f"a value that is {a_type(value)} of layout {value.layout}")
    storage = storages.setdefault(storage_of(value), len(storages))
    layout = (tuple(value.shape), value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
    flags = (value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference())
    return argument_to_json((value.dtype, value.device, storage, *layout, *flags))


def settings() -> Json:
    """The current settings of Inductor, of AOTAutograd and of numerics.

    Raises:
        NotSerializable: the user has registered decompositions, lowerings, passes or a backend of their own.
    """
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor
    from torch._inductor.codegen.common import custom_backend_codegen_configs, custom_backend_passes
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings

    for table in (select_decomp_table(), lowerings):
        if foreign := next(_foreign(table), ""):
            raise NotSerializable(f"{foreign}, which is not PyTorch's own")
    if any((*custom_backend_passes.values(), *custom_backend_codegen_configs.values())):
        raise NotSerializable("a backend of Inductor's that is not its own")
    return [
        inductor.get_config_copy(),
        functorch.get_config_copy(),
        repr(numerics()),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    ]


def _foreign(table: Mapping[Any, Any]) -> Iterator[str]:
    """The names of functions in a table that are from neither PyTorch nor Python's library."""
    for function in table.values():
        function = getattr(function, "func", function)  # of functools.partial
        module = getattr(function, "__module__", None) or type(function).__module__
        if module.partition(".")[0] not in ("torch", "functools", "_operator"):
            yield f"{module}.{getattr(function, '__name__', type(function).__name__)}"


def surroundings(device: str) -> Json:
    """The device, and the versions of everything that takes part in generating kernels for it."""
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
