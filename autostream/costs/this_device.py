"""The profile of this machine's device and the costs of ops on it, from the cache or measured now."""

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
from autostream.store import Notes


def profile_here(device: str) -> tuple[DeviceProfile, Notes]:
    """The profile of a device of this machine: from the cache, else from its datasheet, else measured now.

    Args:
        device: ``"cpu"`` or ``"cuda:0"``.

    Raises:
        TargetError: this machine has no such device.
    """
    looked_up = profile_of(device)
    if device == "cpu":
        return looked_up, ()
    cached, load_notes = load(context_of(device, looked_up, METHOD))
    if cached.profile is not None or looked_up.source == "table":
        return cached.profile or looked_up, load_notes
    try:
        measured, notes = profile_anew(device)
    except Exception as error:
        reason = (
            f"the profile of {looked_up.name} is guessed from its properties: measuring failed: {first_line(error)}"
        )
        return looked_up, (*load_notes, Decision("", "not measured", reason))
    return measured, (*load_notes, *notes)


def profile_anew(device: str) -> tuple[DeviceProfile, Notes]:
    """Measure the profile of a GPU of this machine, which should be idle, and write it to the cache.

    Raises:
        TargetError: this machine has no such device.
        RuntimeError: the device failed, or has not enough memory.
    """
    looked_up = profile_of(device)
    measured = measure_profile(device, looked_up)
    return measured, save(Measurements(context_of(device, looked_up, METHOD), profile=measured))


def costs_here(
    program: Program, graph: OpGraph, profile: DeviceProfile, tensors: Sequence[Tensor], budget_s: float
) -> tuple[Costs, Notes]:
    """The measured costs of a program's ops; ops whose times are in the cache are not timed again.

    If measuring fails, all costs are estimates, and a note says why: a schedule from estimates is better than none.

    Args:
        program: the program; it is run at most once.
        graph: its ops.
        profile: the profile of its device.
        tensors: the program's arguments.
        budget_s: how long timing may take, in seconds.
    """
    context = context_of(program.device, profile, METHOD)
    cached, load_notes = load(context)
    try:
        costs, records = measure(program, graph, profile, tensors, cached.records, budget_s)
        notes = save(Measurements(context, records=records)) if records else ()
    except Exception as error:
        reason = f"costs are estimates, for measuring failed: {first_line(error)}"
        return price(graph, profile), (*load_notes, Decision("", "not measured", reason))
    return costs, (*load_notes, *notes)
