"""Captured CUDA graphs, edge by edge: they order the ops that the schedule orders, and no others."""

from __future__ import annotations

import pytest
import torch

from benchmarks.zoo import INFERENCE, prepare
from tests.captured import captured, disagreements
from tests.delays import without_inner_waits
from tests.gpu.common import GPU
from tests.planned import LEVELS, Planned, planned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # as errors, Inductor's own would make it fall back
]

SHORT = {(name, "eager") for name in ("googlenet", "t5_small", "moe8", "dlrm")} | {("googlenet", "inductor")}
CASES = [
    pytest.param(name, level, marks=() if (name, level) in SHORT else pytest.mark.slow)
    for level in LEVELS
    for name in INFERENCE
]


def prepared(name: str, level: str) -> Planned:
    subject = prepare(INFERENCE[name], 1, GPU, torch.float16)
    model = planned(subject.model, [subject.args], level)
    if not model.capturable:
        pytest.skip("a CUDA graph could not hold it")
    return model


@pytest.mark.parametrize(("name", "level"), CASES)
def test_a_graph_has_the_order_of_its_schedule(name: str, level: str) -> None:
    model = prepared(name, level)
    for policy, streams in (("sequential", 1), ("critical_path", 4), ("path_cover", 3), ("scattered", 3)):
        schedule = model.schedule(policy, streams, captured=True)
        graph = captured(model, schedule, model.arguments[0])
        with_nodes = sum(map(bool, graph.nodes.values()))  # some ops have nothing to copy
        assert with_nodes > len(graph.nodes) / 2, "many ops have no nodes in the graph"
        assert disagreements(model.graph, schedule, graph) == [], policy


def test_a_missing_wait_is_a_missing_edge() -> None:
    model = prepared("googlenet", "eager")
    schedule = model.schedule("critical_path", 4, captured=True)
    broken = next(without_inner_waits(schedule))
    graph = captured(model, broken, model.arguments[0])
    assert disagreements(model.graph, broken, graph)[-1:] != []
    assert any("in the graph it is not" in told for told in disagreements(model.graph, schedule, graph))
