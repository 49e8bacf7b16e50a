"""Graph breaks: the graphs of a model, why each ends, and what runs eagerly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autostream.frontend.graph_breaks import ending_of, with_breaks
from tests.semantics import Model

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Split:
    """A model run as graphs, each of which runs op by op.

    Attributes:
        graphs: in the order in which they were made.
        runs: the position of each graph that has run.
        skipped: why parts run eagerly.
    """

    def __init__(self, model: nn.Module) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.runs: list[int] = []
        self.skipped: list[str] = []
        self.run = with_breaks(model, self._backend, self.skipped.append)

    def _backend(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        number = len(self.graphs)
        self.graphs.append(module)

        def run(*values: Any) -> Any:
            self.runs.append(number)
            return module.forward(*values)

        return run


def prints(s: Model, x: Tensor) -> Tensor:
    y = x.sin()
    print("between")
    return y + 1


def branches(s: Model, x: Tensor) -> Tensor:
    y = x * 2
    return y + 1 if y.sum() > 0 else y - 1


def counts(s: Model, x: Tensor) -> Tensor:
    return x * (x.sum().item() + 1)


@torch.no_grad()
def test_graphs_before_and_after_a_break_are_made_once_and_say_why_they_end(capsys: pytest.CaptureFixture[str]) -> None:
    split, x = Split(Model(prints)), torch.ones(2)
    assert split.graphs == [], "before the first call"
    for _ in range(2):
        assert split.run(x).equal(x.sin() + 1)
    assert split.runs == [0, 1, 0, 1]
    assert len(split.graphs) == 2
    assert capsys.readouterr().out == "between\n" * 2
    (reason, stack), end = map(ending_of, split.graphs)
    assert reason
    assert "\n" not in reason
    assert 'print("between")' in stack
    assert end == ending_of(fx.symbolic_trace(lambda x: x + 1)) == ("", ""), "the model returns"


@torch.no_grad()
def test_branches_on_data_and_numbers_of_tensors_end_a_graph() -> None:
    split = Split(Model(branches))
    for sign in (1, -1):
        assert split.run(sign * torch.ones(2)).tolist() == [sign * 3] * 2
    assert [ending_of(graph)[0] for graph in split.graphs] == ["a branch depends on the value of a tensor", "", ""]
    split = Split(Model(counts))
    for value in (1.0, 2.0):
        assert split.run(torch.full((2,), value)).tolist() == [value * (2 * value + 1)] * 2
    assert ending_of(split.graphs[0])[0]
    outputs: Any = split.graphs[0].graph.output_node().args[0]
    assert all(isinstance(node.meta["example_value"], Tensor) for node in outputs)


def fails_in_dynamo(s: Model, x: Tensor) -> Tensor:
    """A ``cond`` needs branches that can be traced."""
    if torch.compiler.is_dynamo_compiling():
        torch.cond(x.sum() > 0, lambda x: print() or x + 1, lambda x: x - 1, (x,))
    return x + 1


@torch.no_grad()
def test_what_dynamo_or_the_backend_fails_at_runs_eagerly_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    split = Split(Model(fails_in_dynamo))
    with caplog.at_level(logging.WARNING):
        assert split.run(torch.ones(2)).tolist() == [2, 2]
    assert split.skipped
    assert not any("\n" in reason for reason in split.skipped)
    assert not [record for record in caplog.records if record.name.startswith("torch._dynamo")]

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        raise KeyError("no schedule for you")

    skipped: list[str] = []
    assert with_breaks(nn.ReLU(), backend, skipped.append)(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]
    assert any("no schedule for you" in reason for reason in skipped)


@torch.no_grad()
@pytest.mark.parametrize("stance", ["force_eager", "default"])
def test_no_graph_is_made_if_the_user_wants_none_or_another_thread_traces(
    stance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stance == "default":
        monkeypatch.setattr("torch.fx._symbolic_trace._is_fx_tracing_flag", True)  # visible in all threads
    split = Split(nn.ReLU())
    with torch.compiler.set_stance(stance):
        assert split.run(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]
    assert (split.graphs, split.skipped) == ([], [])
