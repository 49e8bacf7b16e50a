"""Calls with fixed weights: arguments are put in order, and a captured graph gets inputs only where it can."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.runtime.cuda_graph import CapturedGraph
from autostream.runtime.partial_call import PartialCall
from autostream.runtime.writes import storages_alive
from tests.captures import Captures


@pytest.mark.parametrize(
    "positions",
    [[None, None, 0, 1], [0, None, 1, None], [1, None, None, 0], [None, 0, None, 0], [None, None], [None, 0, None]],
)
def test_arguments_are_in_order_and_the_memory_of_fixed_ones_is_kept(positions: list[int | None]) -> None:
    fixed = [nn.Parameter(torch.tensor(10.0)), torch.tensor(20.0)]
    alive = storages_alive(fixed)
    call = PartialCall(list, None, fixed, positions, 2)
    inputs, remaining = [torch.tensor(1.0), torch.tensor(2.0)], iter(fixed)
    expected = [next(remaining) if at is None else inputs[at] for at in positions]
    assert [*map(id, call(inputs))] == [*map(id, expected)]
    fixed[0].data = torch.tensor(0.0)
    assert alive()
    del call
    assert not alive()


class Net(nn.Module):
    """Its second output may be an input or a view of an argument; it may write an input."""

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


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "returns",
    ["new", "an input", "a view of an input", "a view of a weight", "an input written", "nothing of an input"],
)
@torch.no_grad()
def test_replays_of_inputs_alone_return_what_the_model_does(
    returns: str, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aliases and writes to inputs included."""
    net = Net(returns).eval()
    fast = autostream.optimize(net)
    inputs_only: list[bool] = []
    launch_inputs = CapturedGraph.launch_inputs

    def logged(graph: CapturedGraph, inputs: list[Tensor], tensors: tuple[Tensor, ...] = ()) -> list[Tensor | None]:
        inputs_only.append(not tensors)
        return launch_inputs(graph, inputs, tensors)

    monkeypatch.setattr(CapturedGraph, "launch_inputs", logged)
    for number in range(3):
        x, y = torch.full((3, 4), float(number)), torch.ones(3, 4)
        ours, eager = y.clone(), y.clone()
        outputs, expected = fast(x, ours), net(x, eager)
        torch.testing.assert_close((*outputs, ours), (*expected, eager))
        shared = outputs[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert shared is (returns in ("an input", "a view of an input"))
    assert inputs_only[-1] is (returns not in ("a view of an input", "a view of a weight", "an input written"))
