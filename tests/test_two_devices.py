"""Training steps over two devices, on the CPU: float64 counts as the first device, float32 as the second."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.errors import TargetError
from autostream.ir import Role
from autostream.runtime.peer_copies import PeerCopies
from tests.cuts import let_be_placed_by_dtype
from tests.in_one_place import InOnePlace
from tests.semantics import same


class TwoStages(nn.Module):
    """Layers on two devices; the input of the first skips to the second."""

    def __init__(self, dropout: float = 0.0, skips: bool = False) -> None:
        super().__init__()
        self.skips = skips
        self.first = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Dropout(dropout))
        self.last = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
        self.first.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).float())
        return y + x.float() if self.skips else y


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def sgd(model: TwoStages) -> torch.optim.Optimizer:
    groups = [{"params": [*part.parameters()]} for part in (model.first, model.last)]  # a rate for each device
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 8, dtype=torch.float64, generator=generator)
    return x, torch.randn(16, 8, generator=generator)


def eager_step(model: TwoStages, optimizer: torch.optim.Optimizer, count: int) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for part in zip(x.chunk(count), y.chunk(count), strict=True):
            loss = loss_fn(model, *part) / count
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return step


@pytest.mark.parametrize(
    ("count", "kind"),
    [(1, {}), (2, {"dropout": 0.25}), (2, {"skips": True})],
    ids=["whole", "random", "skip"],
)
def test_microbatches_over_two_devices_train_as_in_eager(
    count: int, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_be_placed_by_dtype(monkeypatch)
    monkeypatch.setattr("autostream.dispatch.compiled_graph.CompiledGraph", InOnePlace)
    torch.manual_seed(0)
    model = TwoStages(**kind)
    twin = copy.deepcopy(model)
    ours = autostream.train_step(model, sgd(model), loss_fn, microbatches=count)
    theirs = eager_step(twin, sgd(twin), count)
    for seed in range(4):
        torch.manual_seed(seed)
        loss = ours(*batch(seed))
        torch.manual_seed(seed)
        torch.testing.assert_close(loss, theirs(*batch(seed)))
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, other)
    assert [report.mode for report in ours.reports] == ["sections"]


def test_a_step_that_is_written_out_accumulates_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    let_be_placed_by_dtype(monkeypatch)
    torch.manual_seed(0)
    model = TwoStages()
    twin = copy.deepcopy(model)
    optimizer = sgd(model)

    @autostream.step(optimizers=[optimizer])
    def ours(x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for part in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = loss_fn(model, *part) / 2
            loss.backward()
            losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    theirs = eager_step(twin, sgd(twin), 2)
    for seed in range(4):
        torch.testing.assert_close(ours(*batch(seed)), theirs(*batch(seed)))
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    assert [report.mode for report in ours.reports] == ["sections"]


def test_the_first_device_computes_the_next_microbatch_while_the_second_has_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F is a forward on the first device, L a loss on the second, b a backward on the first."""
    made = let_be_placed_by_dtype(monkeypatch)
    model = TwoStages()
    step = autostream.train_step(model, sgd(model), loss_fn, microbatches=4)
    for seed in range(2):
        step(*batch(seed))
    (sections,) = made
    letters = {("cuda:0", "gelu"): "f", ("cuda:1", "mse_loss"): "L", ("cuda:0", "gelu_backward"): "b"}
    nodes = [node for _, part in sections.module.named_children() for node in part.graph.nodes]
    ops = [
        sections.graph.ops[node.name]
        for node in nodes
        if node.op == "call_function" and node.name in sections.graph.ops
    ]
    order = "".join(letters.get((op.device, op.target.split(".")[1]), "") for op in ops)
    assert order == "ffLffLbLbLbb"  # a loss with its backward has as many ops as three forwards


