"""What functions read elsewhere: found by the names in their code, and told anew when it is another."""

from __future__ import annotations

import math
import threading
import types
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from autostream import TraceError, optimize
from autostream.tracing import reads as reads_module
from autostream.tracing.functions import module_of
from autostream.tracing.reads import Reads, functions_of, unlike

number = 1.0
pair = (1, 2.0)
table = {"one": 1.0, "other": 2.0}
several = [1.0, 2.0]
loss = 5.0
count = 0
weights = torch.ones(2)
settings = types.ModuleType("settings")
settings.alpha = 1.0  # type: ignore[attr-defined]


class Config:
    shared = 1.0

    def __init__(self) -> None:
        self.own, self.unread, self.calls = 1.0, 1.0, 0
        self.inner = Inner(1.0)

    def product(self, x: float) -> float:
        self.calls += 1
        return x * self.own

    @property
    def doubled(self) -> float:
        return 2 * self.own

    def __call__(self, x: float) -> float:
        return x * self.shared


@dataclass(slots=True)
class Inner:
    value: float


config = Config()


def reads_globals(x: Any) -> Any:
    return x * number + pair[0] + table["one"] + several[0] + x.loss + weights


def helper(x: Any) -> Any:
    return x * number


def calls(x: Any) -> Any:
    return helper(x) + F.relu(x) + torch.relu(x) + math.pi


def defines(x: Any) -> Any:
    return [x * number for _ in range(2)], lambda y: y * config.own


def uses_an_object(x: Any) -> Any:
    return config.own + config.shared + config.inner.value


inner = Inner(1.0)


def takes_an_object(config: Config, x: Any) -> Any:
    return config.own * x


def asks(config: Config) -> float:
    return config.own


def asks_its_inner(owner: Any) -> Any:
    return owner.inner.value


def asks_a_dictionary(table: dict[str, float]) -> float:
    return table["one"]


def uses_methods(x: Any) -> Any:
    return config.product(x) + config.doubled


def has_defaults(x: Any, scale: float = 1.0, *, shift: float = 2.0) -> Any:
    return x * scale + shift


def counts(x: Any) -> Any:
    global count
    count += 1
    return x * count * number


def uses_a_module(x: Any) -> Any:
    return x * settings.alpha


def recurses(x: Any) -> Any:
    return recurses(x) * number


def closure(scale: float) -> Callable[[Any], Any]:
    def scaled(x: Any) -> Any:
        return x * scale

    return scaled


def seen(function: Callable[..., Any]) -> dict[str, Any]:
    """What is told, but for the methods of classes."""
    return {name: value for name, kind, value in Reads([function])() if not is_method(name, kind)}


def is_method(name: str, kind: type) -> bool:
    return kind is types.FunctionType and "." in name


ONE, TWO = (1.0).hex(), (2.0).hex()
FOUND = {
    "globals, and no list, tensor, or attribute that is called as one is": (
        reads_globals,
        {"number": ONE, "pair": ((int, 1), (float, TWO)), "table['one']": ONE},
    ),
    "functions that are called, but not PyTorch's": (calls, {"helper": helper, "number": ONE}),
    "functions that are defined inside": (defines, {"number": ONE, "config.own": ONE}),
    "attributes, of classes and in slots too": (
        uses_an_object,
        {"config.own": ONE, "config.shared": ONE, "config.inner.value": ONE},
    ),
    "methods and properties": (uses_methods, {"config.own": ONE}),
    "defaults": (has_defaults, {"the defaults of has_defaults": ((float, ONE),), "shift": TWO}),
    "nothing that it writes": (counts, {"number": ONE}),
    "modules of Python": (uses_a_module, {"settings.alpha": ONE}),
    "itself": (recurses, {"recurses": recurses, "number": ONE}),
    "closures": (closure(2.0), {"scale": TWO}),
    "what partial holds": (partial(closure(2.0), config), {"scale": TWO, "scaled(…).shared": ONE}),
    "objects that are called": (config, {"self.shared": ONE}),
    "objects whose method it is": (config.product, {"self.own": ONE}),
    "what partial hands on, which may be called": (
        partial(takes_an_object, config),
        {"takes_an_object(…).own": ONE, "takes_an_object(…).shared": ONE},
    ),
    "what functions that it is handed to ask an object for": (
        lambda x: x * asks(config),
        {"asks": asks, "config.own": ONE, "config.shared": ONE},
    ),
    "also of an object that another has": (
        lambda x: x * asks_its_inner(config),
        {"asks_its_inner": asks_its_inner, "config.inner.value": ONE, "config.shared": ONE},
    ),
    "what other functions ask a dictionary for": (
        lambda x: x * asks_a_dictionary(table),
        {"asks_a_dictionary": asks_a_dictionary, "table['one']": ONE},
    ),
    "what is asked for by a constant name": (
        lambda x: x * getattr(inner, "value", 0.0),
        {"inner.value": ONE},
    ),
    "objects that code calls": (lambda x: config(x), {"config.shared": ONE}),
    "nothing of PyTorch's": (partial(F.mse_loss, reduction="sum"), {}),
}


