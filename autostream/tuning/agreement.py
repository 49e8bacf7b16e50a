"""All processes of a group decide alike, by its store, before any of them launches a collective.

    rank 0   what it does, and has ──╮                  ╭──▶ what all have, on every rank
    rank 1   what it does, and has ──┼──▶ rank 0: same? ┤ no
    …                                ╯                  ╰──▶ a GroupError on every rank: who, and the first difference

Processes whose graphs differ, or that run one more often than others, would wait for each other for ever. So a program
with collectives is tuned by all of its processes together (:class:`Peers`). Each number on which something depends is
agreed on; then they make the same schedules, run them equally often, and choose the same. The store is that of the
process group: this takes no collective.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from typing import Any, TypeVar

from autostream.analysis.effects import group_of
from autostream.analysis.process_groups import gone_from, group_named, launched_in, processes_in, ranks_of
from autostream.errors import AutostreamError, GroupError, first_line
from autostream.ir import OpGraph, Program
from autostream.scheduling.communication import first_difference, first_mismatch, sequence
from autostream.utils.data import Json, decoded, encoded

Result = TypeVar("Result")

LIMIT_S = 300.0
"""How long a process waits for the others to come as far: some compile longer than others."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The processes that tune a program together; of a program without collectives there is one.

    Each method has to be called by all of them, in the same order, and says what for. All raise the same error if a
    process fails, is somewhere else, or is gone.

    Attributes:
        group: the name of their process group; ``""`` if there is one process.

    Example:
        >>> ALONE.slowest("a run", lambda: [2.5])
        [2.5]
    """

    group: str = ""

    def each(self, what: str, do: Callable[[], Result], failing: type[AutostreamError] = GroupError) -> list[Result]:
        """What a function returns in each process, by rank; numbers, strings and lists of them.

        Raises:
            AutostreamError: it has raised in some process, whose rank the message names.
            GroupError: a process is somewhere else, or has not come in time; or it has raised between collectives that
                others have launched.
        """
        if not self.group:
            return [do()]
        result, fault, cause = None, "", None
        try:
            result = do()
        except GroupError:
            raise
        except Exception as error:
            fault, cause = first_line(error), error
        try:
            try:
                told = _exchange(self.group, [what], (fault, result, launched_in(self.group)))
            except GroupError as error:
                if cause is None:
                    raise
                raise GroupError(f"{error}; here it has failed: {fault}") from cause
            if faults := [(launched, rank, fault) for rank, (fault, _, launched) in enumerate(told) if fault]:
                _, rank, fault = min(faults)  # those with more collectives have waited for this one
                reason = f"on rank {rank} of process group {self.group!r}: {fault}"
                if len({launched for *_, launched in told}) > 1:  # the next ones would meet the wrong ones
                    raise GroupError(f"{reason}, with other collectives launched than elsewhere: {_OVER}") from cause
                raise failing(reason) from cause
            return [value for _, value, _ in told]
        finally:
            cause = None  # its traceback has this frame, and what it was out of memory for

    def first(
        self, what: str, do: Callable[[], Result], kind: Any, failing: type[AutostreamError] = GroupError
    ) -> Result:
        """What a function returns in the first process, which alone calls it; of a type that JSON can have."""
        if not self.group:
            return do()
        leads = group_named(self.group).rank() == 0
        found: Result = decoded(kind, self.each(what, (lambda: encoded(do())) if leads else lambda: None, failing)[0])
        return found

    def together(self, what: str, do: Callable[[], Result], failing: type[AutostreamError] = GroupError) -> Result:
        """What a function returns in this process, if it raises in none."""
        if not self.group:
            return do()
        results: list[Result] = []
        self.each(what, lambda: results.append(do()), failing)
        return results[0]

    def slowest(self, what: str, times: Callable[[], Sequence[float]]) -> list[float]:
        """The longest of each of these times: processes that communicate wait for the slowest."""
        return [max(of_all) for of_all in zip(*self.each(what, times), strict=True)]


_OVER = "the group cannot go on, start its processes again"

ALONE = Peers()


def everywhere(
    groups: Iterable[str], what: str, do: Callable[[], Result], failing: type[AutostreamError] = GroupError
) -> Result:
    """What a function returns in this process, if it raises in none of these groups' processes; see :class:`Peers`."""
    for group in groups:
        do = partial(Peers(group).together, what, do, failing)
    return do()


def peers_of(program: Program) -> Peers | None:
    """The processes that take part in a program's collectives.

    Returns:
        ``None`` if none of its process groups has all of them: then nothing can be agreed on over all groups.
    """
    named = set(map(group_of, program.module.graph.nodes)) - {""}
    groups = sorted(group for group in named if processes_in(group) > 1)
    if not groups:
        return ALONE
    everyone = set[int]().union(*map(ranks_of, groups))
    return next((Peers(group) for group in groups if everyone == ranks_of(group)), None)


def agree_on(graph: OpGraph, order: Iterable[str]) -> None:
    """Check that the processes of each group would launch the same collectives in the same order, over all groups.

    Args:
        graph: the ops of a program.
        order: their names, in launch order.

    Raises:
        GroupError: another process would launch others, or has not answered in time.
    """
    order = tuple(order)
    groups = graph.process_groups
    for group in (name for name in groups if processes_in(name) > 1):
        found = sequence(graph, order, {other for other in groups if ranks_of(other) >= ranks_of(group)})
        exchanges = [(each.sends, each.receives) if each.group == group else ((), ()) for each in found]
        told = _exchange(group, [str(each) for each in found], exchanges)
        if mismatch := first_mismatch(told):
            raise GroupError(f"processes of group {group!r} would not exchange the same collectives: {mismatch}")


