"""The gradients of a convolution, taken apart: the same numbers, from two ops of which neither needs the other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autostream.frontend.convolutions import GRADIENTS_APART

BACKWARD = torch.ops.aten.convolution_backward.default

LAYERS = {
    "one dimension": (nn.Conv1d(2, 3, 3), (2, 2, 7)),
    "padded, strided": (nn.Conv2d(2, 4, 3, stride=2, padding=1), (2, 2, 8, 9)),
    "groups, dilated, no bias": (nn.Conv2d(4, 4, 3, dilation=2, groups=2, bias=False), (1, 4, 9, 9)),
    "depthwise": (nn.Conv2d(3, 3, 3, groups=3), (2, 3, 5, 5)),
    "transposed": (nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1), (2, 2, 4, 4)),
    "three dimensions": (nn.Conv3d(1, 2, 2), (1, 1, 3, 4, 5)),
}


def backward_of(
    layer: nn.Module, shape: Sequence[int], wanted: Sequence[bool]
) -> tuple[fx.GraphModule, list[Tensor], tuple[Tensor, ...]]:
    """A graph of forward and backward, its arguments, and what autograd itself gives for these.

    Args:
        layer: a convolution.
        shape: of its input.
        wanted: whether to compute the gradient of the input, the weight and the bias.
    """
    names = [name for name, _ in layer.named_parameters()]
    values = [torch.randn(shape), *(value.detach() for value in layer.parameters())]
    arguments = [value.double().requires_grad_(some) for value, some in zip(values, wanted, strict=False)]

    def run(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        output = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), x)
        asked = [value for value in (x, *parameters) if value.requires_grad]
        return torch.autograd.grad(output.sin().sum(), asked)

    return make_fx(run, dict(GRADIENTS_APART))(*arguments), arguments, run(*arguments)


@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS)
def test_gradients_are_those_of_autograd(layer: nn.Module, shape: tuple[int, ...]) -> None:
    module, arguments, expected = backward_of(layer, shape, [True] * 3)
    torch.testing.assert_close(module(*arguments), expected, rtol=1e-12, atol=1e-12)


@given(st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any))
def test_nobody_waits_for_what_it_does_not_need(wanted: tuple[bool, bool, bool]) -> None:
    """What was one op is two: the input's gradient ◀── op │ op ──▶ the weight's and the bias's."""
    module, _, _ = backward_of(*LAYERS["padded, strided"], wanted)
    ops = module.graph.find_nodes(op="call_function", target=BACKWARD)
    masks = [list(op.args[-1]) for op in ops]
    of_input, *others = wanted
    assert not any(mask[0] and any(mask[1:]) for mask in masks)
    assert [any(column) for column in zip(*masks, strict=True)] == [of_input, *others]
    assert len(ops) == of_input + any(others)
