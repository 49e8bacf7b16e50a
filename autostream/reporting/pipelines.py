"""Pipelines as text and JSON: the stages of a model, and schedules of its microbatches.

    1F1B    device 0   FFFF····BFBFBFBFBF··B·B·B
            device 1   ·FFF··BFBFBFBFBFB·B·B···

``F`` is a forward, ``B`` a backward, ``I`` and ``W`` are its halves, and ``·`` is a wait.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from autostream.ir import Slice
from autostream.reporting.tables import Table, count, few, pairs, size, us
from autostream.scheduling.microbatches import Comparison, Pipeline, Run, action_of, best_of

_WIDTH = 100
"""Characters of a step in a drawing."""


def render(comparison: Comparison) -> str:
    """The best schedule, the stages, all schedules as a table and as drawings, and numbers of microbatches."""
    parts = (
        pairs(summary(comparison)),
        split_table(comparison.pipeline),
        *(each.text() for each in runs_tables(comparison)),
        *map(_drawing, drawn(comparison)),
    )
    return "\n\n".join(parts)


def summary(comparison: Comparison) -> list[tuple[str, str]]:
    """What was compared, the best of it, and what cannot run."""
    pipeline, best = comparison.pipeline, comparison.best
    fastest = min((run for run in comparison.runs if not run.refusal), key=lambda run: run.step_us)
    faster = f"; {_named(fastest)} takes {us(fastest.step_us)}, and more memory" * (fastest.step_us < best.step_us)
    return [
        ("model", pipeline.model),
        ("devices", f"{len(pipeline.stages)} times {pipeline.device}, joined by {comparison.interconnect}"),
        ("step", f"{pipeline.microbatches} microbatches of {count(comparison.rows, 'row')}, forward and backward"),
        ("best", f"{_named(best)}: {us(best.step_us)}, {best.bubble:.0%} waits{faster}"),
        *(("refused", f"{run.schedule}: {run.refusal}") for run in comparison.asked() if run.refusal),
    ]


def _named(run: Run) -> str:
    return f"{run.schedule} with {run.microbatches} microbatches"


def drawn(comparison: Comparison) -> list[Run]:
    """The runs that were asked for, the fastest first; before them the best one, if it has other microbatches."""
    asked = sorted((run for run in comparison.asked() if not run.refusal), key=lambda run: run.step_us)
    return asked if comparison.best in asked else [comparison.best, *asked]


def runs_tables(comparison: Comparison) -> tuple[Table, Table]:
    """The schedules of the microbatches that were asked for, and the best schedule of each number of them."""
    numbers = sorted({run.microbatches for run in comparison.runs})
    runs = [[run for run in comparison.runs if run.microbatches == number and not run.refusal] for number in numbers]
    return (
        _runs_table("Schedules", [run for run in comparison.asked() if not run.refusal]),
        _runs_table(
            "Microbatches, of as many rows together: of schedules within 1 % the one of least memory",
            [best_of(each) for each in runs if each],
        ),
    )


def to_json(comparison: Comparison) -> str:
    """All of it, with each run's timeline, as JSON."""
    best = comparison.best
    chosen = {"schedule": best.schedule, "microbatches": best.microbatches}
    return json.dumps({**asdict(comparison), "best": chosen}, indent=1, allow_nan=False)


def _runs_table(title: str, runs: Iterable[Run]) -> Table:
    head = ("schedule", "microbatches", "step", "waits", "memory of each device")
    rows = [
        (
            run.schedule,
            str(run.microbatches),
            us(run.step_us),
            f"{run.bubble:.1%}",
            ", ".join(map(size, run.memory_bytes)),
        )
        for run in runs
    ]
    return Table(title, head, rows, right="microbatches step waits")


def _drawing(run: Run) -> str:
    """A line for each device, whose characters say what it does at their time."""
    devices = range(1 + max(piece.stream for piece in run.timeline.slices))
    title = f"{run.schedule}, {run.microbatches} microbatches: a character is {us(run.step_us / _WIDTH)}"
    lines = [_line([piece for piece in run.timeline.slices if piece.stream == at], run.step_us) for at in devices]
    return "\n".join([title, *(f"device {at}  {line}" for at, line in enumerate(lines))])


def _line(slices: Sequence[Slice], step_us: float) -> str:
    cells = ["·"] * _WIDTH
    for piece in slices:
        first, end = (round(at_us / step_us * _WIDTH) for at_us in (piece.start_us, piece.end_us))
        cells[first:end] = action_of(piece.op).kind * (end - first)
    return "".join(cells)


def split_table(split: Pipeline) -> str:
    """A model's stages, one a row."""
    return "\n".join([stages_table(split).text(), *stages_notes(split)])


def stages_table(split: Pipeline) -> Table:
    """The same without notes."""
    rows = [
        (
            str(at),
            few(names),
            us(stage.forward_us),
            us(stage.backward_us),
            size(stage.crossing_bytes) if at else "",
            size(stage.weight_bytes),
            size(memory),
        )
        for at, (stage, names, memory) in enumerate(
            zip(split.stages, split.submodules, split.memory_bytes, strict=True)
        )
    ]
    title = f"{split.model} in {count(len(rows), 'stage')} on {split.device}, {split.microbatches} microbatches a step"
    head = ("stage", "submodules", "forward", "backward", "bytes in", "weights, gradients, states", "memory")
    return Table(title, head, rows, right="forward backward bytes weights, memory")


def stages_notes(split: Pipeline) -> list[str]:
    """What a table of stages does not say."""
    about = f"A step by {split.schedule} takes {us(split.step_us)}. Times and bytes in are of one microbatch."
    copies = f"Several stages have a copy of {few(split.shared)}: add up its gradients yourself."
    returned = sum(split.outputs_bytes)
    outputs = (
        f"Of the last stage's memory, {size(returned)} are the outputs of all microbatches, and a copy: call "
        "schedule.step(..., return_outputs=False) if you need none."
    )
    notes = {about: True, outputs: returned > _MUCH * split.memory_bytes[-1], copies: bool(split.shared)}
    return [note for note, applies in notes.items() if applies]


_MUCH = 0.1
"""A smaller share of the memory is not worth a note."""
