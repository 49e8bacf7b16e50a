"""Random programs of kernels in which every scheduling error changes the result.

Kernels compute in integers modulo 2**64, so nothing is lost by rounding: their results depend on each byte that they
read. Each fills its outputs with -1 before it reads, so that tensors that wrongly share memory are noticed. Each result
is read, directly or indirectly, by the program's result, or stays in a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, fx

from autostream.ir import Role
from tests.runtime.programs import Case, Kernels

SIZES = (8, 64, 72, 136)
"""Elements of 8 bytes: some storages need more than one unit of an arena, and each uses 64 bytes of its last one."""

ROWS, WIDTH, PARTS = 4, 2, 3
"""A matrix of so many parts fits into one unit: a storage that overlaps one part overlaps all."""

_GENERATOR = torch.Generator().manual_seed(0)
_ODD = torch.randint(1 << 62, (max(SIZES),), generator=_GENERATOR) * 2 + 1


def random_kernels(seed: int, most_ops: int = 14) -> Case:
    """A program of 3 to ``most_ops`` kernels, or a few more if the last move adds several."""
    return _Player(Random(seed)).play(most_ops)


@dataclass(frozen=True)
class _Value:
    """An argument of a kernel: a storage, or one part of a matrix."""

    storage: fx.Node
    part: int | None = None


class _Player:
    """Chooses random kernels, and keeps track of results that no kernel has read yet."""

    def __init__(self, choose: Random) -> None:
        self._choose = choose
        generator = torch.Generator().manual_seed(choose.randrange(1 << 30))
        inputs = {name: torch.randint(1 << 62, (SIZES[0],), generator=generator) for name in ("x", "y", "m", "n")}
        self._kernels = Kernels(inputs)
        self._known = [_Value(node) for node in self._kernels.arguments]
        self._buffers = self._known[2:]
        self._writable = [*self._buffers]
        self._unread: dict[_Value, None] = {}
        self._launched = 0

    def play(self, most_ops: int) -> Case:
        moves = [self._compute] * 6 + [self._update] * 2 + [self._overwrite, self._overwrite_twice, self._fill]
        most = self._choose.randint(2, most_ops - 1)
        while self._launched < most:
            self._choose.choice(moves)()
        result = self._kernels.taken(SIZES[0])
        last = [value for value in self._unread if value.storage not in self._kernels.arguments]
        self._launch(last or self._choose_sources(), _Value(result))
        return self._kernels.case(result, Role.INPUT, Role.INPUT, Role.BUFFER, Role.BUFFER)

    def _compute(self) -> None:
        """Compute a new storage."""
        sources = self._choose_sources()
        self._made(_Value(self._kernels.taken(self._choose.choice(SIZES))), sources)

    def _update(self) -> None:
        """Update a storage in place."""
        target = self._choose.choice(self._writable)
        self._launch(self._choose_sources(target), target, reads_too=True)

    def _overwrite(self) -> None:
        """Overwrite a buffer whose values have been read.

        Not a storage in an arena: it would have two lifetimes, and other storages could use its bytes in between.
        """
        target = self._choose.choice(self._buffers)
        sources = self._choose_sources(target)
        if target not in self._unread:
            self._launch(sources, target)

    def _overwrite_twice(self) -> None:
        """Overwrite a buffer twice without a read in between; the first values are in a new storage as well."""
        target = self._choose.choice(self._buffers)
        sources = self._choose_sources(target)
        if target not in self._unread:
            value = _Value(self._kernels.taken(SIZES[0]))
            self._launch(sources, target, value)
            self._keep(value)
            self._launch(self._choose_sources(target), target)

    def _fill(self) -> None:
        """Compute a matrix, part by part."""
        matrix = self._kernels.taken(ROWS, PARTS * WIDTH)
        for part in self._choose.sample(range(PARTS), PARTS):
            self._made(_Value(matrix, part), self._choose_sources())
        self._known.append(_Value(matrix))

    def _choose_sources(self, target: _Value | None = None) -> Sequence[_Value]:
        """One to three random values to read, none of them in the storage that is written."""
        others = [value for value in self._known if target is None or value.storage is not target.storage]
        return self._choose.sample(others, self._choose.randint(1, min(3, len(others))))

    def _made(self, value: _Value, sources: Sequence[_Value]) -> None:
        self._launch(sources, value)
        self._keep(value)

    def _keep(self, value: _Value) -> None:
        self._known.append(value)
        self._writable.append(value)

    def _launch(self, sources: Sequence[_Value], *targets: _Value, reads_too: bool = False) -> None:
        arguments = [self._node(value) for value in (*sources, *targets)]
        kernel = _kernel(self._launched, len(sources), reads_too)
        self._kernels.launch(f"kernel{self._launched}", kernel, *arguments, reads_too=reads_too, written=len(targets))
        self._launched += 1
        for cell in (cell for source in sources for cell in self._cells(source)):
            self._unread.pop(cell, None)
        self._unread |= dict.fromkeys(targets)

    def _node(self, value: _Value) -> fx.Node:
        if value.part is None:
            return value.storage
        return self._kernels.columns(value.storage, value.part * WIDTH, (value.part + 1) * WIDTH)

    def _cells(self, value: _Value) -> Sequence[_Value]:
        """The unread parts of a matrix, or the unread storage."""
        return [known for known in self._unread if known.storage is value.storage and value.part in (None, known.part)]


def _kernel(number: int, sources: int, reads_too: bool) -> Callable[..., object]:
    """A kernel that writes a fingerprint of its inputs, different for each number."""

    def launch(*tensors: Tensor) -> None:
        read, written = tensors[:sources], tensors[sources:]
        values = [out * (2 * number + 3) if reads_too else number for out in written]
        for out in written:
            out.fill_(-1)
        total = sum((at + 2 * number + 1) * _fingerprint(source) for at, source in enumerate(read))
        for out, old in zip(written, values, strict=True):
            out.copy_(total * _ODD[: out.numel()].view(out.shape) + old)

    return launch


def _fingerprint(tensor: Tensor) -> Tensor:
    return (tensor.flatten() * _ODD[: tensor.numel()]).sum()
