"""Programs cut at calls of submodules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autostream.analysis.dependencies import analyze
from autostream.analysis.segments import cut_points, ops_of, resized, segments_of, trained_bytes
from autostream.costs.device import profile_named
from autostream.costs.roofline import price
from autostream.frontend.submodules import calls_of
from autostream.frontend.trace import trace
from autostream.ir import OpGraph, Program

H200 = profile_named("h200")


def analyzed(model: nn.Module, *args: Tensor) -> tuple[Program, OpGraph, dict[int, str]]:
    program = trace(model, args, device="cuda:0").program
    graph = analyze(program)
    return program, graph, cut_points(graph, ops_of(program, graph, calls_of(program.module.graph, model)))


class Residual(nn.Module):
    """x ─▶ inner ─▶ add ─▶ head, with an edge from x to add."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.as_tensor(self.head(x + self.inner(x)))


def test_each_call_that_begins_with_an_op_of_its_own_is_a_cut_point() -> None:
    _, graph, cuts = analyzed(Residual(), torch.ones(3, 4))
    assert [name.partition(".")[0] for name in graph.ops] == ["linear", "linear_1", "relu", "add", "linear_2"]
    assert cuts == {1: "inner", 2: "inner.1", 4: "head"}


def test_values_that_are_read_behind_a_cut_cross_it() -> None:
    """Tensors of 3×8 float32: before ``inner`` one is alive, before its ReLU two, before ``head`` the sum alone."""
    program, graph, cuts = analyzed(Residual(), torch.ones(3, 4))
    trained = trained_bytes(program, graph, {"stem.weight", "stem.bias"})
    segments = segments_of(graph, price(graph, H200), H200, cuts, [{}] * 4, trained)
    assert [segment.crossing_bytes for segment in segments] == [0, 96, 192, 96]
    assert [segment.name for segment in segments] == ["", "inner", "inner.1", "head"]
    assert sum(segments[0].weights.values()) == 4 * (4 * 8 + 8) * 4  # gradients and two states besides
    assert sum(segments[1].weights.values()) == (8 * 8 + 8) * 4  # not trained


def test_no_stage_writes_to_what_it_was_sent() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    _, _, cuts = analyzed(model, torch.ones(2, 4))
    assert cuts == {2: "2"}


def test_outputs_cross_all_cuts_behind_them() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first = self.a(x)
            return first, self.c(self.b(first))

    _, graph, cuts = analyzed(Two(), torch.ones(2, 4))
    segments = segments_of(graph, price(graph, H200), H200, cuts, [{}] * 3, {})
    assert [segment.crossing_bytes for segment in segments] == [0, 32, 64]


def test_half_a_microbatch_sends_half_as_much() -> None:
    _, graph, cuts = analyzed(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8)), torch.ones(6, 4))
    for factor, (crossing, returned) in ((1, (96, 192)), (0.5, (48, 96))):
        sized = resized(graph, factor)
        first, last = segments_of(sized, price(sized, H200), H200, cuts, [{}] * 2, {})
        assert (last.crossing_bytes, last.output_bytes) == (crossing, returned)
        assert (first.crossing_bytes, first.output_bytes) == (0, 0)


def test_half_a_microbatch_is_half_the_work_but_not_half_the_weights() -> None:
    _, graph, _ = analyzed(nn.Linear(16, 32), torch.ones(8, 16))
    (whole,), (half,) = graph.ops.values(), resized(graph, 0.5).ops.values()
    assert (half.flops, half.bytes_written, half.elements) == (whole.flops / 2, 8 * 32 * 4 / 2, 8 * 32 / 2)
    weights = (16 * 32 + 32) * 4
    assert half.bytes_read == weights + (whole.bytes_read - weights) / 2 == weights + 8 * 16 * 4 / 2
