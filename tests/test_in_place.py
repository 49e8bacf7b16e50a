"""``optimize_``: the model itself is scheduled, and is otherwise what it was; ``restore`` undoes it."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autostream
from autostream.errors import OptionError, TargetError
from autostream.explaining import reports_of
from tests.semantics import same, t

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    """Two branches; it has parts, and a method that calls it and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.parts = [self.left, self.right]

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return scale * self.left(x).relu() + self.right(x).sigmoid()

    def generate(self, x: Tensor) -> Tensor:
        return self(self(x))

    def loss(self, x: Tensor) -> Tensor:
        return (self.left(x) - self.right(x)).square().mean()

    def __len__(self) -> int:
        return len(self.parts)


def signatures(value: object) -> list[str]:
    return [report.signature for report in reports_of(value) if report.mode != "plain"]


@pytest.mark.parametrize("options", [{}, {"policy": "critical_path", "streams": 3}], ids=["default", "streams"])
@torch.no_grad()
def test_the_models_own_calls_are_scheduled(options: dict[str, Any]) -> None:
    model, x = Net(), t(3, 4)
    expected = copy.deepcopy(model)
    assert autostream.optimize_(model, **options) is model
    for _ in range(3):
        same(model(x), expected(x))
        same(model(x, scale=2.0), expected(x, scale=2.0))
        same(model.generate(x), expected.generate(x))
    assert len(signatures(model)) == 2
    assert autostream.explain(model).count("signature ") == 2
    (report, _) = reports_of(model)
    assert report.model == "Net"


def test_it_is_otherwise_what_it_was() -> None:
    model = Net()
    names, attributes = list(model.state_dict()), set(dir(model))
    autostream.optimize_(model)
    assert type(model) is Net
    assert list(inspect.signature(model.forward).parameters) == ["x", "scale"]
    assert (list(model.state_dict()), len(model), set(dir(model))) == (names, 2, attributes)
    assert [name for name, _ in model.named_modules()] == ["", "left", "right"]
    autostream.restore(model)
    assert set(dir(model)) == attributes
    with torch.no_grad():
        model(t(3, 4))
    with pytest.raises(TargetError, match="not a Net: give it to optimize_ first"):
        autostream.explain(model)


@torch.no_grad()
def test_hooks_weights_and_modes_are_those_of_the_call() -> None:
    model, x = autostream.optimize_(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()), t(3, 4)
    expected = autostream.restore(copy.deepcopy(model))
    same(model(x), expected(x))
    hook = model.register_forward_hook(lambda module, args, output: output + 1)
    same(model(x), expected(x) + 1)
    hook.remove()
    model[0].weight.mul_(2)
    expected[0].weight.mul_(2)
    same(model(x), expected(x))
    model[0].weight = nn.Parameter(t(4, 4))
    expected[0].weight = model[0].weight
    same(model(x), expected(x))
    same(model.double()(x.double()), expected.double()(x.double()))
    torch.manual_seed(0)
    ours = model.train()(x.double())
    torch.manual_seed(0)
    same(ours, expected.train()(x.double()))


def test_gradients_are_the_models() -> None:
    model, x = Net(), t(3, 4)
    expected = copy.deepcopy(model)
    autostream.optimize_(model, policy="critical_path", streams=2)
    for each in (model, expected):
        each(x).sum().backward()
    same([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])
    assert [s for s in signatures(model) if s.endswith("gradients")]


def test_a_training_step_of_it_is_one_graph() -> None:
    model, expected = autostream.optimize_(Net()), Net()
    expected.load_state_dict(model.state_dict())
    losses = []
    for each in (model, expected):
        step = autostream.train_step(each, torch.optim.SGD(each.parameters(), lr=0.1), nn.MSELoss(), strict=True)
        losses.append([step(t(3, 4), t(2, 4)[:1].expand(3, 4)) for _ in range(3)])
        assert signatures(step)
    same(*losses)


