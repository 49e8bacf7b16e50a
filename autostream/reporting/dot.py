"""A schedule as DOT text for Graphviz, and what Graphviz draws of it: ``autostream inspect NAME --dot | dot -Tsvg``."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from itertools import pairwise

from autostream.errors import OptionError, first_line
from autostream.ir import FORK, JOIN, Costs, DeviceProfile, Hazard, OpGraph, Schedule
from autostream.scheduling.lost_time import longest_chain

_GOLDEN = 0.618034
"""Steps of the golden ratio spread hues evenly for any number of streams."""

_CRITICAL = 'color="red" penwidth=3'


def render(graph: OpGraph, schedule: Schedule, costs: Costs, profile: DeviceProfile) -> str:
    r"""Draw ops as boxes, coloured by stream, and hazards as arrows; the critical path is red and thick.

    Dashed arrows are hazards that an event wait covers, solid ones those that the order within a stream covers or
    that follow from other waits. Hazards other than read after write are labelled. Fork and join are drawn where a
    stream waits for them.

    Example:
        >>> from autostream.ir import Launch, Op, OpCost
        >>> relu = Op("a", "aten.relu.default", ("a",), reads=frozenset({"x"}), writes=frozenset({"a"}))
        >>> graph, costs = OpGraph({"a": relu}, (), {}, (), "cuda:0"), {"a": OpCost(2.0, 0.5, 0.1, "roofline")}
        >>> gpu = DeviceProfile("GPU", 132, 4.8e6, {}, 2.0, 1.0, 2.0, 1.0, 1.0, "table")
        >>> print(render(graph, Schedule("sequential", 1, (Launch("a", 0),)), costs, gpu))
        digraph {
          node [shape=box style="filled,rounded" fontname="sans-serif"]
          "a" [label="a\naten.relu.default\nstream 0, 2.0 µs" fillcolor="0.000 0.300 1.000" color="red" penwidth=3]
        }
    """
    path = longest_chain(graph, costs, profile).ops
    waits = {(before, launch.op) for launch in schedule.launches for before in launch.waits}
    waits |= {(before, JOIN) for before in schedule.join_waits}
    lines = [
        'node [shape=box style="filled,rounded" fontname="sans-serif"]',
        *(_node(graph, name, stream, costs, name in path) for name, stream in schedule.stream_of.items()),
        *_ends(waits),
        *_edges(graph, waits, frozenset(pairwise(path))),
    ]
    return "digraph {\n" + "\n".join(f"  {line}" for line in lines) + "\n}"


def svg(drawing: str) -> str:
    """An SVG of a graph in DOT, drawn by Graphviz.

    Raises:
        OptionError: Graphviz is not installed, or fails.
    """
    program = shutil.which("dot")
    if program is None:
        raise OptionError(
            "SVG is drawn by Graphviz, whose dot is not installed: install it (Debian: apt install graphviz, macOS: "
            "brew install graphviz, conda: graphviz), or take DOT (--dot) and draw it elsewhere"
        )
    result = subprocess.run([program, "-Tsvg"], input=drawing, capture_output=True, text=True, encoding="utf-8")
    if result.returncode:
        reason = first_line(RuntimeError(result.stderr)).removeprefix("RuntimeError: ")
        raise OptionError(f"Graphviz does not draw this graph ({reason}): take DOT (--dot) and try another layout")
    return result.stdout


def _node(graph: OpGraph, name: str, stream: int, costs: Costs, critical: bool) -> str:
    label = f"{name}\n{graph.ops[name].target}\nstream {stream}, {costs[name].duration_us:.1f} µs"
    hue = stream * _GOLDEN % 1
    mark = f" {_CRITICAL}" if critical else ""
    source = graph.ops[name].source
    tooltip = f" tooltip={_quoted(source)}" if source else ""
    return f'{_quoted(name)} [label={_quoted(label)} fillcolor="{hue:.3f} 0.300 1.000"{tooltip}{mark}]'


def _ends(waits: set[tuple[str, str]]) -> Iterator[str]:
    waited = {name for wait in waits for name in wait}
    for end, label in ((FORK, "fork"), (JOIN, "join")):
        if end in waited:
            yield f'{_quoted(end)} [label="{label}" shape=ellipse fillcolor="white"]'


def _edges(graph: OpGraph, waits: set[tuple[str, str]], critical: frozenset[tuple[str, str]]) -> Iterator[str]:
    hazards = _hazards(graph)
    # A wait may cover other hazards by transitivity, between two ops that have none themselves.
    for before, after in [*hazards, *sorted(waits - hazards.keys())]:
        kinds = hazards.get((before, after), ())
        named = [kind.name for kind in kinds if kind is not Hazard.RAW]
        style = " ".join(
            [
                *([f"label={_quoted(', '.join(named))}"] if named else []),
                *(["style=dashed"] if (before, after) in waits else []),
                *([_CRITICAL] if (before, after) in critical else []),
            ]
        )
        yield f"{_quoted(before)} -> {_quoted(after)}{f' [{style}]' if style else ''}"


def _hazards(graph: OpGraph) -> Mapping[tuple[str, str], tuple[Hazard, ...]]:
    """The kinds of hazard between two ops, each kind once."""
    kinds: dict[tuple[str, str], dict[Hazard, None]] = {}
    for dependency in graph.dependencies:
        kinds.setdefault((dependency.before, dependency.after), {})[dependency.hazard] = None
    return {pair: tuple(hazards) for pair, hazards in kinds.items()}


def _quoted(text: str) -> str:
    """A DOT string. Backslashes are doubled, since Graphviz interprets them."""
    printable = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    escaped = printable.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
