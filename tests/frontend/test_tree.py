"""Nested values: what comes back is what went in, and structures are equal exactly where no program can tell."""

from __future__ import annotations

import math
import os
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import date
from enum import Enum, IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree

from autostream.errors import TraceError
from autostream.frontend.tree import (
    TENSOR,
    Constant,
    Structure,
    UnknownNumberError,
    flatten,
    map_tensors,
    tensors_like,
    unflatten,
)
from autostream.utils.operators import symbols_of

ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)


class Color(Enum):
    RED = 1


class Number(IntEnum):
    ONE = 1


class Pair(NamedTuple):
    left: Any
    right: Any


class Sum(namedtuple("Sum", "parts total")):
    """A named tuple that is made in its own way."""

    def __new__(cls, parts: list[int]) -> Sum:
        return super().__new__(cls, parts, sum(parts))


@dataclass
class Batch:
    """A dataclass with everything that can go wrong in remaking one."""

    limit: ClassVar[object] = object()
    x: Tensor
    steps: int = 0
    tags: list[str] = field(default_factory=list)
    doubled: Tensor = field(init=False)
    scale: InitVar[float] = 2.0

    def __post_init__(self, scale: float) -> None:
        self.doubled = self.x * scale
        self.steps += 1
        self.note = "no field"


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    y: Tensor | None = None


@dataclass
class Listed(list):  # type: ignore[type-arg]
    """Holds items besides its fields."""

    x: int = 1


class Registered:
    """Opened by torch's pytree."""

    def __init__(self, x: object, about: object) -> None:
        self.x, self.about = x, about


_pytree.register_pytree_node(
    Registered, lambda r: ([r.x], r.about), lambda children, about: Registered(*children, about)
)


def structure(value: object) -> Structure:
    return flatten(value)[1]


def again(value: object) -> Any:
    """A value taken apart and put together."""
    tensors, shape = flatten(value)
    hash(shape)
    result = unflatten(shape, tensors)
    assert type(result) is type(value)
    tensors_again, shape_again = flatten(result)
    assert shape_again == shape
    assert list(map(id, tensors_again)) == list(map(id, tensors))
    return result


CONSTANTS = [
    None, True, 1, 1.5, -0.0, math.inf, 1 + 2j, "text", b"bytes", ..., range(1, 7, 2), int, nn.Linear,
    Color.RED, Number.ONE, torch.float16, torch.device("cpu"), torch.strided, torch.channels_last, torch.Size([2, 3]),
]  # fmt: skip


@pytest.mark.parametrize("value", CONSTANTS, ids=repr)
def test_constants_are_their_own_structure(value: object) -> None:
    tensors, shape = flatten(value)
    assert tensors == []
    assert unflatten(shape, []) == value
    again(value)


def test_a_nan_comes_back_and_equals_itself() -> None:
    assert math.isnan(again(math.nan))
    assert structure(math.nan) == structure(float("nan"))
    assert structure(complex(math.nan, 1)) == structure(complex(math.nan, 1))
    assert math.copysign(1, again(-0.0)) == -1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (0j, complex(0, -0.0)),
        (1, Number.ONE),
        ("a", b"a"),
        ((1, 2), [1, 2]),
        ((2, 3), torch.Size([2, 3])),
        (range(0), range(1, 1)),
        (None, ()),
        ({}, OrderedDict()),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1: ONE}, {True: ONE}),
        ({0.0: ONE}, {-0.0: ONE}),
        ({"a": ONE}, {"b": ONE}),
        (defaultdict(int, a=ONE), defaultdict(list, a=ONE)),
        (slice(1), slice(0, 1)),
        (Registered(ONE, [1, "a"]), Registered(ONE, [True, "a"])),
        ([ONE], [ONE, ONE]),
        (ONE, [ONE]),
        (Frozen(ONE), Frozen(ONE, ONE)),
    ],
)
def test_what_a_program_can_tell_apart_has_different_structures(one: object, other: object) -> None:
    assert structure(one) != structure(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: [x, (x, 1), {"k": [x]}],
        lambda x: OrderedDict(a=x, b=2),
        lambda x: defaultdict(list, a=x),
        lambda x: {("paper", "cites", 1): x, None: 3},
        lambda x: deque([x, 1], maxlen=3),
        lambda x: slice(x, None, 2),
        lambda x: Pair(x, [x]),
        lambda x: Frozen(x),
        lambda x: Batch(x, tags=["t"]),
        lambda x: Registered([x], {"any": ["context", 1.5]}),
        lambda x: nn.Parameter(x),
        lambda x: torch.return_types.max((x, x)),
    ],
)
def test_containers_come_back_and_only_their_tensors_make_them_differ(make: Callable[[Tensor], object]) -> None:
    again(make(ONE))
    assert structure(make(ONE)) == structure(make(TWO))
    assert hash(structure(make(ONE))) == hash(structure(make(TWO)))


