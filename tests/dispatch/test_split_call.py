"""A model with graph breaks: its results and side effects, their order, and the report."""

from __future__ import annotations

import gc
import logging
import re
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

import autostream
from autostream.dispatch import entries
from autostream.dispatch.compiled_graph import CompiledGraph
from autostream.errors import TraceError
from autostream.frontend.graph_breaks import with_breaks
from tests.data_branches import DYNAMO_WARNS, Branching, same_gradients, trained
from tests.semantics import Model, same, t
from tests.threads import in_threads

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Broken(nn.Module):
    r"""Three graphs, with a print and a branch that depends on data between them::

    norm(linear) ── print ── sum > 0 ─┬─ add
                                      └─ neg
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.calls: list[str] = []

    def forward(self, x: Tensor) -> dict[str, object]:
        y = self.norm(self.linear(x))
        print("between")
        self.calls.append("between")
        y = y.relu() + 1 if y.abs().sum() > 0 else -y
        self.calls.append("behind")
        return {"y": y, "shape": tuple(y.shape), "x": x}


def twins(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    return autostream.optimize(model, **options), make()


@pytest.fixture
def often_in_turn() -> Iterator[None]:
    """Python switches threads a hundred times as often as by default."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(interval)


def reasons(fast: Any) -> str:
    return "\n".join(refusal.reason for report in fast.reports for refusal in report.refusals)


