"""FLOPs by the textbook, bytes by counting."""

from __future__ import annotations

import operator

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


class TestFlops:
    def test_linear(self, tape: Tape) -> None:
        assert work_of(tape, aten.linear.default, tape.input(8, 16), tape.input(32, 16)).flops == 2 * 8 * 16 * 32

    def test_batched_matmul(self, tape: Tape) -> None:
        assert work_of(tape, aten.matmul.default, tape.input(5, 8, 16), tape.input(16, 4)).flops == 2 * 5 * 8 * 16 * 4

    def test_convolution(self, tape: Tape) -> None:
        """Each of the 1·4·6·6 results sums 3·3·3 products."""
        work = work_of(tape, aten.conv2d.default, tape.input(1, 3, 8, 8), tape.input(4, 3, 3, 3))
        assert work.flops == 2 * (4 * 6 * 6) * (3 * 3 * 3)

    def test_grouped_convolution(self, tape: Tape) -> None:
        x, w = tape.input(1, 4, 8, 8), tape.input(4, 1, 3, 3)
        work = work_of(tape, aten.conv2d.default, x, w, None, [1, 1], [0, 0], [1, 1], 4)
        assert work.flops == 2 * (4 * 6 * 6) * (3 * 3)

    def test_a_convolution_as_inductor_calls_it(self, tape: Tape) -> None:
        """By name, but for the first two arguments. Each of the 1·4·4·4 results sums 3·3·3 products."""
        settings = {"stride": [2, 2], "padding": [1, 1], "dilation": [1, 1]}
        rest: dict[str, object] = {"transposed": False, "output_padding": [0, 0], "groups": 1, "bias": None}
        x, w = tape.input(1, 3, 8, 8), tape.input(4, 3, 3, 3)
        work = work_of(tape, aten.convolution.default, x, w, **settings, **rest)
        assert work.flops == 2 * (4 * 4 * 4) * (3 * 3 * 3)

    def test_a_transposed_convolution_by_name(self, tape: Tape) -> None:
        """Each of the 1·3·8·8 inputs is multiplied with 4·3·3 weights."""
        settings = {"stride": [2, 2], "padding": [0, 0], "dilation": [1, 1]}
        rest: dict[str, object] = {"transposed": True, "output_padding": [0, 0], "groups": 1, "bias": None}
        x, w = tape.input(1, 3, 8, 8), tape.input(3, 4, 3, 3)
        work = work_of(tape, aten.convolution.default, x, w, **settings, **rest)
        assert work.flops == 2 * (3 * 8 * 8) * (4 * 3 * 3)

    def test_arguments_by_name_count_as_those_by_position(self, tape: Tape) -> None:
        """``beta`` can be given by name only."""
        bias, one, other = tape.input(5), tape.input(8, 16), tape.input(16, 5)
        assert work_of(tape, aten.addmm.default, bias, mat2=other, mat1=one, beta=2).flops == 2 * 8 * 16 * 5

    @pytest.mark.parametrize("key_heads", [4, 2])
    def test_attention(self, tape: Tape, key_heads: int) -> None:
        """Scores and weighted sum: 2·heads·queries·keys·width each; keys may be shared by several heads."""
        q, k = tape.input(2, 4, 8, 16), tape.input(2, key_heads, 8, 16)
        work = work_of(tape, aten.scaled_dot_product_attention.default, q, k, k, enable_gqa=key_heads < 4)
        assert work.flops == 2 * (2 * 2 * 4 * 8 * 8 * 16)

    def test_fused_attention(self, tape: Tape) -> None:
        """Batch 2, 3 steps, width 8: four projections, then scores and weighted sum over 3 steps each."""
        x, qkv, out = tape.input(2, 3, 8), (tape.input(24, 8), tape.input(24)), (tape.input(8, 8), tape.input(8))
        work = work_of(tape, aten._native_multi_head_attention.default, x, x, x, 8, 2, *qkv, *out)
        assert work.flops == 2 * (4 * 2 * 3 * 8 * 8 + 2 * 2 * 3 * 3 * 8)

    def test_fused_encoder_layer(self, tape: Tape) -> None:
        """The same, and from 8 to 5 and back."""
        x, qkv, out = tape.input(2, 3, 8), (tape.input(24, 8), tape.input(24)), (tape.input(8, 8), tape.input(8))
        norms = [tape.input(8) for _ in range(4)]
        linears = tape.input(5, 8), tape.input(5), tape.input(8, 5), tape.input(8)
        op = aten._transformer_encoder_layer_fwd.default
        work = work_of(tape, op, x, 8, 2, *qkv, *out, False, False, 1e-5, *norms, *linears)
        assert work.flops == 2 * (4 * 2 * 3 * 8 * 8 + 2 * 2 * 3 * 3 * 8 + 2 * 2 * 3 * 8 * 5)

    def test_lstm(self) -> None:
        """Four gates in each of 7 steps: 4·5 results from 3 inputs and 5 hidden values."""
        case = exported(nn.LSTM(3, 5), torch.randn(7, 1, 3))
        node = case.nodes["lstm"]
        assert count_work({node: effects_of(node)})["lstm"].flops == 7 * 2 * (4 * 5) * (3 + 5)

    def test_a_device_that_is_not_here(self) -> None:
        tape = Tape("cuda:0")
        assert work_of(tape, aten.linear.default, tape.input(8, 16), tape.input(32, 16)).flops == 2 * 8 * 16 * 32

    def test_autocast(self) -> None:
        def model(x: Tensor, w: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return (x @ w).relu()

        case = exported(model, torch.ones(2, 3), torch.ones(3, 5))
        (node,) = (node for node in case.nodes.values() if "autocast" in str(node.target))
        work = count_work({node: effects_of(node)})[node.name]
        assert (work.flops, work.dtype, work.elements) == (2 * 2 * 3 * 5, "bfloat16", 10)
        assert work.bytes_read == (6 + 15) * 4 + 10 * 2, "the product reads its factors, relu the product"

    def test_pointwise_calls_count_none(self, tape: Tape) -> None:
        assert work_of(tape, aten.relu.default, tape.input(8)).flops == 0

    def test_what_the_counter_rejects_counts_none(self, tape: Tape) -> None:
        x = tape.input(2, 3)
        node = tape.graph.call_function(aten.mm.default, (x, x))
        node.meta["val"] = torch.empty(2, 3)
        assert count_work({node: effects_of(node)})[node.name].flops == 0

    def test_symbolic_sizes_count_as_in_the_example(self) -> None:
        env = ShapeEnv()
        size = env.create_symintnode(env.create_symbol(7, ConstantSource("batch")), hint=7)
        tape = Tape()
        x = tape.input(1)
        node = tape.graph.call_function(aten.mm.default, (x, x))
        with FakeTensorMode(shape_env=env):
            x.meta["val"], node.meta["val"] = torch.empty(size, size), torch.empty(size, size)
        work = count_work({node: effects_of(node)})[node.name]
        assert (work.flops, work.elements, work.bytes_written) == (2 * 7**3, 49, 49 * 4)


class TestTraffic:
    def traffic(self, tape: Tape, target: torch._ops.OpOverload, *args: object) -> tuple[int, int]:
        work = work_of(tape, target, *args)
        return work.bytes_read, work.bytes_written

    def test_arguments_and_results(self, tape: Tape) -> None:
        assert self.traffic(tape, aten.add.Tensor, tape.input(8), tape.input(8)) == (64, 32)

    def test_an_argument_given_twice_is_read_once(self, tape: Tape) -> None:
        x = tape.input(8)
        assert self.traffic(tape, aten.mul.Tensor, x, x) == (32, 32)

    def test_an_expanded_tensor_is_as_large_as_its_storage(self, tape: Tape) -> None:
        expanded = tape.call(aten.expand.default, tape.input(1, 8), [100, 8])
        assert self.traffic(tape, aten.neg.default, expanded) == (32, 3200)

    def test_a_slice_is_as_large_as_itself(self, tape: Tape) -> None:
        part = tape.call(aten.select.int, tape.input(10, 8), 0, 0)
        assert self.traffic(tape, aten.neg.default, part) == (32, 32)

    def test_views_move_nothing(self, tape: Tape) -> None:
        assert self.traffic(tape, aten.t.default, tape.input(2, 4)) == (0, 0)

    def test_updates_in_place(self, tape: Tape) -> None:
        x = tape.input(8)
        assert self.traffic(tape, aten.add_.Tensor, x, 1) == (32, 32)
        assert self.traffic(tape, aten.zero_.default, x) == (0, 32)
        assert self.traffic(tape, aten.copy_.default, x, tape.input(8)) == (32, 32)
        assert self.traffic(tape, aten._foreach_mul_.Scalar, [x, tape.input(8)], 2) == (64, 64)

    def test_lookups_read_what_they_pick(self, tape: Tape) -> None:
        """A table of 1000 rows, three of them read, besides three indices of 8 bytes."""
        table, rows = tape.input(1000, 4), tape.input(3, dtype=torch.int64)
        assert self.traffic(tape, aten.embedding.default, table, rows) == (3 * 16 + 3 * 8, 3 * 16)

    def test_updates_of_rows_write_what_they_put(self, tape: Tape) -> None:
        table, rows, values = tape.input(1000, 4), tape.input(3, dtype=torch.int64), tape.input(3, 4)
        read, written = self.traffic(tape, aten.index_copy_.default, table, 0, rows, values)
        assert read <= 2 * (3 * 16 + 3 * 8)
        assert written <= 3 * 16 + 3 * 8

    def test_allocating_moves_nothing(self, tape: Tape) -> None:
        assert self.traffic(tape, aten.empty_like.default, tape.input(8)) == (0, 0)
        assert self.traffic(tape, aten.zeros_like.default, tape.input(8)) == (0, 32)


class TestTypes:
    def test_what_it_computes_in(self, tape: Tape) -> None:
        x, i = tape.input(8, dtype=torch.float16), tape.input(8, dtype=torch.int64)
        assert work_of(tape, aten.neg.default, x).dtype == "float16"
        assert work_of(tape, aten.gt.Scalar, x, 0).dtype == "float16", "a comparison of floats computes with floats"
        assert work_of(tape, aten.embedding.default, tape.input(8, 4), i).dtype == "float32"
        assert work_of(tape, aten.neg.default, i).dtype == "int64"

    def test_elements_of_the_largest_result(self, tape: Tape) -> None:
        x = tape.input(4, 5)
        assert work_of(tape, aten.max.dim, x, 0).elements == 5
        assert work_of(tape, aten.zero_.default, x).elements == 20
        number = tape.number(aten.item.default, x)
        assert count_work({number: effects_of(number)})[number.name] == Work(0, 80, 0, 0, "float32")

    def test_numbers_alone(self, tape: Tape) -> None:
        number = tape.number(operator.add, 1, 2, value=3)
        assert count_work({number: effects_of(number)})[number.name] == Work(0, 0, 0, 0, "float32")
