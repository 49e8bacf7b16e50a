"""The version is a literal, which packaging reads without importing torch."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import autostream
from autostream import version


def test_the_version_is_a_literal_in_the_form_of_pep_440() -> None:
    assert autostream.__version__ == version.VERSION
    assignments = [node for node in ast.parse(Path(version.__file__).read_text()).body if isinstance(node, ast.Assign)]
    assert [ast.literal_eval(assignment.value) for assignment in assignments] == [version.VERSION]
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", version.VERSION)