def test_parts_read_all_but_the_batch_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations, what comes from the other device, sums of gradients, the optimizer's state: nothing is copied in."""
    let_be_placed_by_dtype(monkeypatch)
    copied: list[list[torch.Size]] = []

    class Counting(InOnePlace):
        def __init__(self, module: Any, names: Any, *args: Any, may_cut: bool = True, **kwargs: Any) -> None:
            super().__init__(module, names, *args, may_cut=may_cut, **kwargs)
            taken = zip(module.graph.find_nodes(op="placeholder"), names, strict=True)
            if not may_cut:  # a section
                copied.append([node.meta["val"].shape for node, (role, _) in taken if role is Role.INPUT])

    monkeypatch.setattr("autostream.dispatch.compiled_graph.CompiledGraph", Counting)
    model = TwoStages()
    step = autostream.train_step(model, sgd(model), loss_fn, microbatches=4)
    for seed in range(2):
        step(*batch(seed))
    assert len(copied) > 8
    assert {shape for section in copied for shape in section} == {torch.Size([16, 8])}


class LateCopies(PeerCopies):
    """Copies between devices that run when something waits for them: as late as streams may run them."""

    def copy(self, name: str, source: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
        if name in self._memory:
            self.__dict__.setdefault("late", {})[name] = source
            return self._memory[name]
        return super().copy(name, source, copy)

    def wait(self, names: Iterable[str]) -> None:
        late = self.__dict__.setdefault("late", {})
        for name in late.keys() & {*names}:
            self._memory[name].copy_(late.pop(name))


class OverwritesASkip(TwoStages):
    """Writes what it has sent to the second device."""

    def forward(self, x: Tensor) -> Tensor:
        here = self.first(x)
        skip = here.float()
        y: Tensor = self.last(self.first(nn.functional.relu_(here)).float()) + skip
        return y


class TurnsASkip(TwoStages):
    """Turns what another part has computed."""

    def forward(self, x: Tensor) -> Tensor:
        here = self.first(x)
        y = self.last(here.float())
        here.t_()
        return y.cos() + here.t().float().sin()


@pytest.mark.parametrize("kind", [OverwritesASkip, TurnsASkip])
def test_what_is_sent_is_what_it_was_then(kind: type[TwoStages], monkeypatch: pytest.MonkeyPatch) -> None:
    let_be_placed_by_dtype(monkeypatch)
    monkeypatch.setattr("autostream.dispatch.compiled_graph.CompiledGraph", InOnePlace)
    monkeypatch.setattr("autostream.dispatch.sections.PeerCopies", LateCopies)
    torch.manual_seed(0)
    model = kind()
    twin = copy.deepcopy(model)
    ours = autostream.train_step(model, sgd(model), loss_fn, microbatches=2)
    theirs = eager_step(twin, sgd(twin), 2)
    for seed in range(4):
        torch.testing.assert_close(ours(*batch(seed)), theirs(*batch(seed)))
    assert [report.mode for report in ours.reports] == ["sections"]


def test_a_batch_that_does_not_divide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    let_be_placed_by_dtype(monkeypatch)
    model = TwoStages()
    step = autostream.train_step(model, sgd(model), loss_fn, microbatches=3)
    with pytest.raises(TargetError, match="a batch of 16 has no 3 equal parts"):
        step(*batch(0))


def test_a_result_that_is_returned_stays_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one call computes for a later section, or copies to it, the next overwrites, unless it is returned."""
    let_be_placed_by_dtype(monkeypatch)
    monkeypatch.setattr("autostream.dispatch.compiled_graph.CompiledGraph", InOnePlace)
    model = nn.Linear(8, 8).double()
    fast = autostream.optimize(model_that_returns_a_copy := Returned(model))
    with torch.no_grad():
        first = fast(batch(0)[0])
        kept = [each.clone() for each in first]
        fast(batch(1)[0])
        same(first, tuple(kept))
        same(fast(batch(2)[0]), model_that_returns_a_copy(batch(2)[0]))


class Returned(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        here = self.layer(x).sin()
        there = here.float()
        return there, there.cos() + 1, here.view(-1), here.cos() + there.double()
