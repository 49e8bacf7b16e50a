"""FLOPs by formulas, bytes by counting."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autostream.analysis.effects import effects_of
from autostream.analysis.work import Work, count_work
from tests.analysis.programs import Tape, aten, exported


@pytest.fixture
def tape() -> Tape:
    return Tape()


def work_of(tape: Tape, target: torch._ops.OpOverload, *args: object, **kwargs: object) -> Work:
    node = tape.call(target, *args, **kwargs)
    return count_work({node: effects_of(node)})[node.name]


# FLOPs


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_products(device: str) -> None:
    """On a device that need not exist."""
    tape = Tape(device)
    assert work_of(tape, aten.linear.default, tape.input(8, 16), tape.input(32, 16)).flops == 2 * 8 * 16 * 32
    assert work_of(tape, aten.matmul.default, tape.input(5, 8, 16), tape.input(16, 4)).flops == 2 * 5 * 8 * 16 * 4
    bias, one, other = tape.input(5), tape.input(8, 16), tape.input(16, 5)
    by_name = work_of(tape, aten.addmm.default, bias, mat2=other, mat1=one, beta=2)
    assert by_name.flops == 2 * 8 * 16 * 5
    assert work_of(tape, aten.addmm_.default, tape.input(8, 5), one, other).flops == 2 * 8 * 16 * 5
    assert work_of(tape, aten.relu.default, one).flops == 0


BY_NAME: dict[str, Any] = {"dilation": [1, 1], "output_padding": [0, 0], "groups": 1, "bias": None, "stride": [2, 2]}


def test_convolutions(tape: Tape) -> None:
    """Each result sums 3·3·3 products, or 3·3 with groups; if transposed, each input is multiplied with the weights."""
    x, w = tape.input(1, 3, 8, 8), tape.input(4, 3, 3, 3)
    assert work_of(tape, aten.conv2d.default, x, w).flops == 2 * (4 * 6 * 6) * (3 * 3 * 3)
    grouped = tape.input(1, 4, 8, 8), tape.input(4, 1, 3, 3), None, [1, 1], [0, 0], [1, 1], 4
    assert work_of(tape, aten.conv2d.default, *grouped).flops == 2 * (4 * 6 * 6) * (3 * 3)
    inductor = work_of(tape, aten.convolution.default, x, w, padding=[1, 1], transposed=False, **BY_NAME)
    assert inductor.flops == 2 * (4 * 4 * 4) * (3 * 3 * 3)
    turned = tape.input(3, 4, 3, 3)
    transposed = work_of(tape, aten.convolution.default, x, turned, padding=[0, 0], transposed=True, **BY_NAME)
    assert transposed.flops == 2 * (3 * 8 * 8) * (4 * 3 * 3)


def test_attention(tape: Tape) -> None:
    """Scores and weighted sum: 2·heads·queries·keys·width each; keys may be shared by several heads.

    The fused ops have batch 2, 3 steps, width 8: four projections; the encoder also from 8 to 5 and back.
    """
    q = tape.input(2, 4, 8, 16)
    for heads in (4, 2):
        k = tape.input(2, heads, 8, 16)
        work = work_of(tape, aten.scaled_dot_product_attention.default, q, k, k, enable_gqa=heads < 4)
        assert work.flops == 2 * (2 * 2 * 4 * 8 * 8 * 16)
    x, qkv, out = tape.input(2, 3, 8), (tape.input(24, 8), tape.input(24)), (tape.input(8, 8), tape.input(8))
    attention = 2 * (4 * 2 * 3 * 8 * 8 + 2 * 2 * 3 * 3 * 8)
    assert work_of(tape, aten._native_multi_head_attention.default, x, x, x, 8, 2, *qkv, *out).flops == attention
    norms = [tape.input(8) for _ in range(4)]
    linears = tape.input(5, 8), tape.input(5), tape.input(8, 5), tape.input(8)
    encoder = aten._transformer_encoder_layer_fwd.default
    work = work_of(tape, encoder, x, 8, 2, *qkv, *out, False, False, 1e-5, *norms, *linears)
    assert work.flops == attention + 2 * 2 * 2 * 3 * 8 * 5


def test_composites_and_autocast_regions() -> None:
    """An LSTM has four gates in each of 7 steps: 4·5 results from 3 inputs and 5 hidden values."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ w).relu()

    node = exported(nn.LSTM(3, 5), torch.randn(7, 1, 3)).nodes["lstm"]
    assert count_work({node: effects_of(node)})["lstm"].flops == 7 * 2 * (4 * 5) * (3 + 5)
    case = exported(model, torch.ones(2, 3), torch.ones(3, 5))
    (node,) = (node for node in case.nodes.values() if "autocast" in str(node.target))
    work = count_work({node: effects_of(node)})[node.name]
    assert (work.flops, work.dtype, work.elements) == (2 * 2 * 3 * 5, "bfloat16", 10)
    assert work.bytes_read == (6 + 15) * 4 + 10 * 2, "the product reads its factors, relu the product"


