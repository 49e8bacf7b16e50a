"""Compares an optimized model with eager: equal results for changing inputs, from several streams and threads.

Fused kernels round differently, so results are compared with float64, as those of benchmarks are
(``harness/accuracy.py``): their error may be a few times that of eager, but at most half of the distance to the
results for other inputs. Results are compared after all calls, so that no call may change what an earlier one
returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autostream.cli.modes import relative_error
from benchmarks.harness.accuracy import allowed_error, dtype_of, reference
from tests.threads import in_threads

Call = Callable[..., Any]

Lane = Callable[[], AbstractContextManager[Any]]
"""Makes a stream current."""

TURNS = 3
"""How often all inputs are used on each stream and in each thread."""


@dataclass(frozen=True)
class Example:
    """The expected outputs of a model for some arguments."""

    args: tuple[Tensor, ...]
    expected: Sequence[Tensor]
    allowed: float

    def check(self, outputs: Any) -> None:
        error = relative_error(outputs, self.expected)
        assert error <= self.allowed, f"the error is {error:.1e}, and {self.allowed:.1e} is allowed"


@torch.no_grad()
def examples_of(model: nn.Module, inputs: Sequence[tuple[Tensor, ...]]) -> list[Example]:
    """Examples that eager gets right, and whose outputs differ from each other."""
    found = [reference(model, args) for args in inputs]
    examples = []
    for args, expected in zip(inputs, found, strict=True):
        outputs = model(*args)
        allowed = allowed_error(relative_error(outputs, expected), dtype_of(model, args))
        apart = min(_apart(other, expected) for other in found if other is not expected)
        assert apart > 0, "the outputs of one example would pass for another's"
        examples.append(Example(args, expected, min(allowed, apart / 2)))
        examples[-1].check(outputs)
    return examples


def _apart(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return min(relative_error(ours, [theirs]) for ours, theirs in zip(outputs, expected, strict=True))


def lanes(device: torch.device, count: int) -> list[Lane]:
    """New streams; on a CPU, nothing."""
    if device.type == "cpu":
        return [nullcontext] * count
    return [partial(torch.cuda.stream, torch.cuda.Stream(device)) for _ in range(count)]


def check_calls(call: Call, examples: Sequence[Example]) -> None:
    _check(*_outputs(call, [(example, nullcontext) for example in [*examples, *examples]]))


def check_streams(call: Call, examples: Sequence[Example], streams: Sequence[Lane]) -> None:
    """Each call with other inputs than the one before and on another stream, without synchronization."""
    turns = [
        (example, streams[(at + turn) % len(streams)])
        for turn in range(TURNS * len(streams))
        for at, example in enumerate(examples)
    ]
    _synchronize()
    _check(*_outputs(call, turns))


def check_threads(call: Call, examples: Sequence[Example], streams: Sequence[Lane]) -> None:
    """A thread for each stream, all at once, with different inputs at each moment."""

    def work(at: int) -> tuple[list[Example], list[Any]]:
        return _outputs(call, [(example, streams[at]) for example in [*examples[at:], *examples[:at]] * TURNS])

    _synchronize()
    for examples_and_outputs in in_threads(len(streams), work):
        _check(*examples_and_outputs)


@torch.no_grad()
def _outputs(call: Call, turns: Sequence[tuple[Example, Lane]]) -> tuple[list[Example], list[Any]]:
    outputs = []
    for example, lane in turns:
        with lane():
            outputs.append(call(*example.args))
    return [example for example, _ in turns], outputs


def _check(examples: Sequence[Example], outputs: Sequence[Any]) -> None:
    _synchronize()
    for example, output in zip(examples, outputs, strict=True):
        example.check(output)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
