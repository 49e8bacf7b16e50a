"""The result of each stage as text: ``autostream inspect --before-after``.

traced ──analyze──▶ ops and hazards ──price──▶ costs ──assign, synchronize──▶ launches ──lower──▶ what runs
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autostream.ir import JOIN, OpGraph, Schedule
from autostream.reporting.tables import count, few, line, table

if TYPE_CHECKING:
    from autostream.reporting.report import Report

_MOST = 8
"""Names in one cell of a table."""


def render(report: Report, traced: str, lowered: str) -> str:
    """The result of each stage.

    Args:
        report: of one planned signature.
        traced: the code of the program that was traced.
        lowered: the code of the graph that runs.
    """
    assert report.graph is not None
    assert report.chosen is not None
    schedule = report.chosen.schedule
    return "\n\n".join(
        [
            f"After trace: {line(report.model)} as a flat graph\n{traced.strip()}",
            _analyzed(report.graph),
            _priced(report, report.graph),
            _scheduled(schedule),
            f"After lower: what runs\n{lowered.strip()}",
        ]
    )


def _analyzed(graph: OpGraph) -> str:
    nodes = sum(len(op.nodes) for op in graph.ops.values())
    title = f"After analyze: {count(len(graph.ops), 'op')} of {count(nodes, 'node')}, and what each must come after"
    before = _before(graph)
    rows = [
        [line(op.name), few(op.nodes[1:], _MOST), _names(op.reads), _names(op.writes), few(before[op.name], _MOST)]
        for op in graph.ops.values()
    ]
    return table(title, ("op", "with", "reads", "writes", "comes after"), rows)


def _before(graph: OpGraph) -> dict[str, list[str]]:
    """What each op depends on, with the kind of hazard if it is not RAW."""
    kinds: dict[str, dict[str, dict[str, None]]] = {name: {} for name in graph.ops}
    for each in graph.dependencies:
        kinds[each.after].setdefault(each.before, {})[each.hazard.name] = None
    return {
        name: [other if [*of] == ["RAW"] else f"{other} ({', '.join(of)})" for other, of in others.items()]
        for name, others in kinds.items()
    }


def _priced(report: Report, graph: OpGraph) -> str:
    costs = [report.costs[name] for name in graph.ops]
    rows = [
        [line(name), f"{cost.duration_us:,.1f}", f"{cost.sm_share:.0%}", f"{cost.bandwidth_share:.0%}", cost.source]
        for name, cost in zip(graph.ops, costs, strict=True)
    ]
    head = ("op", "µs", "SMs", "bandwidth", "by")
    return table("After price: what each op takes alone", head, rows, right="µs SMs bandwidth")


def _scheduled(schedule: Schedule) -> str:
    title = (
        f"After assign and synchronize: {count(schedule.streams, 'stream')} ({schedule.policy}), "
        f"{count(schedule.wait_count, 'wait')}, in the order of launches"
    )
    return table(title, ("stream", "waits for", "op", "lets go of"), [*_launches(schedule)], right="stream")


def _launches(schedule: Schedule) -> Iterator[list[str]]:
    for launch in schedule.launches:
        yield [str(launch.stream), few(launch.waits, _MOST), line(launch.op), few(launch.releases, _MOST)]
    if schedule.join_waits:
        yield ["0", few(schedule.join_waits, _MOST), JOIN, ""]


def _names(storages: frozenset[str]) -> str:
    return few(sorted(storages), _MOST)
