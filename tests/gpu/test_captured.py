"""CUDA graphs, edge by edge: what is captured orders what the schedule orders, and nothing else."""

from __future__ import annotations

import pytest
import torch

from benchmarks.zoo import INFERENCE, prepare
from tests.captured import Captured, captured, disagreements
from tests.delays import without_inner_waits
from tests.planned import LEVELS, Planned, planned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # as errors, Inductor's own would make it fall back
]

GPU = torch.device("cuda", 0)

SHORT = [
    *((name, "eager") for name in ("googlenet", "bert_base", "towers8", "moe8", "dlrm", "t5_small")),
    *((name, "inductor") for name in ("googlenet", "towers8")),
]


def prepared(name: str, level: str) -> Planned:
    subject = prepare(INFERENCE[name], 1, GPU, torch.float16)
    model = planned(subject.model, [subject.args], level)
    if not model.capturable:
        pytest.skip("a CUDA graph could not hold it")
    return model


def check(name: str, level: str) -> None:
    model = prepared(name, level)
    for policy, streams in (("sequential", 1), ("critical_path", 4), ("path_cover", 3), ("scattered", 3)):
        schedule = model.schedule(policy, streams, captured=True)
        graph = captured(model, schedule, model.arguments[0])
        assert _mostly_launches(graph), "the graph has no nodes for many of its ops"
        assert disagreements(model.graph, schedule, graph) == [], policy


def _mostly_launches(graph: Captured) -> bool:
    """Whether ops have nodes; some have nothing to copy."""
    return sum(map(bool, graph.nodes.values())) > len(graph.nodes) / 2


@pytest.mark.parametrize(("name", "level"), SHORT)
def test_a_graph_has_the_order_of_its_schedule(name: str, level: str) -> None:
    check(name, level)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", INFERENCE)
def test_a_graph_has_the_order_of_its_schedule_throughout_the_zoo(name: str, level: str) -> None:
    check(name, level)


def test_a_wait_that_was_left_out_is_an_edge_that_is_missing() -> None:
    model = prepared("googlenet", "eager")
    schedule = model.schedule("critical_path", 4, captured=True)
    broken = next(without_inner_waits(schedule))
    graph = captured(model, broken, model.arguments[0])
    assert disagreements(model.graph, broken, graph)[-1:] != []
    assert any("in the graph it is not" in told for told in disagreements(model.graph, schedule, graph))
