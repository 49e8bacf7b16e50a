"""``Parallel``: on the CPU, traced, and on a GPU, results are those of its modules one after another."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import autostream
from autostream import Parallel, parallel
from autostream.costs.device import profile_named
from autostream.errors import AutostreamError
from autostream.options import Options
from autostream.pipeline import plan

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def linears(count: int = 2, width: int = 4) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(width, width) for _ in range(count)]


X, Y = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), torch.eye(4)


class Scaled(nn.Module):
    def forward(self, x: Tensor, *, by: int) -> Tensor:
        return x * by


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Difference(nn.Module):
    def forward(self, pair: Pair) -> Tensor:
        return pair.left - pair.right


def test_how_arguments_are_distributed() -> None:
    left, right = linears()
    both = Parallel(left, right)
    torch.testing.assert_close(both(X), (left(X), right(X)), rtol=0, atol=0)
    torch.testing.assert_close(both((X, Y)), (left(X), right(Y)), rtol=0, atol=0)
    torch.testing.assert_close(Parallel(left)(X), (left(X),), rtol=0, atol=0)
    several = Parallel(nn.Bilinear(4, 4, 2), nn.Bilinear(4, 4, 3))
    assert [result.shape[-1] for result in several(X, Y)] == [2, 3]
    torch.testing.assert_close(Parallel(Difference(), Difference())(Pair(X, Y)), (X - Y, X - Y))
    torch.testing.assert_close(Parallel(Scaled(), Scaled())((X, Y), by=3), (X * 3, Y * 3))
    torch.testing.assert_close(both(input=X), both(X))
    unknown = object()  # which may hold tensors
    assert Parallel(nn.Identity(), nn.Identity())(unknown) == (unknown, unknown)


def test_it_may_follow_another_in_a_sequence_and_be_nested() -> None:
    a, b, c, d = linears(4)
    model = nn.Sequential(Parallel(a, nn.Sequential(b, nn.ReLU())), Parallel(c, Parallel(d, d, reduce=torch.add)))
    first, second = model(X)
    torch.testing.assert_close(first, c(a(X)), rtol=0, atol=0)
    torch.testing.assert_close(second, 2 * d(b(X).relu()))


def test_results_are_reduced_by_a_function_or_a_module_with_weights() -> None:
    left, right = linears()
    torch.testing.assert_close(Parallel(left, right, reduce=torch.mm)(X), left(X) @ right(X))
    mixed = Parallel(left, right, reduce=nn.Bilinear(4, 4, 1))
    assert "reduce.weight" in mixed.state_dict()
    assert mixed(X).shape == (4, 1)


def test_it_is_a_module_like_any_other() -> None:
    both = Parallel(*linears(), streams=2, reduce=torch.add)
    assert list(both.state_dict()) == ["branches.0.weight", "branches.0.bias", "branches.1.weight", "branches.1.bias"]
    for twin in (copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        twin.load_state_dict({name: 2 * value for name, value in both.state_dict().items()})
        torch.testing.assert_close(twin(X), 2 * both(X))
    state = {name: 0 * value for name, value in both.state_dict().items()}
    assert not functional_call(both, state, (X,)).any()
    torch.testing.assert_close(vmap(both)(X[None])[0], both(X))
    assert "streams=2" in repr(both)


class Product(nn.Module):
    """``Parallel(left, right, reduce=torch.mm)`` by hand."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(self.left(x), self.right(x))


def test_its_schedules_are_those_of_a_model_written_by_hand() -> None:
    blocks = [nn.Sequential(linear, nn.ReLU(), linear) for linear in linears()]
    options, gpu = Options(policy="path_cover", streams=2), profile_named("h200")
    models = (Parallel(*blocks, reduce=torch.mm), Product(*blocks))
    plans = [plan(model, (X,), {}, options, gpu) for model in models]
    parallel, written_out = ([candidate.schedule.launches for candidate in each.candidates] for each in plans)
    assert parallel == written_out
    assert any(launch.stream for launches in parallel for launch in launches), "it is found to be independent"
    with torch.no_grad():
        fast = autostream.optimize(models[0], X)
        assert torch.equal(fast(X), models[0](X))
    assert [report.mode for report in fast.reports] == ["one stream"]


def test_it_can_be_traced_as_one_graph() -> None:
    """Also with a tuple of inputs, and with keyword arguments."""
    a, b, c, d = linears(4)
    model = nn.Sequential(Parallel(a, b), Parallel(c, d, reduce=torch.mm))
    expected = c(a(X)) @ d(b(X))
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(X), expected)
    torch.testing.assert_close(autostream.optimize(model, policy="path_cover", strict=True)(X), expected)
    torch.testing.assert_close(torch.export.export(model, (X,), strict=False).module()(X), expected)
    compiled = torch.compile(model[0], backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(input=X), model[0](X))