@pytest.mark.parametrize("name", FOUND)
def test_it_finds(name: str) -> None:
    function, expected = FOUND[name]
    assert seen(function) == expected


@pytest.mark.parametrize(
    ("function", "holder", "name", "value"),
    [
        (reads_globals, globals(), "number", 2.0),
        (reads_globals, globals(), "number", 1),
        (reads_globals, globals(), "number", "a"),
        (reads_globals, table, "one", 3.0),
        (calls, globals(), "helper", lambda x: x),
        (calls, globals(), "number", 2.0),
        (uses_an_object, vars(config), "own", 2.0),
        (uses_an_object, vars(config), "shared", 2.0),
        (uses_an_object, globals(), "config", None),
        (uses_methods, vars(config), "own", 2.0),
        (uses_a_module, vars(settings), "alpha", 2.0),
    ],
)
def test_another_value_is_told_and_the_old_one_again_is_what_it_was(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], holder: Any, name: str, value: Any
) -> None:
    reads = Reads([function])
    before = reads()
    assert reads() is before
    with monkeypatch.context() as patch:
        patch.setitem(holder, name, value)
        assert reads() != before
        assert list(unlike(before, reads()))
    assert reads() == before


def test_an_object_in_the_place_of_another_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads([uses_an_object])
    before, other = reads(), Config()
    monkeypatch.setitem(globals(), "config", other)
    assert reads() == before
    other.inner.value = 3.0
    assert list(unlike(before, reads())) == ["config.inner.value"]


def test_a_class_attribute_and_one_in_a_slot_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads([uses_an_object])
    before = reads()
    monkeypatch.setattr(Config, "shared", 3.0)
    assert list(unlike(before, reads())) == ["config.shared"]
    monkeypatch.setattr(config.inner, "value", 3.0)
    assert list(unlike(before, reads())) == ["config.inner.value", "config.shared"]


def test_variables_of_closures_and_defaults_are_told() -> None:
    scale = 1.0

    def scaled(x: Any, shift: float = 0.0) -> Any:
        return x * scale + shift  # noqa: F821

    reads = Reads([scaled])
    before = reads()
    scale = 2.0
    assert list(unlike(before, reads())) == ["scale"]
    scaled.__defaults__ = (1.0,)
    assert list(unlike(before, reads())) == ["scale", "the defaults of scaled"]
    del scale
    assert list(unlike(before, reads())) == ["scale", "the defaults of scaled"]


def test_zeros_of_both_signs_are_two_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "number", 0.0)
    reads = Reads([helper])
    before = reads()
    monkeypatch.setitem(globals(), "number", -0.0)
    assert reads() != before


class Trainer:
    """An object that has modules, in its class too, and reaches some by methods."""

    shared = nn.Linear(1, 1)

    def __init__(self) -> None:
        self.student, self.teacher, self.unnamed = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
        self.by_name = {"one": nn.Linear(1, 1), "other": nn.Linear(1, 1)}

    def loss(self, x: Any) -> Any:
        return self.distance(self.student(x)) + self.by_name["one"](x)

    def distance(self, x: Any) -> Any:
        return self.teacher(x) + self.shared(x)

    __call__ = loss


trainer = Trainer()
layer = nn.Linear(1, 1)


