"""Flattening nested values: what comes back, which structures are equal, and what is refused."""

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

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree

from autostream.errors import TraceError
from autostream.frontend.tree import TENSOR, Constant, Structure, flatten, map_tensors, tensors_like, unflatten

ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)


class Color(Enum):
    RED = 1


class Number(IntEnum):
    ONE = 1


class Pair(NamedTuple):
    left: Any
    right: Any


class Sum(namedtuple("Sum", "parts total")):
    def __new__(cls, parts: list[int]) -> Sum:
        return super().__new__(cls, parts, sum(parts))


@dataclass
class Batch:
    """A dataclass whose ``__init__`` must not run again."""

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
    x: int = 1


class Registered:
    def __init__(self, x: object, about: object) -> None:
        self.x, self.about = x, about


_pytree.register_pytree_node(
    Registered, lambda r: ([r.x], r.about), lambda children, about: Registered(*children, about)
)


@dataclass(frozen=True)
class Mode(Constant):
    name: str


def structure(value: object) -> Structure:
    return flatten(value)[1]


def again(value: object) -> Any:
    tensors, shape = flatten(value)
    hash(shape)
    result = unflatten(shape, tensors)
    assert type(result) is type(value)
    tensors_again, shape_again = flatten(result)
    assert shape_again == shape
    assert list(map(id, tensors_again)) == list(map(id, tensors))
    return result


CONSTANTS = [
    None, True, 1, 1.5, -0.0, math.inf, 1 + 2j, "text", b"bytes", ..., range(1, 7, 2), int, nn.Linear, Mode("a"),
    Color.RED, Number.ONE, torch.float16, torch.device("cpu"), torch.strided, torch.channels_last, torch.Size([2, 3]),
]  # fmt: skip


def test_constants_come_back_exactly() -> None:
    for value in CONSTANTS:
        assert flatten(value)[0] == []
        assert again(value) == value
    assert math.isnan(again(math.nan))
    assert structure(math.nan) == structure(float("nan"))
    assert structure(complex(math.nan, 1)) == structure(complex(math.nan, 1))
    assert math.copysign(1, again(-0.0)) == -1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *((1, True), (1, 1.0), (0.0, -0.0), (0j, complex(0, -0.0)), (1, Number.ONE), ("a", b"a"), (None, ())),
        *(((1, 2), [1, 2]), ((2, 3), torch.Size([2, 3])), (range(0), range(1, 1)), (slice(1), slice(0, 1))),
        *(({}, OrderedDict()), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({1: ONE}, {True: ONE}), (Mode("a"), Mode("b"))),
        *(({0.0: ONE}, {-0.0: ONE}), ({"a": ONE}, {"b": ONE}), ([ONE], [ONE, ONE]), (ONE, [ONE])),
        (defaultdict(int, a=ONE), defaultdict(list, a=ONE)),
        (Registered(ONE, [1, "a"]), Registered(ONE, [True, "a"])),
        (Frozen(ONE), Frozen(ONE, ONE)),
    ],
)
def test_values_that_a_program_can_distinguish_have_different_structures(one: object, other: object) -> None:
    assert structure(one) != structure(other)


MAKERS: list[Callable[[Tensor], object]] = [
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
    lambda x: (Mode("a"), x),
    lambda x: torch.return_types.max((x, x)),
    lambda x: nn.utils.rnn.pack_sequence([x.expand(2, 2)]),
]


def test_containers_come_back_and_equal_structures_differ_in_tensors_only() -> None:
    for make in MAKERS:
        again(make(ONE))
        assert structure(make(ONE)) == structure(make(TWO))
        assert hash(structure(make(ONE))) == hash(structure(make(TWO)))


def test_contents_of_containers_come_back() -> None:
    """Also without their constructors, which may compute something else."""
    assert again(Sum([1, 2])) == ([1, 2], 3)
    assert again(Pair(1, 2)) == Pair(1, 2)
    assert again(defaultdict(list, a=ONE)).default_factory is list
    assert again(deque([1], maxlen=7)).maxlen == 7
    assert again(Registered(ONE, {"any": ["context", 1.5]})).about == {"any": ["context", 1.5]}
    assert again(Registered(ONE, len)).about is len
    assert again(torch.linalg.svd(torch.eye(2))).S.tolist() == [1, 1]
    batch = Batch(ONE, steps=4)
    assert vars(again(batch)) == vars(batch)
    assert again(batch).steps == 5
    del batch.doubled
    assert not hasattr(again(batch), "doubled")
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = again(outputs.BaseModelOutput(last_hidden_state=ONE, hidden_states=(ONE, TWO)))
    assert (output.hidden_states[1] is TWO, output.attentions, list(output)) == (
        True, None, ["last_hidden_state", "hidden_states"],
    )  # fmt: skip


