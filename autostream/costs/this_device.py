"""What the device that is here is and costs: kept from earlier, or measured now and kept."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autostream.costs.cache import load, save
from autostream.costs.device import profile_of
from autostream.costs.measured import METHOD, measure
from autostream.costs.microbenchmarks import measure_profile
from autostream.costs.records import Measurements, context_of
from autostream.costs.roofline import price
from autostream.errors import first_line
from autostream.ir import Costs, Decision, DeviceProfile, OpGraph, Program

Remarks = tuple[Decision, ...]
"""What was wrong with keeping measurements, for a report."""


def profile_here(device: str) -> tuple[DeviceProfile, Remarks]:
    """The profile of a device of this machine: as it was measured here before, else by its datasheet, else measured.

    Args:
        device: ``"cpu"`` or ``"cuda:0"``.

    Raises:
        TargetError: this machine has no such device.
    """
    looked_up = profile_of(device)
    if device == "cpu":
        return looked_up, ()
    known, faults = load(context_of(device, looked_up, METHOD))
    if known.profile is not None or looked_up.source == "table":
        return known.profile or looked_up, faults
    try:
        measured, hindrances = profile_anew(device)
    except Exception as error:
        reason = (
            f"the profile of {looked_up.name} is guessed from its properties: measuring failed: {first_line(error)}"
        )
        return looked_up, (*faults, Decision("", "not measured", reason))
    return measured, (*faults, *hindrances)


def profile_anew(device: str) -> tuple[DeviceProfile, Remarks]:
    """Measure the profile of a GPU of this machine, which should have nothing else to do, and keep it.

    Raises:
        TargetError: this machine has no such device.
        RuntimeError: it failed, or has not enough memory.
    """
    looked_up = profile_of(device)
    measured = measure_profile(device, looked_up)
    return measured, save(Measurements(context_of(device, looked_up, METHOD), profile=measured))


def costs_here(
    program: Program, graph: OpGraph, profile: DeviceProfile, tensors: Sequence[Tensor], budget_s: float
) -> tuple[Costs, Remarks]:
    """The costs of a program's ops by the clock; ops that were timed in an earlier run are not timed again.

    Where measuring fails they are estimates, and a remark says why: a schedule made of those is better than none.

    Args:
        program: what to run, at most once.
        graph: its ops.
        profile: of its device.
        tensors: the program's arguments.
        budget_s: what timing may take.
    """
    context = context_of(program.device, profile, METHOD)
    known, faults = load(context)
    try:
        costs, found = measure(program, graph, profile, tensors, known.records, budget_s)
        hindrances = save(Measurements(context, records=found)) if found else ()
    except Exception as error:
        reason = f"costs are estimates, for measuring failed: {first_line(error)}"
        return price(graph, profile), (*faults, Decision("", "not measured", reason))
    return costs, (*faults, *hindrances)
