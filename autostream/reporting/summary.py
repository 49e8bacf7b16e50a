"""What every face of a report says about its graph: how much work there is, how much of it in line, how wide it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autostream.ir import Candidate, Costs, DeviceProfile, OpGraph, Schedule
from autostream.scheduling import structure
from autostream.scheduling.losses import Chain, longest_chain, with_gaps

if TYPE_CHECKING:
    from autostream.reporting.report import Report


@dataclass(frozen=True, slots=True)
class Summary:
    """Numbers that follow from a graph and its costs on a device, whatever the schedule.

    Attributes:
        work_us: duration of all ops one after the other, µs.
        critical_path: the longest chain of ops, with the gaps between them: no schedule is shorter.
        sm_us: what the work would take if every op kept all multiprocessors busy, µs.
        bandwidth_us: the same for the memory bandwidth, µs.
        width: the most ops that are independent of one another.
        regions: stretches whose branches are independent.
        slack_us: op name to how much later it could start without lengthening the critical path, µs.
    """

    work_us: float
    critical_path: Chain
    sm_us: float
    bandwidth_us: float
    width: int
    regions: tuple[structure.Region, ...]
    slack_us: Mapping[str, float]


def summarize(graph: OpGraph, costs: Costs, profile: DeviceProfile) -> Summary:
    """Sum up a graph whose ops are all priced.

    Example:
        >>> from autostream.ir import Op, OpCost
        >>> ops = {n: Op(n, "aten.relu.default", (n,), frozenset(), frozenset({n})) for n in ("a", "b")}
        >>> costs = {n: OpCost(3.0, sm_share=0.5, bandwidth_share=0.1, source="roofline") for n in ops}
        >>> gpu = DeviceProfile("GPU", 132, 4.8e6, {}, 2.0, 1.0, 2.0, 1.0, 1.0, "table")
        >>> summary = summarize(OpGraph(ops, (), {}, (), "cuda:0"), costs, gpu)
        >>> summary.work_us, summary.critical_path, summary.sm_us, summary.width
        (6.0, Chain(ops=('a',), work_us=3.0, us=3.0), 3.0, 2)
    """
    ours = [costs[name] for name in graph.ops]
    return Summary(
        work_us=sum(cost.duration_us for cost in ours),
        critical_path=longest_chain(graph, costs, profile),
        sm_us=sum(cost.duration_us * cost.sm_share for cost in ours),
        bandwidth_us=sum(cost.duration_us * cost.bandwidth_share for cost in ours),
        width=structure.width(graph),
        regions=structure.regions(graph),
        # Sums in another order differ in the last digit, which must not print as -0.0.
        slack_us={name: max(us, 0.0) for name, us in structure.slack(graph, with_gaps(costs, profile)).items()},
    )


def summary_of(report: Report) -> Summary | None:
    """The summary of a report's graph; ``None`` where it was refused before it was priced."""
    graph, costs, profile = report.graph, report.costs, report.profile
    if graph is None or profile is None or not graph.ops.keys() <= costs.keys():
        return None
    return summarize(graph, costs, profile)


def baselines(report: Report) -> tuple[Candidate, ...]:
    """The sequential candidates that the chosen one is compared with: as captured as itself first."""
    chosen = report.chosen
    if chosen is None:
        return ()
    others = [c for c in report.candidates if c.schedule.policy == "sequential" and c != chosen]
    return tuple(sorted(others, key=lambda c: c.captured != chosen.captured))


def gain(chosen: Candidate, other: Candidate) -> float:
    """How many times faster than the other: by the device's clock where both were measured, else by the simulator."""
    if chosen.measured_us is not None and other.measured_us is not None:
        return other.measured_us / chosen.measured_us
    return other.predicted_us / chosen.predicted_us if chosen.predicted_us > 0 else 1.0


def named(schedule: Schedule) -> str:
    """A schedule in a few words.

    Example:
        >>> named(Schedule("sequential", 1, ()))
        'sequential on 1 stream'
    """
    return f"{schedule.policy} {'on 1 stream' if schedule.streams == 1 else f'over {schedule.streams} streams'}"
