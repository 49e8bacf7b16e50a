"""All-reduces of several tensors, in buckets.

    tensors ──▶ buckets ──▶ one tensor each ──▶ all_reduce_ ──▶ wait_tensor ──▶ views: the results

The last tensors come first, as gradients do. Buckets of an eager step are those of ``DistributedDataParallel``, but the
last one is small, as nothing is left to hide it. A traced graph has one op for all tensors, until
``tuning/best_buckets.py`` knows which are ready together. No tensor is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

Bucket = tuple[int, ...]
"""The positions of tensors of one dtype and device that are reduced together."""


class Sizes(NamedTuple):
    """How large buckets of one dtype and device are, if nothing is known of when their tensors are ready.

    Attributes:
        first: bytes that fill the first bucket: a small one begins early.
        middle: bytes that fill others.
        last: how many bytes, at least, the last tensors have that are a bucket of their own: a small one ends soon.
    """

    first: float
    middle: float
    last: float


_MIB = 1 << 20

USUAL = Sizes(_MIB, 25 * _MIB, _MIB / 4)
"""The first two are those of ``DistributedDataParallel``. With 1 MiB at last, 31 of the 36 µs in which sums run alone,
in ResNet-50 over two H200s, are that bucket's (the simulator says 37). With a quarter it says 26, with 16 KiB 103."""

_LIBRARY = torch.library.Library("autostream", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "all_reduces(Tensor[] tensors, Tensor[] like, str reduction, float scale, str group) -> Tensor[]"
)
"""Stands for :func:`all_reduced` in a graph; it is never run."""


def _empty(tensors: Sequence[Tensor], like: Sequence[Tensor], *_: object) -> list[Tensor]:
    pairs = zip(tensors, like, strict=True)
    return [_like(tensor.new_empty(tensor.numel()), other) for tensor, other in pairs]


torch.library.register_fake("autostream::all_reduces", _empty)

ALL_REDUCES = torch.ops.autostream.all_reduces.default

ALIGNMENT = 16
"""Bytes. cuBLAS has slower kernels for results at addresses that are no multiples of it."""


def all_reduced(
    tensors: Sequence[Tensor],
    like: Sequence[Tensor],
    reduction: str,
    scale: float,
    group: str,
    filled: Sequence[Bucket] = (),
) -> list[Tensor]:
    """The reductions of tensors over a process group, in new memory.

    Args:
        tensors: of this process.
        like: for each, a tensor as which the result is laid out.
        reduction: of the group's backend, such as ``"sum"``.
        scale: what a term is multiplied by before.
        group: its name.
        filled: the buckets; by default, those of the usual sizes.
    """
    started = []
    for positions in filled or buckets(like):
        # Those of odd sizes come last, so that all others are aligned.
        bucket = sorted(positions, key=lambda at: tensors[at].nbytes % ALIGNMENT != 0)
        whole = torch.cat([_flat(tensors[at], like[at]) for at in bucket])
        if scale != 1.0:
            whole.mul_(scale)
        started.append((bucket, torch.ops._c10d_functional.all_reduce_(whole, reduction, group)))
    found: dict[int, Tensor] = {}
    for bucket, whole in started:
        parts = torch.ops._c10d_functional.wait_tensor(whole).split([like[at].numel() for at in bucket])
        found |= {at: _like(part, like[at]) for at, part in zip(bucket, parts, strict=True)}
    return [found[at] for at in range(len(tensors))]


def buckets(tensors: Sequence[Tensor], sizes: Sizes = USUAL) -> list[Bucket]:
    """Buckets by size, the last tensors first.

    Args:
        tensors: gradients in the order in which a forward uses their parameters, as a rule.
        sizes: of the buckets.

    Example:
        >>> small, large = torch.empty(8), torch.empty(1 << 20)
        >>> buckets([small, large, small, small.double(), small])
        [(3,), (4, 2, 1), (0,)]
        >>> buckets([small, large, large, large, large, small])
        [(5, 4), (3, 2), (1, 0)]
        >>> buckets([small, large, large, large, large, small], Sizes(1, 4 << 20, 1))
        [(5,), (4,), (3,), (2,), (1,), (0,)]
    """
    kinds = [(tensor.dtype, tensor.device) for tensor in tensors]
    counts = [tensor.numel() * tensor.itemsize for tensor in tensors]
    last: dict[Any, int] = {}  # of the tensors that fill the last bucket, by kind
    before = dict.fromkeys(kinds, 0)
    for at, kind in enumerate(kinds):
        if before[kind] < sizes.last:
            last[kind] = at
        before[kind] += counts[at]
    done: list[list[int]] = []
    filling: dict[Any, list[int]] = {kind: [] for kind in kinds}
    filled = dict.fromkeys(kinds, 0)
    limits = dict.fromkeys(kinds, sizes.first)
    for at in reversed(range(len(tensors))):
        kind = kinds[at]
        ends = at == last.get(kind)
        if filled[kind] >= (sizes.last if ends else limits[kind]):
            done.append(filling[kind])
            filling[kind], filled[kind], limits[kind] = [], 0, inf if ends else sizes.middle
        filling[kind].append(at)
        filled[kind] += counts[at]
    done += [bucket for bucket in filling.values() if bucket]
    return [tuple(each) for each in sorted(done, key=lambda each: -each[-1])]  # as they fill


def _dimensions(tensor: Tensor) -> list[int]:
    """The dimensions in the order in which they lie in memory, the longest stride first."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda at: -strides[at])


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements of a tensor in the order of the other's memory."""
    return tensor.permute(_dimensions(like)).reshape(-1)


def _like(flat: Tensor, like: Tensor) -> Tensor:
    """Elements in the order of a tensor's memory as a tensor of its shape."""
    order = _dimensions(like)
    back = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([like.size(at) for at in order]).permute(back)
