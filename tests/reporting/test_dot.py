"""Graphs as DOT, read back by a small parser (expectations follow from the drawing in reports.py), and as SVG."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autostream.errors import OptionError
from autostream.ir import FORK, JOIN, Launch, OpGraph, Schedule
from autostream.reporting.dot import render, svg
from tests.reporting.reports import CHOSEN, COSTS, DIAMOND, REPORT, with_source
from tests.scheduling.graphs import profile_with

FREE = profile_with()

STRING = r'"(?:[^"\\\n]|\\.)*"'
ATTRIBUTES = rf"\[((?:\w+=(?:{STRING}|\w+) ?)*)\]"


def parse(text: str) -> tuple[dict[str, dict[str, str]], dict[tuple[str, str], dict[str, str]]]:
    """Attributes of the nodes and of the edges; fails on anything that is neither."""
    nodes: dict[str, dict[str, str]] = {}
    edges: dict[tuple[str, str], dict[str, str]] = {}
    opening, default, *lines, closing = text.splitlines()
    assert (opening, closing) == ("digraph {", "}")
    assert default.startswith("  node [")
    for line in lines:
        matched = re.fullmatch(rf"  ({STRING})(?: -> ({STRING}))?(?: {ATTRIBUTES})?", line)
        assert matched, line
        first, second, inner = matched.groups()
        attributes = dict(re.findall(rf"(\w+)=({STRING}|\w+)", inner or ""))
        if second:
            edges[first[1:-1], second[1:-1]] = attributes
        else:
            nodes[first[1:-1]] = attributes
    return nodes, edges


def test_waits_are_dashed_also_those_without_a_hazard_of_their_own() -> None:
    launches = (Launch("a", 1, waits=(FORK,)), Launch("b", 0, waits=("a",)), Launch("d", 1), Launch("c", 0))
    schedule = Schedule("drawn", 2, (*launches, Launch("e", 1, waits=("c", "b"))), join_waits=("e",))
    nodes, edges = parse(render(DIAMOND, schedule, COSTS, FREE))
    dashed = {pair for pair, attributes in edges.items() if attributes.get("style") == "dashed"}
    assert dashed == {(FORK, "a"), ("a", "b"), ("c", "e"), ("b", "e"), ("e", JOIN)}
    assert (nodes[FORK]["label"], nodes[JOIN]["label"]) == ('"fork"', '"join"')


def read(string: str) -> str:
    """What Graphviz shows for a label or tooltip."""
    return re.sub(r"\\(.)", lambda escape: "\n" if escape[1] == "n" else escape[1], string[1:-1])


@given(st.text())
@example('<script>alert("x")</script>')
@example("<b>&amp;</b>")
@example('\\N \\G \\" \\')
@example("\n\\\n")
@example('"]; evil [label="')
def test_whatever_the_model_says_is_shown_and_nothing_else(text: str) -> None:
    """Neither a string ends early, nor does one begin with ``<``, nor do Graphviz's own escapes mean anything."""
    printable = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    odd = replace(DIAMOND.ops["a"], name=text, target=text, source=f"source: {text}")
    graph, schedule = OpGraph({text: odd}, (), {}, (), "cuda:0"), Schedule(text, 1, (Launch(text, 0),))
    nodes, edges = parse(render(graph, schedule, {text: COSTS["a"]}, FREE))
    ((name, attributes),) = nodes.items()
    assert edges == {}
    assert read(f'"{name}"') == printable
    assert read(attributes["label"]).startswith(f"{printable}\n{printable}\nstream 0, ")
    assert read(attributes["tooltip"]) == f"source: {printable}"


# Drawings, where there is a program that makes them

HOSTILE = '"]; <script>alert(1)</script> \\'


def test_without_graphviz_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(OptionError, match=r"whose dot is not installed: install it \(Debian: apt install graphviz"):
        svg("digraph {}")


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_every_op_is_drawn_and_hostile_names_are_text() -> None:
    assert REPORT.profile is not None
    graph = with_source(DIAMOND, "d", HOSTILE)
    drawn = ElementTree.fromstring(svg(render(graph, CHOSEN.schedule, COSTS, REPORT.profile)))
    titles = [title.text for title in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert {"a", "b", "c", "d", "e"} <= set(titles)
    assert not [*drawn.iter("{http://www.w3.org/2000/svg}script")]


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_what_graphviz_refuses_is_one_line() -> None:
    with pytest.raises(OptionError, match=r"Graphviz does not draw this graph \(.*syntax error.*\): take DOT"):
        svg("digraph { -> }")
