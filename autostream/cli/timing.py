"""Commands that hold models against the clock: ``bench``, ``compare`` and ``demo``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import torch

from autostream.api import optimize
from autostream.bench.changes import Change, row_changes
from autostream.bench.clock import clock_of, interleaved
from autostream.bench.inference import Inference, subject_of
from autostream.bench.isolation import hold_isolated
from autostream.bench.modes import AUTOSTREAM, SLOW, modes_of
from autostream.bench.ratios import Spread
from autostream.bench.table import Row, cells_table
from autostream.cli.arguments import names, positive, share
from autostream.cli.command import Command, argument
from autostream.cli.shared import DEVICE, DISABLED, JSON, MODEL, OUT, TARGET
from autostream.cli.targets import InputSpec, parse_device, parse_input, prepare
from autostream.cli.terminal import note, progress, remark, require_writable, show
from autostream.errors import OptionError, TargetError, first_line
from autostream.options import disabled
from autostream.pipeline import versions
from autostream.reporting import text
from autostream.reporting.dump import dump
from autostream.reporting.layout import table

_TOLERANCE = {torch.float16: 1e-2, torch.float32: 1e-4}
"""Largest difference that is put down to kernels chosen differently, relative to the largest output."""


def _bench(arguments: argparse.Namespace) -> int:
    device = parse_device(arguments.device)
    known = modes_of(device)
    modes = arguments.modes or [mode for mode in known if mode not in SLOW]
    baseline = arguments.baseline or ("eager" if device.type == "cpu" else "cuda_graph")
    for mode in (*modes, baseline):
        if mode not in known:
            raise OptionError(f"there is no mode {mode!r} on this device: use {', '.join(known)}")
    modes = list(dict.fromkeys([baseline, *modes]))
    inputs = [parse_input(text) for text in arguments.input]
    require_writable(arguments.out)
    outcome = hold_isolated(partial(_contest, arguments.target, inputs, device), modes, arguments.timeout, note)
    note("")
    if outcome.failure:
        raise TargetError(outcome.failure)
    cells = {mode: cell.dump() for mode, cell in outcome.cells.items()}
    row: dict[str, Any] = {"workload": arguments.target, "cells": cells}
    as_json = arguments.form == "json"
    if as_json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        row = {"device": name, "baseline": baseline, "versions": versions()} | row
    show(_dumped(row) if as_json else cells_table([row], baseline), arguments.out)
    return int(any(cell.status != "ok" for mode, cell in outcome.cells.items() if mode in AUTOSTREAM))


def _contest(target: str, inputs: list[InputSpec], device: torch.device) -> Inference:
    contest = Inference(subject_of(*prepare(target, inputs, device)))
    contest.require_checkable()
    return contest


def _compare(arguments: argparse.Namespace) -> int:
    old, new = (_row(path) for path in (arguments.before, arguments.after))
    for key in ("workload", "baseline"):
        if old[key] != new[key]:
            raise TargetError(
                f"{arguments.before} and {arguments.after} have another {key}, {old[key]} and {new[key]}: measure the "
                "same twice"
            )
    found = [*row_changes(old, new, arguments.modes, old["baseline"], "call")]
    if not any(change.before for change in found):
        raise TargetError(f"{arguments.before} has no time of a mode that starts with {arguments.modes!r}: name others")
    worse = [change.worse(arguments.fail_over) for change in found]
    if arguments.form == "json":
        show(_dumped({"fail_over": arguments.fail_over, "changes": _plain(found, worse)}), arguments.out)
    else:
        show(_changes_table(old, new, found, worse), arguments.out)
    return int(any(worse))


def _row(path: Path) -> Row:
    """What ``bench --json`` wrote.

    Raises:
        TargetError: it cannot be read, or is something else.
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
    """Whether a call may have taken so many µs: Python's JSON has NaN and Infinity, and a bool is a number."""
    return isinstance(us, int | float) and not isinstance(us, bool) and _SHORTEST_US < us < _LONGEST_US


_SHORTEST_US, _LONGEST_US = 1e-6, 1e15
"""A picosecond and thirty years: of what lies in between, every ratio is finite."""


