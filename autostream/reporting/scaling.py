"""A data-parallel step over many processes as text and JSON: its time, and how much of it is communication."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from autostream.reporting.tables import pairs, size, table, us


@dataclass(frozen=True, slots=True)
class Scaled:
    """A predicted step of one of many processes, over one interconnect.

    Attributes:
        interconnect: what the processes communicate over.
        collectives: how many a step has.
        step_us: time of the step, µs.
        range_us: the least and the largest, given the error of the estimates.
        communication_us: time of all collectives together, µs.
        exposed_us: how long collectives run and nothing else does, µs.
        efficiency: time of the step in one process, without collectives, by the time of this step.
        efficiency_range: the least and the largest, if collectives alone take longer or shorter by that error.
        streams: of the schedule.
        unbudgeted_us: time of the step by the fastest schedule if ``memory_budget`` allowed each, µs.
    """

    interconnect: str
    collectives: int
    step_us: float
    range_us: tuple[float, float]
    communication_us: float
    exposed_us: float
    efficiency: float
    efficiency_range: tuple[float, float]
    streams: int
    unbudgeted_us: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """A step as it would run in each of many processes.

    Attributes:
        step: its name.
        device: of each process.
        processes: how many.
        alone_us: time of the step in one process, without collectives, µs.
        message_bytes: of the collectives of a step together.
        error: the relative error of the estimates.
        runs: for each interconnect.
    """

    step: str
    device: str
    processes: int
    alone_us: float
    message_bytes: int
    error: float
    runs: Sequence[Scaled]


def render(scaling: Scaling) -> str:
    """The step, then a table with a row for each interconnect."""
    error = f"{scaling.error:.0%}"
    summary = [
        ("step", scaling.step),
        ("processes", f"{scaling.processes}, each with {scaling.device} and a batch like this one"),
        ("alone", f"{us(scaling.alone_us)}: one process, without collectives"),
        ("communicated", f"{size(scaling.message_bytes)} in the collectives of a step"),
        ("uncertain", f"times of steps if all estimates are off by {error}, efficiencies if collectives alone are"),
    ]
    rows = [
        (
            run.interconnect,
            us(run.step_us),
            f"{run.range_us[0]:,.1f} to {us(run.range_us[1])}",
            str(run.collectives),
            us(run.communication_us),
            us(run.exposed_us),
            f"{run.efficiency:.1%}",
            f"{run.efficiency_range[0]:.1%} to {run.efficiency_range[1]:.1%}",
            str(run.streams),
            us(run.unbudgeted_us) if run.unbudgeted_us < run.step_us else "–",
        )
        for run in scaling.runs
    ]
    head = (
        "interconnect",
        "step",
        "range",
        "collectives",
        "communication",
        "exposed",
        "efficiency",
        "its range",
        "streams",
        "beyond memory_budget",
    )
    right = "step range collectives communication exposed efficiency its streams beyond"
    return "\n\n".join([pairs(summary), table("A step, by what joins the processes", head, rows, right=right)])


def to_json(scaling: Scaling) -> str:
    """All of it, as JSON."""
    return json.dumps(asdict(scaling), indent=1, allow_nan=False)
