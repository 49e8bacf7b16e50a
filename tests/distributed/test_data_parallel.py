"""Steps shared by two to four processes over gloo; what they do is in ``scenarios.py``.

Importing torch takes longer than most scenarios, so processes run all of them, and are forks of one that has done so.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.processes import LOST, Scenario, outcomes, torchrun
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


LAUNCHED = """
import torch, autostream
torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(3, 1)
sgd, world = torch.optim.SGD(model.parameters(), lr=0.1), torch.distributed.group.WORLD
step = autostream.train_step(model, sgd, torch.nn.MSELoss(), data_parallel=world, policy="sequential")
step(torch.ones(4, 3), torch.ones(4, 1))
if torch.distributed.get_rank() == 1:
    torch.distributed.recv(torch.ones(1), 0)
    raise ValueError("a fault of mine")
torch.distributed.send(torch.ones(1), 1)
step(torch.ones(4, 3), torch.ones(4, 1))
print("went on", flush=True)
"""


def test_torchrun_ends_the_others_where_one_fails_that_they_wait_for(tmp_path: Path) -> None:
    """Their own limit is longer than that of this test."""
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    status, told = torchrun(script, 2)
    assert status == 1, told
    assert "ValueError: a fault of mine" in told
    assert "went on" not in told
    assert "GroupError" not in told
