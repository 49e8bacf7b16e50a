"""The fast paths of a model: replays of the latest calls of its entries.

    call ──▶ the first replay that fits ──▶ outputs
                  │ its guards fail: the next one
                  └─▶ MISSED: the slow path

A replay holds tensors of the model. It goes with its entry, with an object among the arguments whose tensors it holds,
and when the model has freed them.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from torch import nn

from autostream.dispatch.admission import Admission
from autostream.dispatch.captured_call import CapturedCall
from autostream.dispatch.eager_call import EagerCall, EagerReplay
from autostream.dispatch.entries import Entry
from autostream.dispatch.replay import GuardFailed, Replay
from autostream.frontend.tensor_parallel import local_of

MISSED: Final = object()
"""No replay has run the call."""


@dataclass(slots=True, eq=False)
class _CachedReplay:
    """A replay and what it stands for.

    Attributes:
        replay: runs the calls.
        key: of the calls.
        entry: ran the first of them.
        state: ids of the model's parameters and buffers that the replay holds.
        calls: how many it has run since they were last counted.
    """

    replay: Replay | EagerReplay
    key: Hashable
    entry: CapturedCall | EagerCall
    state: frozenset[int]
    calls: int = 0


class CachedReplays:
    """The replays of one model, the most recently used first.

    Args:
        model: whose calls they run.
        admission: the model's entries, which count their calls.
        most_eager: how many may call the model itself.
    """

    def __init__(self, model: nn.Module, admission: Admission[list[Entry]], most_eager: int) -> None:
        self._model, self._admission, self._most_eager = model, admission, most_eager
        self._cached: tuple[_CachedReplay, ...] = ()  # replaced as a whole: several threads may call

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call with the first replay that fits, or return ``MISSED``.

        Raises:
            Exception: what a replay raised that may not run again.
        """
        replays, failed = self._cached, False
        for cached in replays:
            if (tensors := cached.replay.fits(args, kwargs)) is None:
                continue
            try:
                value = cached.replay(tensors, args, kwargs)
                cached.calls += 1
                if cached is not replays[0]:
                    self._cached = (cached, *(other for other in replays if other is not cached))
                return value
            except GuardFailed:  # the guards of another replay may hold for this call, and of this one for the next
                cached.replay.check_guards_first()
                failed = True
            except Exception:  # the slow path may recover
                self.drop(cached.entry)
                if not cached.replay.repeatable:
                    raise
                failed = True
                break
        if failed:
            del cached, replays  # they hold memory that the model may have freed
            self.drop_stale()
        return MISSED

    def add(self, key: Hashable, entry: CapturedCall, replay: Replay) -> None:
        """Add the replay of the latest call of an entry."""
        entries = self._admission.entries
        others = [
            cached
            for cached in self._cached
            if isinstance(cached.entry, EagerCall) or cached.entry in entries.get(cached.key, ())
        ]
        self._cached = (_CachedReplay(replay, key, entry, self._state() & replay.held), *others)
        for reference in replay.objects:  # a cache takes its tensors along when it goes
            weakref.finalize(reference(), _drop_of, weakref.ref(self), weakref.ref(entry)).atexit = False

    def add_eager(self, key: Hashable, entry: EagerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the replay of a call that the model itself has run, if it can have one."""
        if replay := entry.replay(self._model, args, kwargs):
            self.drop(entry)
            eager = [cached.entry for cached in self._cached if isinstance(cached.entry, EagerCall)]
            self.drop(*eager[self._most_eager - 1 :])
            self._cached = (_CachedReplay(replay, key, entry, frozenset()), *self._cached)

    def count(self) -> None:
        """Count the calls since the last count as cache hits."""
        for cached in reversed(self._cached):  # in the order of their latest calls
            if cached.calls:
                self._admission.hit(cached.key, cached.calls)
                cached.entry.count_replays(cached.calls)
                cached.calls = 0

    def drop(self, *entries: Entry) -> None:
        """Drop the replays of these entries."""
        self.count()
        self._cached = tuple(cached for cached in self._cached if cached.entry not in entries)

    def drop_stale(self) -> None:
        """Drop replays of parameters and buffers that the model does not have any more, or that have moved."""
        self.count()
        state = self._state()
        self._cached = tuple(cached for cached in self._cached if cached.state <= state and cached.replay.is_in_place)

    def _state(self) -> frozenset[int]:
        return frozenset(id(local_of(each)) for each in chain(self._model.parameters(), self._model.buffers()))


def _drop_of(replays: weakref.ref[CachedReplays], entry: weakref.ref[CapturedCall]) -> None:
    """Drop the replay of an entry that holds tensors of an argument that is gone."""
    live, captured = replays(), entry()
    if live is not None and captured is not None:
        live.drop(captured)
