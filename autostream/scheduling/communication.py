"""Collectives and their stream, which no other op is on.

    stream 0   ─ backward ─ backward ─ backward ─ wait ─ update ─
    stream 1        └─ all-reduce ─ all-reduce ─────┘

A collective begins as soon as its inputs are there and those before it are over, and delays nothing but those who need
its result. (NCCL runs its kernels on a stream of its own anyway; the stream that issues one is joined to that.)
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from autostream.ir import OpGraph, Timeline


def collectives(graph: OpGraph, streams: int, pinned: Set[str]) -> frozenset[str]:
    """The ops that get a stream of their own: collectives, if there is more than one stream."""
    return graph.collectives - pinned if streams > 1 else frozenset()


def set_apart(stream: Mapping[str, int], communicating: Set[str]) -> dict[str, int]:
    """The streams of ops, numbered without gaps, with these ops on the next one after all others.

    Example:
        >>> set_apart({"a": 0, "reduce": 0, "b": 2}, {"reduce"})
        {'a': 0, 'reduce': 2, 'b': 1}
    """
    used = sorted({0, *(at for name, at in stream.items() if name not in communicating)})
    number = {at: place for place, at in enumerate(used)}
    return {name: len(used) if name in communicating else number[at] for name, at in stream.items()}


def exposed_us(timeline: Timeline, graph: OpGraph) -> float:
    """How long collectives run and nothing else does, µs: what hiding them better could save.

    Example:
        The reduction runs from 1 to 5, and beside it from 0 to 3 a product:

        >>> from autostream.ir import Op, Slice
        >>> none = frozenset()
        >>> ops = {name: Op(name, "f", (name,), none, none, group=group) for name, group in (("mm", ""), ("sum", "0"))}
        >>> timeline = Timeline((Slice("mm", 0, 0.0, 3.0), Slice("sum", 1, 1.0, 5.0)))
        >>> exposed_us(timeline, OpGraph(ops, (), {}, (), "cuda:0"))
        2.0
    """
    exposed = covered_to = 0.0
    computing = sorted((s.start_us, s.end_us) for s in timeline.slices if s.op not in graph.collectives)
    communicating = sorted((s.start_us, s.end_us) for s in timeline.slices if s.op in graph.collectives)
    for start, end in communicating:
        at = max(start, covered_to)
        for begin, over in computing:
            if over > at and begin < end:
                exposed += max(0.0, begin - at)
                at = over
        exposed += max(0.0, end - at)
        covered_to = max(covered_to, end)
    return exposed
