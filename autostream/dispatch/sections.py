"""A program that a CUDA graph cannot hold whole: what it can hold is captured, and the ops between run as they are.

program ──▶ cut ──▶ part: a section of its own, scheduled and captured as a program is
             │      part: plain ops, on the caller's stream
             │      part: long copies between the host and the device, beside the parts before (crossing.py)
             └──▶ …

Numbers that were asked of the device (``.item()``) stay between plain ops, which take them from the host. Copies from
one device to another are plain ops too: they come after all that the caller's streams of both devices have been given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from autostream.analysis.argument_views import argument_views
from autostream.analysis.dependencies import analyze
from autostream.dispatch.optimized_callable import MakeSection, OptimizedCallable
from autostream.ir import OpGraph, Program
from autostream.options import Options
from autostream.pipeline import capture_refusals, planned, price_program, versions
from autostream.reporting.report import Report
from autostream.runtime.cutting import split_program
from autostream.runtime.restore import undone
from autostream.runtime.runs import uncaptured
from autostream.runtime.static_inputs import Output
from autostream.scheduling.cut import Part, cut
from autostream.tuning.candidates import candidates_for
from autostream.tuning.select import written
from autostream.tuning.tune import on_copies
from autostream.utils import collector
from autostream.utils.stopwatch import Stopwatch


def sections_of(
    program: Program, bound: Sequence[bool], options: Options, make_section: MakeSection, stopwatch: Stopwatch
) -> Sections | None:
    """Cut a program at the ops that a CUDA graph cannot hold.

    Args:
        program: of ATen ops.
        bound: which of its arguments stay where they are from call to call.
        options: how to schedule.
        make_section: makes what runs in the place of a section.
        stopwatch: is told what took how long.

    Returns:
        Nothing where a graph can hold the whole, or nothing that is worth one, or where none is to be captured.
    """
    if options.cuda_graph is False or program.device == "cpu":
        return None
    with stopwatch("analyze"), collector.paused():
        graph = analyze(program)
        parts = cut(graph) if program.peers or capture_refusals(graph) else ()
    if not parts or (len(parts) == 1 and not program.peers):  # as one graph, it is not copied in and out
        return None
    return Sections(program, graph, parts, bound, options, make_section)


class Sections:
    """Runs a program in parts; takes and returns flat tensors, as the program does.

    Args:
        program: of ATen ops.
        graph: its ops.
        parts: of these.
        bound: which of the program's arguments stay where they are from call to call.
        options: how to schedule.
        make_section: makes what runs in the place of a section.

    Attributes:
        graph: the ops.
        module: what runs, to be read.
    """

    def __init__(
        self,
        program: Program,
        graph: OpGraph,
        parts: Sequence[Part],
        bound: Sequence[bool],
        options: Options,
        make_section: MakeSection,
    ) -> None:
        whole = split_program(program, graph, parts, bound, argument_views(program.module.graph))
        self.graph, self.module = graph, whole.module
        self._program, self._bound = program, bound
        self._refusals = capture_refusals(graph)
        running = copy.copy(whole.module)
        self._reports: list[Callable[[], tuple[Report, ...]]] = []
        for section in whole.sections:
            if section.captured:
                made = make_section(section.program.module, section.bound)
                setattr(running, section.name, _Called(made))
                self._reports.append(partial(getattr, made, "reports"))
            else:
                where = "beside the part before" if section.beside else "between sections"
                self._reports.append(partial(tuple, [_plain_report(section.program, where, options)]))
        self._endings = [*(self._ending(part, after) for part, after in pairwise(parts)), ""]
        self._run = uncaptured(running, program.device, 1)

    def __call__(self, *tensors: Tensor) -> Sequence[Output]:
        """Run one part after the other, on the caller's stream."""
        return self._run(*tensors)

    def prepare(self, arguments: Sequence[Tensor]) -> None:
        """Run once with copies, so that all sections are made. State, inputs and generators are as before then."""
        mode = torch.is_grad_enabled()
        with (
            on_copies(self._program, arguments, self._bound) as copies,
            undone(copies, written(self._program, self.graph), self._program.devices),
            torch.set_grad_enabled(mode),
        ):
            self(*copies)

    def report(self, model: str, signature: str, stopwatch: Stopwatch) -> Report:
        """What is known now.

        Args:
            model: its name.
            signature: what this was made for.
            stopwatch: knows what took how long.
        """
        return Report(
            model=model,
            signature=signature,
            mode="sections",
            refusals=self._refusals,
            seconds=dict(stopwatch.seconds),
            versions=versions(),
            parts=tuple(
                replace(report, model=model, ended=ended)
                for reports, ended in zip(self._reports, self._endings, strict=True)
                for report in reports()
            ),
        )

    def _ending(self, part: Part, after: Part) -> str:
        """Why a part ends where that one begins."""
        if reason := next((refusal.reason for refusal in self._refusals if refusal.op in after.ops), ""):
            return reason
        others = {self.graph.ops[op].device for op in after.ops} - {part.device, "cpu"} if part.captured else set()
        if others:
            return f"what follows runs on {min(others)}"
        return "what follows fits into a CUDA graph" if after.captured else _ON_HOST


_ON_HOST = "what follows uses a tensor in the host's memory that changes in a call"


class _Called(nn.Module):
    """What runs in the place of a section, as the submodule that it is in the whole."""

    def __init__(self, run: OptimizedCallable) -> None:
        super().__init__()
        self._run = run

    def forward(self, *values: Any) -> Any:
        return self._run(*values)


def _plain_report(program: Program, where: str, options: Options) -> Report:
    """What is known of ops that run as they are: nothing was measured, so what they take is predicted."""
    priced = price_program(program, options, Stopwatch())
    candidates = candidates_for(priced, replace(options, policy="sequential"), False, Stopwatch())[:1]
    found = planned("", where, "one stream", program.level, priced, candidates, candidates[0])
    return replace(found, refusals=priced.refusals)
