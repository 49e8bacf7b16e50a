"""``autostream``: all commands and the exit code.

0 success, 1 a check failed or a mode is slower than allowed, 2 the command line or the model cannot be used or the
output cannot be written, 130 interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence

from autostream.cli.bench import BENCH
from autostream.cli.command import Command, Parser, add
from autostream.cli.compare import COMPARE
from autostream.cli.demo import DEMO
from autostream.cli.machine import ENV, PROFILE
from autostream.cli.planning import EXPLAIN, INSPECT, REPORT, SCHEDULE, TRACE
from autostream.cli.terminal import message
from autostream.errors import AutostreamError
from autostream.version import VERSION

COMMANDS: tuple[Command, ...] = (
    SCHEDULE,
    INSPECT,
    EXPLAIN,
    TRACE,
    REPORT,
    BENCH,
    COMPARE,
    PROFILE,
    ENV,
    DEMO,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` is without the program's name, by default that of the process.

    Returns:
        the exit code.
    """
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.run(arguments)
    except AutostreamError as error:
        message(f"error: {' '.join(str(error).split())}")
        return 2
    except KeyboardInterrupt:
        message("interrupted")
        return 130
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        return 0
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="autostream",
        description="Schedule the independent operations of a PyTorch model over CUDA streams.",
        epilog="example: autostream schedule googlenet --device h200",
    )
    parser.add_argument("--version", action="version", version=f"autostream {VERSION}")
    add(COMMANDS, parser)
    return parser
