"""Steps shared by two to four processes over gloo; what they do is in ``scenarios.py``."""

from __future__ import annotations

import pytest

from tests.distributed.processes import LOST, outcomes
from tests.distributed.scenarios import IN_FOUR, IN_THREE, IN_TWO


@pytest.fixture(scope="module")
def in_two() -> dict[str, list[str]]:
    """How all scenarios ended in both processes: importing torch takes longer than most of them."""
    return outcomes(IN_TWO, 2)


@pytest.fixture(scope="module")
def in_four() -> dict[str, list[str]]:
    return outcomes(IN_FOUR, 4)


@pytest.mark.parametrize("name", IN_TWO)
def test_two_processes(name: str, in_two: dict[str, list[str]]) -> None:
    assert in_two[name] == ["", ""], "\n".join(in_two[name])


@pytest.mark.parametrize("name", IN_FOUR)
def test_four_processes(name: str, in_four: dict[str, list[str]]) -> None:
    dead = [LOST] if name == "a_process_dies" else [""]
    assert in_four[name] == ["", "", "", *dead], "\n".join(in_four[name])


def test_a_process_that_dies_while_it_measures_ends_the_others() -> None:
    (found,) = outcomes(IN_THREE, 3).values()
    assert found == ["", "", LOST], "\n".join(found)
