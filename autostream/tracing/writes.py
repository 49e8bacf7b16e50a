"""What functions may write to elsewhere: variables that their code names, containers, random generators, iterators.

    loss_fn ──▶ what it names, as for reads ──▶ places that it writes, whether or not something is there
                                           └──▶ containers ──▶ containers and objects that are in them ──▶ …

A trace, which runs all of it once, has to put back what is written meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from io import IOBase
from typing import Any

from autostream.tracing.generators import is_generator
from autostream.tracing.reads import CONSTANTS, Finder, Place


class Writable:
    """What functions may write to elsewhere.

    Found as :class:`~autostream.tracing.reads.Reads` finds what they read, and in containers also where names are
    computed.

    Args:
        functions: those to look at.

    Attributes:
        variables: the holder, the key and the label of each variable, attribute and entry that they write by name,
            whether or not it is there yet.
        containers: the label and the value of each list, set, dictionary and deque that they name, or that is in one.
        generators: the label and the value of each random generator that they name, or that is in a container.
        iterators: the labels of those that they name: to look at one is to take from it.

    Example:
        >>> history = []
        >>> [label for label, _ in Writable([lambda x: history.append(x)]).containers]
        ['history']
    """

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        finder = _Writes()
        finder.look(functions)
        self.variables = [(place.holder, place.key, place.label) for place in finder.variables.values()]
        self.containers = list(finder.containers.values())
        self.generators = list(finder.generators.values())
        self.iterators = sorted(finder.iterators)


class _Writes(Finder):
    """Collects places that functions write, containers, and generators."""

    def __init__(self) -> None:
        super().__init__()
        self.variables: dict[tuple[int, Any], Place] = {}
        self.containers: dict[int, tuple[str, Any]] = {}
        self.generators: dict[int, tuple[str, Any]] = {}
        self.iterators: dict[str, None] = {}
        self._left = _MOST

    def follow(self, label: str, value: Any, depth: int, name: str = "") -> None:
        if isinstance(value, Iterator) and not isinstance(value, IOBase):
            self.iterators[label] = None
        if is_generator(value):
            self.generators.setdefault(id(value), (label, value))
        super().follow(label, value, depth, name)

    def _into(self, label: str, value: Any, depth: int) -> None:
        if isinstance(value, (*CONTAINERS, tuple)):
            self._container(label, value, depth)
        else:
            super()._into(label, value, depth)

    def _container(self, label: str, value: Any, depth: int) -> None:
        """Note a container and those in it, and follow what else is in them."""
        pending = deque([(label, value)])
        while pending:
            label, value = pending.popleft()
            self._left -= len(value)
            if self._left < 0:
                return
            if isinstance(value, CONTAINERS):
                self.containers.setdefault(id(value), (label, value))
            for name, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if isinstance(item, CONSTANTS):
                    continue
                where = f"{label}[{repr(name) if isinstance(name, CONSTANTS) else type(name).__name__}]"
                if not isinstance(item, (*CONTAINERS, tuple)):
                    self.follow(where, item, depth)
                elif id(item) not in self.containers:
                    pending.append((where, item))

    def _entries(self, prefix: str, holder: dict[str, Any], keys: Iterable[str], depth: int) -> None:
        for key in sorted(self.written):
            self._write(Place(holder, key, key, f"{prefix}{key}"))
        super()._entries(prefix, holder, keys, depth)

    def _attribute(self, label: str, holder: Any, key: str, name: str, depth: int) -> None:
        self._write(Place(holder, key, name, label))
        super()._attribute(label, holder, key, name, depth)

    def _note(self, place: Place, value: Any, depth: int) -> None:
        self._write(place)
        super()._note(place, value, depth)

    def _write(self, place: Place) -> None:
        if place.name in self.written:
            self.variables.setdefault((id(place.holder), place.key), place)


_MOST = 10_000
"""Items of containers that are looked at: a dataset or a vocabulary has millions, and is not what a loss counts in."""

CONTAINERS = (dict, list, set, deque)
"""What has contents that may become others."""
