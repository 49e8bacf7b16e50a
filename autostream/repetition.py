"""A call computed once more by the model itself: it draws the same numbers, and writes to copies of what it found.

    call ──▶ outputs ┄┄▶ a backward that autograd records ──▶ the model, once more ──▶ gradients with a graph
      └── before: states of generators, copies ──────────────────┘

What every call has to keep is little: a generator's state is a few bytes, and of what a model writes only that is
copied which its results depend on. They do not on the running statistics of a batch norm that trains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from autostream.analysis.effects import effects_of
from autostream.analysis.values import tensors_in, value_of
from autostream.ir import Program, Role
from autostream.storages import storage_of


@dataclass(frozen=True, slots=True)
class Before:
    """What a call found.

    Attributes:
        generators: those that it draws from, and their states then.
        copies: of values that it writes, by position, those that its results depend on.
    """

    generators: tuple[tuple[torch.Generator, Tensor], ...]
    copies: Mapping[int, Tensor]


class Repetition:
    """What has to be kept of each call of a program, and how the model repeats one.

    Args:
        model: the model that the program was traced from, its modules in the modes that it was traced in.
        program: its forward.
        names: of the values that a call takes, as far as they are the model's state; its inputs come after these.

    Attributes:
        written: positions of the values that a call writes.
    """

    def __init__(self, model: nn.Module, program: Program, names: Sequence[str]) -> None:
        graph = program.module.graph
        state = {name: at for at, name in enumerate(names)}
        placeholders = zip(graph.find_nodes(op="placeholder"), program.placeholders, strict=True)
        places = {
            len(state) + int(p.target) if p.role is Role.INPUT else state[p.target]: storage_of(value_of(node))
            for node, p in placeholders
        }
        written, mattering = _written(graph), _mattering(graph)
        self.written = [at for at, storage in places.items() if storage in written]
        self._kept = [at for at in self.written if places[at] in mattering]
        self._generators = list(dict.fromkeys(generator for node in graph.nodes for generator in _drawn_from(node)))
        self._modes = [(module, module.training) for module in model.modules()]

    def before(self, values: Sequence[Tensor]) -> Before:
        """What a call that comes now will have found."""
        return Before(
            generators=tuple((generator, generator.get_state()) for generator in self._generators),
            copies=_copies(values, self._kept),
        )

    def values(self, now: Sequence[Tensor], before: Before, trained: Collection[int]) -> list[Tensor]:
        """What the model may take, and write to, once more; autograd leads from it to the values that there are now.

        Args:
            now: these values.
            before: what the call found.
            trained: positions of those that required gradients then, whatever they do now.
        """
        copies = {**_copies(now, self.written), **before.copies}
        found = []
        for at, value in enumerate(now):
            own = value if value.requires_grad and at in trained else value.detach().requires_grad_(at in trained)
            found.append(_StandIn.apply(own, copies[at]) if at in copies else own.view_as(own))  # type: ignore[no-untyped-call]
        return found

    @contextmanager
    def as_then(self, before: Before) -> Iterator[None]:
        """Generators and modes as the call found them; afterwards they are as they are now."""
        now = [(generator, generator.get_state()) for generator, _ in before.generators]
        modes = [(module, module.training) for module, _ in self._modes]
        try:
            _put(before.generators, self._modes)
            yield
        finally:
            _put(now, modes)


def _put(generators: Iterable[tuple[torch.Generator, Tensor]], modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for generator, state in generators:
        generator.set_state(state)
    for module, training in modes:
        if module.training != training:
            module.training = training


class _StandIn(torch.autograd.Function):
    """Another tensor in the place of a value: gradients go to the value."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> Tensor:
        return other.data  # nobody's view: the model may write to it

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _copies(values: Sequence[Tensor], positions: Sequence[int]) -> dict[int, Tensor]:
    """Copies of some values, which share memory where these do."""
    owners = {storage_of(values[at]): values[at] for at in positions}
    memory = {storage: owner.untyped_storage().clone() for storage, owner in owners.items()}  # type: ignore[no-untyped-call]
    copies = {}
    for at in positions:
        own = values[at]
        copy = torch.empty(0, dtype=own.dtype, device=own.device)
        copies[at] = copy.set_(memory[storage_of(own)], own.storage_offset(), own.size(), own.stride())
    return copies


def _written(graph: fx.Graph) -> set[Hashable]:
    return {storage for node in graph.nodes for storage in _storages(effects_of(node).writes)}


def _mattering(graph: fx.Graph) -> frozenset[Hashable]:
    """The storages that hold, at first, what the graph's results depend on."""
    sources = defaultdict[Hashable, frozenset[Hashable]](frozenset)
    for node in graph.find_nodes(op="placeholder"):
        sources.update((storage, frozenset([storage])) for storage in _storages([node]))
    for node in graph.nodes:
        effects = effects_of(node)
        read = _holders(own for own in effects.reads if own not in effects.renews)
        taken = frozenset[Hashable]().union(*(sources[holder] for holder in read))
        for holder in _holders([node, *effects.writes]):
            sources[holder] |= taken
    return frozenset[Hashable]().union(*(sources[holder] for holder in _holders(graph.output_node().all_input_nodes)))


def _holders(nodes: Iterable[fx.Node]) -> list[Hashable]:
    """Where values are: tensors in their storages; a number that was asked of one is nowhere but in its node."""
    return [holder for node in nodes for holder in _storages([node]) or [node]]


def _storages(nodes: Iterable[fx.Node]) -> list[Hashable]:
    return [storage_of(tensor) for node in nodes for tensor in tensors_in(node.meta.get("val"))]


def _drawn_from(node: fx.Node) -> list[torch.Generator]:
    """The generators that an op draws from."""
    if "rng" not in effects_of(node).orders:
        return []
    return [_generator(tensor.device) for tensor in tensors_in(node.meta.get("val"))]


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
