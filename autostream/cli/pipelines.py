"""A model over several devices, or a step in several processes, that need not be here.

``autostream schedule TARGET --stages N``, or ``report``; ``autostream schedule TARGET --world N``.
"""

from __future__ import annotations

import argparse

from torch import nn

from autostream.cli.arguments import whole
from autostream.cli.command import argument
from autostream.costs.interconnects import NAMES, interconnect_of
from autostream.errors import OptionError
from autostream.ir import DeviceProfile
from autostream.options import Options
from autostream.scheduling.microbatches import Comparison
from autostream.splitting import MICROBATCHES, chain_of, compare

PIPELINE = (
    argument("--stages", type=whole, metavar="N", help="plan a pipeline over N such devices instead of one device"),
    argument(
        "--microbatches",
        type=whole,
        metavar="N",
        help=f"of a step of the pipeline, each like the inputs (default: {MICROBATCHES} for each stage)",
    ),
    argument(
        "--interconnect",
        metavar="NAME",
        help=f"""{" or ".join(NAMES)}: what joins the devices (default: {NAMES[0]}, in one machine, for a pipeline, and
each for --world)""",
    ),
)
"""Arguments of a pipeline."""

WORLD = argument("--world", type=whole, metavar="N", help="plan a training step as one of N processes, one a device")
"""The argument of a step in several processes."""


_OF_ONE_DEVICE = ("policy", "streams", "kernels", "tuning_seconds", "memory_budget", "seed")
"""Options that a pipeline does not take."""


def compared(
    arguments: argparse.Namespace, model: nn.Module, args: tuple[object, ...], profile: DeviceProfile | None
) -> Comparison:
    """The plans of a pipeline."""
    chain = chain_of(model, args, profile, "roofline" if arguments.costs == "auto" else arguments.costs)
    link = interconnect_of(chain.profile, arguments.interconnect or NAMES[0])
    number = MICROBATCHES * arguments.stages if arguments.microbatches is None else arguments.microbatches
    return compare(chain, arguments.stages, number, link)


def check(arguments: argparse.Namespace) -> None:
    """Refuse arguments of several devices without their number, and with the stages of a pipeline those of one device.

    Raises:
        OptionError: which one it is.
    """
    world = getattr(arguments, "world", None)
    if arguments.stages is not None:
        if world is not None:
            raise OptionError("--stages plans a pipeline, and --world processes that train: ask for one of them")
        for name in _OF_ONE_DEVICE:
            if getattr(arguments, name) != getattr(Options(), name):
                flag = f"--{name.replace('_', '-')}"
                raise OptionError(f"{flag} is of streams on one device, and --stages plans a pipeline: leave it out")
        return
    if arguments.microbatches is not None:
        raise OptionError("--microbatches is of a pipeline: say over how many devices, as in --stages 4")
    if arguments.interconnect is not None and world is None:
        raise OptionError("--interconnect is of several devices: say how many, as in --stages 4 or --world 8")
