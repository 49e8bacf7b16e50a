"""Which signatures are worth compiling: limits, and what earns one more."""

from __future__ import annotations

from autostream.dispatch.admission import FREE, IDLE, SERVED, Admission


def admission(most: int = 100, *keys: str) -> Admission[str]:
    made = Admission[str](most)
    for key in keys:
        made.add(key, f"schedule of {key}")
    return made


def test_a_few_are_free_and_then_none_where_none_comes_again() -> None:
    made = admission()
    for number in range(FREE):
        assert not made.refusal("next")
        made.add(number, "schedule")
    assert made.refusal("next") == "one call after the other is of a new kind"
    for number in range(10_000):
        made.unserved(f"kind {number}")
    assert made.refusal("next"), "calls of ever new kinds earn nothing"


def test_what_comes_again_is_worth_it_whatever_came_before() -> None:
    made = admission(5, *"abcd")
    for _ in range(SERVED):
        assert made.refusal("e") == "one call after the other is of a new kind"
        made.unserved("e")
    assert not made.refusal("e")
    assert made.refusal("f")
    made.add("e", "schedule of e")
    for _ in range(SERVED):
        made.unserved("f")
    assert made.refusal("f") == "as many signatures as max_signatures allows are compiled"


def test_one_whose_guards_fail_in_call_after_call_earns_one_more_in_a_thousand() -> None:
    made = admission(100, *"abcd")
    for _ in range(IDLE - 1):
        made.unserved("a")
    assert made.refusal("a")
    made.unserved("a")
    assert not made.refusal("a")
    made.add("a", "another schedule of a")
    assert made.refusal("a")


def test_calls_that_are_served_earn_one_more() -> None:
    made = admission(100, *"abcd")
    made.served("a", SERVED - 1)
    assert made.refusal("next")
    made.served("b")
    assert not made.refusal("next")
    made.add("e", "schedule")
    assert made.refusal("next")


def test_no_more_is_saved_up_than_there_was_at_first() -> None:
    made = admission(100, "a")
    made.served("a", 1_000_000)
    for number in range(FREE):
        assert not made.refusal("next")
        made.add(number, "schedule")
    assert made.refusal("next")


def test_there_are_as_many_as_allowed_until_one_is_idle() -> None:
    made = admission(2, "a", "b")
    made.served("b", IDLE)
    assert made.refusal("next") == "as many signatures as max_signatures allows are compiled"
    made.served("b")
    assert not made.refusal("next")
    made.add("c", "schedule of c")
    assert list(made.entries) == ["b", "c"], "the one that nobody used went"


def test_what_is_used_is_not_idle() -> None:
    made = admission(2, "a", "b")
    made.served("b", IDLE)
    made.served("a")
    made.served("b", IDLE)
    assert made.refusal("next")
    assert list(made.entries) == ["a", "b"]


def test_what_is_dropped_may_be_made_again() -> None:
    made = admission(100, *"abcd")
    assert made.refusal("next")
    made.drop("a")
    assert not made.refusal("next")
    assert list(made.entries) == ["b", "c", "d"]


def test_calls_of_what_is_not_there_earn_nothing() -> None:
    made = admission(100, *"abcd")
    made.served("e", SERVED)
    assert made.refusal("next")
