"""The backward of a convolution as two ops: the same gradients, and neither op waits for the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autostream.frontend.decompositions import SPLIT_CONVOLUTIONS

STRIDED = (nn.Conv2d(2, 4, 3, stride=2, padding=1), (2, 2, 8, 9))

LAYERS = {
    "padded, strided": STRIDED,
    "groups, dilated, no bias": (nn.Conv2d(4, 4, 3, dilation=2, groups=2, bias=False), (1, 4, 9, 9)),
    "transposed": (nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1), (2, 2, 4)),
}


def backward_of(
    layer: nn.Module, shape: Sequence[int], needed: Sequence[bool]
) -> tuple[fx.GraphModule, list[Tensor], tuple[Tensor, ...]]:
    """A graph of forward and backward, its arguments, and the gradients by autograd."""
    names = [name for name, _ in layer.named_parameters()]
    values = [torch.randn(shape), *(value.detach() for value in layer.parameters())]
    arguments = [value.double().requires_grad_(some) for value, some in zip(values, needed, strict=False)]

    def run(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        output = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), x)
        return torch.autograd.grad(output.sin().sum(), [value for value in (x, *parameters) if value.requires_grad])

    return make_fx(run, dict(SPLIT_CONVOLUTIONS))(*arguments), arguments, run(*arguments)


@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS)
def test_gradients_are_those_of_autograd(layer: nn.Module, shape: tuple[int, ...]) -> None:
    module, arguments, expected = backward_of(layer, shape, [True] * 3)
    torch.testing.assert_close(module(*arguments), expected, rtol=1e-12, atol=1e-12)


def test_one_op_computes_the_inputs_gradient_and_one_those_of_weight_and_bias() -> None:
    for needed in product([False, True], repeat=3):
        if any(needed):
            module, _, _ = backward_of(*STRIDED, needed)
            ops = module.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default)
            masks = [list(op.args[-1]) for op in ops]
            assert not any(mask[0] and any(mask[1:]) for mask in masks)
            assert [any(column) for column in zip(*masks, strict=True)] == list(needed)
            assert len(ops) == needed[0] + any(needed[1:])
