"""``autostream schedule TARGET --stages N``: a model over several devices that need not be here."""

from __future__ import annotations

import argparse

from torch import nn

from autostream.cli.arguments import whole
from autostream.cli.command import argument
from autostream.costs.interconnects import NAMES, interconnect_of
from autostream.errors import OptionError
from autostream.ir import DeviceProfile
from autostream.reporting import pipelines
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


def planned(
    arguments: argparse.Namespace, model: nn.Module, args: tuple[object, ...], profile: DeviceProfile | None
) -> str:
    """The plan of a pipeline, as text or JSON."""
    chain = chain_of(model, args, profile)
    link = interconnect_of(chain.profile, arguments.interconnect or NAMES[0])
    number = MICROBATCHES * arguments.stages if arguments.microbatches is None else arguments.microbatches
    comparison = compare(chain, arguments.stages, number, link)
    return pipelines.to_json(comparison) if arguments.form == "json" else pipelines.render(comparison)


def check(arguments: argparse.Namespace) -> None:
    """Refuse arguments of several devices without their number.

    Raises:
        OptionError: which one it is.
    """
    if arguments.stages is not None:
        if arguments.world is not None:
            raise OptionError("--stages plans a pipeline, and --world data-parallel processes: ask for one of them")
        return
    if arguments.microbatches is not None:
        raise OptionError("--microbatches is of a pipeline: say over how many devices, as in --stages 4")
    if arguments.interconnect is not None and arguments.world is None:
        raise OptionError("--interconnect is of several devices: say how many, as in --stages 4 or --world 8")
