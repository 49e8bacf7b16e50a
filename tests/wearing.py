"""Models with a limited number of calls: after an extra run that is not undone, the last call fails."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.semantics import same

PLACES, WIDTH = 6, 16


class Ring(nn.Module):
    """A cache of keys, filled row by row; after the last row, the index is out of bounds.

    ::

        x ─┬─▶ key ─▶ index_copy_(cache, pos) ─▶ pos + 1 ─┐
           └─▶ query ─────────────────────────────────────┴─▶ attention
    """

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cache: Tensor
        self.pos: Tensor
        self.register_buffer("cache", torch.zeros(PLACES, WIDTH))
        self.register_buffer("pos", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.cache.index_copy_(0, self.pos, self.key(x).detach())
        self.pos.add_(1)
        return torch.softmax(self.query(x) @ self.cache.t(), -1) @ self.cache.clone()


class Counter(nn.Module):
    """A count of the calls, which looks up a row of a table.

    ::

        pos ─▶ table[pos] ─▶ pos + 1 ─┐
          x ─▶ linear ────────────────┴─▶ add
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(PLACES, WIDTH))
        self.pos: Tensor
        self.register_buffer("pos", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        row = self.table[self.pos.clone()]
        self.pos += 1
        return self.linear(x) + row


class Mask(nn.Module):
    """Each call clears the last element of a mask that is set; if none is, ``max`` fails.

    ::

        left ─▶ nonzero ─▶ max ─▶ left[max] = False ─┐
           x ─▶ linear ─────────────────────────────┴─▶ masked_fill
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, PLACES)
        self.left: Tensor
        self.register_buffer("left", torch.ones(PLACES, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        last = self.left.nonzero().max()
        self.left.index_fill_(0, last, False)
        return self.linear(x).masked_fill(self.left.clone(), 0.0)


WEARING: Mapping[str, Callable[[], nn.Module]] = {"ring": Ring, "counter": Counter, "mask": Mask}


class Given(nn.Module):
    """The ring, with cache and position as inputs, which a call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Tensor, pos: Tensor) -> Tensor:
        cache.index_copy_(0, pos, self.key(x))
        pos.add_(1)
        return cache.sum(0) + x


def worn(name: str, left: int, device: str = "cpu") -> nn.Module:
    """A model with so many calls left."""
    torch.manual_seed(0)
    model = WEARING[name]().to(device)
    with torch.no_grad():
        for at in range(PLACES - left):
            model(batch(at, device))
    return model


def batch(at: int, device: str = "cpu") -> Tensor:
    """The input of a call, the same in each process."""
    return torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(at)).to(device)


def check_calls(
    make: Callable[[nn.Module], Callable[[Tensor], Any]],
    model: nn.Module,
    left: int,
    plainly: Callable[[nn.Module], Callable[[Tensor], Any]] = lambda model: model,
    tolerance: float = 0.0,
) -> None:
    """Compare all calls that are left with the eager model's: outputs, and state afterwards."""
    device = next(model.parameters()).device.type
    other = copy.deepcopy(model)
    ours, theirs = make(model), plainly(other)
    for at in range(left):
        x = batch(PLACES + at, device)
        same(ours(x), theirs(x), tolerance)
        same(dict(model.state_dict()), dict(other.state_dict()), tolerance)


def check_given(
    make: Callable[[nn.Module], Callable[..., Tensor]], device: str = "cpu", tolerance: float = 0.0
) -> None:
    """The same for the last call of a model that writes its inputs."""
    torch.manual_seed(0)
    model = Given().to(device)
    ours, theirs = ((torch.zeros(PLACES, WIDTH).to(device), torch.tensor([PLACES - 1]).to(device)) for _ in range(2))
    same(make(model)(batch(0, device), *ours), model(batch(0, device), *theirs), tolerance)
    same(ours, theirs, tolerance)


def steps(model: nn.Module, step_of: Callable[..., Callable[..., Any]]) -> Callable[[Tensor], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return step_of(model, optimizer, lambda model, x: model(x).square().mean())


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    def step(*data: Tensor) -> Tensor:
        value = loss(model, *data)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step
