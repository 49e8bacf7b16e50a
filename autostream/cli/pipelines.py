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
        help=f"{' or '.join(NAMES)}: what joins the devices of the pipeline (default: {NAMES[0]}, in one machine)",
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
    """Refuse arguments of a pipeline without its number of stages.

    Raises:
        OptionError: which one it is.
    """
    for name in ("microbatches", "interconnect"):
        if arguments.stages is None and getattr(arguments, name) is not None:
            raise OptionError(f"--{name} is of a pipeline: say over how many devices, as in --stages 4")
