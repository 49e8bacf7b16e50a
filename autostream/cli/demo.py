"""``autostream demo``: GoogLeNet, optimized and compared with itself."""

from __future__ import annotations

import argparse
from functools import partial
from math import isfinite
from statistics import median

import torch
from torch import nn

from autostream.api import optimize
from autostream.cli.command import Command
from autostream.cli.shared import DEVICE, DISABLED, JSON, OUT
from autostream.cli.targets import parse_device, prepare
from autostream.cli.terminal import dumped, message, progress, require_writable, show
from autostream.errors import TargetError
from autostream.options import disabled
from autostream.reporting import text
from autostream.reporting.dump import dump
from autostream.runtime.clock import clock_of, interleaved

_TOLERANCE = {torch.float16: 1e-2, torch.float32: 1e-4}
"""Largest difference that other kernels may cause, relative to the largest output."""


def _demo(arguments: argparse.Namespace) -> int:
    device = parse_device(arguments.device)
    require_writable(arguments.out)
    if disabled():
        raise TargetError(DISABLED)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model, args = prepare("googlenet", [], device, dtype)
    assert isinstance(model, nn.Module)
    with torch.no_grad(), progress("optimizing and timing googlenet"):
        fast = optimize(model)
        expected, got = model(*args), fast(*args)
        calls = {"plain": partial(model, *args), "optimized": partial(fast, *args)}
        times = interleaved(calls, clock_of(device), lambda name: None)
    plain_us, fast_us = (median(times[name].call_us) for name in calls)
    error = ((got - expected).abs().max() / expected.abs().max()).item()
    report, allowed = fast.reports[0], _TOLERANCE[dtype]
    if arguments.form == "json":
        answer = {"plain_us": plain_us, "optimized_us": fast_us, "error": error if isfinite(error) else None}
        show(dumped({**answer, "allowed": allowed, "report": dump(report)}), arguments.out)
    else:
        beside = _beside_plain(error, allowed, plain_us, fast_us)
        show(f"{text.summary(report)}\n\n{beside}", arguments.out, report=True)
    if not error <= allowed:  # NaN is not within any tolerance
        message("the outputs differ")
        return 1
    return 0


def _beside_plain(error: float, allowed: float, plain_us: float, fast_us: float) -> str:
    return f"""Beside the plain model, in turns
  largest difference: {error:.1e} of the largest output, {allowed} allowed
  plain model {plain_us / 1e3:.3f} ms, optimized {fast_us / 1e3:.3f} ms: {plain_us / fast_us:.2f}× the speed"""


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