def test_a_training_step_traces_through_it() -> None:
    def trained(make: Callable[[Any], nn.Module]) -> nn.Module:
        model = make(linears())
        step = autostream.train_step(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean(), strict=True
        )
        for _ in range(3):
            step(X)
        return model

    ours = trained(lambda blocks: Parallel(*blocks, reduce=torch.mm))
    theirs = trained(lambda blocks: Product(*blocks))
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Parallel(), "at least one module"),
        (lambda: Parallel(nn.ReLU(), 3), "modules, not 3"),  # type: ignore[arg-type]
        (lambda: Parallel([nn.ReLU()]), r"modules, not \[ReLU\(\)\] of them: write Parallel\(\*modules\)"),  # type: ignore[arg-type]
        (lambda: Parallel(nn.ModuleList([nn.ReLU()])), r"a ModuleList of them: write Parallel\(\*modules\)"),
        (lambda: Parallel(nn.ReLU(), nn.ReLU())((X,)), "2 modules and is given a tuple of 1 inputs"),
        (lambda: Parallel(nn.ReLU(), streams=0), "streams=0 is not allowed"),
        (lambda: Parallel(nn.ReLU(), reduce="sum"), "reduce='sum' is not allowed"),  # type: ignore[arg-type]
        (lambda: Parallel(nn.ReLU(), reduce=sum), "reduce=sum is not allowed"),
    ],
)
def test_mistakes_raise(make: Callable[[], object], message: str) -> None:
    with pytest.raises(AutostreamError, match=message):
        make()


# On a GPU


class Late(nn.Module):
    """Computes after a kernel that spins, in the forward and in the backward."""

    def __init__(self, cycles: int, width: int = 256) -> None:
        super().__init__()
        self.cycles = cycles
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(self.cycles)
        y: Tensor = self.layers(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: torch.cuda._sleep(self.cycles))
        return y


@pytest.fixture(params=[(1_000_000, 0, 0), (0, 1_000_000, 0), (0, 0, 1_000_000)], ids=["first", "second", "third"])
def late(request: pytest.FixtureRequest) -> nn.Sequential:
    """The layer before may free its output while a late child still reads it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(256, 256), Parallel(*map(Late, request.param), reduce=lambda a, b, c: a @ b.t() @ c)
    )
    return model.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_late_children_change_nothing(late: nn.Sequential, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward and update, with memory that is reused. Streams are used at all."""

    def run() -> list[Tensor]:
        model, seen = copy.deepcopy(late), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        torch.manual_seed(1)
        with mode():
            for _ in range(6):
                y = model(torch.randn(128, 256, device="cuda"))
                seen.append(y.sum())
                if y.requires_grad:
                    y.square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                del y
        return [*(each.detach().clone() for each in seen), *model.parameters()]

    ran = []
    original = parallel.side_by_side
    monkeypatch.setattr(parallel, "side_by_side", lambda *args: ran.append(args) or original(*args))
    ours = run()
    assert len(ran) == 6
    monkeypatch.setattr(parallel, "_device_of", lambda dealt: None)
    tolerance = 1e-5 if mode is torch.enable_grad else 0.0  # gradients of three children may be added in any order
    torch.testing.assert_close(ours, run(), rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_children_of_several_devices_and_the_cpu() -> None:
    class On(nn.Module):
        def __init__(self, device: str) -> None:
            super().__init__()
            self.device, self.linear = device, nn.Linear(8, 8).to(device)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.linear(x.to(self.device))
            return result

    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    children = [On(device) for device in devices]
    x = torch.randn(4, 8, device="cuda")
    for child, result in zip(children, Parallel(*children)(x), strict=True):
        torch.testing.assert_close(result, child(x))


@pytest.mark.gpu
def test_sparse_inputs_and_transforms_run_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "side_by_side", lambda *args: pytest.fail("side by side"))
    both, x = Parallel(nn.Identity(), nn.Identity()).cuda(), torch.eye(4, device="cuda")
    assert [y.layout for y in both(x.to_sparse())] == [torch.sparse_coo] * 2
    assert all(torch.equal(y, x) for y in vmap(both)(x))


@pytest.mark.gpu
def test_it_can_be_captured_by_the_user() -> None:
    both, x = Parallel(*linears(width=64), reduce=torch.mm).cuda(), torch.randn(64, 64, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            both(x)
        with torch.cuda.graph(graph, stream=stream):
            y = both(x)
        graph.replay()
        torch.testing.assert_close(y, both(x))


def test_disabled_it_runs_modules_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSTREAM_DISABLE", "1")
    monkeypatch.setattr("autostream.parallel._device_of", lambda dealt: "cuda:0")
    monkeypatch.setattr("autostream.parallel.side_by_side", lambda *args: pytest.fail("side by side"))
    assert Parallel(nn.Identity(), nn.Identity())(3) == (3, 3)