def refers(x: Any) -> Any:
    return layer(x)


def refers_by_default(x: Any, one: Any = trainer.teacher, *, other: Any = trainer.student) -> Any:
    return one(x) + other(x)


def refers_by_an_object(x: Any) -> Any:
    return trainer.teacher(x)


OF_THE_TRAINER = {
    "self_student": trainer.student,
    "self_teacher": trainer.teacher,
    "self_by_name_one_": trainer.by_name["one"],
    "self_shared": Trainer.shared,
}


@pytest.mark.parametrize(
    ("function", "modules"),
    [
        (refers, {"layer": layer}),
        (lambda x: refers(x), {"layer": layer}),
        (lambda x: [refers(each) for each in x], {"layer": layer}),
        (partial(refers), {"layer": layer}),
        (torch.no_grad()(refers), {"layer": layer}),
        (refers_by_default, {"one": trainer.teacher, "other": trainer.student}),
        (refers_by_an_object, {"trainer_teacher": trainer.teacher}),
        (trainer.loss, OF_THE_TRAINER),
        (trainer, OF_THE_TRAINER),
        (layer.forward, {"self": layer}),
        (lambda x: several[0](x), {}),
        (reads_globals, {}),
    ],
)
def test_modules_are_found_on_all_ways_that_numbers_are(
    function: Callable[..., Any], modules: dict[str, nn.Module]
) -> None:
    found = Reads([function]).modules()
    assert found.keys() == modules.keys()
    assert all(found[name] is modules[name] for name in modules)


def test_each_module_has_one_name_and_each_name_one_module() -> None:
    def named_layer(layer: nn.Module) -> Callable[[Any], Any]:
        return lambda x: layer(x)

    def named_again(again: nn.Module) -> Callable[[Any], Any]:
        return lambda x: again(x)

    other = nn.Linear(1, 1)
    modules = Reads([refers, named_layer(other), named_again(layer), named_again(other)]).modules()
    assert modules["layer"] is layer
    assert sorted(map(id, modules.values())) == sorted(map(id, (layer, other)))


def test_another_module_in_the_place_of_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, new = Reads([trainer.loss]), nn.Linear(1, 1)
    before = reads()
    assert reads() is before
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "teacher", new)
        assert list(unlike(before, reads())) == ["self.teacher"]
        assert reads.modules()["self_teacher"] is new
    assert reads() == before
    assert reads.modules()["self_teacher"] is trainer.teacher


class Scaled(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * number


def test_of_modules_it_is_what_they_do_in_forward_and_what_they_were_made_from() -> None:
    one, other = Scaled(), Scaled()
    assert functions_of([nn.Linear(1, 1), one, other]) == [one.forward, other.forward]
    assert functions_of([module_of(helper), module_of(F.mse_loss)]) == [helper]


def test_of_pytorchs_modules_it_is_what_they_were_given() -> None:
    layer = nn.TransformerEncoderLayer(2, 1, 2, activation=helper)
    assert functions_of([layer, nn.TransformerEncoderLayer(2, 1, 2)]) == [helper]
    assert functions_of([nn.TripletMarginWithDistanceLoss(distance_function=config)]) == [config]


class Rooted(nn.Sequential):
    """Python calls its methods where code names none of them."""

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(list(self._modules.values())[: int(number)])  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"{count}"


class Halved(nn.Module):
    def __truediv__(self, x: Any) -> Any:
        return x * number

    def __init__(self) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Any) -> Any:
        return self / x


class Activation(Enum):
    LINEAR = 1

    def __call__(self, x: Any) -> Any:
        return x * number


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.activation = Activation.LINEAR

    def forward(self, x: Any) -> Any:
        return self.activation(x)


class Counted:
    def __init__(self, x: Any) -> None:
        self.x = x * number


class Constructing(nn.Module):
    def forward(self, x: Any) -> Any:
        return Counted(x).x


@pytest.mark.parametrize("kind", [Rooted, Halved, Activated, Constructing])
def test_what_python_calls_of_a_class_is_looked_at_and_what_copies_or_prints_is_not(kind: type[nn.Module]) -> None:
    names = {name for name, _, _ in Reads(functions_of([kind()]))()}
    assert "number" in names
    assert "count" not in names


