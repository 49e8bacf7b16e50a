"""Two ways to do calls, by turns: each call is done once, and what is timed is what it took."""

from __future__ import annotations

import threading

import pytest
import torch

from autostream import turns
from autostream.turns import ROUNDS, Turns


class Clock:
    """Stands still but for what is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(turns.time, "perf_counter", lambda: self.seconds)

    def taking(self, us: float, result: str) -> object:
        def run(*args: object) -> str:
            self.seconds += us / 1e6
            return result

        return run


def test_the_ways_take_turns_and_what_they_take_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    both = Turns(clock.taking(30, "ours"), clock.taking(20, "plain"), [])  # type: ignore[arg-type]
    done = []
    while both.verdict is None:
        done.append(both("x"))
    assert done == ["ours", "plain"] * ROUNDS
    assert both.verdict == pytest.approx((30, 20))


@pytest.mark.parametrize("calls", [0, 4], ids=["alone", "in a row"])
def test_what_comes_between_some_calls_does_not_decide(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most rounds of one way are longer by it, and one round of the other is shorter by chance."""
    clock, each = Clock(monkeypatch), max(calls, 1)
    ours = iter([1e6] * each * (ROUNDS - 2) + [10.0] * each * 3)
    plain = iter([1.0] * each + [20.0] * each * (ROUNDS - 1))
    both = Turns(lambda: clock.taking(next(ours), "")(), lambda: clock.taking(next(plain), "")(), [], calls)  # type: ignore[operator]
    while both.verdict is None:
        both()
    assert both.verdict == pytest.approx((10, 20))


def test_a_call_that_fails_is_not_counted() -> None:
    fails = iter([True])

    def ours() -> str:
        if next(fails, False):
            raise ValueError("mine")
        return "ours"

    both = Turns(ours, lambda: "plain", [])
    with pytest.raises(ValueError, match="mine"):
        both()
    assert [both() for _ in range(2 * ROUNDS)] == ["ours", "plain"] * ROUNDS


def test_all_devices_are_waited_for_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", happened.append)
    devices = [torch.device("cuda", index) for index in range(2)]
    Turns(lambda: happened.append("call"), lambda: None, devices)()
    assert happened == [*devices, "call", *devices]


def test_calls_of_other_threads_are_made_in_our_way_and_not_timed() -> None:
    inside, go = threading.Event(), threading.Event()

    def ours(wait: bool) -> str:
        if wait:
            inside.set()
            assert go.wait(30)
        return "ours"

    both = Turns(ours, lambda wait: "plain", [])
    timed = threading.Thread(target=both, args=(True,))
    timed.start()
    assert inside.wait(30)
    assert [both(False) for _ in range(3)] == ["ours"] * 3
    go.set()
    timed.join()
    assert both(False) == "plain", "only the first was timed"


def test_calls_in_a_row_are_timed_with_what_is_done_until_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step makes two calls, and its backward takes longer in our way."""
    clock, done = Clock(monkeypatch), []
    both = Turns(clock.taking(10, "ours"), clock.taking(20, "plain"), [], 4)  # type: ignore[arg-type]
    while both.verdict is None:
        done.append(both("x"))
        done.append(both("x"))
        clock.seconds += (60 if done[-1] == "ours" else 20) / 1e6
    assert both.verdict == pytest.approx((40, 30))
    assert done[:-2] == (["ours"] * 4 + ["plain"] * 4) * ROUNDS


def test_a_call_in_a_row_that_fails_is_not_counted() -> None:
    fails, done = iter([True]), []

    def ours() -> str:
        if next(fails, False):
            raise ValueError("mine")
        return "ours"

    both = Turns(ours, lambda: "plain", [], 2)
    with pytest.raises(ValueError, match="mine"):
        both()
    while both.verdict is None:
        done.append(both())
    assert done[:-1] == (["ours"] * 2 + ["plain"] * 2) * ROUNDS
