"""``torch.compile(model, backend="autostream")``: the same results as without it, whatever Dynamo hands over."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autostream.api import OptimizedModule
from autostream.backend import autostream
from autostream.errors import OptionError
from autostream.explaining import reports_of
from tests.data_branches import DYNAMOS_OWN, Branching, same_gradients, trained
from tests.semantics import CONFIGURATIONS, Model, force_streams, same

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[OptimizedModule]:
    """The modules that the backend makes from here on."""
    modules: list[OptimizedModule] = []

    def make(*args: Any) -> OptimizedModule:
        modules.append(OptimizedModule(*args))
        return modules[-1]

    monkeypatch.setattr("autostream.backend.OptimizedModule", make)
    return modules


def t(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class Net(nn.Module):
    """Two branches, with a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls.add_(1)
        return {"y": self.left(x).relu() * self.right(x).sigmoid() + self.calls, "n": x.shape[0], "x": x}


def test_it_is_registered_by_entry_point() -> None:
    (entry,) = entry_points(group="torch_dynamo_backends", name="autostream")
    assert entry.value == "autostream.backend:autostream"
    assert "autostream" in torch._dynamo.list_backends()


@torch.no_grad()
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_by_name_and_with_options(
    configuration: str, monkeypatch: pytest.MonkeyPatch, made: list[OptimizedModule]
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
    assert all(report.mode in ("one stream", "threads") for module in made for report in module.reports)
    assert any(report.mode == "threads" for module in made for report in module.reports) or configuration != "scattered"


@torch.no_grad()
def test_as_a_function(made: list[OptimizedModule]) -> None:
    fast = torch.compile(Net(), backend=autostream, dynamic=False, fullgraph=True)
    fast(t(3, 4))
    fast(t(5, 4))
    assert [len(module.reports) for module in made] == [1, 1]


@torch.no_grad()
def test_weights_are_bound_and_inputs_are_not(made: list[OptimizedModule]) -> None:
    """Two weights, two biases and a buffer stay where they are; the input does not."""
    torch.compile(Net(), backend=autostream)(t(3, 4))
    (module,) = made
    assert len(module._autostream._subject.bound_inputs or ()) == 5
    with torch.no_grad():
        assert module.reports[0].signature.count(":float32") == 6


@torch.no_grad()
def test_graph_breaks_make_pieces(monkeypatch: pytest.MonkeyPatch, made: list[OptimizedModule]) -> None:
    def breaks(s: Model, x: Tensor) -> Tensor:
        y = x.sin() + x.cos() * x.exp()
        if y.sum() > 1e9:
            return y
        return y.sin() * y.cos()

    model = Model(breaks)
    fast = torch.compile(model, backend="autostream", options=force_streams(monkeypatch))
    for _ in range(2):
        same(fast(t(3)), model(t(3)))
    assert [report.mode for module in made for report in module.reports] == ["threads", "threads"]


def test_training_through_it(made: list[OptimizedModule]) -> None:
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    torch.compile(model, backend="autostream")(t(3, 4))["y"].sum().backward()
    plain(t(3, 4))["y"].sum().backward()
    same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert "gradients are recorded on a CPU" in made[0].reports[0].refusals[0].reason


@DYNAMOS_OWN
def test_forward_and_backward_of_each_piece_are_scheduled(made: list[OptimizedModule]) -> None:
    model, plain = Branching(), Branching()
    fast = torch.compile(model, backend="autostream", options={"policy": "critical_path"})
    same_gradients(trained(model, fast), trained(plain, plain))
    assert {report.mode for module in made for report in module.reports} == {"forward and backward"}


@DYNAMOS_OWN
def test_buffers_that_come_to_a_piece_are_written_in_its_forward(made: list[OptimizedModule]) -> None:
    """The statistics of a batch norm that trains; where its gradients have gradients, they are not counted twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    plain = copy.deepcopy(model)
    fast = torch.compile(model, backend="autostream", options={"policy": "critical_path"})
    for number in range(3):
        for own, run in ((model, fast), (plain, plain)):
            x = torch.randn(
                5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number), requires_grad=True
            )
            loss = run(x).sum()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
            torch.optim.SGD(own.parameters(), lr=0.1).step()
        same(model.state_dict(), plain.state_dict(), 1e-10)
        same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], 1e-10)
    assert {report.mode for module in made for report in module.reports} == {"forward and backward"}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_random_numbers_are_those_of_the_plain_model(mode: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))
    fast = torch.compile(model, backend="autostream")
    with mode():
        for _ in range(2):
            torch.manual_seed(3)
            ours, state = fast(t(3, 4)), torch.get_rng_state()
            torch.manual_seed(3)
            same(ours, model(t(3, 4)))
            assert torch.equal(state, torch.get_rng_state())


def turns_its_input(s: Model, x: Tensor) -> Tensor:
    x.data = x.data.t()
    return x + 1


@torch.no_grad()
@pytest.mark.parametrize(
    "function",
    [lambda s, x: torch.vmap(lambda row: row.sum() * row)(x), turns_its_input],
)
def test_what_dynamo_follows_and_export_does_not_runs_as_it_is(function: Any, made: list[OptimizedModule]) -> None:
    """Dynamo would only make the same piece of it again."""
    model = Model(function)
    fast = torch.compile(model, backend="autostream")
    same(fast(t(3, 4)), model(t(3, 4)))
    assert [refusal.choice for refusal in made[0].reports[0].refusals] == ["plain"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream": 3}, "there is no option 'stream' (did you mean 'streams'?): use "),
        ({"streams": 0}, "streams=0 is not allowed: use "),
        ({"inductor_options": {"max_autotun": True}}, "inductor_options: torch._inductor.config has no setting "),
    ],
)
def test_a_wrong_option_is_told_in_one_line_at_each_call(options: dict[str, Any], message: str) -> None:
    """Dynamo would say at length what a backend raises while it compiles."""
    fast = torch.compile(nn.ReLU(), backend="autostream", options=options)
    for _ in range(2):
        with pytest.raises(OptionError, match=f"^{re.escape(message)}") as raised:
            fast(t(3))
        assert "\n" not in str(raised.value)


@DYNAMOS_OWN
def test_a_part_that_is_checkpointed_draws_what_the_model_draws(
    made: list[OptimizedModule], caplog: pytest.LogCaptureFixture
) -> None:
    """Dynamo leaves it to the backend to put the generators' states back for the backward."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(), nn.Linear(4, 4))

    def function(x: Tensor) -> Tensor:
        return checkpoint(layers, x, use_reentrant=False).sin()

    def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
        x = t(3, 4).requires_grad_()
        torch.manual_seed(1)
        function(x).sum().backward()
        assert x.grad is not None
        return x.grad

    fast = torch.compile(function, backend="autostream")
    same(gradient(fast), gradient(function))
    assert "left to AOTAutograd: a part is checkpointed" in caplog.text
    assert not made


@torch.no_grad()
@pytest.mark.usefixtures("as_with_a_gpu")
def test_a_model_on_the_cpu_is_not_fused_where_there_is_a_gpu_either() -> None:
    with pytest.raises(OptionError, match=r'is not to be had: .* runs on the CPU: use kernels="eager"'):
        autostream(torch.fx.symbolic_trace(Net()), [nn.Parameter(t(3))], options={"kernels": "inductor"})(t(3, 4))


@torch.no_grad()
@pytest.mark.usefixtures("as_with_a_gpu")
def test_a_piece_without_weights_runs_where_it_is_and_says_why_it_is_not_fused() -> None:
    """The model may well be on the GPU."""
    piece = autostream(torch.fx.symbolic_trace(lambda x: x.relu() + 1), [t(3)], options={"kernels": "inductor"})
    same(piece(t(3)), t(3).relu() + 1)
    (report,) = reports_of(piece)
    assert report.mode == "one stream"
    assert [refusal.choice for refusal in report.refusals] == ["not fused"]
    assert "this program runs on the CPU" in report.refusals[0].reason
