"""What a model holds besides tensors: every change is noticed by name, and everything is put back."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autostream.tracing.attributes import Holder, holders, untouched
from autostream.tracing.reads import Reads


class Counter:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.value = 0
        self.past: list[int] = []


class Net(nn.Module):
    """Attributes of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.register_buffer("scale", torch.ones(2))
        self.number = 1
        self.names = ["a", ["b"]]
        self.table = OrderedDict(k={"inner": 1})
        self.seen = {1}
        self.shape = (1, [2])
        self.counter = Counter()
        self.hidden = [nn.ReLU()]
        self.me = self


def names_of_changes(before: list[Holder]) -> list[str]:
    return sorted({changed for holder in before if (changed := holder.changed())})


CHANGES: dict[str, Callable[[Net], Any]] = {
    "number": lambda net: setattr(net, "number", 2),
    "fresh": lambda net: setattr(net, "fresh", 1),
    "names": lambda net: net.names[1].append("c"),
    "table.k.inner": lambda net: net.table["k"].update(inner=2),
    "table.new": lambda net: net.table.update(new=2),
    "seen": lambda net: net.seen.add(2),
    "shape": lambda net: net.shape[1].append(3),
    "counter.value": lambda net: setattr(net.counter, "value", 2),
    "counter.past": lambda net: net.counter.past.append(2),
    "training": lambda net: setattr(net, "training", False),
    "body.1.training": lambda net: net.body[1].eval(),
    "body.0.out_features": lambda net: setattr(net.body[0], "out_features", 7),
    "body.0.weight": lambda net: setattr(net.body[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "body.1.running_mean": lambda net: setattr(net.body[1], "running_mean", torch.ones(2)),
    "body.0": lambda net: net.body.__setitem__(0, nn.ReLU()),
    "scale": lambda net: delattr(net, "scale"),
    "hidden.inplace": lambda net: setattr(net.hidden[0], "inplace", True),
    "body.0._forward_hooks": lambda net: net.body[0].register_forward_hook(print),
}


@pytest.mark.parametrize("path", CHANGES)
def test_a_change_is_noticed_by_its_path_and_put_back(path: str) -> None:
    net = Net()
    before = holders(net)
    assert names_of_changes(before) == []
    with untouched(net):
        CHANGES[path](net)
        changed = names_of_changes(before)
        assert [name for name in changed if name.startswith(path)], changed
    assert names_of_changes(before) == []


def test_contents_are_put_back_into_the_same_containers_in_order() -> None:
    net = Net()
    names, table = net.names, net.table
    with untouched(net), pytest.raises(ZeroDivisionError):
        net.names = []
        names.clear()
        table["first"] = 1
        table.move_to_end("first", last=False)
        del net.number
        raise ZeroDivisionError
    assert net.names is names
    assert names == ["a", ["b"]]
    assert net.table is table
    assert list(table) == ["k"]
    assert net.number == 1


def test_in_place_changes_of_tensors_are_not_its_business() -> None:
    net = Net()
    with untouched(net):
        net.scale.add_(1)
    assert net.scale.tolist() == [2, 2]


@pytest.mark.parametrize(
    "assign",
    [
        lambda net: setattr(net, "number", 1),
        lambda net: setattr(net, "shape", (1, [2])),
        lambda net: setattr(net, "names", ["a", ["b"]]),
        lambda net: setattr(net, "table", OrderedDict(k={"inner": 1})),
        lambda net: net.seen.add(1),
    ],
)
def test_an_equal_value_is_no_change(assign: Callable[[Net], Any]) -> None:
    net = Net()
    before = holders(net)
    assign(net)
    assert names_of_changes(before) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("table", OrderedDict(k={"inner": 1}, more=1)),
        ("table", OrderedDict()),
        ("names", ["a"]),
        ("seen", {2}),
        ("shape", (1, [2], 3)),
    ],
)
def test_a_new_container_with_other_contents_is_a_change(name: str, value: object) -> None:
    net = Net()
    before = holders(net)
    setattr(net, name, value)
    assert names_of_changes(before) == [name]


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_a_value_of_another_type_is_a_change(value: object) -> None:
    net = Net()
    before = holders(net)
    net.number = value  # type: ignore[assignment]
    assert names_of_changes(before) == ["number"]


def test_what_libraries_hold_is_left_alone() -> None:
    """Behind a logger lies the whole process; it belongs to nobody's model."""
    import logging

    net = Net()
    net.log = logging.getLogger("autostream.test")
    assert not [holder.path for holder in holders(net) if holder.path.startswith("log.")]


def test_so_is_what_autostream_holds() -> None:
    """A step knows where its loss looks, which are dictionaries of everything that a file has."""
    net = Net()
    net.reads = Reads([names_of_changes])
    assert not [holder.path for holder in holders(net) if holder.path.startswith("reads.")]


def test_recurrent_layers_may_renew_their_lists_of_weights() -> None:
    model = nn.LSTM(2, 2)
    before = holders(model)
    model._flat_weights = list(map(torch.clone, model._flat_weights))
    assert names_of_changes(before) == []


def test_random_generators_are_put_back() -> None:
    numpy = pytest.importorskip("numpy")
    torch.manual_seed(0)
    states = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    with untouched(nn.ReLU()):
        torch.rand(1), random.random(), numpy.random.rand()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert str(numpy.random.get_state()) == states[2]
