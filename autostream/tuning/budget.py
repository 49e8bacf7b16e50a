"""The memory budget: how much a schedule may allocate, and what a report says of schedules that exceed it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autostream.ir import Candidate, Decision, DeviceProfile, OpGraph
from autostream.reporting.tables import size
from autostream.scheduling.peak import given_bytes

SLACK_BYTES = 2 * 2**20
"""Bytes that a schedule may take beyond one stream at any ratio: the smallest block that PyTorch's
allocator requests from a GPU."""

_COLLECTIVES_SHARE = 0.01
"""The same of a program with collectives, as a share of the device's memory. Ops run beside a collective whose results
they do not need, so more is in use at a time. A step of a 6-layer encoder on two H100s was measured to take 1,471 µs
where 139 MB more were allowed than on one stream, and 1,612 µs within 1.1 times one stream."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a schedule of a program may allocate.

    Attributes:
        limit: an int is the bytes that the schedule may allocate. A float is a ratio to what the model takes on one
            stream, weights and inputs included, since all of that has to fit on the device.
        alone_bytes: what one stream allocates.
        given_bytes: of weights and inputs.
        slack_bytes: what may be taken beyond one stream at any ratio.

    Example:
        >>> Budget(1.3, 9_900_000, given_bytes=0).room_bytes, Budget(1.3, 9_900_000, given_bytes=10_000_000).room_bytes
        (12870000, 15870000)
        >>> Budget(1.1, 9_900_000, given_bytes=0).room_bytes  # 2 MiB more
        11997152
    """

    limit: int | float
    alone_bytes: int
    given_bytes: int
    slack_bytes: int = SLACK_BYTES

    @property
    def room_bytes(self) -> float:
        """The bytes that a schedule may allocate, or infinity."""
        if not isinstance(self.limit, float) or math.isinf(self.limit):
            return self.limit
        return max(round(self.limit * self._one), self._one + self.slack_bytes) - self.given_bytes

    @property
    def _one(self) -> int:
        return self.alone_bytes + self.given_bytes

    def excess(self, memory_bytes: int, *, at_least: bool = False) -> str:
        """Why a schedule that allocates so much exceeds the budget, or ``""`` if it does not.

        Args:
            memory_bytes: that it allocates.
            at_least: whether that is a lower bound.

        Example:
            >>> Budget(1.3, 9_900_000, given_bytes=0).excess(13_100_000)
            'needs 13.1 MB, the budget is 12.9 MB: 1.3 × the 9.9 MB of one stream (memory_budget)'
            >>> Budget(1.3, 9_900_000, given_bytes=10_000_000).excess(13_100_000)
            ''
            >>> Budget(12_000_000, 9_900_000, given_bytes=10_000_000).excess(13_100_000)
            'needs 13.1 MB, the budget is 12.0 MB (memory_budget)'
        """
        room = self.room_bytes
        if memory_bytes <= room:
            return ""
        needs = "needs at least" if at_least else "needs"
        if not isinstance(self.limit, float):
            return f"{needs} {size(memory_bytes)}, the budget is {size(room)} (memory_budget)"
        one, most = self._one, round(room) + self.given_bytes
        factor = f"{self.limit:g} ×" if most == round(self.limit * one) else f"{size(self.slack_bytes)} more than"
        whole = f"{factor} the {size(one)} of one stream" + (
            ", weights and inputs included" if self.given_bytes else ""
        )
        needed = size(memory_bytes + self.given_bytes)
        return f"{needs} {needed}, the budget is {size(most)}: {whole} (memory_budget)"

    @property
    def exemption(self) -> tuple[Decision, ...]:
        """A note if the sequential schedule exceeds the budget; it is a candidate all the same.

        Example:
            >>> Budget(5_000_000, 9_900_000, given_bytes=0).exemption[0].reason
            'one stream needs 9.9 MB, the budget is 5.0 MB (memory_budget): it is tried all the same'
        """
        reason = self.excess(self.alone_bytes)
        return (Decision("", "over budget", f"one stream {reason}: it is tried all the same"),) if reason else ()


def budget_of(graph: OpGraph, profile: DeviceProfile, sequential: Candidate, limit: int | float) -> Budget:
    """The budget of a program.

    Args:
        graph: its ops.
        profile: of the device that it runs on.
        sequential: its schedule on one stream, complete.
        limit: as an option.
    """
    share = _COLLECTIVES_SHARE if graph.collectives else 0
    slack_bytes = max(SLACK_BYTES, round(share * profile.memory_bytes))
    return Budget(limit, sequential.memory_bytes, given_bytes(graph), slack_bytes)
