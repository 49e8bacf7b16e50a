"""Fixtures for tests of captured graphs and of copies."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.captures import Captures
from tests.make_believe import ORDERS, Device


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    return Captures(monkeypatch)


@pytest.fixture
def at_once() -> Iterator[None]:
    """Without garbage collection: objects are freed with their last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> int:
    """The order in which a fake device runs its queues."""
    return int(request.param)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with Device.installed(monkeypatch) as device:
        yield device
