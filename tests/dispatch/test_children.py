"""Modules as ops: their schedule, and what its lowered graph computes with threads instead of streams."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autostream.dispatch.children import Arguments, call, enter, leave, shared_buffers, side_by_side
from autostream.errors import TargetError
from autostream.runtime import streams
from autostream.runtime.emulator import ThreadedProgram

ALONE: frozenset[int] = frozenset()


def given(*args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


def launched(graph: fx.GraphModule) -> dict[str, int]:
    """By op, the stream that it is launched on."""
    found, lane = {}, 0
    for node in graph.graph.nodes:
        if node.target is streams.use:
            lane = node.args[1]
        elif node.target in (enter, call, leave):
            found[node.name] = lane
    return found


def waits(graph: fx.GraphModule) -> list[tuple[int, str]]:
    return [(node.args[1], node.args[2].name) for node in graph.graph.nodes if node.target is streams.wait]


def test_each_child_runs_on_a_stream_and_results_are_on_the_callers() -> None:
    """
    0:  call ─ leave         the copy for call_1 is made before call, which may write to their common input
    1:  enter ─ call_1
    """
    graph = side_by_side("cuda:0", 2, (ALONE, ALONE))
    assert launched(graph) == {"enter": 1, "call": 0, "call_1": 1, "leave": 0}
    assert waits(graph) == [(1, "forked"), (0, "enter_done"), (0, "call_1_done"), (1, "joined")]
    graph = side_by_side("cuda:0", 2, (ALONE,) * 5)
    assert [lane for name, lane in launched(graph).items() if name.startswith("call")] == [0, 1, 0, 1, 0]


def test_only_children_that_share_a_buffer_wait_for_each_other() -> None:
    both = frozenset({0})
    graph = side_by_side("cuda:0", 3, (ALONE, both, both))
    assert (2, "call_1_done") in waits(graph)
    assert not [wait for wait in waits(side_by_side("cuda:0", 3, (ALONE,) * 3)) if wait == (2, "call_1_done")]


def test_buffers_are_shared_by_storage_or_if_they_have_none_by_identity() -> None:
    whole, children = torch.zeros(4), [Counts(), Counts(), Counts()]
    children[0].calls, children[1].calls = nn.Buffer(whole[:2]), nn.Buffer(whole[2:])
    assert shared_buffers(children) == (frozenset({0}), frozenset({0}), ALONE)
    lazy, sparse = nn.LazyBatchNorm1d(), Counts()
    sparse.calls = nn.Buffer(torch.eye(2).to_sparse())
    first, second, third = shared_buffers([lazy, sparse, nn.Sequential(nn.Sequential(lazy), sparse)])
    assert len(first) > len(second) == 1
    assert third == first | second


class Chosen(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scaled": self.weight * x, "same": x}


def test_outputs_and_gradients_are_those_of_the_children() -> None:
    children = tuple(Chosen(float(factor)) for factor in (1, 2, 3))
    inputs = tuple(given(torch.full((2,), 1.0, requires_grad=True)) for _ in children)
    run = ThreadedProgram(side_by_side("cpu", 3, (ALONE,) * 3))
    results = run(children, inputs)  # type: ignore[arg-type]
    for factor, (child, ((x,), _), result) in enumerate(zip(children, inputs, results, strict=True), 1):
        (result["scaled"] + result["same"]).sum().backward()  # type: ignore[index, call-overload]
        assert (child.weight.grad, x.grad.tolist()) == (2.0, [factor + 1.0] * 2)


class Counts(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


def test_a_buffer_that_children_share_is_written_in_their_order() -> None:
    child = Counts()
    children = (child,) * 4
    run = ThreadedProgram(side_by_side("cpu", 4, shared_buffers(children)))
    for turn, _ in itertools.product(range(5), children):
        if child.calls == 4 * turn:
            results = run(children, (given(x=torch.zeros(())),) * 4)  # type: ignore[arg-type]
            assert [result.item() for result in results] == [4.0 * turn + n for n in (1, 2, 3, 4)]


def test_a_child_that_writes_to_its_input_is_named() -> None:
    run = ThreadedProgram(side_by_side("cpu", 2, (ALONE, ALONE)))
    for writer in (0, 1):
        children = [nn.ReLU(), nn.ReLU()]
        children[writer] = nn.ReLU(inplace=True)
        with pytest.raises(TargetError, match=rf"child {writer} \(ReLU\) writes to its input"):
            run(tuple(children), (given(torch.ones(2)),) * 2)  # type: ignore[arg-type]
    with torch.inference_mode():  # without version counters
        assert call((nn.ReLU(),), 0, (given(torch.ones(2)),), 0).tolist() == [1.0, 1.0]


class Notes(nn.Module):
    def __init__(self, at: str = "") -> None:
        super().__init__()
        self.at = at

    def forward(self, x: Tensor, notes: dict[str, Tensor]) -> Tensor:
        if self.at:
            notes[self.at] = x + 1
        return x


def test_a_child_that_changes_a_container_is_named() -> None:
    run = ThreadedProgram(side_by_side("cpu", 2, (ALONE, ALONE)))
    for writer, at in itertools.product((0, 1), ("new", "old")):
        children = [Notes(), Notes()]
        children[writer].at = at
        with pytest.raises(TargetError, match=rf"child {writer} \(Notes\) changes a container that it is given"):
            run(tuple(children), (given(torch.ones(2), notes={"old": torch.zeros(2)}),) * 2)  # type: ignore[arg-type]


def test_only_tensors_on_the_device_are_copied() -> None:
    x = torch.ones(2)
    assert enter([given(x, scale=x)], 0, "cuda") == (given(x, scale=x),)
    (((copied,), kwargs),) = enter([given(x, scale=x)], 0, "cpu")
    assert x is not copied
    assert x is not kwargs["scale"]
    assert leave(x, 1, "cuda") is x
    assert leave(x, 1, "cpu") is not x


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> object:
        return {"a set": {x}}


def test_a_result_of_an_unknown_type_is_named_with_its_child() -> None:
    run = ThreadedProgram(side_by_side("cpu", 2, (ALONE, ALONE)))
    with pytest.raises(TargetError, match=r"child 1 returns what cannot be copied .*set is neither a tensor"):
        run((Opaque(), Opaque()), (given(torch.ones(2)),) * 2)  # type: ignore[arg-type]
