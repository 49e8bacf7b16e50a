"""Chosen schedules on disk: which kernels and which schedule were fastest for a program.

    Program of ATen ops ──▶ key ──▶ is there a file of that name?
                                      │ yes                                    │ no, or it is damaged
                     verify it, measure it and the sequential one    search, measure all candidates
                            │ faster               │ not faster                │
                            ╰▶ return it           ╰──────────────▶ ◀──────────╯ write the fastest

Searching and measuring take seconds, which later processes save. A file only says which schedule to measure:
``tune.py`` verifies it again, and runs it only if it is still faster than ops one after another.

The key is the program by value, the settings that its kernels depend on, the device, versions, the options that affect
the choice, and the code of this package. Only schedules that were captured on a GPU are kept.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from autostream.errors import first_line
from autostream.frontend.settings import numerics
from autostream.fusion.fingerprint import content_of, fingerprint, surroundings
from autostream.fusion.inductor import with_settings
from autostream.ir import Decision, Program, Schedule
from autostream.options import Options
from autostream.store import Notes, Store, code_in, key_of
from autostream.utils.data import decoded, encoded
from autostream.utils.logs import Log
from autostream.utils.stopwatch import Stopwatch

log = Log(__name__)

_STORE = Store("choices", "the chosen schedule", "its schedule is chosen again", most=1024)
"""A schedule of GoogLeNet's size takes 30 kB."""

_OPTIONS = ("streams", "policy", "costs", "cuda_graph", "kernels", "tuning_seconds", "memory_budget", "seed")
"""The options that affect the choice; Inductor's are among its settings."""

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest schedule of a program.

    Attributes:
        level: the level of kernels, as of a :class:`~autostream.ir.Program`.
        schedule: of ops of that level, captured.
        measured_us: the time of one run, µs.
        date: when it was measured.
        refusals: why it is nothing better, for reports.

    Example:
        >>> from autostream.ir import Launch
        >>> Choice("aten", Schedule("sequential", 1, (Launch("relu", 0),)), 9.5, "2026-01-31 12:00 UTC").level
        'aten'
    """

    level: str
    schedule: Schedule
    measured_us: float
    date: str
    refusals: tuple[Decision, ...] = ()


def now() -> str:
    """The date, as in :class:`Choice`."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def choice_key(program: Program, options: Options, stopwatch: Stopwatch) -> str:
    """The key of a program's choice, or ``""`` if it cannot be kept.

    Args:
        program: of ATen ops.
        options: how to schedule it. With ``{"freezing": True}`` kernels depend on the values of weights, and the choice
            is not kept.
        stopwatch: records the seconds as ``"load"``.
    """
    if program.device == "cpu" or options.cuda_graph is False or options.inductor_options.get("freezing"):
        return ""
    try:
        with stopwatch("load"):
            return _key(program, options)
    except Exception as error:  # choosing works without a cache
        log.debug("the choice is not kept: %s", first_line(error))
        return ""


def read(key: str) -> tuple[Choice | None, Notes]:
    """The choice that was written for a key, and a note if its file is damaged."""
    return _STORE.read(key, _parse)


def write(key: str, choice: Choice) -> Notes:
    """Keep a choice, in place of an earlier one; return a note if it cannot be kept."""
    return _STORE.write(key, partial(json.dumps, encoded(choice)))


def _key(program: Program, options: Options) -> str:
    """A key of all that the choice depends on, or ``""`` if Inductor's caches are off.

    Raises:
        Exception: JSON has no form for some of it.
    """
    chosen_by = [getattr(options, name) for name in _OPTIONS]
    code = code_in(_PACKAGE)
    if options.kernels == "eager":  # does not depend on Inductor, whose modules take seconds to import
        return key_of(content_of(program), repr(numerics()), surroundings(program.device), chosen_by, code)
    from torch._inductor import config

    with with_settings(options.inductor_options):
        return "" if config.force_disable_caches else key_of(fingerprint(program), chosen_by, code)


def _parse(text: str) -> Choice:
    choice: Choice = decoded(Choice, json.loads(text))
    return choice
