"""Where calls of submodules lie in graphs, and what they keep for the backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autostream.errors import TargetError, TraceError
from autostream.frontend.pipelining import orders, split_spec
from autostream.frontend.submodules import calls_of, saved_for_backward, trained_of
from autostream.frontend.trace import trace


class Net(nn.Module):
    """x ─▶ first ─▶ again ─▶ again ─▶ last, of which ``again`` is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.again = nn.Linear(4, 4)
        self.last = nn.Sigmoid()
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.again(self.again(self.first(x)))
        return torch.as_tensor(self.last(y + 1))


def test_submodules_that_are_called_once_are_found_outer_ones_first() -> None:
    model = Net()
    program = trace(model, [torch.ones(2, 4)]).program
    names = [node.name for node in program.module.graph.nodes]
    calls = calls_of(program.module.graph, model)
    assert [*calls] == ["first", "first.0", "first.1", "last"]
    assert [tuple(names[at] for at in calls[name]) for name in ("first", "last")] == [
        ("linear", "relu"),
        ("sigmoid", "sigmoid"),
    ]


def test_activations_are_listed_with_the_node_that_keeps_them() -> None:
    """Each linear layer keeps its input, the ReLU and the sigmoid their results; what two keep has one storage."""
    model = Net()
    captured = trace(model, [torch.ones(2, 4)]).captured
    saved = saved_for_backward(captured)
    nodes = [*captured.module.graph.nodes]
    kept = [(str(nodes[each.node].target).split(" ")[-1], each.bytes) for each in saved]
    assert [size for _, size in kept] == [32] * 5
    storages = [each.storage for each in saved]
    assert storages[1] == storages[2]  # the ReLU's result is what the next layer keeps
    assert len(set(storages)) == 4


def test_what_has_no_gradients_keeps_nothing() -> None:
    model = Net().requires_grad_(False)
    assert saved_for_backward(trace(model, [torch.ones(2, 4)]).captured) == []
    assert trained_of(model) == frozenset()


def test_a_backward_that_autograd_refuses_is_named() -> None:
    class Written(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.add_(1)
            return super().forward(x)

    with pytest.raises(TraceError, match="does not run with gradients: RuntimeError: a leaf Variable"):
        saved_for_backward(trace(Written(4, 4), [torch.ones(2, 4)]).captured)


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_each_stage_runs_each_microbatch_once(schedule: str) -> None:
    order = [action for device in orders(schedule, 4, 8) for action in device]
    assert len(order) == len(set(order))
    for stage in range(8):
        kinds = [(action.kind, action.microbatch) for action in order if action.stage == stage]
        assert sorted(m for kind, m in kinds if kind == "F") == [*range(8)]
        assert sorted(m for kind, m in kinds if kind in ("B", "W")) == [*range(8)]


def test_a_number_of_microbatches_that_a_schedule_refuses_is_named() -> None:
    with pytest.raises(TargetError, match="refuses 9 microbatches: ValueError: "):
        orders("Interleaved1F1B", 4, 9)


def test_stages_begin_with_submodules() -> None:
    from torch.distributed.pipelining import SplitPoint

    assert split_spec(["a", "b.1"]) == {"a": SplitPoint.BEGINNING, "b.1": SplitPoint.BEGINNING}
