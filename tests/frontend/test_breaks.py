"""A model that is run in graphs: which graphs there are, what ends them, and what is told of the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autostream.frontend.breaks import ending_of, with_breaks
from tests.semantics import Model

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Split:
    """A model run in graphs, which do what is in them op by op.

    Attributes:
        graphs: in the order of their making.
        runs: the position of each graph that has been run.
        refused: why parts are run as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.runs: list[int] = []
        self.refused: list[str] = []
        self.run = with_breaks(model, self._backend, self.refused.append)

    def _backend(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        number = len(self.graphs)
        self.graphs.append(module)

        def run(*values: Any) -> Any:
            self.runs.append(number)
            return module.forward(*values)

        return run

    def endings(self) -> list[str]:
        """Why each graph ends."""
        return [ending_of(module)[0] for module in self.graphs]


def prints(s: Model, x: Tensor) -> Tensor:
    y = x.sin()
    print("between")
    return y + 1


def asks(s: Model, x: Tensor) -> Tensor:
    y = x * 2
    return y + 1 if y.sum() > 0 else y - 1


def counts(s: Model, x: Tensor) -> Tensor:
    return x * (x.sum().item() + 1)


@torch.no_grad()
def test_graphs_on_both_sides_of_a_break_are_made_once(capsys: pytest.CaptureFixture[str]) -> None:
    split, x = Split(Model(prints)), torch.ones(2)
    assert split.graphs == [], "until somebody calls it"
    for _ in range(2):
        assert split.run(x).equal(x.sin() + 1)
    assert split.runs == [0, 1, 0, 1]
    assert len(split.graphs) == 2
    assert capsys.readouterr().out == "between\n" * 2


@torch.no_grad()
def test_a_graph_says_why_and_where_it_ends() -> None:
    split = Split(Model(prints))
    split.run(torch.ones(2))
    (reason, stack), end = map(ending_of, split.graphs)
    assert reason
    assert "\n" not in reason
    assert 'print("between")' in stack
    assert end == ("", ""), "the model returns"


@torch.no_grad()
def test_a_graph_that_a_branch_ends_says_so_in_plain_words() -> None:
    split = Split(Model(asks))
    for sign in (1, -1):
        assert split.run(sign * torch.ones(2)).tolist() == [sign * 3] * 2
    assert split.endings() == ["a branch depends on the value of a tensor", "", ""]


@torch.no_grad()
def test_a_number_of_a_tensor_ends_a_graph() -> None:
    split = Split(Model(counts))
    for value in (1.0, 2.0):
        assert split.run(torch.full((2,), value)).tolist() == [value * (2 * value + 1)] * 2
    assert split.endings()[0]
    outputs: Any = split.graphs[0].graph.output_node().args[0]
    assert all(isinstance(node.meta["example_value"], Tensor) for node in outputs)


def test_what_was_made_without_dynamo_ends_nowhere() -> None:
    assert ending_of(fx.symbolic_trace(lambda x: x + 1)) == ("", "")


def breaks(s: Model, x: Tensor) -> Tensor:
    """The branches of a ``cond`` must be traceable; run plainly, it does not compile them."""
    if torch.compiler.is_dynamo_compiling():
        torch.cond(x.sum() > 0, lambda x: print() or x + 1, lambda x: x - 1, (x,))
    return x + 1


@torch.no_grad()
def test_what_dynamo_fails_at_runs_as_it_is_and_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    split = Split(Model(breaks))
    with caplog.at_level(logging.WARNING):
        assert split.run(torch.ones(2)).tolist() == [2, 2]
    assert split.refused
    assert not any("\n" in reason for reason in split.refused)
    assert not [record for record in caplog.records if record.name.startswith("torch._dynamo")]


@torch.no_grad()
def test_a_backend_that_fails_leaves_the_part_as_it_is() -> None:
    def fails(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        raise KeyError("no schedule for you")

    refused: list[str] = []
    run = with_breaks(nn.ReLU(), fails, refused.append)
    assert run(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]
    assert any("no schedule for you" in reason for reason in refused)


@torch.no_grad()
def test_models_of_one_class_do_not_use_up_a_limit() -> None:
    limit = torch._dynamo.config.recompile_limit
    splits = [Split(Model(lambda s, x: x + s.plus, plus=at)) for at in range(limit + 2)]
    for split in splits:
        split.run(torch.ones(2))
    assert all(split.runs for split in splits)
    assert torch._dynamo.config.recompile_limit == limit, "the user's own setting is as it was"


@torch.no_grad()
def test_no_graph_is_made_where_the_user_wants_none() -> None:
    split = Split(nn.ReLU())
    with torch.compiler.set_stance("force_eager"):
        assert split.run(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]
    assert (split.graphs, split.refused) == ([], [])


@torch.no_grad()
def test_while_another_thread_traces_the_model_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.fx._symbolic_trace._is_fx_tracing_flag", True)  # it is the same for all threads
    split = Split(nn.ReLU())
    assert split.run(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]
    assert split.graphs == []


@torch.no_grad()
def test_what_the_model_raises_is_raised_and_it_is_not_run_again() -> None:
    def fails(s: Model, x: Tensor) -> Tensor:
        y = x.sin()
        print(end="")
        s.calls.append(1)
        if y.sum() > -100:
            raise RuntimeError("the model's own")
        return y

    model = Model(fails, calls=[])
    with pytest.raises(RuntimeError, match=r"^the model's own$"):
        Split(model).run(torch.ones(2))
    assert model.calls == [1]
