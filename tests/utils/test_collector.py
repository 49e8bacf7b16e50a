"""The garbage collector is as it was afterwards, whatever happens in between."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from autostream.utils import collector


@pytest.fixture(autouse=True)
def _enabled_afterwards() -> Iterator[None]:
    yield
    gc.enable()


def test_nothing_is_collected_until_the_end_even_if_that_is_an_exception() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), collector.paused():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with collector.paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_the_outermost_pause_counts() -> None:
    with collector.paused():
        with collector.paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
