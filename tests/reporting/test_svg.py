"""Drawings, where there is a program that makes them."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ElementTree

import pytest

from autostream.errors import OptionError
from autostream.reporting import dot, svg
from tests.reporting.reports import CHOSEN, COSTS, DIAMOND, REPORT, with_source

HOSTILE = '"]; <script>alert(1)</script> \\'


def test_without_graphviz_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(OptionError, match=r"whose dot is not installed: install it \(Debian: apt install graphviz"):
        svg.render("digraph {}")


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_every_op_is_drawn_and_hostile_names_are_text() -> None:
    assert REPORT.profile is not None
    graph = with_source(DIAMOND, "d", HOSTILE)
    drawn = ElementTree.fromstring(svg.render(dot.render(graph, CHOSEN.schedule, COSTS, REPORT.profile)))
    titles = [title.text for title in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert {"a", "b", "c", "d", "e"} <= set(titles)
    assert not [*drawn.iter("{http://www.w3.org/2000/svg}script")]


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_what_graphviz_refuses_is_one_line() -> None:
    with pytest.raises(OptionError, match=r"Graphviz does not draw this graph \(.*syntax error.*\): take DOT"):
        svg.render("digraph { -> }")
