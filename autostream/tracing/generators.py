"""Random generators that are a model's own, or that its code names: PyTorch's, Python's and NumPy's.

To draw from one changes it. What calls a model on the quiet, to trace or to try it, has to notice, and to put it back.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """A random generator, with its state at some time.

    Attributes:
        path: what users call it.
        generator: itself, such as a ``torch.Generator``.
        before: the state.

    Example:
        >>> generator = random.Random(0)
        >>> state = GeneratorState.of("dice", generator)
        >>> _ = generator.random()
        >>> state.changed()
        'dice, a random generator'
        >>> state.restore()
        >>> state.changed()
        ''
    """

    path: str
    generator: Any
    before: Any

    @staticmethod
    def of(path: str, generator: Any) -> GeneratorState:
        """A generator as it is."""
        return GeneratorState(path, generator, _state(generator))

    def now(self) -> Any:
        """The generator."""
        return self.generator

    def changed(self) -> str:
        """Its path and what it is, if it was drawn from or seeded, or ``""``."""
        same = _comparable(self.before) == _comparable(_state(self.generator))
        return "" if same else f"{self.path}, a random generator"

    def restore(self) -> None:
        """Put back its state."""
        if not self.changed():  # others may draw from it meanwhile
            return
        if isinstance(self.generator, random.Random):
            self.generator.setstate(self.before)
        elif hasattr(self.generator, "bit_generator"):
            self.generator.bit_generator.state = self.before
        else:
            self.generator.set_state(self.before)


def is_generator(value: object) -> bool:
    """Whether a value is a random generator whose state can be put back, which that of the system's cannot.

    Example:
        >>> is_generator(torch.Generator()), is_generator(random.SystemRandom())
        (True, False)
    """
    numpy = sys.modules.get("numpy")  # nobody has one of its generators who has not imported it
    kinds = (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _comparable(state: Any) -> Any:
    """A state in a form that ``==`` compares: arrays have another, and a tracer may forbid to compare tensors."""
    if isinstance(state, dict):
        return {name: _comparable(item) for name, item in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_comparable, state))
    return state.tolist() if hasattr(state, "tolist") else state