def test_tensors_are_in_order_and_repeated_ones_are_repeated() -> None:
    tensors, shape = flatten({"b": ONE, "a": (TWO, [ONE])})
    assert list(map(id, tensors)) == [id(ONE), id(TWO), id(ONE)]
    assert shape.children == (TENSOR, structure((TWO, [ONE])))
    swapped = unflatten(shape, [TWO, ONE, TWO])
    assert swapped["b"] is TWO
    assert list(swapped) == ["b", "a"]


def test_named_tuples_are_remade_without_their_own_constructor() -> None:
    assert again(Sum([1, 2])) == ([1, 2], 3)
    assert again(Pair(1, 2)) == Pair(1, 2)


def test_dataclasses_are_remade_as_they_are_and_not_initialised_again() -> None:
    batch = Batch(ONE, steps=4)
    remade = again(batch)
    assert vars(remade) == vars(batch)
    assert remade.steps == 5
    assert remade.doubled is batch.doubled
    assert again(Frozen(ONE, None)) == Frozen(ONE, None)


def test_a_dataclass_with_an_unset_field_stays_so() -> None:
    batch = Batch(ONE)
    del batch.doubled
    assert not hasattr(again(batch), "doubled")


def test_defaults_and_lengths_of_containers_survive() -> None:
    assert again(defaultdict(list, a=ONE)).default_factory is list
    assert again(deque([1], maxlen=7)).maxlen == 7
    remade = again(Registered(ONE, {"any": ["context", 1.5]}))
    assert remade.about == {"any": ["context", 1.5]}


def test_results_of_torch_ops_come_back() -> None:
    assert again(torch.eye(2).max(0)).values.tolist() == [1, 1]
    assert again(torch.linalg.svd(torch.eye(2))).S.tolist() == [1, 1]
    assert again(nn.utils.rnn.pack_sequence([torch.ones(2, 2)])).data.shape == (2, 2)


def test_outputs_of_transformers_come_back(transformers_outputs: Any) -> None:
    output = transformers_outputs.BaseModelOutput(last_hidden_state=ONE, hidden_states=(ONE, TWO))
    remade = again(output)
    assert remade.hidden_states[1] is TWO
    assert remade.attentions is None
    assert list(remade) == ["last_hidden_state", "hidden_states"]


@pytest.fixture
def transformers_outputs() -> Any:
    return pytest.importorskip("transformers.utils.generic") and pytest.importorskip("transformers.modeling_outputs")


class MyInt(int):
    """Could carry anything."""


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, MyInt(3), torch.Generator(), nn.ReLU(), len, lambda: 1, Listed(), bytearray(b"a")],
    ids=lambda value: type(value).__name__,
)
def test_unknown_objects_are_refused_by_type_in_one_line_that_says_what_to_do(value: object) -> None:
    with pytest.raises(TraceError, match=rf"{type(value).__qualname__} is neither .*register_pytree_node") as refusal:
        flatten([ONE, {"k": value}])
    assert "\n" not in str(refusal.value)


def test_of_a_mapping_a_dict_is_asked_for() -> None:
    """As of what tokenizers return."""
    with pytest.raises(TraceError, match=r"UserDict is neither .* or pass it as a dict"):
        flatten([UserDict(x=ONE)])


def test_numbers_of_numpy_are_no_floats() -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(TraceError, match="numpy"):
        flatten(numpy.float64(1.5))  # is an instance of float


def test_a_tensor_cannot_be_a_key() -> None:
    with pytest.raises(TraceError, match="key"):
        flatten({ONE: 1})
    with pytest.raises(TraceError, match="compared"):
        flatten(Registered(1, ONE))
    with pytest.raises(TraceError, match="neither"):
        flatten({object(): 1})


def test_a_registered_container_may_be_compared_by_anything_that_can_be() -> None:
    about = len
    assert again(Registered(ONE, about)).about is about
    with pytest.raises(TraceError, match="Registered cannot be compared"):
        flatten(Registered(ONE, [len]))


values = st.recursive(
    st.sampled_from([*CONSTANTS, math.nan, ONE, TWO]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", 1, None, (1, "c")]), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Frozen, inner, inner),
        st.builds(slice, inner, inner, inner),
    ),
    max_leaves=12,
)


@given(values)
def test_any_nesting_comes_back(value: object) -> None:
    again(value)
    assert repr(again(value)) == repr(value)