def _plain(found: Sequence[Change], worse: Sequence[bool]) -> list[dict[str, Any]]:
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
        for change, bad in zip(found, worse, strict=True)
    ]


def _changes_table(old: Row, new: Row, found: Sequence[Change], worse: Sequence[bool]) -> str:
    rows = [_changed(change, bad) for change, bad in zip(found, worse, strict=True)]
    title = f"{old['workload']}, as times the speed of {old['baseline']}: {_origin(old)}, then {_origin(new)}"
    return table(title, ("mode", "before", "after", "change", ""), rows, right="before after change")


def _changed(change: Change, worse: bool) -> tuple[str, ...]:
    share = "" if change.share is None else f"{change.share:+.1%}"
    remarks = [
        *(["worse"] if worse else []),
        *(["noisy"] if change.noisy else []),
        *([change.status] if change.status != "ok" else []),
    ]
    return change.mode, _times(change.before), _times(change.after), share, ", ".join(remarks)


def _times(found: Spread | None) -> str:
    return f"{found.median:.3f}×" if found else "–"


def _origin(row: Row) -> str:
    return f"{row.get('device', 'unknown')} with torch {dict(row.get('versions', {})).get('torch', 'unknown')}"


def _dumped(value: object) -> str:
    return json.dumps(value, indent=1, allow_nan=False)


def _demo(arguments: argparse.Namespace) -> int:
    device = parse_device(arguments.device)
    require_writable(arguments.out)
    if disabled():
        raise TargetError(DISABLED)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model, args = prepare("googlenet", [], device, dtype)
    with torch.no_grad(), progress("optimizing and timing googlenet"):
        fast = optimize(model)
        expected, got = model(*args), fast(*args)
        calls = {"plain": partial(model, *args), "optimized": partial(fast, *args)}
        times = interleaved(calls, clock_of(device), lambda name: None)
    plain_us, fast_us = (median(times[name].call_us) for name in calls)
    error = ((got - expected).abs().max() / expected.abs().max()).item()
    report, allowed = fast.reports[0], _TOLERANCE[dtype]
    if arguments.form == "json":
        found = {"plain_us": plain_us, "optimized_us": fast_us, "error": error if isfinite(error) else None}
        show(_dumped({**found, "allowed": allowed, "report": dump(report)}), arguments.out)
    else:
        beside = _beside_plain(error, allowed, plain_us, fast_us)
        show(f"{text.summary(report)}\n\n{beside}", arguments.out, report=True)
    if not error <= allowed:  # NaN is not within any tolerance either
        remark("the outputs differ")
        return 1
    return 0


def _beside_plain(error: float, allowed: float, plain_us: float, fast_us: float) -> str:
    return f"""Beside the plain model, in turns
  largest difference: {error:.1e} of the largest output, {allowed} allowed
  plain model {plain_us / 1e3:.3f} ms, optimized {fast_us / 1e3:.3f} ms: {plain_us / fast_us:.2f}× the speed"""


BENCH = Command(
    "bench",
    "time a model in every mode there is, side by side",
    f"""Time a model in every mode there is, side by side, in interleaved rounds, after checking what each computes.
Exits with 1 if autostream has no time: it failed, or its outputs are wrong.

{TARGET}""",
    "bench googlenet --input 1x3x224x224:float16",
    [
        *MODEL,
        DEVICE,
        argument("--modes", type=names, metavar="A,B", help="only these (default: all but the slow ones)"),
        argument(
            "--baseline", metavar="MODE", help="what the others are compared with (default: cuda_graph, on a CPU eager)"
        ),
        argument("--timeout", type=positive, default=900.0, metavar="SECONDS", help="for one mode (default: 900)"),
        JSON,
        OUT,
    ],
    _bench,
)

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

DEMO = Command(
    "demo",
    "optimize GoogLeNet and compare it with itself",
    """Optimize torchvision's GoogLeNet, check its outputs against the plain model and time both.
Exits with 1 if they differ.
""",
    "demo --device cuda",
    [DEVICE, JSON, OUT],
    _demo,
)
