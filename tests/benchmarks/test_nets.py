"""The benchmarks' own nets compute what their papers say."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from torch import Tensor

from benchmarks import nets


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_a_product_multiplies_each_row_with_each_row() -> None:
    model, x = nets.Product(4), torch.randn(3, 4)
    a, b = model.block1(x), model.block2(x)
    assert not torch.equal(a, b)
    torch.testing.assert_close(model(x), torch.stack([torch.stack([a[i] @ b[j] for j in range(3)]) for i in range(3)]))


def test_experts_are_weighed_by_the_gate() -> None:
    model, x = nets.Experts(experts=3, width=4, hidden=8), torch.randn(2, 5, 4)
    outputs = model(x)
    for i in range(2):
        for j in range(5):
            token = x[i, j]
            scores = model.gate(token).exp()
            expected = sum(scores[e] / scores.sum() * model.experts[e](token) for e in range(3))
            torch.testing.assert_close(outputs[i, j], expected)


def test_dlrm_multiplies_all_pairs_of_vectors() -> None:
    model, vectors = nets.Dlrm(dense=2, tables=4, rows=10, width=3), torch.randn(2, 5, 3)
    products = model.interactions(vectors)
    expected = [[row[i] @ row[j] for i in range(5) for j in range(i)] for row in vectors]
    torch.testing.assert_close(products, torch.tensor(expected))


def test_deepfm_adds_weights_products_of_all_pairs_and_a_perceptron() -> None:
    model, fields = nets.DeepFm(fields=4, rows=10, width=3), torch.randint(10, (6, 4))
    logits = model(fields)
    assert logits.shape == (6,)
    for n in range(6):
        rows = [10 * f + int(fields[n, f]) for f in range(4)]  # each field has rows of its own
        factors = model.factors.weight[rows]
        linear = model.weights.weight[rows].sum()
        products = sum((factors[i] @ factors[j] for i in range(4) for j in range(i)), torch.zeros(()))
        torch.testing.assert_close(logits[n], linear + products + model.deep(factors.flatten())[0])


def test_the_wiring_of_a_random_stage_is_that_of_its_graph_each_time() -> None:
    stage = nets.RandomStage(3, 4, nodes=32, seed=1)
    graph = nx.connected_watts_strogatz_graph(32, k=4, p=0.75, seed=1)
    edges = {(source, node) for node, sources in enumerate(stage.sources) for source in sources}
    assert edges == {(min(edge), max(edge)) for edge in graph.edges}
    assert set(stage.sinks) == set(range(32)) - {source for source, _ in edges}
    assert nets.RandomStage(3, 4, nodes=32, seed=1).sources == stage.sources
    assert nets.RandomStage(3, 4, nodes=32, seed=2).sources != stage.sources


def test_a_random_stage_runs_its_graph() -> None:
    """Of five nodes, each looked up by name: what it reads is what its predecessors made, halved in size once."""
    stage, x = nets.RandomStage(3, 4, nodes=5, seed=0).eval(), torch.randn(2, 3, 8, 8)

    def value(number: int) -> Tensor:
        node, sources = stage.nodes[number], stage.sources[number]
        if not sources:
            return node(x)
        return node.unit(sum(w * value(s) for w, s in zip(node.weights.sigmoid(), sources, strict=True)))

    outputs = stage(x)
    assert outputs.shape == (2, 4, 4, 4)
    torch.testing.assert_close(outputs, torch.stack([value(sink) for sink in stage.sinks]).mean(0))
