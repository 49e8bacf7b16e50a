"""Integers that a call reads and writes back: one graph for all of their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from tests.semantics import same

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Table:
    """What calls keep: a row for each, and how many there are."""

    def __init__(self) -> None:
        self.rows, self.used, self.scale = torch.zeros(8, 4), 0, 2


class Net(nn.Module):
    def __init__(self, forward: Callable[[Net, Tensor, Table], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.steps, self._forward = nn.Linear(4, 4), 0, forward

    def forward(self, x: Tensor, table: Table) -> Tensor:
        return self._forward(self, x, table)


def counts_itself(net: Net, x: Tensor, table: Table) -> Tensor:
    net.steps += len(x)
    return net.linear(x)


def counts_in_an_argument(net: Net, x: Tensor, table: Table) -> Tensor:
    full = table.used >= len(table.rows)
    table.used += len(x)
    table.rows.add_(net.linear(x).sum(0))
    return table.rows.clone() if full else net.linear(x) * table.scale


def takes_turns(net: Net, x: Tensor, table: Table) -> Tensor:
    net.steps += 1
    return net.linear(x) if net.steps % 2 else torch.relu(x)


def counts_down_beside(net: Net, x: Tensor, table: Table) -> Tensor:
    net.steps, table.used = net.steps + 1, table.used - 2 * net.steps
    return net.linear(x)


def computes_with_it(net: Net, x: Tensor, table: Table) -> Tensor:
    net.steps += 1
    return net.linear(x) * net.steps


def returns_it(net: Net, x: Tensor, table: Table) -> Any:
    net.steps += 1
    return net.linear(x), net.steps


def check(forward: Any, calls: int = 9) -> list[str]:
    """A scheduled model does what the model does; the modes in which it runs."""
    model, plain, tables = Net(forward), Net(forward), (Table(), Table())
    fast = autostream.optimize(model)
    with torch.no_grad():
        for at in range(calls):
            x = torch.full((2, 4), float(at))
            same(fast(x, tables[0]), plain(x, tables[1]))
            assert (model.steps, tables[0].used) == (plain.steps, tables[1].used)
            assert type(model.steps) is type(tables[0].used) is int
            same(tables[0].rows, tables[1].rows)
    return [report.mode for report in fast.reports]


@pytest.mark.parametrize(
    ("forward", "graphs"),
    [(counts_itself, 1), (counts_in_an_argument, 2), (takes_turns, 2), (counts_down_beside, 1), (returns_it, 1)],
)
def test_one_graph_serves_all_values_that_python_treats_alike(forward: Any, graphs: int) -> None:
    assert check(forward) == ["one stream"] * graphs


def test_a_number_that_tensors_depend_on_is_a_part_of_the_graph() -> None:
    modes = check(computes_with_it, calls=3)
    assert modes == ["one stream"] * 3


def divides_by_it(net: Net, x: Tensor, table: Table) -> Tensor:
    net.steps += 1
    table.scale = 12 // (net.steps - 4)
    table.rows.add_(1)
    return net.linear(x)


def takes_the_rest_by_it(net: Net, x: Tensor, table: Table) -> Tensor:
    net.steps += 1
    table.scale = 12 % (net.steps - 4)
    return net.linear(x)


@pytest.mark.parametrize("forward", [divides_by_it, takes_the_rest_by_it])
def test_what_fails_at_one_number_has_counted_and_written_as_the_model_has(forward: Any) -> None:
    model, plain, tables = Net(forward), Net(forward), (Table(), Table())
    fast = autostream.optimize(model)

    def outcome(call: Any, table: Table) -> Any:
        try:
            return call(torch.ones(2, 4), table)
        except ZeroDivisionError as error:
            return str(error)

    with torch.no_grad():
        for _ in range(8):
            same(outcome(fast, tables[0]), outcome(plain, tables[1]))
            same(tables[0].rows, tables[1].rows)
            assert (model.steps, tables[0].scale) == (plain.steps, tables[1].scale)
    assert model.steps == 8
