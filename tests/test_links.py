"""Outputs that are computed from others of the same call: whoever looks at a gradient in between sees eager's."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream import links
from autostream.api import OptimizedModule
from autostream.differentiated import Differentiated
from autostream.links import linked_in, shares


class Chain(nn.Module):
    """Some of its outputs are computed from others, d is not, and e is nothing that is trained.

    x ── first ──▶ a ── second ──▶ b ── * a ── third ──▶ c
    └── other ──▶ d, e
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third, self.other = (nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Any:
        a = self.norm(self.first(x)).tanh()
        b = self.second(a).sigmoid()
        c = self.third(a * b).square()
        return c, a, self.other(x).sin(), {"b": b}, x.sum() * 2


Use = Callable[[nn.Module, Sequence[Tensor]], list[Tensor | None]]


def parameters(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def loss_of_all(model: nn.Module, found: Sequence[Tensor]) -> list[Tensor | None]:
    a, b, c, d = found
    (a.sum() + 2 * b.square().sum() + c.sum() + d.sum()).backward()
    return parameters(model)


def kept(model: nn.Module, found: Sequence[Tensor]) -> list[Tensor | None]:
    a, b, c, d = found
    a.retain_grad()
    b.retain_grad()
    (c.sum() + 3 * a.sum() + d.sum()).backward()
    return [a.grad, b.grad, *parameters(model)]


def only_the_first_kept(model: nn.Module, found: Sequence[Tensor]) -> list[Tensor | None]:
    a, _, c, _ = found
    a.retain_grad()
    c.sum().backward()
    return [a.grad, *parameters(model)]


def hooked(model: nn.Module, found: Sequence[Tensor]) -> list[Tensor | None]:
    a, b, c, _ = found
    seen: list[Tensor | None] = []
    a.register_hook(lambda gradient: (seen.append(gradient), gradient * 2)[1])
    b.register_hook(lambda gradient: (seen.append(gradient), gradient * 0)[1])
    (c.sum() + b.sum()).backward()
    return [*seen, *parameters(model)]


def hooked_and_dropped(model: nn.Module, found: Sequence[Tensor]) -> list[Tensor | None]:
    assert isinstance(found, list)
    found[0].register_hook(lambda gradient: gradient * 2)
    c = found[2]
    found.clear()
    gc.collect()
    c.sum().backward()
    return parameters(model)


def asked_for(model: nn.Module, found: Sequence[Tensor]) -> list[Tensor | None]:
    a, b, c, d = found
    some = torch.autograd.grad(c.sum() + a.sum(), [a, b], retain_graph=True)
    others = torch.autograd.grad(c.sum(), [a, model.first.weight, b], retain_graph=True)
    none = torch.autograd.grad(d.sum(), [a], allow_unused=True, retain_graph=True)
    (c.sum() + d.sum()).backward()
    return [*some, *others, *none, *parameters(model)]


def for_some_alone(model: nn.Module, found: Sequence[Tensor]) -> list[Tensor | None]:
    a, b, c, _ = found
    c.sum().backward(inputs=[a, model.second.weight])
    return [a.grad, b.grad if b.retains_grad else None, *parameters(model)]


def twice(model: nn.Module, found: Sequence[Tensor]) -> list[Tensor | None]:
    a, b, c, d = found
    a.retain_grad()
    c.sum().backward(retain_graph=True)
    (b.sum() + d.sum()).backward()
    return [a.grad, *parameters(model)]


def penalty(model: nn.Module, found: Sequence[Tensor]) -> list[Tensor | None]:
    a, _, c, _ = found
    (slope,) = torch.autograd.grad(c.sum(), a, create_graph=True)
    (slope.square().sum() + c.sum()).backward()
    return [slope.detach(), *parameters(model)]


def written(model: nn.Module, found: Sequence[Tensor]) -> list[Tensor | None]:
    _, _, c, d = found
    c.mul_(2)
    (c.sum() + d.sum()).backward()
    return parameters(model)


USES: list[Use] = [
    *(loss_of_all, kept, only_the_first_kept, hooked, hooked_and_dropped, asked_for, for_some_alone, twice, penalty),
    written,
]


def outputs_of(run: Any, x: Tensor) -> list[Tensor]:
    c, a, d, more, e = run(x)
    assert not e.requires_grad
    return [a, more["b"], c, d]


def optimized(device: str = "cpu") -> tuple[nn.Module, nn.Module, OptimizedModule]:
    plain = Chain().to(device).double()
    model = copy.deepcopy(plain)
    return plain, model, autostream.optimize(model, policy="sequential")


def assert_seen_alike(use: Use, device: str) -> None:
    plain, model, fast = optimized(device)
    for number in range(2):
        x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number)).to(device)
        results = []
        for own, run in ((plain, plain), (model, fast)):
            own.zero_grad()
            results.append(use(own, outputs_of(run, x)))
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(model.state_dict(), plain.state_dict())
    assert {report.mode for report in fast.reports} == {"forward and backward"}


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_who_looks_sees_eagers_gradients(use: Use) -> None:
    assert_seen_alike(use, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_so_it_is_with_captured_graphs(use: Use) -> None:
    assert_seen_alike(use, "cuda")


def test_a_weight_that_the_call_writes_has_a_gradient_all_the_same() -> None:
    class Clamping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-2, 2, 4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            first = (x * self.weight).exp()
            return first, first.square().sin()

    plain, model = Clamping().double(), Clamping().double()
    fast = autostream.optimize(model, policy="sequential")
    results = []
    for own, run in ((plain, plain), (model, fast)):
        first, second = run(torch.ones(3, 4).double())
        first.retain_grad()
        second.sum().backward()
        results.append([first.grad, own.weight.grad])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
    assert fast.reports[0].mode == "forward and backward"


def test_where_nobody_looks_nothing_is_computed_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[Any] = []
    monkeypatch.setattr(Differentiated, "again", lambda self, run: again.append(run))
    _, model, fast = optimized()
    loss_of_all(model, outputs_of(fast, torch.ones(5, 4).double()))
    assert not again


def test_where_a_version_does_not_tell_who_looks_somebody_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.torch._C, "_will_engine_execute_node", None)
    plain, model, fast = optimized()
    x = torch.ones(5, 4).double()
    torch.testing.assert_close(loss_of_all(model, outputs_of(fast, x)), loss_of_all(plain, outputs_of(plain, x)))


