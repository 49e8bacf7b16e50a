"""Which replay runs a call, and when replays go: those of a model of one weight, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autostream.dispatch.admission import Admission
from autostream.dispatch.cached_replays import MISSED, CachedReplays
from autostream.dispatch.replay import GuardFailed


class Replay:
    """Runs calls with one argument: its name."""

    def __init__(self, name: str, run: Callable[[], Any], *, repeatable: bool = True, held: Any = ()) -> None:
        self.name, self.run, self.repeatable = name, run, repeatable
        self.held, self.objects, self.is_in_place = frozenset(map(id, held)), (), True
        self.guards_first = False

    def fits(self, args: Any, kwargs: Any) -> Any:
        return [] if args == (self.name,) else None

    def check_guards_first(self) -> None:
        self.guards_first = True

    def __call__(self, tensors: Any, args: Any, kwargs: Any) -> Any:
        return self.run()


class Entry:
    """What a replay stands for; counts the calls that it was told of."""

    calls = 0

    def count_replays(self, calls: int) -> None:
        self.calls += calls


def raising(error: BaseException) -> Callable[[], Any]:
    def run() -> Any:
        raise error

    return run


class Model:
    """A weight, its replays and their entries."""

    def __init__(self) -> None:
        self.module, self.admission = nn.Linear(1, 1, bias=False), Admission[Any](8)
        self.replays = CachedReplays(self.module, self.admission, 8)

    def add(self, replay: Replay) -> Entry:
        entry = Entry()
        key = (replay.name, id(entry))
        self.admission.add(key, [entry])
        self.replays.add(key, entry, replay)  # type: ignore[arg-type]
        return entry

    def __call__(self, name: str) -> Any:
        return self.replays((name,), {})


def test_the_first_replay_that_fits_and_whose_guards_hold_runs_a_call() -> None:
    model = Model()
    for name, run in (("x", lambda: "old"), ("x", raising(GuardFailed())), ("y", lambda: "other")):
        model.add(Replay(name, run))
    assert (model("x"), model("y"), model("z")) == ("old", "other", MISSED)


def test_guards_that_have_failed_after_a_replay_are_checked_before_the_next() -> None:
    model = Model()
    failing = Replay("x", raising(GuardFailed()))
    model.add(failing)
    assert model("x") is MISSED
    assert failing.guards_first


def test_calls_are_counted_as_those_of_the_entry() -> None:
    model = Model()
    entry = model.add(Replay("x", lambda: None))
    for _ in range(3):
        model("x")
    assert entry.calls == 0
    model.replays.count()
    model.replays.count()
    assert entry.calls == 3


def test_a_replay_that_raises_goes_and_its_error_is_seen_only_if_it_may_not_run_again() -> None:
    model = Model()
    model.add(Replay("x", raising(RuntimeError("lost")), repeatable=False))
    model.add(Replay("y", raising(RuntimeError("lost"))))
    with pytest.raises(RuntimeError, match="lost"):
        model("x")
    assert model("x") is model("y") is MISSED


@pytest.mark.parametrize("change", ["moved", "replaced"])
def test_replays_of_weights_that_the_model_has_freed_go_when_guards_fail(change: str) -> None:
    """They hold memory for nothing. What holds no weight of the model stays."""
    model = Model()
    stale = Replay("x", lambda: "stale", held=[model.module.weight])
    for replay in (stale, Replay("y", lambda: "fresh"), Replay("z", raising(GuardFailed()))):
        model.add(replay)
    assert (model("z"), model("x"), model("y")) == (MISSED, "stale", "fresh")
    if change == "moved":
        stale.is_in_place = False
    else:
        model.module.weight = nn.Parameter(torch.ones(1, 1))
    assert (model("z"), model("x"), model("y")) == (MISSED, MISSED, "fresh")


def test_a_replay_goes_with_its_entry() -> None:
    model = Model()
    first, _ = model.add(Replay("x", lambda: "x")), model.add(Replay("y", lambda: "y"))
    model.replays.drop(first)  # type: ignore[arg-type]
    assert (model("x"), model("y")) == (MISSED, "y")
