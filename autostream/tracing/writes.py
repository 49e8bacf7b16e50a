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

from autostream.tracing.bytecode import Named
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
        for function in functions:
            finder.look(function)
        self.variables = [(place.holder, place.key, place.label) for place in finder.variables.values()]
        self.containers = list(finder.containers.values())
        self.generators = list(finder.generators.values())
        self.iterators = list(finder.iterators)


class _Writes(Finder):
    """Collects places that functions write, containers, and generators."""

    def __init__(self) -> None:
        super().__init__()
        self.variables: dict[tuple[int, Any], Place] = {}
        self.containers: dict[int, tuple[str, Any]] = {}
        self.generators: dict[int, tuple[str, Any]] = {}
        self.iterators: dict[str, None] = {}
        self._left = _MOST

    def follow(self, label: str, value: Any, named: Named, depth: int) -> None:
        if isinstance(value, Iterator) and not isinstance(value, IOBase):
            self.iterators[label] = None
        if is_generator(value):
            self.generators.setdefault(id(value), (label, value))
        if not isinstance(value, (*CONTAINERS, tuple)):
            super().follow(label, value, named, depth)
        elif self._enters(value, named, depth):
            self._container(label, value, named, depth)

    def _container(self, label: str, value: Any, named: Named, depth: int) -> None:
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
                    self.follow(where, item, named, depth)
                elif id(item) not in self.containers:
                    pending.append((where, item))

    def _entries(
        self, label: str, holder: dict[str, Any], keys: Iterable[str], named: Named, form: str, depth: int
    ) -> None:
        for key in sorted(named.written):
            self._write(Place(holder, key, key, form.format(label, key)), named)
        super()._entries(label, holder, keys, named, form, depth)

    def _attribute(self, label: str, holder: Any, key: str, name: str, named: Named, depth: int) -> None:
        self._write(Place(holder, key, name, label), named)
        super()._attribute(label, holder, key, name, named, depth)

    def _note(self, place: Place, value: Any, named: Named, depth: int) -> None:
        self._write(place, named)
        super()._note(place, value, named, depth)

    def _write(self, place: Place, named: Named) -> None:
        if place.name in named.written:
            self.variables.setdefault((id(place.holder), place.key), place)


_MOST = 10_000
"""Items of containers that are looked at: a dataset or a vocabulary has millions, and is not what a loss counts in."""

CONTAINERS = (dict, list, set, deque)
"""What has contents that may become others."""
