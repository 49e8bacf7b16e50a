"""Dry runs at scale: a training step in each of many processes, none of which is there.

step ──over one process────▶ trace ──▶ plan ──▶ time alone ─────────────╮
step ──over N processes────▶ trace ──▶ plan for each interconnect ──────┴▶ step, exposed, efficiency

The step alone has as much memory as one of many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.distributed import ProcessGroup

from autostream.costs.interconnects import LOOPBACK, NAMES, Interconnect, interconnect_of
from autostream.costs.this_device import profile_here
from autostream.dispatch.step_functions import StepFunction
from autostream.errors import TargetError
from autostream.ir import DeviceProfile, Limit
from autostream.options import Options
from autostream.reporting.explanation import ERRORS, spread_of
from autostream.reporting.report import Report
from autostream.reporting.scaling import Scaled, Scaling
from autostream.scheduling.communication import exposed_us, with_collectives
from autostream.scheduling.policies.sequential import one_stream
from autostream.scheduling.simulate import run_us, simulate
from autostream.training import TrainStep
from autostream.tuning.budget import budget_of


def scaled(
    step: StepFunction | TrainStep,
    batch: tuple[object, ...],
    options: Options,
    profile: DeviceProfile | None,
    group: ProcessGroup,
    interconnects: Sequence[str] | None = None,
) -> Scaling:
    """What a step would take in each process of a group; all have a batch like this one.

    Args:
        step: the step. What it averages its gradients over is replaced by the group, unless it is tensor parallel.
        batch: its arguments. It runs eagerly, in this process, to make the state of optimizers.
        options: how to schedule.
        profile: as for :func:`autostream.pipeline.plan`.
        group: of any size: :func:`~autostream.frontend.fake_processes.fake_processes` makes one.
        interconnects: what the processes communicate over; by default, each that is known.

    Raises:
        OptionError: see :func:`autostream.pipeline.plan`; or there is no such interconnect.
        TargetError: the step itself fails, averages its gradients already, or communicates in a smaller group.
        TraceError: no graph computes the whole step.
    """
    traced = (step if step.has_shards else step.over(group)).traced(batch, options, profile)
    device = traced.program.device
    of_device = profile or profile_here(device)[0]
    links = _links(of_device, interconnects, device)
    reports = [traced.plan(options, profile, link)[1] for link in links]
    report = reports[0]
    assert report.graph is not None
    communicating = [*map(report.graph.ops.__getitem__, report.graph.collectives)]
    if fewer := sorted({op.processes for op in communicating} - {1, group.size()}):
        raise TargetError(f"it has collectives of {fewer[0]} processes: make its groups and meshes of {group.size()}")
    room = budget_of(report.graph, of_device, report.candidates[0], options.memory_budget).room_bytes
    _, alone = step.over(False).traced(batch, options, profile).plan(replace(options, memory_budget=room), profile)
    alone_us = _alone_us(alone)
    return Scaling(
        step=report.model,
        device=of_device.name,
        processes=group.size(),
        alone_us=alone_us,
        message_bytes=sum(max(op.bytes_read, op.bytes_written) for op in communicating),
        error=ERRORS["roofline"],
        runs=tuple(_run(link, report, alone_us) for link, report in zip(links, reports, strict=True)),
    )


def _alone_us(report: Report) -> float:
    """The time of a planned step; a collective that its user has written costs nothing."""
    assert report.graph is not None
    assert report.chosen is not None
    assert report.profile is not None
    costs = with_collectives(report.costs, report.graph, 0.0)
    return run_us(report.chosen.schedule, costs, report.profile, captured=report.chosen.captured)


def _links(profile: DeviceProfile, names: Sequence[str] | None, device: str) -> list[Interconnect]:
    if names is None and device == "cpu":
        return [LOOPBACK]
    return [interconnect_of(profile, name) for name in names or NAMES]


def _run(link: Interconnect, report: Report, alone_us: float) -> Scaled:
    graph, costs, profile, chosen = report.graph, report.costs, report.profile, report.chosen
    assert graph is not None
    assert profile is not None
    assert chosen is not None
    schedule, captured = chosen.schedule, chosen.captured
    spread = spread_of(chosen, one_stream(graph), costs, profile)
    steps_us = [
        run_us(schedule, with_collectives(costs, graph, times), profile, captured=captured)
        for times in (1.0, 1 + ERRORS["roofline"], 1 - ERRORS["roofline"])
    ]
    efficiencies = [alone_us / step_us for step_us in steps_us]
    return Scaled(
        interconnect=link.name,
        collectives=len(graph.collectives),
        step_us=steps_us[0],
        range_us=(steps_us[0], steps_us[0]) if spread is None else spread.us,
        communication_us=sum(costs[name].duration_us for name in graph.collectives),
        exposed_us=exposed_us(simulate(schedule, costs, profile, captured=captured), graph),
        efficiency=efficiencies[0],
        efficiency_range=(min(efficiencies), max(efficiencies)),
        streams=schedule.streams,
        unbudgeted_us=min(
            (each.predicted_us for each in report.candidates if each.limit is Limit.BUDGET), default=steps_us[0]
        ),
    )
