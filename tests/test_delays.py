"""Delays show what is missing, and do no harm where nothing is; here on the CPU, where streams are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream.runtime import streams
from tests import delays as module
from tests.delays import LONGEST_US, MOST, captured_symptoms, delayed, pause, symptoms, without_inner_waits
from tests.planned import Cells, Planned, planned, same
from tests.runtime.programs import fused_case

pytestmark = pytest.mark.usefixtures("one_thread_for_each_op")


@pytest.fixture
def cells() -> Planned:
    torch.manual_seed(0)
    return planned(Cells(), [(torch.randn(4, 8),) for _ in range(2)])


def test_delays_are_put_before_ops_and_are_the_same_for_the_same_seed(cells: Planned) -> None:
    lowered = cells.lowered(cells.schedule("scattered", 3, captured=False))
    before = lowered.code
    first, again, other = (delayed(cells, lowered, seed) for seed in (1, 1, 2))
    assert lowered.code == before
    assert first.code == again.code != other.code
    pauses = [node for node in first.graph.nodes if node.target is pause]
    assert 1 <= len(pauses) <= MOST
    assert all(node.next.name in cells.graph.ops for node in pauses)
    assert all(node.args[0] == "cpu" and 1 <= node.args[1] <= LONGEST_US["cpu"] for node in pauses)
    kept = [node.name for node in first.graph.nodes if node.target is not pause]
    assert kept == [node.name for node in lowered.graph.nodes]


def test_all_lanes_are_delayed_some_time(cells: Planned) -> None:
    lowered, seen = cells.lowered(cells.schedule("scattered", 3, captured=False)), set()
    for seed in range(10):
        lane = 0
        for node in delayed(cells, lowered, seed).graph.nodes:
            lane = node.args[1] if node.target is streams.use else lane
            seen |= {lane} if node.target is pause else set()
    assert seen == {0, 1, 2}


@pytest.mark.parametrize(("policy", "lanes"), [("critical_path", 3), ("scattered", 3)])
def test_delays_do_no_harm(cells: Planned, policy: str, lanes: int) -> None:
    schedule = cells.schedule(policy, lanes, captured=False)
    assert schedule.streams == lanes
    found = list(symptoms(cells, schedule, cells.expected(), range(10), runs=20))
    assert found == [""] * 20


def test_each_run_sees_other_arguments_than_the_one_before() -> None:
    """Fifteen runs with ten seeds: each seed serves one or two, and arguments take turns all the way."""
    model = planned(nn.ReLU(), [(torch.full((2,), float(at)),) for at in (1, 2)])
    expected = model.expected()
    schedule = model.schedule("sequential", 1, captured=False)
    assert list(symptoms(model, schedule, expected, range(10), runs=15)) == [""] * 15
    wrong = list(symptoms(model, schedule, expected[::-1], range(2), runs=4))
    assert wrong == [f"seed {seed}: wrong numbers for arguments {at}" for seed in (0, 1) for at in (0, 1)]


def test_a_missing_wait_shows(cells: Planned) -> None:
    """Each of them that is for the end of an op. The fork is none here: inputs are there when a thread starts."""
    expected = cells.expected()
    changed = list(without_inner_waits(cells.schedule("scattered", 3, captured=False)))
    assert len(changed) > 5
    for broken in changed:
        assert any(symptoms(cells, broken, expected, range(40), runs=40))


def test_inner_waits_leave_all_streams_forked_and_joined(cells: Planned) -> None:
    schedule = cells.schedule("critical_path", 3, captured=False)
    changed = list(without_inner_waits(schedule))
    assert 0 < len(changed) < schedule.wait_count
    assert {each.wait_count for each in changed} == {schedule.wait_count - 1}


def test_what_is_not_the_same_twice_is_no_yardstick() -> None:
    noise = planned(nn.Dropout(0.5), [(torch.ones(100),)])
    with pytest.raises(AssertionError, match="does not compute the same twice"):
        noise.expected()
    deaf = planned(nn.ReLU(), [(-torch.ones(2),), (-torch.full((2,), 2.0),)])
    with pytest.raises(AssertionError, match="stale result"):
        deaf.expected()


def test_fused_kernels_are_delayed_too() -> None:
    """What they compute in between lies in an arena, and some of it is written part by part."""
    case = fused_case()
    others = tuple(tensor + 1 for tensor in case.tensors)
    fused = Planned(case.program, case.graph, (case.tensors, others))
    schedule = fused.schedule("scattered", 3, captured=False)
    assert schedule.arena.offsets
    lowered = delayed(fused, fused.lowered(schedule), 0)
    assert any(node.target is pause for node in lowered.graph.nodes)
    args, untouched = ([tensor.clone() for tensor in case.tensors] for _ in range(2))
    with torch.no_grad():
        assert same(fused.run(lowered, schedule.streams)(*args), case.program.module(*untouched))


def test_captured_runs_are_delayed_as_others_are(cells: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a graph there is here only the run that would be captured, called at each replay."""
    pools: list[object] = []

    class Graph:
        def __init__(self, run: Any, static: Any, bound: Any, *_: object, pool: object = None, **rest: object) -> None:
            self.run, self.static, self.pool = run, static, pool or object()
            self.inputs = [at for at, is_bound in enumerate(bound) if not is_bound]
            pools.append(self.pool)

        def __call__(self, *tensors: Tensor) -> Any:
            for at in self.inputs:
                self.static[at].copy_(tensors[at])
            return self.run(*self.static)

    monkeypatch.setattr(module, "CapturedGraph", Graph)
    schedule, expected = cells.schedule("scattered", 3, captured=True), cells.expected()
    assert list(captured_symptoms(cells, schedule, expected, range(5), runs=10)) == [""] * 10
    assert len(pools) == 6
    assert len(set(pools)) == 1
    wrong = list(captured_symptoms(cells, schedule, expected[::-1], range(1), runs=2))
    assert wrong == ["seed 0: wrong numbers for arguments 0", "seed 0: wrong numbers for arguments 1"]


def test_a_run_is_late_as_often_and_as_long_as_its_graph_says(cells: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    schedule = cells.schedule("scattered", 3, captured=False)
    lowered = delayed(cells, cells.lowered(schedule), 1)
    wanted = [node.args[1] / 1e6 for node in lowered.graph.nodes if node.target is pause]
    with torch.no_grad():
        cells.run(lowered, schedule.streams)(*cells.arguments[0])
    assert sorted(slept) == sorted(wanted)
