"""The two gradients of a convolution as ops of their own, so that they may run side by side.

Autograd has one op for both. What is before a convolution in the model waits in the backward for its input's gradient
alone; its weight's is needed by nobody but the optimizer. cuDNN computes them in separate kernels anyway, so taken
apart they are no more work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def _gradients(*arguments: Any) -> Any:
    """``aten.convolution_backward``; its last argument says which gradients are wanted: input, weight, bias."""
    *arguments_before, wanted = arguments
    of_input, of_weight, of_bias = wanted
    if not of_input or not (of_weight or of_bias):
        return NotImplemented

    def compute(some: Sequence[bool]) -> Any:
        return aten.convolution_backward.default(*arguments_before, some)

    first, _, _ = compute([True, False, False])
    _, second, third = compute([False, of_weight, of_bias])
    return first, second, third


GRADIENTS_APART: Mapping[Any, Callable[..., Any]] = {aten.convolution_backward.default: _gradients}
"""Decompositions for ``make_fx``.

Example:
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> def gradients(x, weight):
    ...     return torch.autograd.grad(torch.conv1d(x, weight).sum(), [x, weight])
    >>> x, weight = (torch.ones(1, 1, 3, requires_grad=True) for _ in range(2))
    >>> graph = make_fx(gradients, dict(GRADIENTS_APART))(x, weight).graph
    >>> [node.args[-1] for node in graph.nodes if node.target is aten.convolution_backward.default]
    [[True, False, False], [False, True, False]]
"""