class Handed(nn.Module):
    """It hands on an object to a submodule, and itself to a function."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.part = Config(), Part()

    def forward(self, x: Any) -> Any:
        return self.part(x, self.config) * asks_its_config(self)


class Part(nn.Module):
    def forward(self, x: Any, config: Config) -> Any:
        return x * config.own


def asks_its_config(module: Handed) -> float:
    return module.config.inner.value


@torch.no_grad()
def test_a_graph_has_the_numbers_of_objects_that_are_handed_on() -> None:
    model = Handed()
    fast, x = optimize(model), torch.ones(2)
    for holder, name in ((model.config, "own"), (model.config.inner, "value")):
        torch.testing.assert_close(fast(x), model(x))
        setattr(holder, name, 3.0)
        torch.testing.assert_close(fast(x), model(x))
    assert len(fast.reports) == 3


class Blocks(nn.Module):
    def __getitem__(self, at: Any) -> Any:
        return lambda x: x * number

    def forward(self, x: Any) -> Any:
        return x


class Indexing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks()

    def forward(self, x: Any) -> Any:
        return self.blocks[0](x)


def test_of_modules_python_may_call_anything() -> None:
    assert "number" in {name for name, _, _ in Reads(functions_of(list(Indexing().modules())))()}


@dataclass
class Progress:
    """It is compared by all that it has, by code that nobody wrote, and nobody here calls it."""

    alpha: float = 1.0
    step: int = 0

    def __call__(self, x: Any) -> Any:
        return x * number


class Progressing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.progress = Progress()

    def forward(self, x: Any) -> Any:
        return x * self.progress.alpha


def test_of_objects_python_calls_what_code_does_not_only_ask_for_attributes() -> None:
    progress = Progress()
    assert seen(lambda x: x * progress.alpha) == {"progress.alpha": ONE}
    assert seen(lambda x: progress(x)) == {"number": ONE}
    assert seen(Progressing().forward) == {"Progressing.progress.alpha": ONE}


def test_an_object_may_be_called_by_a_name_that_is_found_last() -> None:
    progress = Progress()
    holder = types.SimpleNamespace(part=types.SimpleNamespace(run=progress))

    def runs(x: Any, holder: Any) -> Any:
        return holder.part.run(x)

    def hands_on(x: Any) -> Any:
        return runs(x, holder)

    assert "number" in seen(lambda x: hands_on(x) * progress.alpha)


class Tabled(nn.Module):
    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Any) -> Any:
        return x * float(self.table[0])


@pytest.mark.parametrize("make", [np.ones, lambda size: array("d", [1.0] * size), lambda size: deque([1.0] * size)])
@torch.no_grad()
def test_a_graph_has_the_numbers_that_an_array_contains_now(make: Callable[[int], Any]) -> None:
    model = Tabled(make(2))
    fast, x = optimize(model, policy="sequential"), torch.ones(2)
    for value in (1.0, 2.0, 1.0):
        model.table[0] = value
        torch.testing.assert_close(fast(x), model(x))
    assert len(fast.reports) == 2


@torch.no_grad()
def test_a_model_that_reads_a_large_array_is_refused() -> None:
    model = Tabled(np.ones(1 << 20))
    with pytest.raises(TraceError, match=r"reads Tabled.table, whose contents are too large"):
        optimize(model, strict=True)(torch.ones(2))
    fast, x = optimize(model), torch.ones(2)
    for value in (1.0, 2.0, 1.0):
        model.table[0] = value
        torch.testing.assert_close(fast(x), model(x))


def test_contents_are_told_until_they_are_what_they_were() -> None:
    table = bytearray(b"ab")
    reads = Reads([lambda x: x * table[0]])
    before = reads()
    assert reads() is before
    table[0] = 0
    assert list(unlike(before, reads())) == ["table"]
    table[:] = b"ab"
    assert reads() == before


class Fresh(dict[str, Any]):
    """Another object at each look; and it says so when that goes on and on."""

    looks = 0

    def __getitem__(self, key: str) -> Any:
        self.looks += 1
        assert self.looks < 100
        return Fresh(one=lambda x: x)


def test_what_is_another_object_at_each_look_is_not_looked_at_without_end() -> None:
    fresh = Fresh(one=1.0)
    seen(lambda x: fresh["one"]["one"](x))
    assert fresh.looks < 10


def test_the_nearest_way_to_an_object_counts() -> None:
    far = Link(1, Link(2, None))

    def fourth(x: Any) -> Any:
        return far.value * x

    def third(x: Any) -> Any:
        return fourth(x)

    def second(x: Any) -> Any:
        return third(x)

    def first(x: Any) -> Any:
        return second(x) * far.following.value  # type: ignore[union-attr]

    assert "far.following.value" in seen(first)


class Configured(nn.Module):
    """It looks at objects that it has, and at its class, itself and in a method; its own numbers are others' matter."""

    shared = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.own, self.layer = 1.0, nn.Linear(1, 1)
        self.config, self.space = Config(), types.SimpleNamespace(alpha=1.0, unread=1.0)

    def forward(self, x: Any) -> Any:
        return self.scaled(x) * self.own * self.shared

    def scaled(self, x: Any) -> Any:
        return self.layer(x) * self.config.inner.value * self.space.alpha


