"""Splitting at graph breaks: the pieces, which of their inputs stay put, and what counts as a refusal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autostream.tracing import dynamo
from autostream.tracing.dynamo import bound_inputs, ending_of, is_refusal, split

X = torch.tensor([[1.0, -2.0], [3.0, 4.0]])


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Broken(nn.Module):
    r"""Three pieces, with a print and a branch that depends on data between them::

    norm(linear) ── print ── sum > 0 ─┬─ add
                                      └─ neg
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, object]:
        y = self.norm(self.linear(x))
        print("between")
        y = y.relu() + 1 if y.abs().sum() > 0 else -y
        return {"y": y, "shape": tuple(y.shape)}


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Recorder:
    """Makes pieces that run as they are, and keeps what it was given."""

    def __init__(self) -> None:
        self.pieces: list[tuple[GraphModule, frozenset[int]]] = []
        self.runs = 0

    def __call__(self, module: GraphModule, bound: frozenset[int]) -> object:
        self.pieces.append((module, bound))

        def run(*args: object) -> object:
            self.runs += 1
            return module(*args)

        return run

    def ops(self) -> list[list[str]]:
        return [
            [
                getattr(node.target, "__name__", str(node.target))
                for node in module.graph.nodes
                if node.op.startswith("call")
            ]
            for module, _ in self.pieces
        ]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@torch.no_grad()
def test_a_model_is_split_where_it_breaks_and_computes_the_same(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Broken().eval()
    fast = split(model, recorder, print)
    result = fast(X)
    assert torch.equal(result["y"], model(X)["y"])
    assert result["shape"] == (2, 2)
    assert capsys.readouterr().out == "between\n" * 2
    first, *others = recorder.ops()
    assert first == ["linear", "batch_norm"]
    assert others == [["abs", "sum", "gt"], ["relu", "add"]]


@torch.no_grad()
@pytest.mark.parametrize(("take_numbers", "made"), [(False, [6, 9, 12]), (True, [6, 6, 6])])
def test_pieces_are_made_once_for_each_shape_or_take_sizes(
    recorder: Recorder, take_numbers: bool, made: list[int]
) -> None:
    """A size that has been another one is a number that pieces may take."""
    model = Broken().eval()
    fast = split(model, recorder, print, take_numbers=take_numbers)
    fast(X)
    fast(X + 1)
    assert (len(recorder.pieces), recorder.runs) == (3, 6)
    for rows, count in zip((5, 7, 9), made, strict=True):
        x = torch.full((rows, 2), float(rows))
        torch.testing.assert_close(fast(x), model(x))
        assert len(recorder.pieces) == count


@torch.no_grad()
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_weights_and_buffers_stay_put_and_inputs_do_not(recorder: Recorder, mode: str) -> None:
    model = Broken().train(mode == "train")
    split(model, recorder, print)(X)
    module, bound = recorder.pieces[0]
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    moving = [name for index, name in enumerate(names) if index not in bound]
    assert len(moving) == 1
    assert "x" in moving[0]
    assert len(bound) == (7 if mode == "train" else 6)
    assert all(bound == frozenset() for _, bound in recorder.pieces[1:])


def test_parameters_are_bound_and_tensors_and_numbers_are_not() -> None:
    assert bound_inputs([torch.ones(1), nn.Parameter(torch.ones(1)), 3]) == {1}


@torch.no_grad()
def test_a_buffer_written_by_a_piece_is_the_models_own(recorder: Recorder) -> None:
    model = Broken().train()
    split(model, recorder, print)(X)
    assert model.norm.num_batches_tracked.item() == 1


def test_errors_of_the_model_are_no_refusals(recorder: Recorder) -> None:
    def fails(x: Tensor) -> Tensor:
        raise KeyError("the model's own")

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fails(x)

    with pytest.raises(KeyError) as caught:
        split(Failing(), recorder, print)(X)
    assert not is_refusal(caught.value)


@torch.no_grad()
def test_what_dynamo_fails_at_runs_as_it_is_and_nothing_is_done_twice(recorder: Recorder) -> None:
    """The piece before the break has run when the one behind it fails."""
    runs = 0

    def make_piece(module: GraphModule, bound: frozenset[int]) -> object:
        if recorder.pieces:
            raise RuntimeError("no piece for you")
        return recorder(module, bound)

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal runs
            x.add_(1)
            torch._dynamo.graph_break()
            runs += 1
            return x * 2

    reasons: list[str] = []
    fast = split(Counting(), make_piece, reasons.append)
    x = torch.zeros(2)
    assert fast(x).tolist() == [2, 2]
    assert x.tolist() == [1, 1]
    assert (runs, recorder.runs) == (1, 1)
    assert any("BackendCompilerFailed" in reason for reason in reasons)


@torch.no_grad()
def test_what_dynamo_does_not_let_go_is_a_refusal(recorder: Recorder) -> None:
    """The branches of a ``cond`` must be traceable."""

    class Breaking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: print() or x + 1, lambda x: x - 1, (x,))

    with pytest.raises(RuntimeError) as caught:
        split(Breaking(), recorder, print)(X)
    assert is_refusal(caught.value)


