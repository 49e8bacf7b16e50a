"""``autostream compare``: whether a mode became slower between two results of ``autostream bench --json``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autostream.cli.arguments import share
from autostream.cli.changes import Change, Row, Spread, row_changes
from autostream.cli.command import Command, argument
from autostream.cli.shared import JSON, OUT
from autostream.cli.terminal import dumped, show
from autostream.errors import TargetError, first_line
from autostream.reporting.tables import table


def _compare(arguments: argparse.Namespace) -> int:
    old, new = (_row(path) for path in (arguments.before, arguments.after))
    for key in ("workload", "baseline"):
        if old[key] != new[key]:
            raise TargetError(
                f"{arguments.before} and {arguments.after} have another {key}, {old[key]} and {new[key]}: measure the "
                "same twice"
            )
    changed = [*row_changes(old, new, arguments.modes, old["baseline"])]
    if not any(change.before for change in changed):
        raise TargetError(f"{arguments.before} has no time of a mode that starts with {arguments.modes!r}: name others")
    worse = [change.worse(arguments.fail_over) for change in changed]
    if arguments.form == "json":
        show(dumped({"fail_over": arguments.fail_over, "changes": _plain(changed, worse)}), arguments.out)
    else:
        show(_changes_table(old, new, changed, worse), arguments.out)
    return int(any(worse))


def _row(path: Path) -> Row:
    """Read a result of ``bench --json``.

    Raises:
        TargetError: it cannot be read, or is no such result.
    """
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        cells = row["cells"].values()
        named = all(isinstance(name, str) for name in (row["workload"], *(cell["status"] for cell in cells)))
        versioned = isinstance(row.get("versions", {}), dict)
        times = [cell["call_us"] for cell in cells if "call_us" in cell]
        timed = all(len(us) > 1 and all(map(_is_time, us)) for us in times) and len(set(map(len, times))) <= 1
        if not (named and versioned and timed and row["baseline"] in row["cells"]):
            raise ValueError("its names or times are none")
        return dict(row)
    except OSError as error:
        raise TargetError(f"{path} cannot be read ({first_line(error)}): name what bench --json --out wrote") from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise TargetError(f"{path} is not what autostream bench --json writes ({first_line(error)})") from error


def _is_time(us: object) -> bool:
    """Whether a value is a plausible time: Python's JSON has NaN and Infinity, and a bool is an int."""
    return isinstance(us, int | float) and not isinstance(us, bool) and _SHORTEST_US < us < _LONGEST_US


_SHORTEST_US, _LONGEST_US = 1e-6, 1e15
"""A picosecond and thirty years: ratios of times in between are finite."""


def _plain(changed: Sequence[Change], worse: Sequence[bool]) -> list[dict[str, Any]]:
    return [
        {
            "mode": change.mode,
            "before": change.before and change.before.median,
            "after": change.after and change.after.median,
            "change": change.share,
            "status": change.status,
            "noisy": change.noisy,
            "worse": bad,
        }
        for change, bad in zip(changed, worse, strict=True)
    ]


def _changes_table(old: Row, new: Row, changed: Sequence[Change], worse: Sequence[bool]) -> str:
    rows = [_changed(change, bad) for change, bad in zip(changed, worse, strict=True)]
    title = f"{old['workload']}, as times the speed of {old['baseline']}: {_origin(old)}, then {_origin(new)}"
    return table(title, ("mode", "before", "after", "change", ""), rows, right="before after change")


def _changed(change: Change, worse: bool) -> tuple[str, ...]:
    share = "" if change.share is None else f"{change.share:+.1%}"
    notes = [
        *(["worse"] if worse else []),
        *(["noisy"] if change.noisy else []),
        *([change.status] if change.status != "ok" else []),
    ]
    return change.mode, _times(change.before), _times(change.after), share, ", ".join(notes)


def _times(speedup: Spread | None) -> str:
    return f"{speedup.median:.3f}×" if speedup else "–"


def _origin(row: Row) -> str:
    return f"{row.get('device', 'unknown')} with torch {dict(row.get('versions', {})).get('torch', 'unknown')}"


COMPARE = Command(
    "compare",
    "say what became slower between two bench --json, with 1 if something did",
    """Compare what autostream bench --json wrote before a change and after it: each mode's speed, as times that of the
baseline in the same rounds, so that the machine's mood does not count. Exits with 1 if a mode lost more than is allowed
and more than medians differ by chance, or has no time any more.
""",
    "compare before.json after.json --fail-over 3%",
    [
        argument("before", type=Path, metavar="BEFORE", help="written by bench --json --out"),
        argument("after", type=Path, metavar="AFTER", help="likewise, of the same model"),
        argument("--fail-over", type=share, default=0.03, metavar="3%", help="the most to lose (default: 3%%)"),
        argument(
            "--modes", default="autostream", metavar="PREFIX", help="those that start so (default: autostream; all: '')"
        ),
        JSON,
        OUT,
    ],
    _compare,
)
