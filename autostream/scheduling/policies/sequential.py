"""The baseline: every op on the caller's stream, in program order."""

from __future__ import annotations

from autostream.ir import Assignment, Costs, Decision, DeviceProfile, OpGraph, Schedule
from autostream.scheduling.synchronize import synchronize


def sequential(
    graph: OpGraph, costs: Costs, profile: DeviceProfile, streams: int, pinned: frozenset[str]
) -> Assignment:
    """Every op on stream 0, in program order; ``costs``, ``profile``, ``streams`` and ``pinned`` are ignored.

    Example:
        >>> from autostream.ir import Op
        >>> graph = OpGraph({"a": Op("a", "f", ("a",), frozenset(), frozenset({"a"}))}, (), {}, (), "cpu")
        >>> sequential(graph, {}, None, 4, frozenset()).stream
        {'a': 0}
    """
    return _in_program_order(graph)


def one_stream(graph: OpGraph) -> Schedule:
    """The baseline's schedule, without releases.

    Example:
        >>> from autostream.ir import Op
        >>> one_stream(OpGraph({"a": Op("a", "f", ("a",), frozenset(), frozenset({"a"}))}, (), {}, (), "cpu")).launches
        (Launch(op='a', stream=0, waits=(), releases=()),)
    """
    return synchronize(graph, _in_program_order(graph))


def _in_program_order(graph: OpGraph) -> Assignment:
    reason = "program order on the caller's stream: nothing to wait for, and memory is reused at once"
    return Assignment(
        policy="sequential",
        streams=1,
        order=tuple(graph.ops),
        stream=dict.fromkeys(graph.ops, 0),
        decisions=(Decision("", "1 stream", reason),),
    )
