"""Steps shared by two to four processes over gloo; what they do is in ``scenarios.py``.

Importing torch takes longer than most scenarios, so processes run all of them, and are forks of one that has done so.
"""

from __future__ import annotations

import pytest

from tests.distributed.processes import LOST, Scenario, outcomes
from tests.distributed.scenarios import IN_FOUR, IN_THREE, IN_TWO


@pytest.mark.parametrize(
    ("scenarios", "processes", "killed"),
    [
        (IN_TWO, 2, "a_process_dies"),
        (IN_THREE, 3, "a_process_dies_while_it_measures"),
        (IN_FOUR, 4, "a_process_dies_in_a_step"),
    ],
    ids=["two", "three", "four"],
)
def test_all_scenarios_end_as_they_should(scenarios: dict[str, Scenario], processes: int, killed: str) -> None:
    """The last process of the scenario in which it is killed has nothing to tell."""
    found = outcomes(scenarios, processes)
    good = {name: [*[""] * (processes - 1), LOST if name == killed else ""] for name in scenarios}
    wrong = {name: "\n".join(texts) for name, texts in found.items() if texts != good[name]}
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
