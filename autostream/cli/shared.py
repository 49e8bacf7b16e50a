"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from autostream.cli.arguments import memory, positive, streams, whole
from autostream.cli.command import Argument, argument
from autostream.cli.targets import DTYPES
from autostream.costs.device import known_names
from autostream.options import CostSource, KernelLevel, PolicyName

TARGET = """TARGET is a torchvision or timm model's name (random weights, nothing is downloaded),
package.module:factory or file.py:factory. A factory is a function that takes no arguments and returns a
module, or (module, args); or (step, batch), where step is what autostream.step or train_step made.
The module is imported and the factory called: TARGET RUNS CODE, so name only what you trust.
"""

DISABLED = "nothing is scheduled while AUTOSTREAM_DISABLE is set: unset it"

_INPUT = f"""one example input, random, such as 1x3x224x224:float16 or scalar; once for each input. Without DTYPE it is
that of the model; with a floating-point one the model is cast to it. DTYPE is one of {", ".join(DTYPES)}"""

_PLANNED_FOR = f"""plan for this: cpu, cuda, cuda:N, or a GPU that need not be here: {", ".join(known_names()[:-1])} or
a FILE.json in which it was measured (default: the GPU if there is one)"""

_BUDGET = """the most memory: a ratio to what one stream, weights and inputs take together, 1.1 or 2x, or bytes that
a schedule may allocate beside them, 64MiB; inf is no limit (default: 1.1)"""


def _either(values: object) -> str:
    """The values of an option as text."""
    *others, last = get_args(values)
    return f"{', '.join(others)} or {last}"


DEVICE = argument("--device", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
OUT = argument("--out", metavar="FILE", type=Path, help="write there instead of to the terminal")
JSON = argument("--json", dest="form", action="store_const", const="json", default="text", help="everything, as JSON")

MODEL = (
    argument("target", metavar="TARGET", help="the model"),
    argument("--input", metavar="SHAPE[:DTYPE]", action="append", default=[], help=_INPUT),
)

PLANNING: tuple[Argument, ...] = (
    *MODEL,
    argument("--device", help=_PLANNED_FOR),
    argument("--policy", default="auto", help=f"{_either(PolicyName)} (default: auto)"),
    argument("--streams", type=streams, default="auto", metavar="N", help="how many streams, or auto (default: auto)"),
    argument(
        "--tuning-seconds", type=positive, default=10.0, metavar="SECONDS", help="to time ops and search (default: 10)"
    ),
    argument("--memory-budget", type=memory, default=1.1, metavar="SIZE", help=_BUDGET),
    argument("--seed", type=whole, default=0, metavar="N", help="of the random choices of the search (default: 0)"),
    argument("--costs", default="auto", help=f"{_either(CostSource)} (default: auto)"),
    argument("--kernels", default="auto", help=f"{_either(KernelLevel)}, the last where the GPU is (default: auto)"),
    OUT,
)
"""Arguments of commands that plan: the target, and options of :func:`autostream.optimize`."""
