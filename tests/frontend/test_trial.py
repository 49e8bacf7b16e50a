"""Example inputs that a model does not take are told in one line, and trying them changes nothing."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream.errors import TargetError, TraceError
from autostream.frontend.modules import module_of
from autostream.frontend.trial import check_call, check_devices, tried
from tests.semantics import Model


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "TypeError: Linear.forward() missing 1 required positional argument: 'input'"),
        ((torch.ones(2, 4), 1), {}, "TypeError: Linear.forward() takes 2 positional arguments but 3 were given"),
        ((), {"x": torch.ones(2, 4)}, "TypeError: Linear.forward() got an unexpected keyword argument 'x'"),
        ((torch.ones(2, 5),), {}, "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and 4x4)"),
        ((torch.ones(2, 4, dtype=torch.int64),), {}, "RuntimeError: mat1 and mat2 must have the same dtype"),
        (("text",), {}, "TypeError: linear(): argument 'input' (position 1) must be Tensor, not str"),
    ],
)
def test_inputs_that_a_model_does_not_take_are_told_in_one_line(args: Any, kwargs: Any, said: str) -> None:
    said = re.escape(f"Linear itself fails at these example inputs ({said}")
    with pytest.raises(TargetError, match=f"^{said}.*: give what it takes$") as raised:
        check_call(nn.Linear(4, 4), args, kwargs)
    assert "\n" not in str(raised.value)


def learns(s: Model, x: Tensor) -> Tensor:
    s.layer(x).sum().backward()
    return x - s.layer.weight.grad


@torch.inference_mode()
def read_only() -> Tensor:
    return torch.ones(4, 4)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda s, x: s.layer(x) if x.sum() > 0 else x, torch.ones(2, 4)),
        (learns, torch.ones(4, 4)),
        (lambda s, x: torch.autograd.grad(s.layer(x).sum(), x)[0], torch.ones(4, 4, requires_grad=True)),
        (lambda s, x: x.add_(1), read_only()),
        (lambda s, x: s.layer.weight.add_(x), torch.ones(4, 4)),
        (lambda s, x: s.layer.weight.add_(x), torch.ones(4, 4, requires_grad=True)),
    ],
)
def test_what_works_in_some_mode_passes(function: Callable[..., Any], x: Tensor) -> None:
    """Calls may come in another mode than the one in which it is prepared."""
    with torch.no_grad():
        check_call(Model(function, layer=nn.Linear(4, 4)), (x,), {})


def scarce(s: Model, x: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(("model", "given"), [(Model(scarce), torch.ones(1)), (Model(lambda s, x: 1 / 0), object())])
def test_what_cannot_be_tried_passes(model: nn.Module, given: object) -> None:
    """There may be memory for the call itself; and nobody can copy any object."""
    check_call(model, (given,), {})


def leaves_traces(s: Model, x: Tensor, log: list[Tensor]) -> Tensor:
    s.layer.weight.data.mul_(2)
    s.norm(x)
    s.layer(x).sum().backward()
    s.calls = 7
    s.seen.append(x)
    x.mul_(2)
    log.append(x)
    return torch.rand(1) + random.random()


@pytest.mark.parametrize("fails", [True, False])
def test_a_trial_changes_nothing(fails: bool) -> None:
    def function(s: Model, x: Tensor, log: list[Tensor]) -> Tensor:
        y = leaves_traces(s, x, log)
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


def test_inputs_that_lie_elsewhere_are_told() -> None:
    x = torch.ones(2, 4)
    check_devices(nn.Linear(4, 4), ((x,), {}))
    check_devices(nn.ReLU(), ((x.to("meta"),), {}))
    check_devices(nn.Linear(4, 4), ((object(),), {}))
    with pytest.raises(TargetError, match=r"^example input 1 is on meta, the model on cpu: use \.to\('cpu'\)$"):
        check_devices(nn.Linear(4, 4), ((x,), {"y": x.to("meta")}))


def test_what_a_call_did_is_told_and_undone() -> None:
    def counts(s: Model, x: Tensor, twice: bool) -> Tensor:
        s.count += 1
        s.calls += 1
        return x.add_(torch.rand(3)) * (1 + twice)

    model, x = Model(counts, count=nn.Buffer(torch.zeros(())), calls=0), torch.zeros(3)
    generator = torch.get_rng_state()
    found = tried(model, [x], {"twice": True})
    assert found.outputs.equal(2 * found.inputs[0])
    assert found.state["count"].item() == 1
    assert (x.sum().item(), model.count.item(), model.calls) == (0, 0, 0)
    assert torch.get_rng_state().equal(generator)


def test_what_a_tried_model_raises_comes_through() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        tried(nn.Linear(3, 4), [torch.ones(2, 5)], {})


def test_a_trial_takes_nothing_from_an_iterator_and_leaves_a_users_lists_alone() -> None:
    stream, seen, unique = iter(range(3)), list[float](), (number for number in range(3))

    def takes(s: Model, x: Tensor) -> Tensor:
        seen.append(x.sum().item())
        return x @ torch.ones(5) * next(stream)

    def cannot(s: Model, x: Tensor) -> Tensor:
        return x @ torch.ones(5) * next(unique)

    with pytest.raises(TargetError):
        check_call(Model(takes), (torch.ones(2, 4),), {})
    assert tried(Model(takes), (torch.ones(2, 5),), {}).outputs.sum() == 0
    assert seen == []
    assert next(stream) == 0
    check_call(Model(cannot), (torch.ones(2, 4),), {})
    with pytest.raises(TraceError, match="it cannot be copied, to be tried without being changed"):
        tried(Model(cannot), (torch.ones(2, 5),), {})
    assert next(unique) == 0


RUNS = [0]
layer = nn.BatchNorm1d(4)


def counts_globally(x: Tensor) -> Tensor:
    RUNS[0] += 1
    return layer(x)


def test_so_it_does_of_what_functions_refer_to() -> None:
    """Variables around them, globals, default values and what ``partial`` binds."""
    runs = [0]

    def counts(x: Tensor, seen: list[int] = runs) -> Tensor:
        runs[0] += 1
        seen[0] += 1
        return counts_globally(x)

    for function in (counts, partial(counts), partial(counts, seen=runs), counts_globally):
        module = module_of(function)
        assert tried(module, [torch.ones(2, 4)], {}).outputs.shape == (2, 4)
    assert (runs, RUNS, layer.num_batches_tracked) == ([0], [0], 0)