def test_of_modules_it_is_also_what_they_name_of_the_objects_that_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Configured(), Configured()
    reads = Reads(functions_of([one, other]))
    of_each = [
        *("Configured.config.inner.value", "Configured.config.own", "Configured.config.shared"),
        "Configured.space.alpha",
    ]
    found = [name for name, kind, _ in reads() if not is_method(name, kind)]
    assert sorted(found) == sorted([*of_each, *of_each, "Configured.shared"])
    for holder, name in ((other.config.inner, "value"), (one.space, "alpha"), (Configured, "shared")):
        before = reads()
        monkeypatch.setattr(holder, name, 2.0)
        assert reads() != before
    before = reads()
    one.own = one.config.unread = one.space.unread = 2.0
    assert reads() == before


@torch.no_grad()
def test_a_graph_has_the_numbers_that_a_modules_objects_have_now() -> None:
    model = Configured()
    fast, x = optimize(model), torch.ones(2, 1)
    for value in (1.0, 2.0, 1.0):
        model.config.inner.value = value
        torch.testing.assert_close(fast(x), model(x))
    assert len(fast.reports) == 2


class Base(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * number


class Derived(Base):
    def forward(self, x: Any) -> Any:
        return super().forward(x) + 1


@torch.no_grad()
def without_gradients(x: Any) -> Any:
    return x * number


def uses_a_decorated_function(x: Any) -> Any:
    return without_gradients(x)


counts_of = defaultdict(float, l1=1.0)


def uses_a_kind_of_dictionary(x: Any) -> Any:
    return x * counts_of["l1"] * number


@pytest.mark.parametrize(
    "function", [Derived().forward, uses_a_decorated_function, uses_a_kind_of_dictionary], ids=lambda f: f.__qualname__
)
def test_what_is_read_on_other_ways_is_watched_too(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]
) -> None:
    reads = Reads([function])
    before = reads()
    assert reads() is before
    monkeypatch.setitem(globals(), "number", 2.0)
    assert {name: value for name, _, value in reads()}["number"] == TWO
    assert reads() != before


class Answering:
    """Looks its attributes up itself."""

    def __init__(self, **answers: Any) -> None:
        self.__dict__["answers"] = answers

    def __getattr__(self, name: str) -> Any:
        if name not in self.answers:
            raise AttributeError(name)
        return self.answers[name] if number else None


class Redirecting:
    def __init__(self) -> None:
        self.names, self.hidden = {"scale": "hidden"}, 1.0

    def __getattribute__(self, name: str) -> Any:
        names = object.__getattribute__(self, "__dict__")["names"]
        return object.__getattribute__(self, names.get(name, name))


class Descriptor:
    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return owner._scale * number


class Described:
    scale = Descriptor()
    _scale = 1.0


class Meta(type):
    def __getattr__(cls, name: str) -> Any:
        return number


class OfMeta(metaclass=Meta):
    pass


answering, redirecting, described = Answering(scale=1.0, part=Answering(scale=1.0)), Redirecting(), Described()