@given(values, values)
def test_a_quick_look_finds_the_tensors_of_equal_structures_only(one: object, other: object) -> None:
    tensors, its = flatten(one)
    found = tensors_like(structure(other), one)
    assert found is None or its == structure(other)
    again = tensors_like(its, one)
    assert again is None or list(map(id, again)) == list(map(id, tensors))


def test_a_quick_look_finds_what_calls_are_made_of() -> None:
    value = ([ONE, {"a": TWO, 1: (ONE, None)}], 2.0, "x", Color.RED)
    assert tensors_like(structure(value), value) == [ONE, TWO, ONE]
    for other in (([ONE], 2.0), ([ONE, {"a": TWO, 1: (ONE, None)}], -2.0, "x", Color.RED), [*value], ONE):
        assert tensors_like(structure(value), other) is None
    assert tensors_like(structure({"a": ONE}), {frozenset("a"): ONE}) is None, "no constant"


@dataclass(frozen=True)
class Mode(Constant):
    name: str


def test_a_constant_of_ones_own_is_compared_as_a_whole() -> None:
    tensors, one = flatten((Mode("a"), ONE))
    assert tensors == [ONE]
    assert one == structure((Mode("a"), TWO)) != structure((Mode("b"), ONE))
    assert unflatten(one, [TWO]) == (Mode("a"), TWO)


@given(values, values)
def test_equal_structures_mean_equal_values_up_to_tensors(one: object, other: object) -> None:
    if structure(one) == structure(other):
        zeros = [torch.zeros(())] * len(flatten(one)[0])
        assert repr(unflatten(structure(one), zeros)) == repr(unflatten(structure(other), zeros))


def test_each_tensor_is_mapped_and_all_else_is_the_same() -> None:
    odd = object()
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    given = {
        "pair": Pair(ONE, odd),
        "tokens": UserDict(x=ONE),
        "frozen": Frozen(ONE),
        3: [packed, "text", float("nan")],
    }
    mapped = map_tensors(torch.neg, given)
    assert mapped["pair"].left == mapped["tokens"]["x"] == mapped["frozen"].x == -1
    assert mapped["pair"].right is odd
    assert mapped[3][0].data.tolist() == [-1.0] * 3
    assert mapped[3][0].batch_sizes is packed.batch_sizes
    assert given["tokens"]["x"] == 1
    assert mapped[3][1] == "text"


class OwnDict(dict[str, Any]):
    """Knows more than its items."""

    path = "/data"


class OwnList(list[Any]):
    pass


class OwnTuple(tuple[Any, ...]):
    pass


@pytest.mark.parametrize(
    "own",
    [OwnDict(x=ONE, n=3), ChainMap({"x": ONE}, {"n": 3}), OwnList([ONE, 3]), UserList([ONE, 3]), OwnTuple([ONE, 3])],
    ids=lambda own: type(own).__name__,
)
def test_containers_of_the_users_own_are_mapped_as_well(own: Any) -> None:
    if isinstance(own, OwnDict):
        own.path = "/elsewhere"
    mapped = map_tensors(torch.neg, {"nested": [own]})["nested"][0]
    first, second = ("x", "n") if isinstance(own, MutableMapping) else (0, 1)
    assert type(mapped) is type(own)
    assert (mapped[first].item(), mapped[second], len(mapped)) == (-ONE.item(), 3, 2)
    assert own[first] is ONE
    assert getattr(mapped, "path", None) == getattr(own, "path", None)


class View(Mapping[str, Any]):
    """Copies of it have its items in the same place."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_of_it = items

    def __getitem__(self, key: str) -> Any:
        return self.items_of_it[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of_it)

    def __len__(self) -> int:
        return len(self.items_of_it)


class Shared(View, MutableMapping[str, Any]):
    """May be written to: what is written to a copy is written to it."""

    def __setitem__(self, key: str, item: Any) -> None:
        self.items_of_it[key] = item

    def __delitem__(self, key: str) -> None:
        del self.items_of_it[key]


class Refusing(Shared):
    """Made in its own way, and never written to."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)

    def __setitem__(self, key: str, item: Any) -> None:
        raise RuntimeError("frozen")


class Forgetful(Shared):
    """Made of anything, and takes nothing of it."""

    def __init__(self, *items: dict[str, Any]) -> None:
        super().__init__({"x": ONE, "n": 3})


class FrozenDict(dict[str, Any]):
    def __setitem__(self, key: str, item: Any) -> None:
        raise TypeError("frozen")