def test_nothing_of_a_call_stays_when_its_outputs_go() -> None:
    """Neither with a backward nor without one, and without a collection of garbage."""
    _, model, fast = optimized()
    x = torch.ones(5, 4).double()
    loss_of_all(model, outputs_of(fast, x))
    gc.collect()
    gc.disable()
    try:
        for backward in (True, False):
            found = outputs_of(fast, x)
            storages = [weakref.ref(own.untyped_storage()) for own in found]
            nodes = [weakref.ref(own.grad_fn) for own in found]
            if backward:
                found[2].sum().backward()
            del found
            assert not any(own() for own in (*storages, *nodes))
    finally:
        gc.enable()


def test_outputs_are_let_go_after_a_backward_where_losses_are_kept() -> None:
    _, _, fast = optimized()
    found = outputs_of(fast, torch.ones(5, 4).double())
    loss = found[2].sum()
    storages = [weakref.ref(own.untyped_storage()) for own in found[:3]]
    loss.backward()
    del found
    assert not any(own() for own in storages)
    assert loss.grad_fn is not None


def test_an_output_says_where_it_may_be_too_late() -> None:
    _, model, fast = optimized()
    a, _, c, _ = outputs_of(fast, torch.ones(5, 4).double())
    a.retain_grad()
    with torch.no_grad():
        model.other.bias.add_(1)
    with pytest.raises(RuntimeError, match="outputs that others are computed from"):
        c.sum().backward()


def test_what_comes_by_way_of_a_later_one_is_not_counted_twice() -> None:
    """Of four, each is computed from all before it.

    a ── *3 ──▶ b ── squared ──▶ c ── * a * b ──▶ d
    """
    a = torch.tensor(2.0, requires_grad=True)
    b = a * 3
    c = b * b
    d = a * b * c
    with torch.no_grad():
        found = shares(d, [a, b, c], torch.tensor(1.0))
    assert [float(own) for own in found] == [6 * 36, 2 * 36, 2 * 6]
    assert linked_in([(), (0,), (0, 1), ()]) == {0, 1, 2}
