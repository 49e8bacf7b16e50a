"""Replaces convolutions by variants with ``out=``, so that the schedule can place their results in memory.

    conv = aten.convolution(x, w, …)        conv = aten.empty_strided(…)
                                     ──▶    aten.cudnn_convolution.out(x, w, …, out=conv)

TorchInductor already uses the ``out=`` variants of matrix products. ``aten.convolution.out`` would not help: it copies
from a result that the operator allocates. ``cudnn_convolution.out`` writes into the given memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def use_out_variants(module: fx.GraphModule) -> None:
    """Replace convolutions that cuDNN computes by an allocation and a call with ``out=``.

    The same kernels run, in the memory format that the operator would choose, with the current settings of cuDNN.
    Convolutions with a bias, transposed ones, and those that other libraries compute stay as they are.

    Args:
        module: a graph whose nodes have fake values; it is changed in place.
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
            convolution = module.graph.call_function(aten.cudnn_convolution.out, call, {"out": memory})
        for new in (memory, convolution):
            new.meta = dict(node.meta)
        node.replace_all_uses_with(memory)
        name = node.name
        module.graph.erase_node(node)
        memory.name = name
    module.recompile()


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a convolution in the order of its schema: Inductor passes some by name."""
    schema = aten.convolution.default._schema.arguments
    named = dict(zip((argument.name for argument in schema), node.args, strict=False)) | dict(node.kwargs)
    return tuple(named.get(argument.name, argument.default_value) for argument in schema)


def _is_cudnn(node: fx.Node) -> bool:
    """Whether cuDNN computes a convolution, in the memory format that the strides of its fake value have.

    Uses the private functions of PyTorch (2.11 and 2.13) by which the operator and its fake kernel choose the backend.
    """
    x, weight, bias, *rest = _arguments(node)
    value, inputs = node.meta["val"], [source.meta["val"] for source in (x, weight)]
    choose = getattr(torch._C, "_select_conv_backend", None)
    format_of = getattr(torch._C, "_conv_determine_backend_memory_format", None)
    cudnn = getattr(getattr(torch._C, "_ConvBackend", None), "Cudnn", None)
    transposed = rest[3]
    static = all(isinstance(size, int) for size in (*value.shape, *value.stride()))
    if bias is not None or transposed or not static or None in (choose, format_of, cudnn) or not value.numel():
        return False
    # aten.convolution computes one dimension as two, by views; aten.cudnn_convolution does not.
    if value.dim() not in (4, 5) or choose(*inputs, None, *rest, None) != cudnn:  # type: ignore[misc]
        return False
    return bool(value.is_contiguous(memory_format=format_of(*inputs, cudnn)))  # type: ignore[misc]


def _cudnn_settings() -> tuple[bool, bool, bool] | None:
    """The settings benchmark, deterministic and allow_tf32 as ``aten.convolution`` uses them when it runs.

    TF32 depends on the precision of convolutions, which a getter tells that is private to PyTorch (2.11 and 2.13). If a
    version lacks it, ``torch.backends.cudnn.allow_tf32`` tells; it raises an error if precisions were set by both the
    old and the new interface, and the result is ``None`` then.
    """
    deterministic = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    try:
        tf32 = torch.backends.cudnn.allow_tf32 if precision is None else precision("cuda", "conv") == "tf32"
    except RuntimeError:
        return None
    return torch.backends.cudnn.benchmark, deterministic, tf32
