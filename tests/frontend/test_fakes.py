"""Fake tensors: which mode a graph was traced in, and what that remembers of tensors that are real."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from autostream.frontend.fakes import forget, mode_of


def graph_of(*examples: object) -> fx.GraphModule:
    """A graph that takes such values as Dynamo notes these; ``None`` where it notes nothing."""
    graph = fx.Graph()
    for at, example in enumerate(examples):
        node = graph.placeholder(f"x{at}")
        if example is not None:
            node.meta["example_value"] = example
    graph.output(())
    return fx.GraphModule(nn.Module(), graph)


def test_a_graph_of_dynamos_has_the_mode_of_its_inputs() -> None:
    """The first of those that have one: sizes, and what nothing is known of, have none."""
    mode = FakeTensorMode()
    fake = mode.from_tensor(torch.ones(2))
    assert mode_of(graph_of(fake)) is mode
    assert mode_of(graph_of(None, 3, torch.ones(2), fake, FakeTensorMode().from_tensor(torch.ones(2)))) is mode


def test_what_was_traced_without_fakes_has_none() -> None:
    assert mode_of(graph_of()) is None
    assert mode_of(graph_of(None, 3, torch.ones(2))) is None


def test_values_within_a_graph_do_not_count() -> None:
    graph = fx.symbolic_trace(lambda x: x.sin())
    (node,) = graph.graph.find_nodes(op="call_method", target="sin")
    node.meta["example_value"] = FakeTensorMode().from_tensor(torch.ones(2))
    assert mode_of(graph) is None


def test_tensors_that_were_traced_may_be_swapped_once_they_are_forgotten() -> None:
    def swapped(forgotten: bool) -> Tensor:
        mode, own = FakeTensorMode(), nn.Parameter(torch.zeros(2))
        mode.from_tensor(own)
        if forgotten:
            forget(mode)
        torch.utils.swap_tensors(own, nn.Parameter(torch.ones(2)))
        return own

    assert swapped(True).tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="weakref"):
        swapped(False)


def test_where_there_is_nothing_to_forget_nothing_happens() -> None:
    forget(None)
    mode = FakeTensorMode()
    own, fake = torch.ones(2), mode.from_tensor(torch.ones(2))
    forget(mode)
    assert mode.from_tensor(own).shape == fake.shape, "it may be used on"
