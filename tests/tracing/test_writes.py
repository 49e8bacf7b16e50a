"""What functions may write to elsewhere: found by the names in their code, and in containers."""

from __future__ import annotations

import random
import threading
from io import StringIO
from typing import Any, ClassVar

import torch

from autostream.tracing.writes import Writable

number = 1.0
table = {"one": 1.0, "other": 2.0}
several = [1.0, 2.0]


class Config:
    def __init__(self) -> None:
        self.own, self.calls = 1.0, 0

    def product(self, x: float) -> float:
        self.calls += 1
        return x * self.own


config = Config()


def names_what_it_writes(x: float) -> None:
    global number, made
    number = made = x
    config.own += x
    table["one"] = several[0]


def test_what_may_be_written_is_told_whether_it_is_there_or_not() -> None:
    found = Writable([names_what_it_writes])
    assert {label for _, _, label in found.variables} >= {"number", "made", "config.own"}
    assert {label for label, _ in found.containers} == {"table", "several"}
    assert not found.iterators


def test_generators_are_found_by_name_and_in_containers() -> None:
    dice, box = random.Random(), [torch.Generator()]
    found = Writable([lambda x: x * dice.random() + torch.rand(1, generator=box[0])]).generators
    assert dict(found) == {"dice": dice, "box[0]": box[0]}


class Counted(torch.autograd.Function):
    norms: ClassVar[list[float]] = []
    calls = 0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Counted.calls += 1
        Counted.norms.append(gradient.norm().item())
        return gradient


def test_what_autograd_calls_of_a_users_function_may_write_too() -> None:
    found = Writable([lambda x: Counted.apply(x)])
    assert "Counted.calls" in {label for _, _, label in found.variables}
    assert {label for label, _ in found.containers} == {"Counted.norms"}


def test_what_a_thread_has_for_itself_may_be_written() -> None:
    local = threading.local()
    local.calls = 0

    def counts(x: float) -> None:
        local.calls += 1
        local.last = x

    found = Writable([counts])
    assert {"local.calls", "local.last"} <= {label for _, _, label in found.variables}


class Unspeakable:
    """Has no text; as a key of a dictionary it needs none."""

    def __repr__(self) -> str:
        raise RuntimeError


def test_what_cannot_be_looked_through_costs_nothing() -> None:
    """A dataset is no list that a loss counts in; a list in a list in a list … has no end."""
    dataset, deep, odd = [[number] for number in range(20_000)], list[Any](), {Unspeakable(): [1]}
    for _ in range(3000):
        deep = [deep]
    assert Writable([lambda x: x * dataset[0][0]]).containers == []
    assert 1 < len(Writable([lambda x: x * len(deep)]).containers) <= 3001
    assert [label for label, _ in Writable([lambda x: x * len(odd)]).containers] == ["odd", "odd[Unspeakable]"]


class Lazy:
    """Fails when it is looked at."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("not loaded")


def test_objects_that_fail_when_looked_at_are_let_alone() -> None:
    lazy = Lazy()
    assert Writable([lambda x: x * lazy]).containers == []


def test_iterators_are_told_and_files_are_none() -> None:
    stream, file = iter([1]), StringIO()
    assert Writable([lambda x: file.write(str(x * next(stream)))]).iterators == ["stream"]
    assert next(stream) == 1


def test_containers_in_containers_and_objects_in_them_may_be_written() -> None:
    nested, known = [{"inner": ([1], Config())}], (1, 2)
    found = Writable([lambda x: nested[0]["inner"][1].product(x) + known[0]])
    labels = [label for label, _ in found.containers]
    assert labels == ["nested", "nested[0]", "nested[0]['inner'][0]"]
    assert "nested[0]['inner'][1].calls" in {label for _, _, label in found.variables}
