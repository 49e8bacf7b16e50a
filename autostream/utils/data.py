"""Values of dataclasses as JSON has them, and back by their types."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from itertools import repeat
from typing import Any, Union, get_args, get_origin, get_type_hints

Json = Any
"""Values that ``json`` reads back as they were."""


def encoded(value: Any) -> Json:
    """A value as dictionaries, lists and plain values.

    Example:
        >>> from autostream.ir import Launch
        >>> encoded((Launch("relu", 0, ("mm",)),))
        [{'op': 'relu', 'stream': 0, 'waits': ['mm'], 'releases': []}]
    """
    if is_dataclass(value) and not isinstance(value, type):
        return encoded(asdict(value))
    if isinstance(value, Mapping):
        return {key: encoded(item) for key, item in value.items()}
    return [encoded(item) for item in value] if isinstance(value, list | tuple) else value


def decoded(kind: Any, data: Json) -> Any:
    """The value of a type from what :func:`encoded` has made of it.

    Args:
        kind: e.g. ``tuple[Launch, ...]``: dataclasses, tuples, mappings, enums, one of these or ``None``, plain types.
        data: encoded.

    Raises:
        Exception: it is something else; numbers and strings are taken as they are.

    Example:
        >>> from autostream.ir import Launch
        >>> decoded(tuple[Launch, ...], [{"op": "relu", "stream": 0, "waits": ["mm"], "releases": []}])
        (Launch(op='relu', stream=0, waits=('mm',), releases=()),)
    """
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: decoded(hints[name], item) for name, item in data.items()})  # type: ignore[operator]
    if origin is tuple:
        kinds = repeat(inner[0]) if inner[1:] == (...,) else inner
        return tuple(decoded(each, item) for each, item in zip(kinds, data, strict=False))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: decoded(inner[1], item) for key, item in data.items()}
    if origin in (Union, types.UnionType):
        return None if data is None else decoded(next(each for each in inner if each is not types.NoneType), data)
    return kind(data) if isinstance(kind, type) and issubclass(kind, Enum) else data
