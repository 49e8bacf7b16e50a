"""``autostream bench``: a model or a training step in several modes, each checked, then timed in interleaved rounds."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import isfinite
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autostream.cli import step_modes
from autostream.cli.arguments import names
from autostream.cli.changes import ratio, spread
from autostream.cli.command import Command, argument
from autostream.cli.modes import Call, Mode, modes_of, relative_error, tensors_in
from autostream.cli.restarted import restarted
from autostream.cli.shared import DEVICE, JSON, MODEL, OUT, TARGET
from autostream.cli.step_modes import FreshStep, StepCheck
from autostream.cli.targets import parse_device, parse_input, prepare
from autostream.cli.terminal import dumped, require_writable, show, status
from autostream.errors import AutostreamError, OptionError, TargetError, first_line
from autostream.pipeline import versions
from autostream.reporting.tables import table
from autostream.runtime.clock import clock_of, interleaved

Cells = dict[str, dict[str, Any]]
"""By mode, as in the JSON."""

_ALLOWED = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The largest relative error of outputs by the model's dtype; for others 1e-4, or 1e-2 on a GPU, which may use TF32."""


def _bench(arguments: argparse.Namespace) -> int:
    device = parse_device(arguments.device)
    inputs = [parse_input(text) for text in arguments.input]
    require_writable(arguments.out)
    target, args = prepare(arguments.target, inputs, device)
    known: Mapping[str, Any] = (
        modes_of(device) if isinstance(target, nn.Module) else step_modes.modes_of(target, device)
    )
    baseline = arguments.baseline or ("cuda_graph" if "cuda_graph" in known else "eager")
    modes = [baseline, *(arguments.modes or known)]
    for mode in modes:
        if mode not in known:
            raise OptionError(f"there is no mode {mode!r} on this device: use {', '.join(known)}")
    chosen = {mode: known[mode] for mode in known if mode in modes}
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if isinstance(target, nn.Module):
            with torch.no_grad():
                cells = _measured(_Check(target, args, device), chosen, device)
        else:
            fresh = cast(FreshStep, partial(prepare, arguments.target, inputs, device))
            cells = _measured(StepCheck(fresh, partial(_allowed, device=device)), chosen, device)
    status("")
    row: dict[str, Any] = {"workload": arguments.target, "cells": cells}
    if arguments.form == "json":
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        show(dumped({"device": name, "baseline": baseline, "versions": versions(), **row}), arguments.out)
    else:
        show(_table(arguments.target, cells, baseline), arguments.out)
    return int(any(cell["status"] != "ok" for mode, cell in cells.items() if mode.startswith("autostream")))


def _measured(check: _Check | StepCheck, modes: Mapping[str, Any], device: torch.device) -> Cells:
    """Prepare and check each mode, time those that are right side by side, and check them again."""
    cells: Cells = {mode: {"status": "ok"} for mode in modes}
    calls: dict[str, Any] = {}
    for name, mode in modes.items():
        status(name)
        with _failures(cells[name]):
            start = time.perf_counter()
            call = check.prepared(mode)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            cells[name]["first_s"] = round(time.perf_counter() - start, 3)
            calls[name] = call
    # Only now: what captures or compiles later may reuse memory of an earlier graph.
    calls = _right(check, calls, cells)
    times = interleaved({name: check.timed(call) for name, call in calls.items()}, clock_of(device), status)
    for name in _right(check, calls, cells):
        cells[name] |= times[name].dump()
    return cells


def _right(check: _Check | StepCheck, calls: Mapping[str, Any], cells: Cells) -> dict[str, Any]:
    """The calls that compute what the target computes; the cells of the others get the reason."""
    right = {}
    for name, call in calls.items():
        with _failures(cells[name]):
            error = check.error(call)
            cells[name]["error"] = error if isfinite(error) else None  # JSON has no infinity
            if error <= check.allowed:
                right[name] = call
            else:
                cells[name] |= {"status": "wrong", "reason": f"error {error:.1e}, {check.allowed:.1e} allowed"}
    return right


