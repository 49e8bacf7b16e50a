"""What a model holds besides tensors: every change is noticed by name, and everything is put back."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from autostream.tracing.attributes import Holder, Variable, holders, referred_to, untouched
from autostream.tracing.functions import module_of
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


dice = random.Random(0)


def test_generators_that_a_model_has_or_names_are_put_back() -> None:
    box = [torch.Generator()]
    model = module_of(lambda x: dice.random() + torch.rand(1, generator=box[0]))
    model.own = {"dice": random.Random(1)}  # type: ignore[assignment]
    own: Any = model.own
    then = dice.getstate(), box[0].get_state().tolist(), own["dice"].getstate()
    with untouched(model):
        dice.random(), torch.rand(1, generator=box[0]), own["dice"].random()
        assert dice.getstate() != then[0]
    assert (dice.getstate(), box[0].get_state().tolist(), own["dice"].getstate()) == then


class Meter:
    """Sums over calls: its number is of the class until the first of them."""

    total = 0.0

    def __init__(self) -> None:
        self.calls = 0
        self.history: list[float] = []

    def update(self, value: float) -> None:
        self.total += value
        self.calls += 1
        self.last = value
        self.history.append(value)


@dataclass(slots=True)
class Slotted:
    calls: int = 0


steps = 0
meter, slotted, log, recent, table, meters = Meter(), Slotted(), [[1]], deque([1], 1), {"n": 0}, {"a": Meter()}


def counts_globally(x: float) -> None:
    global steps, never_before
    steps += 1
    never_before = x


def counts_in_a_closure() -> Callable[[float], None]:
    count = 0

    def counting(x: float) -> None:
        nonlocal count, last
        count += 1
        last = x

    if steps:
        last = 0.0
    return counting


def counts_on_a_class(x: float) -> None:
    Meter.total += x


def counts_in_a_slot(x: float) -> None:
    slotted.calls += 1


def counts_in_a_list(x: float) -> None:
    log[0].append(1)


def counts_in_a_deque(x: float) -> None:
    recent.append(2)


def counts_in_a_dictionary(x: float) -> None:
    table["n"] += 1


def counts_at_a_computed_name(x: float) -> None:
    for name in meters:
        meters[name].update(x)


def calls_what_counts(x: float) -> None:
    counts_globally(x)


WRITERS: dict[str, tuple[Callable[..., Any], str]] = {
    "a global variable": (counts_globally, "steps"),
    "a variable of a closure": (counts_in_a_closure(), "count"),
    "an object": (meter.update, "self.calls"),
    "a class": (counts_on_a_class, "Meter.total"),
    "an object with slots": (counts_in_a_slot, "slotted.calls"),
    "a list in a list": (counts_in_a_list, "log[0]"),
    "a deque": (counts_in_a_deque, "recent"),
    "a dictionary": (counts_in_a_dictionary, "table.n"),
    "an object in a dictionary": (counts_at_a_computed_name, "meters['a'].calls"),
    "in a function that it calls": (calls_what_counts, "steps"),
}


def state() -> object:
    cells = [cell for cell in WRITERS["a variable of a closure"][0].__closure__ or () if cell != type(cell)()]
    numbers = [cell.cell_contents for cell in cells]
    objects = [(dict(vars(own)), [*own.history]) for own in (meter, meters["a"])]
    there = "never_before" in globals()
    return steps, numbers, objects, Meter.total, slotted.calls, [*log[0]], [*recent], dict(table), there


@pytest.mark.parametrize("where", WRITERS)
def test_what_a_function_changes_elsewhere_is_noticed_and_put_back(where: str) -> None:
    function, path = WRITERS[where]
    model, then = module_of(function), state()
    before = referred_to(model).holders
    with untouched(model):
        function(1.0)
        assert path in [holder.changed() for holder in before]
        assert state() != then
    assert not any(holder.changed() for holder in before)
    assert state() == then


def test_what_is_only_read_is_not_looked_at_again() -> None:
    """Somebody else may change it meanwhile."""
    found = referred_to(module_of(lambda x: x * steps)).holders
    assert not [holder for holder in found if isinstance(holder, Variable)]


def test_what_is_as_it_was_is_left_alone() -> None:
    """Somebody else may be at it: to empty it and to fill it again would be seen."""
    values = deque([1, 2])
    holder, items = Holder.of("values", values), iter(values)
    holder.restore()
    assert next(items) == 1
    values.append(3)
    holder.restore()
    assert [*values] == [1, 2]


class Refusing(OrderedDict[str, int]):
    """Does not let itself be filled or emptied, as some outputs of models do not."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("no")

    clear = update


@pytest.mark.parametrize(
    ("values", "change"),
    [
        (Refusing(a=1, b=2), lambda values: (values.pop("a"), values.__setitem__("c", 3))),
        (defaultdict(list, {"a": [1]}), lambda values: values["b"].append(2)),
        (deque([1, 2], maxlen=2), lambda values: values.append(3)),
        ({1, 2}, lambda values: values.add(3)),
    ],
    ids=["one that refuses", "defaultdict", "deque", "set"],
)
def test_every_kind_of_container_gets_back_what_it_held(values: Any, change: Callable[[Any], object]) -> None:
    expected, holder = copy.copy(values), Holder.of("values", values)
    change(values)
    assert holder.changed()
    holder.restore()
    assert (values, list(values), type(values)) == (expected, list(expected), type(expected))


def test_a_class_among_the_attributes_is_let_alone() -> None:
    class Meta(type):
        pass

    class Settings(metaclass=Meta):
        calls = 0

    model = nn.ReLU()
    model.settings = Settings  # type: ignore[assignment]
    with untouched(model):
        Settings.calls = 1
    assert Settings.calls == 1


def test_iterators_are_found_in_what_functions_name() -> None:
    stream, lists = iter([1]), [iter([2])]
    with untouched(module_of(lambda x: next(stream) + next(lists[0]))) as outside:
        assert outside.iterators == ("lists[0]", "stream")
    assert referred_to(module_of(lambda x: [x for _ in range(3)])).iterators == ()
