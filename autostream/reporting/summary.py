"""Numbers of a graph, independent of the schedule: work, critical path, width and slack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autostream.ir import Candidate, Costs, DeviceProfile, OpGraph, Schedule
from autostream.scheduling import structure
from autostream.scheduling.lost_time import Chain, longest_chain, with_gaps

if TYPE_CHECKING:
    from autostream.reporting.report import Report


@dataclass(frozen=True, slots=True)
class Summary:
    """Numbers of a graph and its costs on a device, independent of the schedule.

    Attributes:
        work_us: sum of the ops' durations, µs.
        critical_path: the longest chain of ops, with the gaps between them: no schedule is shorter.
        sm_us: time of the work if every op kept all multiprocessors busy, µs.
        bandwidth_us: the same for the memory bandwidth, µs.
        width: the largest number of mutually independent ops.
        regions: subgraphs with independent branches.
        slack_us: op name to how much later it could start without a longer critical path, µs.
    """

    work_us: float
    critical_path: Chain
    sm_us: float
    bandwidth_us: float
    width: int
    regions: tuple[structure.Region, ...]
    slack_us: Mapping[str, float]


def summarize(graph: OpGraph, costs: Costs, profile: DeviceProfile) -> Summary:
    """Summarize a graph whose ops are all priced.

    Example:
        >>> from autostream.ir import Op, OpCost
        >>> ops = {n: Op(n, "aten.relu.default", (n,), frozenset(), frozenset({n})) for n in ("a", "b")}
        >>> costs = {n: OpCost(3.0, sm_share=0.5, bandwidth_share=0.1, source="roofline") for n in ops}
        >>> gpu = DeviceProfile("GPU", 132, 4.8e6, {}, 2.0, 1.0, 2.0, 1.0, 1.0, "table")
        >>> summary = summarize(OpGraph(ops, (), {}, (), "cuda:0"), costs, gpu)
        >>> summary.work_us, summary.critical_path, summary.sm_us, summary.width
        (6.0, Chain(ops=('a',), work_us=3.0, us=3.0), 3.0, 2)
    """
    op_costs = [costs[name] for name in graph.ops]
    return Summary(
        work_us=sum(cost.duration_us for cost in op_costs),
        critical_path=longest_chain(graph, costs, profile),
        sm_us=sum(cost.duration_us * cost.sm_share for cost in op_costs),
        bandwidth_us=sum(cost.duration_us * cost.bandwidth_share for cost in op_costs),
        width=structure.width(graph),
        regions=structure.regions(graph),
        # Rounding may leave a slack just below 0, which would print as -0.0.
        slack_us={name: max(us, 0.0) for name, us in structure.slack(graph, with_gaps(costs, profile)).items()},
    )


def summary_of(report: Report) -> Summary | None:
    """The summary of a report's graph; ``None`` where it was refused before it was priced."""
    graph, costs, profile = report.graph, report.costs, report.profile
    if graph is None or profile is None or not graph.ops.keys() <= costs.keys():
        return None
    return summarize(graph, costs, profile)


def baselines(report: Report) -> tuple[Candidate, ...]:
    """The sequential candidates that the chosen one is compared with; first the one that is captured if it is."""
    chosen = report.chosen
    if chosen is None:
        return ()
    others = [c for c in report.candidates if c.schedule.policy == "sequential" and c != chosen]
    return tuple(sorted(others, key=lambda c: c.captured != chosen.captured))


def gain(chosen: Candidate, other: Candidate) -> float:
    """Speedup over the other candidate: measured where both were, else predicted."""
    if chosen.measured_us is not None and other.measured_us is not None:
        return other.measured_us / chosen.measured_us
    return other.predicted_us / chosen.predicted_us if chosen.predicted_us > 0 else 1.0


def named(schedule: Schedule) -> str:
    """A short name of a schedule.

    Example:
        >>> named(Schedule("sequential", 1, ()))
        'sequential on 1 stream'
    """
    return f"{schedule.policy} {'on 1 stream' if schedule.streams == 1 else f'over {schedule.streams} streams'}"
