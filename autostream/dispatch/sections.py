"""A program that does not fit into one CUDA graph: sections that fit are captured, the ops between them run eagerly.

    program ──▶ cut ──▶ part: a section, scheduled and captured like a program
             │      part: eager ops, on the caller's stream
             │      part: long copies between the host and the device, beside the part before (host_copies.py)
             └──▶ …

Numbers that are read from the device (``.item()``) pass from one eager op to another on the host. Copies from one
device to another are eager ops too. Of a program over several devices, values that sections pass to each other stay
where they are computed, and copies for sections run beside them (``runtime/peer_copies.py``); other copies run after
all work on the caller's streams of both devices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from autostream.analysis.dependencies import analyze
from autostream.analysis.effects import argument_views
from autostream.dispatch.optimized_callable import MakeSection, SharingCallable
from autostream.ir import Hazard, OpGraph, Program
from autostream.options import Options
from autostream.pipeline import planned, versions
from autostream.reporting.report import Report
from autostream.runtime.cutting import Section, split_program, with_copies
from autostream.runtime.lower import storages_of
from autostream.runtime.peer_copies import PeerCopies
from autostream.runtime.restore import undone
from autostream.runtime.runs import uncaptured
from autostream.runtime.static_inputs import Output
from autostream.scheduling.cut import Part, cut
from autostream.tuning.candidates import candidates_for
from autostream.tuning.pricing import capture_refusals, price_program
from autostream.tuning.select import written
from autostream.tuning.tune import on_copies
from autostream.utils import collector
from autostream.utils.stopwatch import Stopwatch


def sections_of(
    program: Program, bound: Sequence[bool], options: Options, make_section: MakeSection, stopwatch: Stopwatch
) -> Sections | None:
    """Cut a program at the ops that cannot be captured.

    Args:
        program: of ATen ops.
        bound: which of its arguments keep their addresses from call to call.
        options: how to schedule.
        make_section: compiles a section.
        stopwatch: measures the time of the stages.

    Returns:
        ``None`` if all fits into one CUDA graph, if no section is worth one, or if none may be captured.
    """
    if options.cuda_graph is False or program.device == "cpu":
        return None
    with stopwatch("analyze"), collector.paused():
        graph = analyze(program)
        durations = _durations_us(program, options) if program.peers else {}
        parts = cut(graph, durations) if program.peers or capture_refusals(graph) else ()
    if not parts or (len(parts) == 1 and not program.peers):  # one graph needs no copies between sections
        return None
    return Sections(program, graph, parts, bound, options, make_section)


class Sections:
    """Runs a program in parts; takes and returns flat tensors, as the program does.

    Args:
        program: of ATen ops.
        graph: its ops.
        parts: which ops are in which part, in the order in which the parts run.
        bound: which of the program's arguments keep their addresses from call to call.
        options: how to schedule.
        make_section: compiles a section.

    Attributes:
        graph: the ops.
        module: the graph that runs, for reading, with a submodule for each part.
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
        copied = {op.name for op in graph.ops.values() if op.crosses == "peer"}
        whole = split_program(program, graph, parts, bound, argument_views(program.module.graph, copied))
        self.graph, self.module = graph, whole.module
        self._program, self._bound = program, bound
        self._refusals = capture_refusals(graph)
        running, several = copy.copy(whole.module), bool(program.peers)
        captured = sum(section.captured for section in whole.sections)
        kept = _kept(program, whole.sections) if several else frozenset[str]()
        memory = _Memory(kept, _beside(graph, whole.sections) & kept, captured if several else 1)
        self._copies = memory.copies if several else None
        self._reports: list[Callable[[], tuple[Report, ...]]] = []
        for section in whole.sections:
            if section.captured:
                called = _Called(section, make_section, memory)
                setattr(running, section.name, called)
                self._reports.append(called.reports)
            else:
                if self._copies and not section.beside:
                    setattr(running, section.name, _Copying(section, memory))
                where = "beside the part before" if section.beside else "between sections"
                self._reports.append(partial(tuple, [_plain_report(section.program, where, options)]))
        self._endings = [*(self._ending(part, after) for part, after in pairwise(parts)), ""]
        self._run = uncaptured(running, program.device, 1)

    def __call__(self, *tensors: Tensor) -> Sequence[Output]:
        """Run one part after the other, on the caller's stream."""
        with self._copies.call() if self._copies else nullcontext():
            return self._run(*tensors)

    def prepare(self, arguments: Sequence[Tensor]) -> None:
        """Run once with copies, so that all sections are compiled. State, inputs and generators stay as they are."""
        mode = torch.is_grad_enabled()
        with (
            on_copies(self._program, arguments, self._bound) as copies,
            undone(copies, written(self._program, self.graph), self._program.devices),
            torch.set_grad_enabled(mode),
        ):
            self(*copies)

    def report(self, model: str, signature: str, stopwatch: Stopwatch) -> Report:
        """One report, with the reports of the parts.

        Args:
            model: its name.
            signature: describes the calls.
            stopwatch: has the time of the stages.
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
        """Why a part ends where the next one begins."""
        if reason := next((refusal.reason for refusal in self._refusals if refusal.op in after.ops), ""):
            return reason
        others = {self.graph.ops[op].device for op in after.ops} - {part.device, "cpu"} if part.captured else set()
        if others:
            return f"what follows runs on {min(others)}"
        return "what follows fits into a CUDA graph" if after.captured else _ON_HOST


_ON_HOST = "what follows uses a tensor in the host's memory that changes in a call"


class _Memory:
    """Where values lie that sections over several devices pass to each other.

    Args:
        kept: the names of values that may stay where they are computed.
        beside: copies between devices that may run beside sections.
        sections: how many share the seconds of tuning.

    Attributes:
        kept: the same.
        beside: the same.
        sections: the same.
        staying: those that do, by the sections that were compiled so far.
        copies: from one device to another.
    """

    def __init__(self, kept: frozenset[str], beside: frozenset[str], sections: int) -> None:
        self.kept, self.beside, self.sections = kept, beside, sections
        self.staying, self.copies = set[str](), PeerCopies()


class _Called(nn.Module):
    """A section as a module, to be a submodule of the program's. It is compiled when it is called first.

    Args:
        section: the section.
        make: compiles it.
        memory: of the program.
    """

    def __init__(self, section: Section, make: MakeSection, memory: _Memory) -> None:
        super().__init__()
        self._section, self._make, self._memory = section, make, memory
        self._names = [each.name for each in section.program.placeholders]
        self._run: SharingCallable | None = None

    def forward(self, *values: Any) -> Any:
        self._memory.copies.wait(self._names)
        return (self._run or self._made(values))(*values)

    def reports(self) -> tuple[Report, ...]:
        """Of the compiled section."""
        return () if self._run is None else self._run.reports

    def _made(self, values: Sequence[Any]) -> SharingCallable:
        program, memory = self._section.program, self._memory
        bound = self._section.bound | {at for at, name in enumerate(self._names) if name in memory.staying}
        keeps = frozenset(at for at, name in enumerate(program.outputs) if name in memory.kept)
        self._run = run = self._make(program.module, frozenset(bound), alone=bool(keeps), of=memory.sections)
        if keeps:
            shared = run.share_outputs(values, keeps, aliased=True)
            memory.staying.update(program.outputs[at] for at in shared)
        return run


class _Copying(nn.Module):
    """A part that runs eagerly between sections; copies to other devices that sections read run beside these.

    Args:
        section: the part.
        memory: of the program.
    """

    def __init__(self, section: Section, memory: _Memory) -> None:
        super().__init__()
        self._copies, self._names = memory.copies, [each.name for each in section.program.placeholders]
        self._module, replaced = with_copies(section.program.module, memory.beside, partial(_Copy, memory.copies))
        memory.staying.update(replaced)

    def forward(self, *values: Any) -> Any:
        self._copies.wait(self._names)
        return self._module(*values)


class _Copy(nn.Module):
    """A copy to another device as a module.

    Args:
        copies: of the program.
        name: of the copy.
        copying: makes the first one.
    """

    def __init__(self, copies: PeerCopies, name: str, copying: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._copies, self._name, self._copying = copies, name, copying

    def forward(self, source: Tensor) -> Tensor:
        return self._copies.copy(self._name, source, self._copying)


def _kept(program: Program, sections: Sequence[Section]) -> frozenset[str]:
    """The values that captured sections read where others leave them, and that the program does not return.

    A copy of each activation from a forward to its backward would take as long as to compute many of them.
    """
    nodes = {node.name: node for node in program.module.graph.nodes}
    returned = {storage for name in program.outputs for storage in storages_of(nodes[name])}
    made = {name for section in sections for name in section.program.outputs if not section.beside}
    read = {each.name for section in sections if section.captured for each in section.program.placeholders}
    return frozenset(name for name in made & read if returned.isdisjoint(storages_of(nodes[name])))


def _beside(graph: OpGraph, sections: Sequence[Section]) -> frozenset[str]:
    """The copies between devices that may run beside sections: all that read a copy wait for it.

    Who overwrites its source, or copies it to the host on streams of its own, does not.
    """
    overwritten = {each.before for each in graph.dependencies if each.hazard is Hazard.WAR}
    downloaded = {each.name for section in sections if section.beside for each in section.program.placeholders}
    copies = {op.name for op in graph.ops.values() if op.crosses == "peer"}
    return frozenset(copies - overwritten - downloaded)


def _durations_us(program: Program, options: Options) -> dict[str, float]:
    """Estimates for each op, µs; all devices count as the first."""
    costs = price_program(program, options, Stopwatch()).costs
    return {name: cost.duration_us for name, cost in costs.items()}


def _plain_report(program: Program, where: str, options: Options) -> Report:
    """The report of ops that run eagerly. Their times are predictions, as nothing was measured."""
    priced = price_program(program, options, Stopwatch())
    candidates = candidates_for(priced, options.on_one_stream, False, Stopwatch())[:1]
    report = planned("", where, "one stream", program.level, priced, candidates, candidates[0])
    return replace(report, refusals=priced.refusals)
