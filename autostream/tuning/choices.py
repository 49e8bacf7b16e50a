"""What was chosen for a program, kept for the next process: which kernels, in which schedule.

    Program of ATen ops ──▶ key ──▶ is there a file of that name?
                                      │ yes                                   │ no, or it is damaged
                     verify it, meet the sequential one once                  search, meet all rivals
                            │ still faster           │ not any more                   │
                            ╰▶ that                  ╰───────────────▶ ◀──────────────╯ write what won

Searching and measuring rivals takes seconds that a second process need not spend. A file is believed as far as to say
which schedule is worth measuring: ``tune.py`` proves it anew, and runs it only if it is faster here and now.

The key is the program by value, the settings that its kernels depend on, the device, versions, the options that decide
what is chosen, and this package's own code. Only what is captured on a GPU is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autostream.errors import first_line
from autostream.frontend.settings import numerics
from autostream.fusion.fingerprint import content_of, fingerprint, surroundings
from autostream.fusion.inductor import with_settings
from autostream.fusion.kernel_json import Unwritable
from autostream.ir import Arena, Decision, Launch, Program, Schedule
from autostream.options import Options, cache_folder
from autostream.store import HINDRANCES, code_in, key_of, not_kept, read_json, reported, write_json
from autostream.utils.stopwatch import Stopwatch

log = logging.getLogger(__name__)

_MOST = 1024
"""Files. One of GoogLeNet's size is 30 kB."""

_DECISIVE = ("streams", "policy", "costs", "cuda_graph", "kernels", "tuning_seconds", "memory_budget", "seed")
"""Options that decide what is chosen; Inductor's are among its settings."""

Remarks = tuple[Decision, ...]
"""What was wrong with keeping, for a report."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What won.

    Attributes:
        level: what one op is, as of a :class:`~autostream.ir.Program`.
        schedule: of those ops, captured.
        measured_us: what a run took, µs.
        date: when that was.
        refusals: why it is not something better.

    Example:
        >>> Choice("aten", Schedule("sequential", 1, (Launch("relu", 0),)), 9.5, "2026-01-31 12:00 UTC").level
        'aten'
    """

    level: str
    schedule: Schedule
    measured_us: float
    date: str
    refusals: tuple[Decision, ...] = ()


def now() -> str:
    """The date of a choice that is made now."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def place_of(program: Program, options: Options, stopwatch: Stopwatch) -> Path | None:
    """The file of a program's choice, whether or not it exists; ``None`` if there is to be none.

    Args:
        program: of ATen ops.
        options: how to schedule it. With ``{"freezing": True}`` kernels depend on what weights hold: nothing is kept.
        stopwatch: is told how long finding out takes: ``"load"``.
    """
    if program.device == "cpu" or options.cuda_graph is False or options.inductor_options.get("freezing"):
        return None
    try:
        with stopwatch("load"):
            return cache_folder() / "choices" / f"{_key(program, options)}.json"
    except Exception as error:  # whatever it is, choosing does without
        log.debug("the choice is not kept: %s", first_line(error))
        return None


def read(path: Path) -> tuple[Choice | None, Remarks]:
    """What a file holds, and what was wrong with it."""
    try:
        return _from_json(read_json(path)), ()
    except FileNotFoundError:
        return None, ()
    except Exception as error:
        reason = f"{path} cannot be used ({first_line(error)}); its schedule is chosen again"
        return None, (reported("cache rebuilt", reason),)


def write(path: Path, choice: Choice) -> Remarks:
    """Keep a choice, in the place of an earlier one; what hindered that."""
    try:
        write_json(path, asdict(choice), _MOST)
    except HINDRANCES as error:
        return (not_kept("the chosen schedule", error),)
    return ()


def _key(program: Program, options: Options) -> str:
    """Of all that a choice depends on.

    Raises:
        Exception: there is no key for some of it.
    """
    decisive = [getattr(options, name) for name in _DECISIVE]
    code = code_in(Path(__file__).parent)
    if options.kernels == "eager":  # Inductor, whose modules take seconds to import, has no part in it
        return key_of(content_of(program), repr(numerics()), surroundings(program.device), decisive, code)
    from torch._inductor import config

    with with_settings(options.inductor_options):
        if config.force_disable_caches:
            raise Unwritable("what is not to be kept, by Inductor's force_disable_caches")
        return key_of(fingerprint(program), decisive, code)


def _from_json(data: Mapping[str, Any]) -> Choice:
    refusals = tuple(Decision(**each) for each in data["refusals"])
    return Choice(data["level"], _schedule(data["schedule"]), data["measured_us"], data["date"], refusals)


def _schedule(data: Mapping[str, Any]) -> Schedule:
    launches = (
        Launch(each["op"], each["stream"], tuple(each["waits"]), tuple(each["releases"])) for each in data["launches"]
    )
    decisions = (Decision(**each) for each in data["decisions"])
    return Schedule(
        data["policy"],
        data["streams"],
        tuple(launches),
        tuple(data["join_waits"]),
        tuple(decisions),
        Arena(**data["arena"]),
    )