def test_tensors_are_in_order_and_repeated_ones_are_repeated() -> None:
    tensors, shape = flatten({"b": ONE, "a": (TWO, [ONE])})
    assert list(map(id, tensors)) == [id(ONE), id(TWO), id(ONE)]
    assert shape.children == (TENSOR, structure((TWO, [ONE])))
    swapped = unflatten(shape, [TWO, ONE, TWO])
    assert swapped["b"] is TWO
    assert list(swapped) == ["b", "a"]


class MyInt(int):
    """Could have any attributes."""


UNKNOWN = r".* is neither .*register_pytree_node"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((value, rf"{type(value).__qualname__}{UNKNOWN}") for value in (object(), {1, 2}, MyInt(3), nn.ReLU(), len)),
        *((value, rf"{type(value).__qualname__}{UNKNOWN}") for value in (torch.Generator(), Listed(), bytearray(b"a"))),
        (UserDict(x=ONE), r"UserDict is neither .* or pass it as a dict"),
        (np.float64(1.5), "numpy"),  # is an instance of float
        (os.stat("."), r"os\.stat_result is neither"),  # has more fields than items
        ({ONE: 1}, "key"),
        ({object(): 1}, "neither"),
        (Registered(1, ONE), "compared"),
        (Registered(ONE, [len]), "Registered cannot be compared"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_flattened_is_refused_in_one_line_that_says_what_to_do(value: object, message: str) -> None:
    with pytest.raises(TraceError, match=message) as refusal:
        flatten([ONE, {"k": value}])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("function", [flatten, lambda value: map_tensors(torch.neg, value)])
def test_a_value_that_contains_itself_is_refused(function: Callable[[object], object]) -> None:
    endless: list[object] = [ONE]
    endless.append({"again": endless})
    with pytest.raises(TraceError, match=r"type list is nested too deeply, or contains itself: .*$"):
        function(endless)


def test_a_number_that_is_not_known_before_a_run_is_refused() -> None:
    with FakeTensorMode(shape_env=ShapeEnv(), allow_fallback_kernels=False):
        number = torch.ones(3).sum().item()
        with pytest.raises(TraceError, match="the number of a tensor goes to Python"):
            flatten({"mean": [number / 3]})


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


@settings(max_examples=50)
@given(values, values)
def test_any_nesting_comes_back_and_the_fast_path_agrees(one: object, other: object) -> None:
    assert repr(again(one)) == repr(one)
    tensors, its = flatten(one)
    if its == structure(other):
        zeros = [torch.zeros(())] * len(tensors)
        assert repr(unflatten(its, zeros)) == repr(unflatten(structure(other), zeros))
    else:
        assert tensors_like(structure(other), one) is None
    fast = tensors_like(its, one)
    assert fast is None or list(map(id, fast)) == list(map(id, tensors))


def test_the_fast_path_takes_calls_of_tuples_lists_and_dictionaries() -> None:
    value = ([ONE, {"a": TWO, 1: (ONE, None)}], 2.0, "x", Color.RED)
    assert tensors_like(structure(value), value) == [ONE, TWO, ONE]
    for other in (([ONE], 2.0), ([ONE, {"a": TWO, 1: (ONE, None)}], -2.0, "x", Color.RED), [*value], ONE):
        assert tensors_like(structure(value), other) is None
    assert tensors_like(structure({"a": ONE}), {frozenset("a"): ONE}) is None, "no constant"


# Mapping a function over tensors


def test_tensors_are_mapped_and_all_else_is_the_same() -> None:
    """Keys may be anything."""
    unknown, stat = object(), os.stat(".")
    keys = (Path("a"), date(2024, 1, 2), frozenset({1}), unknown, ONE, 1.5)
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    value = {
        "pair": Pair(ONE, unknown),
        "tokens": UserDict(x=ONE),
        "frozen": Frozen(ONE),
        "registered": Registered(ONE, [unknown]),
        3: [packed, "text", float("nan"), stat],
    }
    mapped = map_tensors(torch.neg, value)
    assert mapped["pair"].left == mapped["tokens"]["x"] == mapped["frozen"].x == mapped["registered"].x == -1
    assert (mapped["pair"].right, mapped["registered"].about) == (unknown, [unknown])
    assert mapped[3][0].data.tolist() == [-1.0] * 3
    assert mapped[3][0].batch_sizes is packed.batch_sizes
    assert (mapped[3][1], mapped[3][3] is stat) == ("text", True)
    assert value["tokens"]["x"] == 1
    for kind in (dict, OrderedDict, lambda pairs: defaultdict(list, pairs)):
        mapped = map_tensors(torch.neg, kind((key, TWO) for key in keys))
        assert list(map(id, mapped)) == list(map(id, keys))
        assert [value.item() for value in mapped.values()] == [-2.0] * len(keys)


class OwnDict(dict[str, Any]):
    """Has an attribute besides its items."""

    path = "/data"


class Itself(OwnDict):
    """Returns itself as its copy."""

    def __copy__(self) -> Itself:
        return self


class Shared(MutableMapping[str, Any]):
    """A copy shares the items with the original: a write to one writes to the other."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.shared = items

    def __getitem__(self, key: str) -> Any:
        return self.shared[key]

    def __setitem__(self, key: str, item: Any) -> None:
        self.shared[key] = item

    def __delitem__(self, key: str) -> None:
        del self.shared[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shared)

    def __len__(self) -> int:
        return len(self.shared)


class Refusing(Shared):
    def __init__(self, **items: Any) -> None:
        super().__init__(items)

    def __setitem__(self, key: str, item: Any) -> None:
        raise RuntimeError("frozen")


class Forgetful(Shared):
    def __init__(self, *items: dict[str, Any]) -> None:
        super().__init__({"x": ONE, "n": 3})


class Row(Sequence[Any]):
    """Cannot be constructed from a sequence."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


class Point(tuple[Any, ...]):
    """Cannot be constructed from a sequence."""

    def __new__(cls, x: Any, n: Any) -> Point:
        return super().__new__(cls, (x, n))


@pytest.mark.parametrize(
    ("own", "kind"),
    [
        (OwnDict(x=ONE, n=3), OwnDict),
        (Itself(x=ONE, n=3), Itself),
        (ChainMap({"x": ONE}, {"n": 3}), ChainMap),
        (UserList([ONE, 3]), UserList),
        (Shared({"x": ONE, "n": 3}), Shared),
        (Refusing(x=ONE, n=3), dict),
        (Forgetful(), dict),
        (MappingProxyType({"x": ONE, "n": 3}), MappingProxyType),
        (Row(ONE, 3), list),
        (Point(ONE, 3), Point),
    ],
    ids=lambda own: type(own).__name__,
)
def test_containers_of_the_users_own_types_are_mapped_and_never_written(own: Any, kind: type) -> None:
    """The result has the same type, or is a plain container where that type cannot be made."""
    if isinstance(own, OwnDict | Point):
        own.path = "/elsewhere"
    mapped = map_tensors(torch.neg, {"nested": [own]})["nested"][0]
    first, second = ("x", "n") if isinstance(own, Mapping) else (0, 1)
    assert type(mapped) is kind
    assert (mapped[first].item(), mapped[second], len(mapped)) == (-1, 3, 2)
    assert own[first] is ONE
    assert type(own) is Itself or getattr(mapped, "path", None) == getattr(own, "path", None)


def refusing(items: dict[str, Any]) -> Refusing:
    own = Refusing()
    own.shared = items
    return own


@pytest.mark.parametrize("make", [OwnDict, Shared, MappingProxyType, refusing], ids=lambda make: make.__name__)
def test_later_writes_to_a_container_do_not_change_the_mapped_one(make: Callable[[dict[str, Any]], Any]) -> None:
    """Also where the function returns each tensor itself, and where there is no tensor."""
    items = {"x": ONE}
    own, plain = make(items), OwnDict(n=3)
    mapped, mapped_plain = map_tensors(lambda tensor: tensor, own), map_tensors(torch.neg, plain)
    (own if isinstance(own, OwnDict) else items)["x"] = TWO
    plain["n"] = 4
    assert mapped["x"] is ONE
    assert mapped_plain == {"n": 3}
    for value in (Refusing(n=3), Row(3), range(3), b"ab", "ab", bytearray(b"ab")):
        assert map_tensors(torch.neg, value) is value, "it cannot be made again, and has no tensors"
