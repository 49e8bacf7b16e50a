"""Random generators of a model's own: drawing from one is noticed, and put back, whoever made it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autostream.tracing.generators import GeneratorState, is_generator


class Dice(random.Random):
    """A user's own."""


def of_numpy(make: Callable[[Any], Any]) -> Any:
    return make(pytest.importorskip("numpy").random)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "PyTorch's": (torch.Generator, lambda own: torch.rand(1, generator=own).item()),
    "Python's": (random.Random, lambda own: own.random()),
    "of Python's, a user's": (Dice, lambda own: own.random()),
    "NumPy's": (lambda: of_numpy(lambda numpy: numpy.default_rng()), lambda own: own.random()),
    "NumPy's Philox": (lambda: of_numpy(lambda numpy: numpy.Generator(numpy.Philox())), lambda own: own.random()),
    "NumPy's of old": (lambda: of_numpy(lambda numpy: numpy.RandomState()), lambda own: own.rand()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_is_noticed_and_put_back(kind: str) -> None:
    make, draw = KINDS[kind]
    generator = make()
    assert is_generator(generator)
    draw(generator)  # so that it is not one that has just been made
    state = GeneratorState.of("net.dice", generator)
    assert not state.changed()
    first = [draw(generator) for _ in range(3)]
    assert state.changed() == "net.dice, a random generator"
    state.restore()
    assert not state.changed()
    assert [draw(generator) for _ in range(3)] == first


def test_one_that_was_not_drawn_from_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else may be drawing from it."""
    generator = Dice()
    state = GeneratorState.of("dice", generator)
    monkeypatch.setattr(Dice, "setstate", lambda *_: pytest.fail("it is set"))
    state.restore()


@pytest.mark.parametrize("value", [random.SystemRandom(), random, iter([1]), 1])
def test_what_has_no_state_is_none(value: object) -> None:
    assert not is_generator(value)


def test_numpy_is_not_imported_for_that() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None; from autostream.tracing.generators import is_generator as is_; is_(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
