"""The HTML page of a pipeline: its stages, and a drawing of all devices by each schedule. It has no scripts.

    device 0  │F0│F1│  │B0│F2│B1│
    device 1     │F0│B0│F1│B1│…

There is a bar for each forward, backward or half of a backward, with its microbatch; its stage and times show where the
pointer is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from autostream.ir import Slice
from autostream.reporting.page.template import filled, hash_of, text_of
from autostream.reporting.pipelines import drawn, runs_tables, stages_notes, stages_table, summary
from autostream.reporting.tables import Table, us
from autostream.scheduling.microbatches import Comparison, Run, action_of

KINDS = {"F": "forward", "B": "backward", "I": "backward of the input", "W": "backward of the weights"}
"""What each kind of action is called; ``pipelines.css`` has its colour."""

_WIDTH, _LANE, _BAR, _NAMES = 1200, 26, 20, 76
"""Pixels of a drawing, of the lane of a device and its bars, and for the names of devices."""

_LABEL = 16
"""Pixels that a bar needs for the number of its microbatch."""


def render(comparison: Comparison) -> str:
    """A comparison as an HTML page.

    Args:
        comparison: what :func:`autostream.splitting.compare` returned.
    """
    schedules, microbatches = runs_tables(comparison)
    stages = stages_table(comparison.pipeline)
    sections = (
        _section("Summary", _pairs(summary(comparison))),
        _section("Stages", _table(stages), *(_hint(each) for each in stages_notes(comparison.pipeline))),
        _section(schedules.title, _table(schedules)),
        _section(microbatches.title, _table(microbatches)),
        _section("Timelines", _legend(), *map(_drawing, drawn(comparison))),
    )
    style = text_of("page.css") + text_of("pipelines.css")
    parts = {
        "title": escape(f"{comparison.pipeline.model} as a pipeline"),
        "style": style,
        "style-hash": hash_of(style),
        "sections": "\n".join(sections),
    }
    return filled("pipelines.html", parts)


def _drawing(run: Run) -> str:
    """A run as SVG: a lane for each device."""
    slices = run.timeline.slices
    devices = 1 + max(piece.stream for piece in slices)
    title = f"{run.schedule}, {run.microbatches} microbatches: {us(run.step_us)}, {run.bubble:.0%} waits"
    names = (f'<text x="0" y="{_LANE * at + 15}">device {at}</text>' for at in range(devices))
    size = f'viewBox="0 0 {_WIDTH} {_LANE * devices}"'
    parts = (*names, *_bars(slices, (_WIDTH - _NAMES) / run.step_us))
    svg = f'<svg {size} role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f'<h3>{escape(title)}</h3>\n<div class="scroll">{svg}</div>'


def _bars(slices: Sequence[Slice], pixels_per_us: float) -> Iterator[str]:
    """A bar for each slice, with its microbatch if there is room."""
    for piece in slices:
        stage, kind, microbatch = action_of(piece.op)
        left, width = _NAMES + piece.start_us * pixels_per_us, (piece.end_us - piece.start_us) * pixels_per_us
        top = _LANE * piece.stream
        about = f"{KINDS[kind]} of microbatch {microbatch}, stage {stage}: {us(piece.start_us)} to {us(piece.end_us)}"
        place = f'x="{left:.1f}" y="{top}" width="{max(width - 0.5, 0.5):.1f}" height="{_BAR}"'
        yield f'<rect class="{kind}" {place}><title>{about}</title></rect>'
        if width >= _LABEL:
            yield f'<text class="number" x="{left + width / 2:.1f}" y="{top + 15}">{microbatch}</text>'


def _legend() -> str:
    bars = (f'<span class="{kind}">{kind}</span> {name}' for kind, name in KINDS.items())
    return _hint_of(", ".join(bars) + "; the number is that of the microbatch, and what is empty is a wait.")


def _section(title: str, *parts: str) -> str:
    return "\n".join(["<section>", f"<h2>{escape(title)}</h2>", *parts, "</section>"])


def _table(table: Table) -> str:
    # The page's policy allows its style sheet, and no styles of elements.
    aligned = table.html().replace('style="text-align: right;"', 'class="number"')
    return f'<div class="scroll">{aligned}</div>'


def _pairs(lines: Iterable[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(key)}</dt><dd>{escape(value)}</dd>' for key, value in lines)}</dl>"


def _hint(text: str) -> str:
    return _hint_of(escape(text))


def _hint_of(markup: str) -> str:
    return f'<p class="hint">{markup}</p>'
