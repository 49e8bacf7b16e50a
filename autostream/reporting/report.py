"""The report: everything known about one signature of one model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from autostream.ir import Candidate, Costs, Decision, DeviceProfile, OpGraph, Timeline
from autostream.reporting import notebook
from autostream.reporting.dump import dump
from autostream.reporting.page import assemble


@dataclass(frozen=True)
class Report:
    """All that is known about one signature of one model: what runs, why, and what was refused.

    Attributes:
        model: the name of the model's class, or of the function.
        signature: readable, e.g. ``"1x3x224x224:float16 on cuda:0, eval, no_grad"``.
        mode: what a call runs: ``"plain"`` (the model itself), ``"one stream"``, ``"streams"``, ``"threads"`` (streams
            of a CPU), ``"cuda graph"``, ``"sections"`` (CUDA graphs, and between them ops that cannot be captured),
            ``"graph breaks"`` and ``"forward and backward"`` (see ``parts``), ``"not run yet"`` before the first call
            of a model with graph breaks, or ``"dry run"`` for a plan.
        level: level of kernels, as in :class:`~autostream.ir.Program`; ``""`` where tracing was refused.
        profile: the device that was planned for.
        graph, costs, chosen, timeline: the stages' results; all ``None`` or empty where tracing was refused.
            ``timeline`` is the simulated run of the chosen candidate.
        measured: a profiled run of the chosen candidate, if there was one.
        candidates: all that were considered, including the chosen one.
        chosen_on: the date on which the chosen candidate was selected, if it comes from the cache of choices:
            ``candidates`` are then itself and the sequential one. ``""`` where it was selected now.
        refusals: what could not be done, and why, in the order in which it was tried.
        seconds: stage name to the wall-clock seconds it took.
        versions: package name to version.
        parts: reports of the parts of a model: with graph breaks, one for each graph that has run; with ops that cannot
            be captured, one for each section and for the ops between two; with gradients, one for the forward, and one
            for the backward once it has run.
        ended: why such a part ends, with the user's source line; ``""`` where the model returns.
        half: ``"forward"`` or ``"backward"`` of a call with gradients; else ``""``.
    """

    model: str
    signature: str
    mode: str
    level: str = ""
    profile: DeviceProfile | None = None
    graph: OpGraph | None = None
    costs: Costs = field(default_factory=dict)
    chosen: Candidate | None = None
    timeline: Timeline | None = None
    measured: Timeline | None = None
    candidates: tuple[Candidate, ...] = ()
    chosen_on: str = ""
    refusals: tuple[Decision, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[Report, ...] = ()
    ended: str = ""
    half: str = ""

    def to_json(self) -> str:
        """The report as JSON, with the keys of :func:`~autostream.reporting.dump.dump`.

        Example:
            >>> json.loads(Report("Net", "1x8:float32 on cpu, eval, no gradients", "plain").to_json())["model"]
            'Net'
        """
        return json.dumps(dump(self), indent=1, allow_nan=False)

    def to_html(self) -> str:
        """The page of ``autostream report``: one file that needs no network.

        Example:
            >>> page = Report("Net", "1x8:float32 on cpu, eval, no gradients", "plain").to_html()
            >>> page.startswith("<!doctype html>")
            True
        """
        return assemble.render(self)

    def _repr_html_(self) -> str:
        """The summary, for notebooks."""
        return notebook.render([self])