@torch.no_grad()
def test_results_side_effects_and_their_order_are_the_models(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Also after weights change; Dynamo's long messages are not logged."""
    fast, plain = twins(Broken)
    for rows in (3, 3, 5, 3):
        x = t(rows, 2)
        found, expected = fast(x), plain(x)
        same(found, expected)
        assert found["x"] is x
    assert capsys.readouterr().out == "between\n" * 8
    assert fast.calls == plain.calls
    same(fast.state_dict(), plain.state_dict())
    logged = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    (message,) = logged  # one for both shapes
    assert "splitting it at graph breaks" in message
    assert "\n" not in message
    told = autostream.explain(fast)
    line = Broken.forward.__code__.co_firstlineno + 2
    assert f'test_split_call.py:{line}: print("between")' in told
    assert f"test_split_call.py:{line + 2}: y = y.relu() + 1 if y.abs().sum() > 0 else -y" in told
    assert fast.reports[0].parts[0].signature.endswith("x2:float32 on cpu"), "of inputs, not of weights"
    for own in (fast.eval(), plain.eval()):
        own.linear.weight.mul_(2)
        own.norm.running_mean = nn.Buffer(torch.ones(2))
    same(fast(t(3, 2)), plain(t(3, 2)))


@torch.no_grad()
def test_a_model_that_dynamo_fails_at_runs_eagerly() -> None:
    """The branches of a ``cond`` must be traceable; run eagerly, it does not compile them."""

    def breaks(s: Model, x: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            torch.cond(x.sum() > 0, lambda x: print() or x + 1, lambda x: x - 1, (x,))
        return x + 1

    fast, _ = twins(lambda: Model(breaks))
    for _ in range(2):
        same(fast(t(3)), t(3) + 1)
    (report,) = fast.reports
    assert report.mode == "plain"
    assert len(report.refusals) >= 1


@torch.no_grad()
def test_a_graph_that_cannot_be_scheduled_does_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph before the break has run when the one behind it fails."""
    made = entries._compiled_graph
    graphs: list[int] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        graphs.append(1)
        if len(graphs) > 1:
            raise RuntimeError("no schedule for you")
        return made(*args, **kwargs)

    monkeypatch.setattr(entries, "_compiled_graph", make)

    def counts(s: Model, x: Tensor) -> Tensor:
        x.add_(1)
        torch._dynamo.graph_break()
        s.calls.append(1)
        return x * 2

    fast, x = autostream.optimize(Model(counts, calls=[])), torch.zeros(2)
    assert fast(x).tolist() == [2, 2]
    assert (x.tolist(), fast.calls) == ([1, 1], [1])
    assert "no schedule for you" in reasons(fast)


@torch.no_grad()
def test_a_loop_with_a_break_runs_eagerly_unless_its_body_is_a_function() -> None:
    def body(s: Model, x: Tensor) -> Tensor:
        return x.sin() if x.sum() > 0 else x.cos()

    def inside(s: Model, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.sin() if x.sum() > 0 else x.cos()
        return x

    def outside(s: Model, x: Tensor) -> Tensor:
        for _ in range(3):
            x = body(s, x)
        return x

    for function, mode in ((inside, "plain"), (outside, "graph breaks")):
        fast, _ = twins(lambda function=function: Model(function))
        same(fast(t(3)), inside(Model(inside), t(3)))
        assert [report.mode for report in fast.reports] == [mode]


@torch.no_grad()
@pytest.mark.parametrize(
    "function",
    [
        lambda s, x: (x + 1) * x.sum().item() if x.sum() > -1 else x,
        lambda s, x: (x + 1) * int(x.sum()) if x.sum() > -1 else x,
        lambda s, x: s.scales[int(x[0])] * (x + 1),
    ],
    ids=["a number", "a whole number", "experts"],
)
def test_numbers_that_are_read_from_tensors_are_those_of_the_call(function: Callable[..., Any]) -> None:
    fast, plain = twins(lambda: Model(function, scales=[torch.tensor(float(at)) for at in range(6)]))
    for at in [*range(6), *range(6)]:
        same(fast(torch.full((3,), float(at))), plain(torch.full((3,), float(at))))


@torch.no_grad()
def test_models_of_one_class_do_not_use_up_each_others_compilations() -> None:
    """Dynamo counts by code, and gives code up after eight compilations."""
    for count in range(1, 10):
        fast, plain = twins(lambda: Model(lambda s, x: x + 1 if x.sum() > 0 else x - 1))
        same(fast(torch.ones(count)), plain(torch.ones(count)))
        assert [report.mode for report in fast.reports] == ["graph breaks"]


@torch.no_grad()
@pytest.mark.parametrize("stance", ["default", "eager_then_compile", "force_eager"])
def test_numpys_random_numbers_are_the_models_under_each_stance(stance: Any) -> None:
    """Traced, NumPy's calls would be PyTorch's."""

    def draws(s: Model, x: Tensor) -> Tensor:
        return x + torch.from_numpy(np.random.rand(2, 2)) if x.sum() > 0 else x

    fast, plain = twins(lambda: Model(draws))
    results = []
    for run in (fast, plain):
        np.random.seed(0)
        with torch.compiler.set_stance(stance):
            results.append([run(torch.ones(2, 2)) for _ in range(4)])
    same(*results)


@torch.no_grad()
@pytest.mark.parametrize("stance", ["force_eager", "default"])
def test_no_graph_is_made_if_the_user_wants_none_or_another_thread_traces(
    stance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stance == "default":
        monkeypatch.setattr("torch.fx._symbolic_trace._is_fx_tracing_flag", True)  # visible in all threads
    graphs: list[object] = []
    skipped: list[str] = []
    run = with_breaks(nn.ReLU(), lambda *call: graphs.append(call) or len, skipped.append)  # type: ignore[func-returns-value]
    with torch.compiler.set_stance(stance):
        assert run(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]
    assert (graphs, skipped) == ([], [])


@torch.no_grad()
def test_graphs_are_freed_with_the_model() -> None:
    others = {id(found) for found in gc.get_objects() if type(found) is CompiledGraph}
    fast, _ = twins(Broken)
    fast(t(3, 2))
    held = [ref(found) for found in gc.get_objects() if type(found) is CompiledGraph and id(found) not in others]
    held.append(ref(fast.linear.weight))
    assert len(held) == 4
    del fast
    gc.collect()
    assert not any(own() for own in held)


def test_threads_may_take_different_branches(often_in_turn: None) -> None:
    """Some trace while Dynamo compiles for others: no patch that a tracer makes for all threads stays."""
    calls = nn.Module.__call__
    for _ in range(3):
        fast, plain = twins(lambda: Model(lambda s, x: x.sin() + 1 if x.sum() > 0 else x.cos() - 1))

        def work(number: int, fast: nn.Module = fast, plain: nn.Module = plain) -> None:
            x = torch.full((3,), (-1.0) ** number)
            with torch.no_grad():
                for _ in range(8):
                    same(fast(x), plain(x))

        in_threads(4, work)
        assert nn.Module.__call__ is calls
        torch._dynamo.reset()


# Calls that record gradients


@DYNAMO_WARNS
@pytest.mark.parametrize("backward", [{}, {"retain_graph": True}])
def test_forward_and_backward_of_each_graph_are_scheduled(backward: dict[str, bool]) -> None:
    model, plain = Branching(), Branching()
    fast = autostream.optimize(model, policy="critical_path")
    same_gradients(trained(model, fast, **backward), trained(plain, plain, **backward))
    (report,) = fast.reports
    assert report.mode == "graph breaks"
    assert {part.mode for part in report.parts} == {"forward and backward"}
    assert {tuple(half.half for half in part.parts) for part in report.parts} == {("forward", "backward")}


@DYNAMO_WARNS
@pytest.mark.parametrize("outside", [False, True], ids=["in the model", "around the model"])
def test_checkpoints_generate_the_same_random_numbers_again(outside: bool) -> None:
    class Checkpointing(Branching):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return checkpoint(lambda y: torch.dropout(self.other(y).sin(), 0.5, True), y, use_reentrant=False)

    model, plain = (Branching(), Branching()) if outside else (Checkpointing(), Checkpointing())
    fast, found = autostream.optimize(model, policy="critical_path"), []
    for own, run in ((model, fast), (plain, plain)) * (1 + outside):
        torch.manual_seed(1)
        call = (lambda x, run=run: checkpoint(run, x, use_reentrant=False)) if outside else run
        found.append(trained(own, call))
    for ours, theirs in zip(found[::2], found[1::2], strict=True):
        same_gradients(ours, theirs)
    assert [report.mode for report in fast.reports] == ["graph breaks"]


@DYNAMO_WARNS
def test_a_checkpoint_ends_early_where_pytorch_loses_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch 2.11 does on a GPU (pytorch#179536)."""
    kept = Function.__dict__["apply"]

    def losing(cls: type[Function], *args: Any) -> Any:
        try:
            return kept.__get__(None, cls)(*args)
        except _StopRecomputationError:
            lost.append(cls)
            raise SystemError("<built-in method apply> returned NULL without setting an exception") from None

    model, plain, lost = Branching(), Branching(), list[type[Function]]()
    fast = autostream.optimize(model, policy="critical_path")
    theirs = trained(plain, lambda x: checkpoint(plain, x, use_reentrant=False))
    monkeypatch.setattr(Function, "apply", classmethod(losing))
    same_gradients(trained(model, lambda x: checkpoint(fast, x, use_reentrant=False)), theirs)
    assert lost


@pytest.mark.gpu
@DYNAMO_WARNS
@pytest.mark.parametrize("wrapped", [False, True], ids=["as it is", "checkpointed"])
def test_gradients_are_the_models_on_a_gpu(wrapped: bool) -> None:
    model, plain = Branching().cuda(), Branching().cuda()
    fast = autostream.optimize(model, kernels="eager")

    def ours(x: Tensor) -> Any:
        return checkpoint(fast, x.cuda(), use_reentrant=False) if wrapped else fast(x.cuda())

    for _ in range(10):
        same_gradients(trained(model, ours), trained(plain, lambda x: plain(x.cuda())))
    assert [report.mode for report in fast.reports] == ["graph breaks"]


@DYNAMO_WARNS
@torch.no_grad()
def test_a_number_of_numpys_is_named_and_may_change(caplog: pytest.LogCaptureFixture) -> None:
    """As in ``self.scale = np.sqrt(64)``: Dynamo makes a new tensor of it in each call."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 4), np.sqrt(64)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) / self.scale  # type: ignore[no-any-return]

    model, x = Scaled(), torch.ones(2, 4)
    fast = autostream.optimize(model, policy="critical_path")
    for scale in (np.sqrt(64), np.sqrt(64), np.float32(2), 3.0):
        model.scale = scale
        same(fast(x), model(x))
    assert "it reads scale, a value of NumPy's: make it a number or a tensor" in caplog.text
    model.scale = np.sqrt(64)
    with pytest.raises(TraceError, match="it reads scale, a value of NumPy's"):
        autostream.optimize(model, strict=True)(x)


class Warns(nn.Module):
    """As models of transformers do, with a method that they add to loggers."""

    def forward(self, x: Tensor) -> Tensor:
        LOGGER.warning_once("once")  # type: ignore[attr-defined]
        return x + 1


LOGGER = logging.getLogger("theirs")


def quantized() -> nn.Module:
    from torch.ao.quantization import quantize_dynamic

    return quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})  # type: ignore[no-any-return]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # that module of PyTorch's is deprecated
@pytest.mark.parametrize(
    ("make", "words"), [(Warns, "it prints or logs"), (quantized, "packed weights of a quantized layer")]
)
def test_the_reason_is_in_plain_words(
    make: Callable[[], nn.Module], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.Logger, "warning_once", lru_cache(logging.Logger.warning), raising=False)
    fast, plain = twins(make)
    same(fast(t(2, 4)), plain(t(2, 4)))
    assert words in reasons(fast)


@torch.no_grad()
def test_a_part_says_in_plain_words_at_which_line_it_ends() -> None:
    """What to write instead is said once, by the reason of the call."""

    def breaks(s: Model, x: Tensor) -> Tensor:
        x = x + 1
        print(end="")
        y = x.exp()
        x = y * next(s.factors)
        if x.sum() > 0:
            x = x.sin()
        return x.cos()

    fast = autostream.optimize(Model(breaks, factors=iter([torch.ones(3)] * 9)))
    fast(torch.ones(3))
    (report,) = fast.reports
    (reason,) = (refusal.reason for refusal in report.refusals if refusal.choice == "graph breaks")
    assert reason.startswith("it prints or logs: return what it says")
    ends = r"it prints .*print\(", "Dynamo does not .*x = y", "Python branches on a number .*if x", ""
    line = r"\(tests/dispatch/test_split_call\.py:\d+: "
    for part, ended in zip(report.parts, ends, strict=True):
        assert re.match(ended.replace(".*", f"[^:]*{line}") or "$", part.ended)
