"""Trial calls: example inputs that a model does not take are reported in one line, and nothing changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream.errors import TargetError, TraceError
from autostream.frontend.modules import module_of
from autostream.frontend.trial import check_call, tried
from tests.semantics import Model


def learns(s: Model, x: Tensor) -> Tensor:
    s.layer(x).sum().backward()
    return x - s.layer.weight.grad


def raises_out_of_memory(s: Model, x: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


@torch.inference_mode()
def inference_tensor() -> Tensor:
    return torch.ones(4, 4)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda s, x: s.layer(x) if x.sum() > 0 else x, torch.ones(2, 4)),
        (learns, torch.ones(4, 4)),
        (lambda s, x: torch.autograd.grad(s.layer(x).sum(), x)[0], torch.ones(4, 4, requires_grad=True)),
        (lambda s, x: x.add_(1), inference_tensor()),
        (lambda s, x: s.layer.weight.add_(x), torch.ones(4, 4)),
        (lambda s, x: s.layer.weight.add_(x), torch.ones(4, 4, requires_grad=True)),
        (raises_out_of_memory, torch.ones(4, 4)),  # there may be enough for the call itself
        (lambda s, x: 1 / 0, object()),  # cannot be copied
    ],
)
def test_what_works_in_some_mode_or_cannot_be_tried_passes(function: Callable[..., Any], x: Any) -> None:
    with torch.no_grad():
        check_call(Model(function, layer=nn.Linear(4, 4)), (x,), {})


@pytest.mark.parametrize("fails", [True, False])
def test_a_trial_changes_nothing(fails: bool) -> None:
    def function(s: Model, x: Tensor, log: list[Tensor]) -> Tensor:
        s.layer.weight.data.mul_(2)
        s.norm(x)
        s.layer(x).sum().backward()
        s.calls = 7
        s.seen.append(x)
        x.mul_(2)
        log.append(x)
        y = torch.rand(1) + random.random()
        return y @ torch.ones(5) if fails else y

    model = Model(function, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4), calls=0, seen=[])
    x, log = torch.ones(2, 4), list[Tensor]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = [id(tensor) for tensor in model.state_dict(keep_vars=True).values()]
    generators = torch.get_rng_state(), random.getstate()
    with pytest.raises(TargetError) if fails else torch.no_grad():
        check_call(model, (x, log), {})
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert [id(tensor) for tensor in model.state_dict(keep_vars=True).values()] == tensors
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (model.calls, model.seen, log, x.sum().item()) == (0, [], [], 8)
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == random.getstate()


RUNS = [0]
layer = nn.BatchNorm1d(4)


def counts_globally(x: Tensor) -> Tensor:
    RUNS[0] += 1
    return layer(x)


def test_a_trial_copies_what_functions_refer_to() -> None:
    """Closure variables, iterators, globals, defaults and arguments that ``partial`` binds."""
    stream, generator, runs = iter(range(3)), (number for number in range(3)), [0]

    def counts(x: Tensor, seen: list[int] = runs) -> Tensor:
        runs[0] += 1
        seen[0] += 1
        return counts_globally(x) * next(stream)

    for function in (counts, partial(counts), partial(counts, seen=runs), counts_globally):
        assert tried(module_of(function), [torch.ones(2, 4)], {}).outputs.shape == (2, 4)
    assert (runs, RUNS, layer.num_batches_tracked, next(stream)) == ([0], [0], 0, 0)
    unique = Model(lambda s, x: x * next(generator))  # a generator cannot be copied
    with pytest.raises(TraceError, match="it cannot be copied, to be tried without being changed"):
        tried(unique, (torch.ones(2, 5),), {})
    assert next(generator) == 0