class Row(Sequence[Any]):
    """Made in its own way."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __getitem__(self, place: Any) -> Any:
        return self.items[place]

    def __len__(self) -> int:
        return len(self.items)


class Point(tuple[Any, ...]):
    """Made in its own way."""

    def __new__(cls, x: Any, n: Any) -> Point:
        return super().__new__(cls, (x, n))


class Slim(tuple[Any, ...]):
    __slots__ = ()

    def __new__(cls, x: Any, n: Any) -> Slim:
        return super().__new__(cls, (x, n))


@pytest.mark.parametrize(
    ("own", "kind"),
    [
        (Shared({"x": ONE, "n": 3}), Shared),
        (Refusing(x=ONE, n=3), dict),
        (Forgetful(), dict),
        (FrozenDict(x=ONE, n=3), FrozenDict),
        (View({"x": ONE, "n": 3}), View),
        (MappingProxyType({"x": ONE, "n": 3}), MappingProxyType),
        (Row(ONE, 3), list),
        (Point(ONE, 3), Point),
        (Slim(ONE, 3), Slim),
    ],
    ids=lambda own: type(own).__name__,
)
def test_containers_of_the_users_own_are_never_written_to(own: Any, kind: type) -> None:
    """They are made anew, or plain where that cannot be."""
    mapped = map_tensors(torch.neg, own)
    first, second = ("x", "n") if isinstance(own, Mapping) else (0, 1)
    assert type(mapped) is kind
    assert (mapped[first].item(), mapped[second], len(mapped)) == (-ONE.item(), 3, 2)
    assert own[first] is ONE


def test_tuples_of_the_users_own_keep_what_else_they_know() -> None:
    own = Point(ONE, 3)
    own.path = "/data"  # type: ignore[attr-defined]
    assert map_tensors(torch.neg, [own])[0].path == "/data"


def refusing(items: dict[str, Any]) -> Refusing:
    own = Refusing()
    own.items_of_it = items
    return own


@pytest.mark.parametrize("make", [OwnDict, Shared, View, MappingProxyType, refusing], ids=lambda make: make.__name__)
def test_a_container_that_is_filled_again_is_another_one(make: Callable[[dict[str, Any]], Any]) -> None:
    """Where each tensor stays what it is, too."""
    items = {"x": ONE}
    own = make(items)
    mapped = map_tensors(lambda tensor: tensor, own)
    (own if isinstance(own, OwnDict) else items)["x"] = TWO
    assert mapped["x"] is ONE


def test_a_container_without_tensors_that_is_filled_again_is_another_one() -> None:
    own = OwnDict(n=3)
    mapped = map_tensors(torch.neg, own)
    own["n"] = 4
    assert mapped == {"n": 3}


class Itself(OwnDict):
    """Says that it is its own copy."""

    def __copy__(self) -> Itself:
        return self


def test_a_container_that_is_its_own_copy_is_not_written_to() -> None:
    own = Itself(x=ONE)
    assert map_tensors(torch.neg, own)["x"] == -1
    assert own["x"] is ONE


def test_what_cannot_be_made_again_and_holds_no_tensor_stays() -> None:
    for value in (Refusing(n=3), Row(3), range(3), b"ab", "ab", bytearray(b"ab")):
        assert map_tensors(torch.neg, value) is value


def test_mapping_compares_nothing_so_keys_and_contexts_may_be_anything() -> None:
    odd = object()
    keys = (Path("a"), date(2024, 1, 2), frozenset({1}), odd, ONE, 1.5)
    for kind in (dict, OrderedDict, lambda pairs: defaultdict(list, pairs)):
        mapped = map_tensors(torch.neg, kind((key, TWO) for key in keys))
        assert list(map(id, mapped)) == list(map(id, keys))
        assert [value.item() for value in mapped.values()] == [-2.0] * len(keys)
    mapped = map_tensors(torch.neg, Registered(ONE, [odd]))
    assert (mapped.x, mapped.about) == (-1, [odd])


def test_tuples_of_the_system_hold_more_than_their_items_and_stay() -> None:
    found = os.stat(".")
    assert map_tensors(torch.neg, found) is found
    with pytest.raises(TraceError, match=r"os\.stat_result is neither"):
        flatten(found)


@pytest.mark.parametrize("take", [flatten, lambda value: map_tensors(torch.neg, value)])
def test_what_contains_itself_is_told(take: Callable[[object], object]) -> None:
    endless: list[object] = [ONE]
    endless.append({"again": endless})
    with pytest.raises(TraceError, match=r"type list is nested too deeply, or contains itself: .*$"):
        take(endless)


def test_a_number_that_only_a_run_tells_is_told_by_its_symbols() -> None:
    with FakeTensorMode(shape_env=ShapeEnv(), allow_fallback_kernels=False):
        number = torch.ones(3).sum().item()
        with pytest.raises(UnknownNumberError) as caught:
            flatten({"mean": [number / 3]})
    assert caught.value.symbols == symbols_of(number)
    assert len(caught.value.symbols) == 1