@pytest.mark.parametrize(
    ("function", "label", "change"),
    [
        (lambda x: x * answering.scale, "answering.answers['scale']", lambda: answering.answers.update(scale=2.0)),
        (
            lambda x: x * answering.part.scale,
            "answering.answers['part'].answers['scale']",
            lambda: answering.answers["part"].answers.update(scale=2.0),
        ),
        (lambda x: x * redirecting.scale, "redirecting.hidden", lambda: vars(redirecting).update(hidden=2.0)),
        (lambda x: x * described.scale, "described._scale", lambda: setattr(described, "_scale", 2.0)),
    ],
)
def test_what_a_users_way_to_look_up_an_attribute_reads_is_told(
    function: Callable[..., Any], label: str, change: Callable[[], None]
) -> None:
    reads = Reads([function])
    before = reads()
    assert reads() is before
    change()
    assert list(unlike(before, reads())) == [label]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * answering.scale,
        lambda x: x * described.scale,
        lambda x: x * OfMeta.scale,  # type: ignore[attr-defined]
    ],
)
def test_the_code_that_looks_an_attribute_up_is_followed(function: Callable[..., Any]) -> None:
    assert seen(function)["number"] == ONE


class Plain:
    def method(self, x: Any) -> Any:
        return x

    @property
    def value(self) -> float:
        return 1.0

    @classmethod
    def of_class(cls, x: Any) -> Any:
        return x

    @staticmethod
    def static(x: Any) -> Any:
        return x


class Inheriting(Plain):
    pass


@pytest.mark.parametrize("kind", [Plain, Inheriting])
@pytest.mark.parametrize("wrap", [lambda function: function, property, classmethod, staticmethod])
@pytest.mark.parametrize("name", ["method", "value", "of_class", "static"])
def test_methods_that_are_replaced_in_a_class_are_told(
    kind: type, wrap: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Inheriting()
    reads = Reads([lambda x: own.static(own.of_class(own.method(x))) * own.value])
    before = reads()
    assert reads() is before
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, wrap(lambda *args: number))
        assert list(unlike(before, reads())) == sorted(["number", f"{kind.__name__}.{name}"])
    if kind is Plain:  # pytest leaves the other what it had inherited
        assert reads() == before


def test_a_forward_that_is_replaced_in_a_class_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(functions_of([Scaled(), Scaled()]))
    before = reads()
    assert reads() is before
    monkeypatch.setattr(Scaled, "forward", lambda self, x: x * count)
    assert set(unlike(before, reads())) == {"Scaled.forward", "count"}


class Halving(torch.optim.lr_scheduler.StepLR):
    """A user's, which reads as PyTorch's do."""


def test_what_objects_of_libraries_have_themselves_is_watched() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler, mine = torch.optim.lr_scheduler.StepLR(optimizer, 1, 2.0), Halving(optimizer, 1)
    optimizer.step()  # a scheduler warns if that comes first
    scaler, slice_ = torch.amp.GradScaler("cpu", 2.0), slice(1, 2)
    cases: list[tuple[Callable[..., Any], str, Callable[[], Any]]] = [
        (lambda x: x * scheduler.last_epoch, "scheduler.last_epoch", scheduler.step),
        (lambda x: x * scheduler.get_last_lr()[0], "scheduler._last_lr", scheduler.step),
        (lambda x: x * mine.get_last_lr()[0], "mine._last_lr", mine.step),
        (lambda x: x * scheduler.base_lrs[0], "scheduler.base_lrs", lambda: scheduler.base_lrs.append(2.0)),
        (lambda x: x * optimizer.param_groups[0]["lr"], "optimizer.param_groups[0]['lr']", scheduler.step),
        (lambda x: x * optimizer.defaults["lr"], "optimizer.defaults['lr']", lambda: optimizer.defaults.update(lr=3.0)),
        (lambda x: x * scaler._init_scale, "scaler._init_scale", lambda: setattr(scaler, "_init_scale", 3.0)),
        (lambda x: x * scaler.get_scale(), "scaler._init_scale", lambda: setattr(scaler, "_init_scale", 4.0)),
    ]
    for function, label, change in cases:
        reads = Reads([function])
        before = reads()
        assert reads() is before
        change()
        assert list(unlike(before, reads())) == [label]
    assert seen(lambda x: x[slice_.start])["slice_.start"] == 1


