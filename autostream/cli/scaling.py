"""``autostream schedule TARGET --world N``: a training step over many processes, none of which is started."""

from __future__ import annotations

import argparse

from torch.distributed import ProcessGroup

from autostream.cli.arguments import whole
from autostream.cli.command import argument
from autostream.cli.targets import Step
from autostream.ir import DeviceProfile
from autostream.options import Options
from autostream.reporting import scaling
from autostream.scaling import scaled

WORLD = argument(
    "--world", type=whole, metavar="N", help="plan a training step as one of N data-parallel processes, one a device"
)
"""The argument of such a dry run."""


def planned(
    arguments: argparse.Namespace,
    step: Step,
    batch: tuple[object, ...],
    options: Options,
    profile: DeviceProfile | None,
    group: ProcessGroup,
) -> str:
    """The plan of a step over these processes, as text or JSON."""
    names = None if arguments.interconnect is None else (arguments.interconnect,)
    found = scaled(step, batch, options, profile, group, names)
    return scaling.to_json(found) if arguments.form == "json" else scaling.render(found)