@torch.no_grad()
def test_inside_others_it_is_traced() -> None:
    inner, x = Net(), t(3, 4)
    expected = inner(x).tanh()
    outer = nn.Sequential(autostream.optimize_(inner), nn.Tanh())
    same(torch.compile(outer, backend="eager", fullgraph=True)(x), expected)
    fast = autostream.optimize(outer, strict=True)
    same(fast(x), expected)
    assert signatures(fast)
    assert not signatures(inner), "its ops are a part of the outer graph"
    same(outer(x), expected)
    assert signatures(inner)
    assert [node.op for node in fx.symbolic_trace(outer).graph.nodes].count("call_module") >= 3
    same(torch.export.export(outer, (x,)).module()(x), expected)


@torch.no_grad()
def test_copies_are_not_scheduled() -> None:
    model, x = autostream.optimize_(Net()), t(3, 4)
    expected = model(x)
    for copied in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(copied(x), expected)
        assert reports_of(copied) == ()
    assert signatures(model)


class Stateful(Net):
    """Its class pickles all attributes, such as those of Lightning."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


@torch.no_grad()
def test_copies_that_keep_all_attributes_have_schedules_of_their_own() -> None:
    model, x = autostream.optimize_(Stateful(), streams=1), t(3, 4)
    expected = model(x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert reports_of(copied) == ()
        copied.left.weight.zero_()
        same(model(x), expected)
        assert not torch.equal(copied(x), expected)
        assert signatures(copied)


def test_wrong_options_change_nothing() -> None:
    model = Net()
    for wrong in ({"polices": "auto"}, {"streams": 0}, {"inductor_options": {"no_such_setting": 1}}):
        with pytest.raises(OptionError):
            autostream.optimize_(model, **wrong)
    with pytest.raises(OptionError, match="no argument"):
        autostream.optimize_(model, dynamic={"tokens": {0: autostream.Bucket("length", 8)}})
    assert model._compiled_call_impl is None
    autostream.optimize_(model, streams=1)
    with pytest.raises(OptionError):
        autostream.optimize_(model, streams=0)
    with torch.no_grad():
        model(t(3, 4))
    assert signatures(model)


@torch.no_grad()
def test_the_options_of_the_last_time_hold() -> None:
    model = autostream.optimize_(Net(), streams=1)
    model(t(3, 4))
    autostream.optimize_(model, strict=True)
    assert reports_of(model) == ()
    model(t(3, 4))
    autostream.restore(autostream.restore(model))
    model(t(3, 4))


@torch.no_grad()
def test_lengths_are_padded() -> None:
    model = Net()
    expected = model(t(3, 4))
    autostream.optimize_(model, dynamic={"x": {0: autostream.Bucket("rows", 8)}})
    same(model(t(3, 4)), expected, 1e-6)  # products of other sizes round otherwise
    model(t(5, 4))
    assert signatures(model)[0].startswith("8x4")


class Calling(nn.Module):
    def __call__(self, x: Tensor) -> Tensor:
        return x + 1


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_what_has_no_calls_to_schedule_is_refused() -> None:
    compiled = Net()
    compiled.compile(backend="eager")
    for wrong, match in [
        (torch.relu, "it is no torch.nn.Module: use optimize for functions$"),
        (t(2), "it is no torch.nn.Module$"),
        (Net, "Net'> in place: it is a class: make a module of it$"),
        (int, "it is no torch.nn.Module$"),
        (autostream.optimize(Net()), "it is optimized already: give optimize_ the model that it was made from$"),
        (autostream.optimize(Net().loss), "it is optimized already"),
        (torch.compile(Net(), backend="eager"), "torch.compile has compiled it: give optimize_ the model that it was"),
        (Calling(), "Calling has a __call__ of its own: use optimize"),
        (compiled, "nn.Module.compile has compiled its calls"),
        (torch.jit.script(nn.ReLU()), "TorchScript"),
    ]:
        with pytest.raises(TargetError, match=match):
            autostream.optimize_(wrong)  # type: ignore[type-var]
    for wrong in (torch.relu, autostream.optimize(Net())):
        with pytest.raises(TargetError, match="restore takes a model"):
            autostream.restore(wrong)  # type: ignore[type-var]


@torch.no_grad()
def test_graph_modules_are_scheduled() -> None:
    model, x = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), t(3, 4)
    expected = model(x)
    autostream.optimize_(model)
    same(model(x), expected)
    assert signatures(model)


@pytest.mark.parametrize("options", [{}, {"policy": "critical_path", "streams": 3}], ids=["default", "streams"])
@torch.no_grad()
def test_a_method_may_take_the_place_of_its_own(options: dict[str, Any]) -> None:
    model, expected, x = Net(), Net(), t(3, 4)
    expected.load_state_dict(model.state_dict())
    model.forward = autostream.optimize(model.forward, **options)  # type: ignore[method-assign]
    model.loss = autostream.optimize(model.loss, **options)  # type: ignore[method-assign]
    hook = model.register_forward_hook(lambda module, args, output: output.tolist())  # in no graph
    assert model(x) == expected(x).tolist()
    hook.remove()
    for _ in range(2):
        same(model(x), expected(x))
        same(model.loss(x), expected.loss(x))
    assert list(model.state_dict()) == list(expected.state_dict())
    assert inspect.signature(model.forward) == inspect.signature(expected.forward)
    assert [report.model for report in (*reports_of(model.forward), *reports_of(model.loss))] == ["Net", "Net.loss"]
    assert autostream.explain(model.forward)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.left.weight.zero_()
        assert not torch.equal(copied(x), expected(x))
        same(model(x), expected(x))
    del model.forward
    same(model(x), expected(x))


def test_the_wrapper_has_the_signature_and_the_special_methods_of_the_model() -> None:
    fast = autostream.optimize(Net())
    assert list(inspect.signature(fast.forward).parameters) == ["x", "scale"]
    assert len(fast) == 2
    assert not hasattr(autostream.optimize(nn.ReLU()), "__len__")
    assert bool(autostream.optimize(nn.ReLU()))
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    fast = autostream.optimize(layers)
    assert (fast[0], [*fast], layers[1] in fast) == (layers[0], [*layers], True)
    assert isinstance(fast[:1], nn.Sequential)
    assert isinstance(fast, autostream.OptimizedModule)
    fast[1] = nn.Tanh()
    del fast[0]
    with torch.no_grad():
        same(fast(t(3, 4)), t(3, 4).tanh())
    assert len(pickle.loads(pickle.dumps(fast))) == len(layers) == 1
    assert "relu" in autostream.optimize(nn.ModuleDict({"relu": nn.ReLU()}))


@torch.no_grad()
def test_generate_of_the_wrapper_says_once_that_it_calls_the_model_itself(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Net(), t(3, 4)
    fast = autostream.optimize(model, strict=True)
    same(fast.loss(x), model.loss(x))
    assert caplog.text == ""
    for _ in range(2):
        same(fast.generate(x), model.generate(x))
    assert caplog.text.count("Net runs plainly: its generate() calls the model itself, past the wrapper: use") == 1
    assert "autostream.optimize_(model)" in autostream.explain(fast)
    assert fast.generate == model.generate


@torch.no_grad()
def test_a_method_of_the_wrapper_is_a_part_of_graphs() -> None:
    model, x = Net(), t(3, 4)
    fast = autostream.optimize(model)
    same(torch.compile(lambda x: fast.generate(x) + 1, backend="eager", fullgraph=True)(x), model.generate(x) + 1)
    same(autostream.optimize(fast.loss, strict=True)(x), model.loss(x))


@torch.no_grad()
def test_a_forward_of_the_wrapper_may_be_wrapped() -> None:
    """As accelerate does."""
    model, x = Net(), t(3, 4)
    fast = autostream.optimize(model)
    run = fast.forward
    fast.forward = lambda *args, **kwargs: run(*args, **kwargs) + 1
    same(fast(x), model(x) + 1)
    same(run(x), model(x))
    assert signatures(fast)


@torch.no_grad()
def test_another_forward_of_the_class_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    model, x = autostream.optimize_(Adds()), t(3, 4)
    for _ in range(2):
        same(model(x), x + 1)
    monkeypatch.setattr(Adds, "forward", lambda self, x: x + 2)
    same(model(x), x + 2)