@torch.no_grad()
def test_models_of_one_class_do_not_use_up_each_others_compilations(recorder: Recorder) -> None:
    """Dynamo counts by code, and gives code up after eight compilations."""

    class Breaking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x - 1

    for count in range(1, 12):
        recorder.runs = 0
        split(Breaking(), recorder, print)(torch.ones(count))
        assert recorder.runs == 2, count


@torch.no_grad()
@pytest.mark.parametrize("private", [True, False])
def test_settings_are_for_compiling_alone(recorder: Recorder, private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entered at each call, they would take as long as Dynamo itself. A Dynamo without callbacks is run in them."""
    entered, compiling = [], dynamo._compiling
    monkeypatch.setattr(dynamo, "_compiling", lambda refused: (entered.append(True), compiling(refused))[1])
    if not private:
        monkeypatch.setattr(dynamo, "_BACKEND", "no such attribute")
    run, config = split(Broken(), recorder, print), torch._dynamo.config
    before = config.recompile_limit, config.suppress_errors
    for turn in range(3):
        entered.clear()
        run(X)
        assert bool(entered) is (turn == 0 or not private)
        assert (config.recompile_limit, config.suppress_errors) == before
    assert len(recorder.pieces) == 3


@torch.no_grad()
@pytest.mark.parametrize("stance", ["default", "eager_then_compile", "force_eager"])
def test_whatever_stance_the_user_takes_numpys_numbers_are_its_own(recorder: Recorder, stance: Any) -> None:
    """Traced, NumPy's calls would be PyTorch's. Some stances compile past the callback that has our settings."""

    def draws(x: Tensor) -> Tensor:
        return x + torch.from_numpy(np.random.rand(2, 2)) if x.sum() > 0 else x

    run = split(Model(draws), recorder, print)
    for how in ([run] * 4, [draws] * 4):
        np.random.seed(0)
        with torch.compiler.set_stance(stance):
            results = [call(X) for call in how]
        if how[0] is run:
            ours = results
    torch.testing.assert_close(ours, results, rtol=0, atol=0)


def test_compilations_of_threads_come_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where settings are the whole process's, whoever ends last would leave those that it found: another thread's."""
    monkeypatch.setattr(torch._dynamo.convert_frame, "compile_lock", threading.RLock(), raising=False)
    inside, most, both = 0, 0, threading.Event()

    @contextmanager
    def compiling() -> Iterator[None]:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        yield
        inside -= 1

    def compile_frame() -> None:
        if inside == 2:
            both.set()
        both.wait(0.5)

    setattr(compile_frame, dynamo._BACKEND, None)
    context = SimpleNamespace(callback=compile_frame)
    assert dynamo._compiles_within(context, compiling)
    threads = [threading.Thread(target=context.callback) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


@torch.no_grad()
def test_each_piece_says_why_and_where_it_ends(recorder: Recorder) -> None:
    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * (x + 1).sum().item()
            return y + 1 if y.sum() > 0 else y - 1

    split(Asking(), recorder, print)(X)
    item, branch, end = [ending_of(module) for module, _ in recorder.pieces]
    assert "Tensor.item()" in item[0]
    assert "\n" not in item[0]
    assert "y = x * (x + 1).sum().item()" in item[1]
    assert branch[0] == "a branch depends on the value of a tensor"
    assert "return y + 1 if y.sum() > 0" in branch[1]
    assert end == ("", "")
    assert ending_of(torch.fx.symbolic_trace(nn.ReLU())) == ("", ""), "not Dynamo's"
