"""``in_threads``: all threads run at once, and no failure is lost."""

from __future__ import annotations

import threading

import pytest

from tests.threads import in_threads


def test_all_threads_run_at_once_and_results_are_in_order() -> None:
    """A barrier waits for all of them."""
    meeting = threading.Barrier(5, timeout=30)

    def work(number: int) -> tuple[int, int]:
        meeting.wait()
        return number, threading.get_ident()

    results = in_threads(5, work)
    assert [number for number, _ in results] == list(range(5))
    assert len({thread for _, thread in results} - {threading.get_ident()}) == 5


def test_an_exception_is_raised_when_all_have_ended() -> None:
    done: list[int] = []
    failed = threading.Event()

    def work(number: int) -> None:
        if number == 1:
            failed.set()
            raise ZeroDivisionError
        failed.wait(30)
        done.append(number)

    with pytest.raises(ZeroDivisionError):
        in_threads(3, work)
    assert sorted(done) == [0, 2]
