"""Programs launched with other inputs: what else they take is held, and a captured graph is given inputs alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.runtime.cuda_graph import CapturedGraph
from autostream.runtime.partial_call import PartialCall
from autostream.runtime.writes import storages_alive
from tests.captures import Captures

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_inputs_go_where_they_belong() -> None:
    held = [torch.tensor(10.0), torch.tensor(20.0)]
    for positions in (
        [None, None, 0, 1],
        [0, None, 1, None],
        [1, None, None, 0],
        [None, 0, None, 0],
        [None, None],
        [None, 0, None],
    ):
        launch = PartialCall(list, None, held, positions, 2)
        given, left = [torch.tensor(1.0), torch.tensor(2.0)], iter(held)
        expected = [next(left) if at is None else given[at] for at in positions]
        assert [*map(id, launch(given))] == [*map(id, expected)]


def test_the_memory_of_what_is_held_is_kept() -> None:
    weight = nn.Parameter(torch.ones(3))
    is_there = storages_alive([weight])
    launch = PartialCall(list, None, [weight], [None, 0], 1)
    weight.data = torch.zeros(3)
    assert is_there()
    del launch
    assert not is_there()


class Net(nn.Module):
    """What it returns may be an argument, or a view of one; it may write what it is given."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.returns = nn.Linear(4, 4), returns

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        out = self.layer(x) - y
        if self.returns == "an input written":
            y.add_(out)
        if self.returns == "nothing of an input":
            return self.layer.weight * 2, self.layer.weight * 3
        also = {"an input": x, "a view of a weight": self.layer.weight.t(), "a view of an input": x[:1]}
        return (out, also[self.returns]) if self.returns in also else (out, out * 2)


@pytest.mark.parametrize(
    "returns",
    ["new", "an input", "a view of an input", "a view of a weight", "an input written", "nothing of an input"],
)
@torch.no_grad()
def test_a_graph_is_given_what_it_needs(returns: str, captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on the short way return what the model does, aliases and writes to inputs included."""
    net = Net(returns).eval()
    fast = autostream.optimize(net)
    alone: list[bool] = []
    launch = CapturedGraph.launch_inputs

    def noted(graph: CapturedGraph, inputs: list[Tensor], tensors: tuple[Tensor, ...] = ()) -> list[Tensor | None]:
        alone.append(not tensors)
        return launch(graph, inputs, tensors)

    monkeypatch.setattr(CapturedGraph, "launch_inputs", noted)
    for number in range(4):
        x, y = torch.full((3, 4), float(number)), torch.ones(3, 4)
        mine, plain = y.clone(), y.clone()
        found, expected = fast(x, mine), net(x, plain)
        torch.testing.assert_close((*found, mine), (*expected, plain))
        shared = found[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert shared is (returns in ("an input", "a view of an input"))
    assert alone[-1] is (returns not in ("a view of an input", "a view of a weight", "an input written"))
