"""What tests of captured graphs share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.captures import Captures


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
