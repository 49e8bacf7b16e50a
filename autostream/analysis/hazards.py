"""Computes the hazards between ops that access the same resources, in one pass.

The three hazards are those of Hennessy and Patterson, *Computer Architecture*, chapter 3. For each resource only the
last writer and the readers since then are kept: they already depend on all earlier accesses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autostream.ir import Dependency, Hazard


class AccessHistory:
    """The last writer of each resource and the readers since, updated op by op in program order.

    Example:
        >>> history = AccessHistory()
        >>> history.record("a", reads=["x"], writes=["y"])
        ()
        >>> for dependency in history.record("b", reads=["y"], writes=["x"]):
        ...     print(dependency.before, dependency.hazard.name, dependency.resource)
        a RAW y
        a WAR x
    """

    def __init__(self) -> None:
        self._position: dict[str, int] = {}
        self._writer: dict[str, str] = {}
        self._readers: dict[str, list[str]] = {}
        self._user: dict[str, str] = {}
        self._before: dict[str, frozenset[str]] = {}

    def record(
        self, op: str, reads: Sequence[str], writes: Sequence[str], orders: Iterable[str] = ()
    ) -> tuple[Dependency, ...]:
        """Add the next op and return its dependencies: at most one for each earlier op and hazard."""
        hazards: dict[tuple[str, Hazard], str] = {}
        for resource in reads:
            if resource in self._writer:
                hazards.setdefault((self._writer[resource], Hazard.RAW), resource)
        for resource in writes:
            for reader in self._readers.get(resource, ()):
                hazards.setdefault((reader, Hazard.WAR), resource)
            if resource in self._writer and not self._readers.get(resource) and resource not in reads:
                hazards.setdefault((self._writer[resource], Hazard.WAW), resource)
        for resource in orders:
            if resource in self._user:
                hazards.setdefault((self._user[resource], Hazard.ORDER), resource)
        self._remember(op, reads, writes, orders)
        self._before[op] = frozenset(before for before, _ in hazards)
        earliest_first = sorted(hazards.items(), key=lambda item: self._position[item[0][0]])
        return tuple(Dependency(before, op, hazard, resource) for (before, hazard), resource in earliest_first)

    def last_writer(self, resource: str) -> str | None:
        """The op that last wrote a resource, if any did."""
        return self._writer.get(resource)

    def last(self, ops: Iterable[str]) -> str:
        """The latest of some ops in program order."""
        return max(ops, key=self._position.__getitem__)

    def directly_before(self, op: str) -> frozenset[str]:
        """The ops that an op directly depends on."""
        return self._before[op]

    def _remember(self, op: str, reads: Iterable[str], writes: Iterable[str], orders: Iterable[str]) -> None:
        self._position[op] = len(self._position)
        for resource in reads:
            self._readers.setdefault(resource, []).append(op)
        for resource in writes:
            self._writer[resource] = op
            self._readers.pop(resource, None)
        self._user.update(dict.fromkeys(orders, op))
