"""``torch.compile(model, backend="autostream")``: results, gradients, options and reports."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import autostream as library
from autostream.backend import BackendGraph, autostream
from autostream.dispatch.compiled_graph import CompiledSignature
from autostream.errors import MismatchError, OptionError
from autostream.explaining import reports_of
from tests.data_branches import DYNAMO_WARNS, Branching, same_gradients, trained
from tests.semantics import CONFIGURATIONS, Model, force_streams, same, t

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[BackendGraph]:
    """The graphs that the backend compiles from here on."""
    graphs: list[BackendGraph] = []

    def make(*args: Any) -> BackendGraph:
        graphs.append(BackendGraph(*args))
        return graphs[-1]

    monkeypatch.setattr("autostream.backend.BackendGraph", make)
    return graphs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls.add_(1)
        return {"y": self.left(x).relu() * self.right(x).sigmoid() + self.calls, "n": x.shape[0], "x": x}


@torch.no_grad()
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_by_the_name_of_its_entry_point_and_with_options(
    configuration: str, monkeypatch: pytest.MonkeyPatch, made: list[BackendGraph]
) -> None:
    options = CONFIGURATIONS[configuration](monkeypatch)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    fast = torch.compile(model, backend="autostream", options={**options, "strict": True})
    for rows in (3, 3, 5, 6, 3):
        x = t(rows, 4)
        result = fast(x)
        same(result, plain(x))
        assert result["x"] is x
    assert model.calls.item() == 5
    assert all(report.mode in ("one stream", "threads") for graph in made for report in graph.reports)
    assert any(report.mode == "threads" for graph in made for report in graph.reports) or configuration != "scattered"


@torch.no_grad()
def test_sizes_may_be_inputs(made: list[BackendGraph]) -> None:
    """A graph is made once for all sizes, and a schedule for each."""
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    fast = torch.compile(model, backend="autostream", dynamic=True, options={"strict": True})
    for rows in (3, 5, 7, 5, 3):
        same(fast(t(rows, 4)), plain(t(rows, 4)))
    (graph,) = made
    assert sorted(report.signature.partition(":")[0] for report in graph.reports) == ["3x4", "5x4", "7x4"]
    assert {report.mode for report in graph.reports} == {"one stream"}


@torch.no_grad()
def test_as_a_function_and_after_weights_change(made: list[BackendGraph]) -> None:
    """The signature is of the input alone, not of weights."""
    model = Net()
    fast = torch.compile(model, backend=autostream, dynamic=False, fullgraph=True)
    fast(t(3, 4))
    (graph,) = made
    assert [report.signature for report in graph.reports] == ["3x4:float32 on cpu"]
    model.left.weight.mul_(2)
    y = fast(t(3, 4))["y"]
    same(y, model.left(t(3, 4)).relu() * model.right(t(3, 4)).sigmoid() + 2)


@torch.no_grad()
def test_graphs_between_graph_breaks_are_scheduled(monkeypatch: pytest.MonkeyPatch, made: list[BackendGraph]) -> None:
    def breaks(s: Model, x: Tensor) -> Tensor:
        y = x.sin() + x.cos() * x.exp()
        if y.sum() > 1e9:
            return y
        return y.sin() * y.cos()

    model = Model(breaks)
    fast = torch.compile(model, backend="autostream", options=force_streams(monkeypatch))
    for _ in range(2):
        same(fast(t(3)), model(t(3)))
    assert [report.mode for graph in made for report in graph.reports] == ["threads", "threads"]


@DYNAMO_WARNS
def test_forward_and_backward_of_each_graph_are_scheduled(made: list[BackendGraph]) -> None:
    model, plain = Branching(), Branching()
    fast = torch.compile(model, backend="autostream", options={"policy": "critical_path"})
    same_gradients(trained(model, fast), trained(plain, plain))
    assert {report.mode for graph in made for report in graph.reports} == {"forward and backward"}


def test_gradients_of_gradients_are_refused_as_torch_compile_does() -> None:
    refusals = []
    for backend, options in (("autostream", {"policy": "sequential"}), ("aot_eager", None)):
        torch._dynamo.reset()
        fast = torch.compile(nn.Tanh(), backend=backend, options=options)
        x = t(3).requires_grad_()
        (slope,) = torch.autograd.grad(fast(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError) as refusal:
            slope.sum().backward()
        refusals.append(str(refusal.value))
    assert refusals[0] == refusals[1]


def test_sizes_may_be_inputs_where_gradients_are_recorded(made: list[BackendGraph]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    plain = copy.deepcopy(model)
    fast = torch.compile(model, backend="autostream", dynamic=True, options={"policy": "sequential"})
    for rows in (3, 5, 3):
        for run in (fast, plain):
            run(t(rows, 4)).sum().backward()
        same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], 1e-6)
    assert "Backward" in library.explain(made[0])


@torch.no_grad()
def test_batches_of_a_vmap_are_ops_of_the_graph(made: list[BackendGraph]) -> None:
    model = Model(lambda s, x: torch.vmap(lambda row: row.sum() * row)(x))
    fast = torch.compile(model, backend="autostream")
    same(fast(t(3, 4)), model(t(3, 4)))
    in_a_graph = torch.__version__ >= TorchVersion("2.13")  # before that, what Dynamo captures cannot be traced again
    assert [report.mode for graph in made for report in graph.reports] == ["one stream" if in_a_graph else "plain"]


@torch.no_grad()
def test_lazily_conjugated_tensors_run_eagerly(made: list[BackendGraph]) -> None:
    fast = torch.compile(Model(lambda s, x: x.conj() * 2), backend="autostream")
    x = torch.randn(3, dtype=torch.complex64).conj()
    torch.testing.assert_close(fast(x), x.conj() * 2)


@torch.no_grad()
def test_it_may_be_switched_off(monkeypatch: pytest.MonkeyPatch, made: list[BackendGraph]) -> None:
    monkeypatch.setenv("AUTOSTREAM_DISABLE", "1")
    same(torch.compile(nn.ReLU(), backend="autostream")(t(3)), t(3).relu())
    assert [graph.reports for graph in made] == [()]
    assert "AUTOSTREAM_DISABLE" in library.explain(made[0])


@DYNAMO_WARNS
def test_paranoid_calls_are_compared(monkeypatch: pytest.MonkeyPatch, made: list[BackendGraph]) -> None:
    """Forward, backward, and graphs after a break."""
    monkeypatch.setenv("AUTOSTREAM_VERIFY", "paranoid")
    model, plain = Branching(), Branching()
    fast = torch.compile(model, backend="autostream", options={"policy": "critical_path"})
    same_gradients(trained(model, fast), trained(plain, plain))
    monkeypatch.setattr(CompiledSignature, "__call__", lambda self, values: [value + 1 for value in values])
    with torch.no_grad(), pytest.raises(MismatchError):
        torch.compile(nn.ReLU(), backend="autostream")(t(3))


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream": 3}, "there is no option 'stream' (did you mean 'streams'?): use "),
        ({"streams": 0}, "streams=0 is not allowed: use "),
        ({"inductor_options": {"max_autotun": True}}, "inductor_options: torch._inductor.config has no setting "),
    ],
)
def test_a_wrong_option_raises_a_short_error_in_each_call(options: dict[str, Any], message: str) -> None:
    """Raised while Dynamo compiles, it would be wrapped in a long one."""
    fast = torch.compile(nn.ReLU(), backend="autostream", options=options)
    for _ in range(2):
        with pytest.raises(OptionError, match=f"^{re.escape(message)}") as raised:
            fast(t(3))
        assert "\n" not in str(raised.value)


@torch.no_grad()
@pytest.mark.usefixtures("as_with_a_gpu")
def test_a_model_on_the_cpu_is_not_fused_where_there_is_a_gpu_either() -> None:
    with pytest.raises(OptionError, match=r'is not to be had: .* runs on the CPU: use kernels="eager"'):
        autostream(torch.fx.symbolic_trace(Net()), [nn.Parameter(t(3))], options={"kernels": "inductor"})(t(3, 4))


@torch.no_grad()
@pytest.mark.usefixtures("as_with_a_gpu")
def test_a_graph_without_weights_runs_where_it_is_and_says_why_it_is_not_fused() -> None:
    """Its model may be on the GPU."""
    graph = autostream(torch.fx.symbolic_trace(lambda x: (x.relu() + 1,)), [t(3)], options={"kernels": "inductor"})
    same(graph(t(3))[0], t(3).relu() + 1)
    (report,) = reports_of(graph)
    assert report.mode == "one stream"
    assert [refusal.choice for refusal in report.refusals] == ["not fused"]
    assert "this program runs on the CPU" in report.refusals[0].reason
