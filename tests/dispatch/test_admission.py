"""Which signatures are compiled: the first few, those that recur, and more as calls hit the cache."""

from __future__ import annotations

from autostream.dispatch.admission import COMPILATION_CALLS, FREE_COMPILATIONS, HITS_PER_COMPILATION, Admission

NEW = "one call after the other is of a new kind"
FULL = "as many signatures as max_signatures allows are compiled"


def admission(most: int = 100, *keys: str) -> Admission[str]:
    cache = Admission[str](most)
    for key in keys:
        cache.add(key, f"schedule of {key}")
    return cache


def test_a_few_are_compiled_at_once_and_then_those_that_recur() -> None:
    cache = admission()
    for number in range(FREE_COMPILATIONS):
        assert not cache.refusal("next")
        cache.add(number, "schedule")
    for number in range(10_000):
        cache.miss(f"kind {number}")
    cache.hit("not there", HITS_PER_COMPILATION)
    assert cache.refusal("next") == NEW, "misses of ever new keys earn nothing"
    for _ in range(HITS_PER_COMPILATION):
        assert cache.refusal("recurs") == NEW
        cache.miss("recurs")
    assert not cache.refusal("recurs")
    assert cache.refusal("next") == NEW


def test_a_key_whose_guards_fail_is_compiled_again_after_a_thousand_misses() -> None:
    cache = admission(100, *"abcd")
    for _ in range(COMPILATION_CALLS):
        assert cache.refusal("a") == NEW
        cache.miss("a")
    assert not cache.refusal("a")
    cache.add("a", "another schedule of a")
    assert cache.refusal("a") == NEW


def test_hits_earn_compilations_but_no_more_than_there_were_at_first() -> None:
    cache = admission(100, *"abcd")
    cache.hit("a", HITS_PER_COMPILATION - 1)
    assert cache.refusal("next") == NEW
    cache.hit("b")
    assert not cache.refusal("next")
    cache.hit("a", 1_000_000)
    for number in range(FREE_COMPILATIONS):
        assert not cache.refusal("next")
        cache.add(number, "schedule")
    assert cache.refusal("next") == NEW


def test_the_cache_is_full_until_an_entry_is_idle() -> None:
    cache = admission(2, "a", "b")
    cache.hit("b", COMPILATION_CALLS)
    assert cache.refusal("next") == FULL, "a may still be used"
    cache.hit("a")
    cache.hit("b", COMPILATION_CALLS)
    assert cache.refusal("next") == FULL, "both were used"
    cache.hit("b")
    assert not cache.refusal("next")
    cache.add("c", "schedule of c")
    assert list(cache.entries) == ["b", "c"], "the one that was not used is evicted"


def test_a_dropped_entry_may_be_compiled_again() -> None:
    cache = admission(100, *"abcd")
    assert cache.refusal("next") == NEW
    cache.drop("a")
    assert not cache.refusal("next")
    assert list(cache.entries) == ["b", "c", "d"]