def test_symbolic_sizes_count_as_in_the_example_and_unknown_flops_as_none(tape: Tape) -> None:
    env = ShapeEnv()
    size = env.create_symintnode(env.create_symbol(7, ConstantSource("batch")), hint=7)
    x = tape.input(1)
    node = tape.graph.call_function(aten.mm.default, (x, x))
    with FakeTensorMode(shape_env=env):
        x.meta["val"], node.meta["val"] = torch.empty(size, size), torch.empty(size, size)
    work = count_work({node: effects_of(node)})[node.name]
    assert (work.flops, work.elements, work.bytes_written) == (2 * 7**3, 49, 49 * 4)
    x.meta["val"] = node.meta["val"] = torch.empty(2, 3)  # the counter raises
    assert count_work({node: effects_of(node)})[node.name].flops == 0


# Traffic


def test_bytes_read_and_written(tape: Tape) -> None:
    x, y = tape.input(8), tape.input(8)
    expanded = tape.call(aten.expand.default, tape.input(1, 8), [100, 8])
    row = tape.call(aten.select.int, tape.input(10, 8), 0, 0)
    table, rows, values = tape.input(1000, 4), tape.input(3, dtype=torch.int64), tape.input(3, 4)
    for traffic, target, *args in (
        ((64, 32), aten.add.Tensor, x, y),
        ((32, 32), aten.mul.Tensor, x, x),
        ((32, 3200), aten.neg.default, expanded),  # as large as its storage
        ((32, 32), aten.neg.default, row),
        ((0, 0), aten.t.default, tape.input(2, 4)),
        ((32, 32), aten.add_.Tensor, x, 1),
        ((0, 32), aten.zero_.default, x),
        ((32, 32), aten.copy_.default, x, y),
        ((64, 64), aten._foreach_mul_.Scalar, [x, y], 2),
        ((3 * 16 + 3 * 8, 3 * 16), aten.embedding.default, table, rows),  # reads the rows that it returns
        ((0, 0), aten.empty_like.default, x),
        ((0, 32), aten.zeros_like.default, x),
    ):
        work = work_of(tape, target, *args)
        assert (work.bytes_read, work.bytes_written) == traffic, target
    work = work_of(tape, aten.index_copy_.default, table, 0, rows, values)
    assert work.bytes_read <= 2 * (3 * 16 + 3 * 8)
    assert work.bytes_written <= 3 * 16 + 3 * 8


def test_dtypes_and_elements(tape: Tape) -> None:
    half, i, x = tape.input(8, dtype=torch.float16), tape.input(8, dtype=torch.int64), tape.input(4, 5)
    assert work_of(tape, aten.neg.default, half).dtype == "float16"
    assert work_of(tape, aten.gt.Scalar, half, 0).dtype == "float16", "a comparison of floats computes with floats"
    assert work_of(tape, aten.embedding.default, tape.input(8, 4), i).dtype == "float32"
    assert work_of(tape, aten.neg.default, i).dtype == "int64"
    assert work_of(tape, aten.max.dim, x, 0).elements == 5
    assert work_of(tape, aten.zero_.default, x).elements == 20
    item, total = tape.number(aten.item.default, x), tape.number(operator.add, 1, 2, value=3)
    works = count_work({node: effects_of(node) for node in (item, total)})
    assert works == {item.name: Work(0, 80, 0, 0, "float32"), total.name: Work(0, 0, 0, 0, "float32")}
