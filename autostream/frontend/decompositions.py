"""Decompositions of ATen ops while they are traced, so that the parts may run side by side.

A convolution's backward becomes two ops, and an op on a list of tensors becomes one op for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten


def _convolution_backward(*arguments: Any) -> Any:
    """``aten.convolution_backward`` as one op for the input's gradient and one for those of weight and bias.

    Layers before a convolution wait for its input's gradient only; its weight's is needed by the optimizer alone. cuDNN
    computes them in separate kernels anyway, so the two ops are no more work. The last argument says which gradients
    are needed: input, weight, bias.
    """
    *others, needed = arguments
    of_input, of_weight, of_bias = needed
    if not of_input or not (of_weight or of_bias):
        return NotImplemented

    def compute(mask: Sequence[bool]) -> Any:
        return aten.convolution_backward.default(*others, mask)

    first, _, _ = compute([True, False, False])
    _, second, third = compute([False, of_weight, of_bias])
    return first, second, third


SPLIT_CONVOLUTIONS: Mapping[Any, Callable[..., Any]] = {aten.convolution_backward.default: _convolution_backward}
"""Decompositions for ``make_fx``.

Example:
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> def gradients(x, weight):
    ...     return torch.autograd.grad(torch.conv1d(x, weight).sum(), [x, weight])
    >>> x, weight = (torch.ones(1, 1, 3, requires_grad=True) for _ in range(2))
    >>> graph = make_fx(gradients, dict(SPLIT_CONVOLUTIONS))(x, weight).graph
    >>> [node.args[-1] for node in graph.nodes if node.target is aten.convolution_backward.default]
    [[True, False, False], [False, True, False]]
"""


@cache
def split_lists() -> Mapping[OpOverload, Callable[..., Any]]:
    """Decompositions of ops on lists of tensors (``_foreach_*``) into ops on single tensors.

    They are the kernels that PyTorch has for devices without kernels for lists, called by their dispatch key. How to do
    so is private to PyTorch.

    Example:
        >>> aten._foreach_add.List in split_lists()
        True
    """
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::_foreach_"))
    ops = (_overload(name) for name in names)
    return {op: partial(op._op_dk, key) for op in ops if op.has_kernel_for_dispatch_key(key)}


def _overload(name: str) -> OpOverload:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    op: OpOverload = getattr(getattr(aten, packet), overload or "default")
    return op
