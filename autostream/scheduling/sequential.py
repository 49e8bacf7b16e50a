"""Everything on the caller's stream, in program order: the baseline that every other schedule has to beat."""

from __future__ import annotations

from autostream.ir import Assignment, Costs, Decision, DeviceProfile, OpGraph


def sequential(
    graph: OpGraph, costs: Costs, profile: DeviceProfile, streams: int, pinned: frozenset[str]
) -> Assignment:
    """Give every op stream 0, in program order, whatever ``costs``, ``profile``, ``streams`` and ``pinned`` are.

    Example:
        >>> from autostream.ir import Op
        >>> graph = OpGraph({"a": Op("a", "f", ("a",), frozenset(), frozenset({"a"}))}, (), {}, (), "cpu")
        >>> sequential(graph, {}, None, 4, frozenset()).stream
        {'a': 0}
    """
    reason = "program order on the caller's stream: nothing to wait for, and memory is reused at once"
    return Assignment(
        policy="sequential",
        streams=1,
        order=tuple(graph.ops),
        stream=dict.fromkeys(graph.ops, 0),
        decisions=(Decision("", "1 stream", reason),),
    )