class _Check:
    """Compares outputs with the model's, for its inputs and for others.

    Raises:
        TargetError: the model fails, returns no tensors, or two runs of it differ.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], device: torch.device) -> None:
        try:
            self._model = model = restarted(model, args)
            # The first inputs once more at the end: a mode may keep those of the last call.
            self._inputs = (args, _other(args), args)
            self._expected = [[tensor.clone() for tensor in tensors_in(model(*each))] for each in self._inputs]
        except AutostreamError:
            raise
        except Exception as error:
            raise TargetError(f"the model failed: {first_line(error)}") from error
        self.allowed = _allowed([*model.parameters(), *tensors_in(args)], device)
        if not all(self._expected):
            name = type(model).__name__
            raise TargetError(f"{name} returns no tensors that could be checked: return them in a container")
        apart = self.error(model)
        if not apart <= self.allowed:
            raise TargetError(
                f"results cannot be checked: two runs of the model differ by {apart:.1e}, {self.allowed:.1e} allowed; "
                "it draws random numbers or keeps a state that is no tensor of its own"
            )

    def prepared(self, mode: Mode) -> Call:
        """The model in a mode, after one call."""
        call = mode(self._model, self._inputs[0])
        call(*self._inputs[0])
        return call

    def timed(self, call: Call) -> Callable[[], Any]:
        """What is timed of it."""
        return partial(call, *self._inputs[0])

    def error(self, call: Call) -> float:
        """The largest relative error."""
        pairs = zip(self._inputs, self._expected, strict=True)
        return max(relative_error(call(*args), expected) for args, expected in pairs)


def _allowed(tensors: Sequence[Tensor], device: torch.device) -> float:
    """The largest relative error that the first of these dtypes explains."""
    dtypes = (tensor.dtype for tensor in tensors if tensor.is_floating_point())
    return _ALLOWED.get(next(dtypes, torch.float32), 1e-4 if device.type == "cpu" else 1e-2)


@contextmanager
def _failures(cell: dict[str, Any]) -> Iterator[None]:
    """Enter an exception as the reason of a cell."""
    try:
        yield
    except Exception as error:
        cell |= {"status": "failed", "reason": first_line(error)}


def _other(args: tuple[Any, ...]) -> Any:
    """Arguments with other values: smaller ones in reverse. Integers may be indices, and stay."""

    def other(tensor: Tensor) -> Tensor:
        return tensor.flip(tuple(range(tensor.dim()))) * 0.75 if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(Tensor, other, args)


def _table(title: str, cells: Cells, baseline: str) -> str:
    head = ("mode", "µs a call", "faster", "device µs", "latency µs", "host µs", "first s", "error", "remark")
    rows = [(mode, *_times(cells, mode, baseline), *_facts(cell)) for mode, cell in cells.items()]
    return table(f"{title}, faster than {baseline}", head, rows, right="µs faster device latency host first error")


def _times(cells: Cells, mode: str, baseline: str) -> tuple[str, ...]:
    cell = cells[mode]
    if "call_us" not in cell:
        return ("",) * 5
    faster = ratio(cells, mode, baseline)
    device_us = f"{spread(cell['device_us']).median:,.1f}" if "device_us" in cell else ""
    return (
        f"{spread(cell['call_us']).median:,.1f}",
        f"{faster.median:.2f}×" + (f" ±{faster.iqr:.2f}" if faster.noisy else "") if faster else "",
        device_us,
        f"{cell['latency_us']['median']:,.1f}",
        f"{cell['host_us']['median']:,.1f}",
    )


def _facts(cell: Mapping[str, Any]) -> tuple[str, ...]:
    first, error = cell.get("first_s"), cell.get("error")
    remark = "" if cell["status"] == "ok" else f"{cell['status']}: {cell['reason']}"
    return "" if first is None else f"{first:.1f}", "" if error is None else f"{error:.1e}", remark


BENCH = Command(
    "bench",
    "time a model or a training step in several modes, side by side",
    f"""Time a model or a training step in several modes, side by side, in interleaved rounds, after checking what each
computes. Each mode of a step gets a step of its own from the factory, and what its first steps return is compared.
Exits with 1 if autostream has no time: it failed, or its outputs are wrong.

{TARGET}""",
    "bench googlenet --input 1x3x224x224:float16",
    [
        *MODEL,
        DEVICE,
        argument("--modes", type=names, metavar="A,B", help="only these (default: all)"),
        argument(
            "--baseline", metavar="MODE", help="what the others are compared with (default: cuda_graph, on a CPU eager)"
        ),
        JSON,
        OUT,
    ],
    _bench,
)
