"""What a model remembers of a trace is taken back: the plain model never meets a fake tensor."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from types import CellType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode

from autostream.errors import TraceError
from autostream.tracing.export import trace
from autostream.tracing.leaks import recalled
from autostream.frontend.tree import flatten

X = torch.ones(3, 3)


class Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def refusal(function: Callable[[Tensor], Tensor]) -> str:
    tensors, structure = flatten(((X,), {}))
    with pytest.raises(TraceError) as raised:
        trace(Function(function), tensors, structure)
    return str(raised.value)


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(2)


def watched(*tensors: Tensor) -> Any:
    return [weakref.ref(tensor) for tensor in tensors]


@pytest.mark.parametrize("size", [2, None])
def test_a_cached_function_forgets_what_it_made_in_a_trace(size: int | None) -> None:
    @functools.lru_cache(maxsize=size)
    def mask(n: int) -> tuple[Tensor, int]:
        return torch.ones(n, n).tril(), n

    assert "keeps a tensor in a cache" in refusal(lambda x: mask(len(x))[0] @ x)
    assert type(mask(3)[0]) is Tensor


def test_a_dictionary_of_somebody_else_is_as_before() -> None:
    made: dict[int, Any] = {7: "kept"}
    remembered = made.setdefault  # no name leads from the model to the dictionary

    def model(x: Tensor) -> Tensor:
        remembered(len(x), (torch.arange(len(x)), "beside"))
        return x + remembered(len(x))[0]

    assert "keeps a tensor" in refusal(model)
    assert made == {7: "kept"}


def test_lists_sets_and_objects_are_as_before() -> None:
    class Memory:
        last: Any = None

    memory, seen, kinds = Memory(), [1], {2}
    put, append, add = functools.partial(setattr, memory, "last"), seen.append, kinds.add

    def model(x: Tensor) -> Tensor:
        put(x * 2)
        append(x)  # the input itself
        add(x * 3)
        return x + 1

    assert "keeps a tensor" in refusal(model)
    assert (memory.last, seen, kinds) == (None, [1], {2})


def test_attributes_of_classes_are_as_before() -> None:
    class Memory:
        last: Any = None

    class Special(Memory):
        pass

    put = functools.partial(setattr, Special, "last")

    def model(x: Tensor) -> Tensor:
        put(x * 2)
        return x + Special.last

    assert "keeps a tensor" in refusal(model)
    assert Special.last is None, "which Memory says"
    assert "last" not in vars(Special)


def test_they_are_as_before_also_where_the_trace_fails_later() -> None:
    seen: list[Tensor] = []

    def model(x: Tensor) -> Tensor:
        seen.append(x * 2)
        return x + 1 if x.sum() > 0 else x

    assert "data-dependent" in refusal(model)
    assert seen == []


def test_what_nobody_keeps_is_no_leak() -> None:
    tensors, structure = flatten(((X,), {}))
    traced = trace(Function(lambda x: x.relu() + torch.ones(3)), tensors, structure)
    assert len(traced.program.outputs) == 1


def test_who_holds_a_tensor_is_not_looked_for_where_nobody_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """All objects that there are would be looked at: with a model's inputs, PyTorch holds a trace alone."""
    monkeypatch.setattr(gc, "get_referrers", None)
    tensors, structure = flatten(((X, X + 1), {}))
    graph = trace(Function(lambda x, y: x.relu() + y), tensors, structure)
    assert len(graph.program.placeholders) == 2


def test_a_tensor_in_a_dead_cycle_is_no_leak() -> None:
    cycle: list[Any] = [fake()]
    cycle.append(cycle)
    seen = watched(cycle[0])
    del cycle
    assert not recalled(seen)


def test_every_one_is_taken_back() -> None:
    kept = [[fake()], [fake()]]
    assert recalled(watched(kept[0][0], kept[1][0]))
    assert kept == [[], []]
    assert not recalled([])


def test_a_cell_is_found_though_it_cannot_be_taken_back() -> None:
    cell = CellType(None)
    put = functools.partial(setattr, cell, "cell_contents")

    def model(x: Tensor) -> Tensor:
        put(x * 2)
        return x

    assert "keeps a tensor" in refusal(model)
    assert isinstance(cell.cell_contents, FakeTensor)


def test_the_arguments_of_the_search_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.13 copies them, and finds those that it was given: as ever more holders of holders."""
    found = gc.get_referrers
    if sys.version_info < (3, 13):
        monkeypatch.setattr(gc, "get_referrers", lambda *values: found(*values))
    tensor = fake()
    kept = [(tensor,)]
    references = watched(tensor)
    del tensor
    assert recalled(references)
    assert kept == []
