"""Which signatures are worth compiling: limits, and what earns one more."""

from __future__ import annotations

from autostream.admission import FREE, IDLE, SERVED, Admission


def admission(most: int = 100, *keys: str) -> Admission[str]:
    made = Admission[str](most)
    for key in keys:
        made.add(key, f"schedule of {key}")
    return made


def test_a_few_are_free_and_then_none_where_none_comes_again() -> None:
    made = admission()
    for number in range(FREE):
        assert not made.refusal()
        made.add(number, "schedule")
    assert made.refusal() == "one call after the other is of a new kind, and none comes again"
    for _ in range(10_000):
        made.unserved()
    assert made.refusal(), "calls without an entry earn nothing"


def test_calls_that_are_served_earn_one_more() -> None:
    made = admission(100, *"abcd")
    made.served("a", SERVED - 1)
    assert made.refusal()
    made.served("b")
    assert not made.refusal()
    made.add("e", "schedule")
    assert made.refusal()


def test_no_more_is_saved_up_than_there_was_at_first() -> None:
    made = admission(100, "a")
    made.served("a", 1_000_000)
    for number in range(FREE):
        assert not made.refusal()
        made.add(number, "schedule")
    assert made.refusal()


def test_there_are_as_many_as_allowed_until_one_is_idle() -> None:
    made = admission(2, "a", "b")
    made.served("b", IDLE)
    assert made.refusal() == "as many signatures as max_signatures allows are compiled"
    made.served("b")
    assert not made.refusal()
    made.add("c", "schedule of c")
    assert list(made.entries) == ["b", "c"], "the one that nobody used went"


def test_what_is_used_is_not_idle() -> None:
    made = admission(2, "a", "b")
    made.served("b", IDLE)
    made.served("a")
    made.served("b", IDLE)
    assert made.refusal()
    assert list(made.entries) == ["a", "b"]


def test_what_is_dropped_may_be_made_again() -> None:
    made = admission(100, *"abcd")
    assert made.refusal()
    made.drop("a")
    assert not made.refusal()
    assert list(made.entries) == ["b", "c", "d"]


def test_calls_of_what_is_not_there_earn_nothing() -> None:
    made = admission(100, *"abcd")
    made.served("e", SERVED)
    assert made.refusal()