def test_attributes_of_a_thread_are_those_of_the_thread_that_asks() -> None:
    local = threading.local()
    local.scale = 1.0
    reads, found = Reads([lambda x: x * local.scale]), list[Any]()
    before = reads()

    def elsewhere() -> None:
        found.append(reads())
        local.scale = 2.0
        found.append(reads())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [(), (("local.scale", float, TWO),)]
    assert reads() == before


def test_a_librarys_code_is_not_run_to_look() -> None:
    class Proxy:
        __dict__ = property(lambda self: pytest.fail("asked for its attributes"))  # type: ignore[assignment]

        @property
        def mean(self) -> float:
            pytest.fail("asked for mean")

    Proxy.__module__ = "torch.proxies"
    proxy = Proxy()
    assert seen(lambda x: x * proxy.mean * number) == {"number": ONE}


class Reversed(torch.autograd.Function):
    """PyTorch calls its methods where code names none of them."""

    strength = 1.0
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Any, own: float) -> Any:
        ctx.own = own  # of another object than the one that is read below
        return x * number

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:
        Reversed.calls += 1
        return -Reversed.strength * gradient * ctx.own, None


class Activating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(2, 1, 2, activation=Reversed.apply)


@pytest.mark.parametrize(
    "functions",
    [
        [lambda x: Reversed.apply(x, config.own) + config.own],
        [partial(lambda function, x: function(x, config.own), Reversed.apply)],
        [Reversed.apply],
        functions_of(list(Activating().modules())),
    ],
)
def test_what_autograd_calls_of_a_users_function_is_looked_at(functions: list[Callable[..., Any]]) -> None:
    told = {name: value for name, _, value in Reads(functions)()}
    assert told["number"] == ONE
    assert ONE in {value for name, value in told.items() if name.endswith("strength")}
    assert not any(name.endswith("calls") for name in told)
    assert told.get("config.own", ONE) == ONE


def test_what_a_context_is_given_does_not_hide_what_others_read() -> None:
    assert seen(lambda x: Reversed.apply(x, config.own))["config.own"] == ONE


class Odd:
    """Looking here runs a user's code."""

    @cached_property
    def mean(self) -> float:
        raise RuntimeError("nobody asked")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("nor for this")


def test_a_users_code_is_not_run_to_look() -> None:
    odd = Odd()

    def names_what_is_odd(x: Any) -> Any:
        return (x.mean() + number) if odd is not None else x.missing

    assert seen(names_what_is_odd) == {"number": ONE}


def test_another_thread_in_between_sees_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one looks again, the others must not take the old value for one that holds still."""
    reads = Reads([helper])
    before = reads()
    monkeypatch.setitem(globals(), "number", 2.0)
    told, found = reads_module._told, []

    def slowly(value: Any) -> Any:
        monkeypatch.setattr(reads_module, "_told", told)
        found.append(reads())
        return told(value)

    monkeypatch.setattr(reads_module, "_told", slowly)
    after = reads()
    assert found == [after]
    assert after != before


class Lazy:
    """Fails when it is looked at."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("not loaded")


def test_what_fails_when_it_is_looked_at_or_has_no_end_is_let_alone() -> None:
    lazy, nested = Lazy(), ()
    for _ in range(3000):
        nested = (nested,)  # type: ignore[assignment]
    assert Reads([lambda x: x * lazy])() == ()
    scale = 1.0
    assert seen(lambda x: x * lazy * scale) == {"scale": ONE}
    assert Reads([lambda x: x * len(nested)])() == ()


class Link:
    def __init__(self, value: int, following: Link | None) -> None:
        self.value, self.following = value, following


def test_objects_in_objects_are_followed_to_the_fourth() -> None:
    chain = None
    for value in (6, 5, 4, 3, 2, 1):
        chain = Link(value, chain)
    assert set(seen(lambda x: x * chain.following.value).values()) == {1, 2, 3, 4}  # type: ignore[union-attr]
