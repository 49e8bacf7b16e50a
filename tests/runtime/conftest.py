"""What tests of captured graphs share, and those of copies."""

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
    """Without a collection of garbage: what nobody has is gone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> int:
    """In which a make-believe device runs its queues."""
    return int(request.param)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with Device.installed(monkeypatch) as device:
        yield device
