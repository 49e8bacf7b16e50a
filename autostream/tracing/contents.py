"""What arrays, byte strings, queues and the like contain, which only a look at all of it tells."""

from __future__ import annotations

import sys
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Hashable, Mapping
from typing import Any

from autostream.frontend.tree import exact


def has_contents(value: Any) -> bool:
    """Whether a value is such a container.

    Example:
        >>> has_contents(deque()), has_contents([])
        (True, False)
    """
    return isinstance(value, (*_BUFFERS, *_COLLECTIONS, *_arrays()))


def contents_of(value: Any) -> Hashable:
    """What such a container contains now, so that it is equal only where no program can tell it apart.

    Of what is no constant in it, that is the kind.

    Returns:
        ``None`` where it is too large to be looked at in each call, is an array of objects, or fails.

    Example:
        >>> contents_of(bytearray(b"ab")), contents_of(bytearray(1 << 20))
        (b'ab', None)
    """
    try:
        return _contents(value)
    except Exception:  # of a user's class, or since another thread writes to it
        return None


def _contents(value: Any) -> Hashable:
    if isinstance(value, (*_COLLECTIONS, list)):
        if len(value) > MOST_ITEMS:
            return None
        items = tuple(value.items()) if isinstance(value, Mapping) else tuple((item,) for item in value)
        return tuple(tuple(map(_item, item)) for item in items)
    if isinstance(value, bytearray):
        return bytes(value) if len(value) <= _MOST_BYTES else None
    if isinstance(value, array):
        return (value.typecode, value.tobytes()) if len(value) * value.itemsize <= _MOST_BYTES else None
    if value.nbytes > _MOST_BYTES:
        return None
    if isinstance(value, memoryview):
        return value.format, value.shape, value.tobytes()
    return None if value.dtype.hasobject else (value.dtype.str, value.shape, value.tobytes())


def _item(value: Any) -> Hashable:
    return type(value), exact(value) if isinstance(value, _CONSTANTS) else None


def _arrays() -> tuple[type, ...]:
    """The kinds of arrays, and of numbers that are like them, of NumPy's, where it is loaded."""
    numpy = sys.modules.get("numpy")
    return (numpy.ndarray, numpy.generic) if numpy else ()


_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
_BUFFERS = (array, bytearray, memoryview)
_COLLECTIONS = (deque, ChainMap, UserDict, UserList)

_MOST_BYTES = 1 << 16
"""In an array: they are copied and compared in some µs."""

MOST_ITEMS = 256
