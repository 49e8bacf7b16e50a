"""Rendering of DOT text to SVG with Graphviz's ``dot``."""

from __future__ import annotations

import shutil
import subprocess

from autostream.errors import OptionError, first_line


def render(drawing: str) -> str:
    """An SVG of a graph in DOT.

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
