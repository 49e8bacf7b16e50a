"""Compiled kernels as call targets in fx graphs."""

from __future__ import annotations

import torch
from torch import fx

from autostream.utils.kernels import Kernel


def double() -> Kernel:
    return Kernel("triton_poi_double_0", lambda x, out: torch.mul(x, 2, out=out), frozenset({1}), frozenset({1}))


def test_a_graph_calls_a_kernel_and_prints_its_name() -> None:
    graph, kernel = fx.Graph(), double()
    x, out = graph.placeholder("x"), graph.placeholder("out")
    node = graph.call_function(kernel, (x, out))
    graph.output(out)
    module = fx.GraphModule(torch.nn.Module(), graph)
    assert node.name == str(kernel) == "triton_poi_double_0"
    assert "triton_poi_double_0(x, out)" in module.code
    assert torch.equal(module(torch.ones(2), torch.empty(2)), torch.full((2,), 2.0))


def test_kernels_with_the_same_name_are_distinct_in_one_graph() -> None:
    """Inductor numbers the kernels of each graph from 0."""
    graph = fx.Graph()
    x, out = graph.placeholder("x"), graph.placeholder("out")
    triple = Kernel("triton_poi_double_0", lambda x, out: torch.mul(x, 3, out=out), frozenset({1}), frozenset({1}))
    graph.call_function(double(), (x, out))
    graph.call_function(triple, (out, out))
    graph.output(out)
    result = fx.GraphModule(torch.nn.Module(), graph)(torch.ones(1), torch.empty(1))
    assert result.item() == 6
    assert double() != double()