def agree(group: str, said: Sequence[str], limit_s: float | None = None) -> None:
    """Check that all processes of a group say the same, line by line. Each has to call this as often as the others.

    Args:
        group: its name; one that is not known here has no other processes.
        said: what this process would do.
        limit_s: how long to wait for the others; ``LIMIT_S`` by default.

    Raises:
        GroupError: a process says something else, or nothing in time.
    """
    if processes_in(group) > 1:
        _exchange(group, said, None, limit_s)


def naming_who_has_ended(run: Callable[..., Result], groups: Iterable[str]) -> Callable[..., Result]:
    """The same function, which says which process of these groups has ended, if that is why it fails.

    Raises:
        GroupError: a process has ended.
    """
    named = tuple(groups)

    @wraps(run)
    def checked(*args: Any) -> Result:
        try:
            return run(*args)
        except RuntimeError as error:
            check_all_there(named, error)
            raise

    return checked


def check_all_there(groups: Iterable[str], error: BaseException) -> None:
    """Say which process has ended, if that is why something with collectives has failed.

    A process that ends breaks the connections of those who wait for it, and they end, and break others: all say what
    the first of them has found.

    Args:
        groups: the names of the process groups.
        error: what was raised.

    Raises:
        GroupError: a process has ended.
    """
    if isinstance(error, GroupError):  # it says so, or something else
        return
    # Gloo closes the connection to a process for which it has waited too long, too.
    what = "has ended" if "timed out" not in str(error).lower() else "has ended, or was late beyond the group's timeout"
    for group in groups:
        if gone := gone_from(group):
            raise GroupError(_first_account(group, gone, what)) from error


def _first_account(group: str, gone: Sequence[int], what: str) -> str:
    """Which processes have ended, as the first has found that found one."""
    who = f"rank {gone[0]}" if len(gone) == 1 else f"ranks {', '.join(map(str, gone[:-1]))} and {gone[-1]}"
    advice = f"look there for an error, fewer steps, or a batch of another shape; {_OVER}"
    account = f"{who} of process group {group!r} {what}: {advice}"
    known = group_named(group)
    with suppress(Exception):  # the store may have gone, too
        store = known.get_group_store()
        account = store.compare_set("autostream/ended", "", account).decode()
        _wait_for_readers(store, "autostream/ended", known.rank(), set(range(1, known.size())).difference(gone))
    return account


def _wait_for_readers(store: Any, key: str, rank: int, others: Iterable[int]) -> None:
    """Let the others read a fault: the store goes with the first process, which may end now.

    Raises:
        Exception: one does not, or the store has gone already.
    """
    if rank:
        store.set(f"{key}/read by {rank}", "")
    else:
        store.wait([f"{key}/read by {other}" for other in others], timedelta(seconds=_READ_S))


def _exchange(group: str, said: Sequence[str], value: Any, limit_s: float | None = None) -> list[Json]:
    """The values of all processes, by rank, as JSON has them, if all say the same.

    The first process collects them and tells the others the result, an error too: all raise the same one.
    """
    known, limit_s = group_named(group), limit_s or LIMIT_S
    rank, end = known.rank(), time.monotonic() + limit_s
    try:
        store = known.get_group_store()
        turn = f"autostream/{store.add(f'autostream/{rank}', 1)}"
        store.set(f"{turn}/{rank}", json.dumps([[*said], encoded(value)]))
    except Exception as error:
        raise GroupError(f"the store of process group {group!r} does not answer: {first_line(error)}") from error

    def told(by: int, key: str, seconds: float) -> Any:
        began, look_s, pause_s = time.monotonic(), _LOOK_S, 0.0005
        try:
            while not store.check([key]):  # a wait writes warnings when its time is over
                waited_s = time.monotonic() - began
                if waited_s > seconds:
                    raise TimeoutError
                if waited_s > look_s:
                    check_all_there([group], TimeoutError())
                    look_s *= 2  # each look leaves a message that nobody reads
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.1)
            return json.loads(store.get(key))
        except GroupError:
            raise
        except Exception as error:
            check_all_there([group], error)
            raise GroupError(
                f"rank {by} of process group {group!r} has not come as far within {limit_s:g} s, or is gone, while "
                f"another one would go on with {_short(said)}: all have to make the same steps in the same order"
            ) from error

    if rank:
        told(0, f"{turn}/0", end - time.monotonic())
        # The first process waits for the others no longer than this one has waited for it; then it says who is missing.
        fault, values = told(0, f"{turn}/result", limit_s + _SPARE_S)
    else:
        fault, values = "", [encoded(value)]
        try:
            for other in range(1, known.size()):
                lines, theirs = told(other, f"{turn}/{other}", end - time.monotonic())
                values.append(theirs)
                if lines != list(said):
                    fault = fault or (
                        f"ranks 0 and {other} of process group {group!r} would not launch the same collectives: "
                        f"{first_difference(said, lines, 'rank 0', f'rank {other}')}"
                    )
        except GroupError as error:
            fault = str(error)
        store.set(f"{turn}/result", json.dumps([fault, [] if fault else values]))
    if fault:
        with suppress(Exception):
            _wait_for_readers(store, turn, rank, range(1, known.size()))
        raise GroupError(fault)
    return values  # type: ignore[no-any-return]


_LOOK_S = 1.0
"""After so long a process that waits looks whether others have ended, then after twice as long, and so on."""

_SPARE_S = 10.0
"""So much longer than the first process the others wait, for its answer to arrive."""


_READ_S = 3.0
"""How long the first process waits until the others have read of a fault; those that are gone never do."""


def _short(said: Sequence[str]) -> str:
    return f"{said[0]}{', …' * (len(said) > 1)}" if said else "no collectives"
