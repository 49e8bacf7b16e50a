"""What is in arrays and queues: another value where a program could tell them apart, and the same where none could."""

from __future__ import annotations

from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autostream.tracing.contents import contents_of, has_contents


def put(at: Any, value: Any) -> Callable[[Any], None]:
    return lambda container: container.__setitem__(at, value)


def cast(array: Any) -> None:
    array.dtype = np.int32


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "an array's number": (lambda: np.zeros(2), put(0, 1.0)),
    "the sign of a zero": (lambda: np.zeros(2), put(1, -0.0)),
    "an array's dtype": (lambda: np.zeros(2, dtype=np.float32), cast),
    "an array's shape": (lambda: np.zeros((2, 1)), lambda container: container.resize((1, 2), refcheck=False)),
    "an array of Python's": (lambda: array("d", [0.0]), put(0, 1.0)),
    "bytes": (lambda: bytearray(b"a"), put(0, 0)),
    "what a view shows": (lambda: memoryview(bytearray(b"a")), put(0, 0)),
    "an item of a queue": (lambda: deque([0]), put(0, 0.0)),
    "another item": (lambda: deque([0]), lambda container: container.append(0)),
    "the kind of an item": (lambda: deque([object()]), put(0, [])),
    "an entry": (lambda: ChainMap({}, {"one": 0.0}), put("one", -0.0)),
    "a key": (lambda: UserDict(one=1), lambda container: container.update(two=container.data.pop("one"))),
    "an item of a list of others": (lambda: UserList([1]), put(0, True)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told(name: str) -> None:
    make, change = CHANGES[name]
    one, other = make(), make()
    assert has_contents(one)
    assert contents_of(one) == contents_of(other) is not None
    change(one)
    assert contents_of(one) != contents_of(other)
    change(other)
    assert contents_of(one) == contents_of(other)


@pytest.mark.parametrize("value", [[1], {1: 1}, {1}, (1,), 1.0, "a", b"a", None, object()])
def test_what_others_look_at_is_not_its_business(value: Any) -> None:
    assert not has_contents(value)


class Failing(UserDict[str, int]):
    def __len__(self) -> int:
        raise RuntimeError("not loaded")


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(1 << 14),
        np.array([None]),
        array("d", bytes(1 << 17)),
        bytearray(1 << 17),
        memoryview(bytes(1 << 17)),
        deque(range(1000)),
        Failing(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_of_what_is_large_or_fails_nothing_is_known(value: Any) -> None:
    assert has_contents(value)
    assert contents_of(value) is None


def test_numbers_of_numpys_are_told_apart() -> None:
    assert contents_of(np.float32(1.0)) == contents_of(np.float32(1.0))
    assert len({contents_of(kind(1)) for kind in (np.float32, np.float64, np.int32)}) == 3
