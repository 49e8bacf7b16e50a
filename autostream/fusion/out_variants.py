"""Results into memory of the schedule's choice: operators that allocate by themselves, by variants that do not.

    conv = aten.convolution(x, w, …)        conv = aten.empty_strided(…)
                                     ──▶    aten.cudnn_convolution.out(x, w, …, out=conv)

Of the operators that TorchInductor leaves to libraries, products have variants with ``out=`` and it uses them.
``aten.convolution.out`` only copies what the operator itself allocated; what cuDNN computes can go anywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def write_into_given_memory(module: fx.GraphModule) -> None:
    """Let convolutions that cuDNN computes write into memory that is taken before, in place of their own.

    The same kernels run, in the memory format that the operator would choose, with the settings of cuDNN as they are
    now. Those with a bias, transposed ones, and those that other libraries compute stay as they are.

    Args:
        module: a graph whose nodes have fake values; it is changed.
    """
    for node in module.graph.find_nodes(op="call_function", target=aten.convolution.default):
        settings = _cudnn_settings()
        if settings is None or not _is_cudnn(node):
            continue
        x, weight, _, stride, padding, dilation, _, _, groups = _arguments(node)
        value = node.meta["val"]
        with module.graph.inserting_before(node):
            memory = module.graph.call_function(
                aten.empty_strided.default,
                (list(value.shape), list(value.stride())),
                {"dtype": value.dtype, "device": value.device},
            )
            call = (x, weight, padding, stride, dilation, groups, *settings)
            written = module.graph.call_function(aten.cudnn_convolution.out, call, {"out": memory})
        for new in (memory, written):
            new.meta = dict(node.meta)
        node.replace_all_uses_with(memory)
        name = node.name
        module.graph.erase_node(node)
        memory.name = name
    module.recompile()


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a convolution in the order of its schema: Inductor gives some by name."""
    schema = aten.convolution.default._schema.arguments
    named = dict(zip((argument.name for argument in schema), node.args, strict=False)) | dict(node.kwargs)
    return tuple(named.get(argument.name, argument.default_value) for argument in schema)


def _is_cudnn(node: fx.Node) -> bool:
    """Whether cuDNN computes a convolution as it is called, and what its result's strides are is known.

    Private to PyTorch (2.11 and 2.13): the choice that the operator makes when it runs, which fake values make too.
    """
    x, weight, bias, *rest = _arguments(node)
    value, given = node.meta["val"], [source.meta["val"] for source in (x, weight)]
    choose = getattr(torch._C, "_select_conv_backend", None)
    format_of = getattr(torch._C, "_conv_determine_backend_memory_format", None)
    cudnn = getattr(getattr(torch._C, "_ConvBackend", None), "Cudnn", None)
    transposed = rest[3]
    static = all(isinstance(size, int) for size in (*value.shape, *value.stride()))
    if bias is not None or transposed or not static or None in (choose, format_of, cudnn) or not value.numel():
        return False
    # One dimension is computed as two, by views: the operator does that, and not what is below it.
    if value.dim() not in (4, 5) or choose(*given, None, *rest, None) != cudnn:  # type: ignore[misc]
        return False
    return bool(value.is_contiguous(memory_format=format_of(*given, cudnn)))  # type: ignore[misc]


def _cudnn_settings() -> tuple[bool, bool, bool] | None:
    """Whether to try algorithms, to be deterministic, and to allow TF32: what the operator asks when it runs.

    The precision of convolutions alone decides on the last, by a getter that is private to PyTorch (2.11 and 2.13). Its
    public relative raises where somebody set precisions in the old way and in the new: ``None`` then.
    """
    deterministic = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    try:
        tf32 = torch.backends.cudnn.allow_tf32 if precision is None else precision("cuda", "conv") == "tf32"
    except RuntimeError:
        return None
    return torch.backends.cudnn.benchmark, deterministic, tf32
