"""Pausing the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from autostream.utils import collector


@pytest.fixture(autouse=True)
def _enabled_afterwards() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_off_until_the_outermost_pause_ends_and_then_as_before(enabled: bool) -> None:
    if not enabled:
        gc.disable()
    with pytest.raises(KeyError), collector.paused():
        with collector.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() == enabled
