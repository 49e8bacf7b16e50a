"""The module that ``optimize`` returns behaves like the model; errors and fallbacks."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import random
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import autostream
from autostream.dispatch.admission import HITS_PER_COMPILATION
from autostream.errors import OptionError, TargetError, TraceError
from autostream.explaining import reports_of
from tests.semantics import CONFIGURATIONS, Beside, Model, force_streams, same, t
from tests.threads import in_threads

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    """Two branches, a tied weight, a buffer, a plain tensor, a number, and a method."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.left.weight
        self.offset = nn.Buffer(t(4))
        self.shift = t(4)
        self.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.left(x).relu() + self.tied(self.right(x)).sigmoid() + self.offset + self.shift

    def describe(self, name: str) -> str:
        return f"{name}: {self.factor}"


def modes(fast: autostream.OptimizedModule) -> list[str]:
    return [report.mode for report in fast.reports]


def reasons(fast: autostream.OptimizedModule) -> str:
    return "; ".join(refusal.reason for report in fast.reports for refusal in report.refusals)


# An nn.Module like the model


def test_it_has_the_models_state_under_the_same_names() -> None:
    model = Net()
    fast = autostream.optimize(model)
    assert isinstance(fast, nn.Module)
    for listing in ("named_parameters", "named_buffers", "named_children"):
        ours, theirs = (list(getattr(module, listing)()) for module in (fast, model))
        assert [(name, id(item)) for name, item in ours] == [(name, id(item)) for name, item in theirs]
    assert [id(module) for module in fast.modules()] == [id(fast), *(id(m) for m in list(model.modules())[1:])]
    assert list(fast.state_dict()) == list(model.state_dict()) == [*dict.fromkeys(fast.state_dict())]
    assert fast.get_submodule("left") is model.left
    assert fast.get_parameter("left.weight") is model.left.weight


@torch.no_grad()
def test_inside_another_module_its_state_has_the_plain_names() -> None:
    model, outer = Net(), nn.Sequential(nn.ReLU(), Net(), nn.Tanh())
    fast = nn.Sequential(nn.ReLU(), autostream.optimize(model), nn.Tanh())
    assert list(fast.state_dict()) == list(outer.state_dict())
    x = t(3, 4)
    fast(x)
    for assign in (False, True):
        fast.load_state_dict({name: value * 1.5 for name, value in outer.state_dict().items()}, assign=assign)
        outer.load_state_dict({name: value * 1.5 for name, value in outer.state_dict().items()})
        same(fast(x), outer(x))
    fast.double().train()
    assert model.training
    same(fast(x.double()), outer.double()(x.double()))
    with pytest.raises(RuntimeError, match=r"Missing key.*1.left.weight"):
        fast.load_state_dict({})
    assert modes(fast[1])[0] == "one stream"


@torch.no_grad()
def test_mode_and_dtype_are_the_models() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    fast = autostream.optimize(model)
    x = t(3, 4)
    assert fast.eval() is fast
    assert not fast.training
    assert not model[1].training
    same(fast(x), model(x))
    assert fast.train() is fast
    assert model[1].training
    torch.manual_seed(5)
    ours = fast(x)
    torch.manual_seed(5)
    same(ours, model(x))
    model.eval()
    assert not fast.training
    fast.training = True
    assert model.training
    assert not model[1].training
    assert fast.to(torch.float64) is fast
    assert fast.reports == (), "what was prepared for the old weights would keep them alive"
    assert model[0].weight.dtype is torch.float64
    same(fast(x.double()), model(x.double()))
    assert fast.requires_grad_(False) is fast
    assert not model[0].weight.requires_grad


def test_submodules_may_be_deleted_and_added() -> None:
    """Deleting from an ``nn.Sequential`` replaces its dictionaries."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    fast = autostream.optimize(model)
    del model[1]
    model.append(nn.Linear(4, 2))
    fast.register_buffer("extra", torch.ones(1))
    for listing in ("named_parameters", "named_buffers", "named_children"):
        assert [name for name, _ in getattr(fast, listing)()] == [name for name, _ in getattr(model, listing)()]
    assert list(fast.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        same(fast(t(3, 4)), model(t(3, 4)))


def test_replicas_for_data_parallel_are_the_models() -> None:
    model, x = nn.Linear(4, 4), t(3, 4)
    replica: Any = autostream.optimize(model)._replicate_for_data_parallel()
    assert "_is_replica" not in vars(model)
    replica.weight, replica.bias = torch.eye(4), torch.zeros(4)  # as nn.parallel.replicate does
    same(replica(x), x)


def test_hooks_on_it_are_called_as_on_any_module() -> None:
    model = nn.Linear(4, 4)
    fast = autostream.optimize(model)
    calls: list[str] = []
    fast.register_forward_pre_hook(lambda m, args: calls.append("before") or (args[0] + 1,))
    fast.register_forward_hook(
        lambda m, args, kwargs, result: calls.append(f"after {sorted(kwargs)}") or -result, with_kwargs=True
    )
    fast.register_forward_hook(lambda m, args, result: calls.append("always"), always_call=True)
    x = t(3, 4)
    with torch.no_grad():
        same(fast(x), -model(x + 1))
        assert calls == ["before", "after []", "always"]
        same(copy.deepcopy(fast)(x), -model(x + 1))
    assert modes(fast) == ["one stream"]
    gradients: list[Tensor] = []
    fast.register_full_backward_hook(lambda m, given, taken: gradients.append(taken[0]))
    fast(x.requires_grad_()).sum().backward()
    assert torch.equal(gradients[0], torch.ones(3, 4))
    fast.register_state_dict_post_hook(lambda m, state, prefix, metadata: state.__delitem__(prefix + "bias"))
    assert list(fast.state_dict()) == ["weight"]


@torch.no_grad()
@pytest.mark.parametrize(
    "register",
    [
        lambda module, hook: module.register_forward_hook(lambda m, args, result: hook()),
        lambda module, hook: module.register_forward_pre_hook(lambda m, args: hook()),
        lambda module, hook: nn.modules.module.register_module_forward_hook(
            lambda m, args, result: hook() if m is module else None
        ),
    ],
)
def test_hooks_on_a_submodule_are_called(register: Callable[..., Any]) -> None:
    """Dynamo traces hooks of a module; the model calls hooks of all modules."""
    model = Net()
    fast = autostream.optimize(model)
    x, calls = t(3, 4), list[int]()
    fast(x)
    handle = register(model.left, lambda: calls.append(1))
    try:
        same(fast(x), model(x))
        assert len(calls) == 2
    finally:
        handle.remove()
    fast(x)
    assert len(calls) == 2


@torch.no_grad()
def test_copies_are_independent_and_can_be_saved() -> None:
    model, x = Net(), t(3, 4)
    fast = autostream.optimize(model, x, policy="path_cover")
    twin = copy.deepcopy(fast)
    twin.left.weight.mul_(2)
    same(fast(x), model(x))
    assert not torch.equal(twin(x), fast(x))
    assert twin.tied.weight is twin.left.weight
    shallow = copy.copy(fast)
    assert shallow.left is model.left
    buffer = io.BytesIO()
    torch.save(fast, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for copied in (twin, shallow, loaded):
        assert isinstance(copied, autostream.OptimizedModule)
        assert copied._autostream.options == fast._autostream.options
    for copied in (shallow, loaded):
        same(copied(x), model(x))
    copied = copy.deepcopy(autostream.optimize(torch.fx.symbolic_trace(Net())))
    assert isinstance(copied, autostream.OptimizedModule), "though graph modules have a __deepcopy__"


@torch.no_grad()
def test_attributes_and_methods_are_the_models() -> None:
    model = Net()
    fast = autostream.optimize(model)
    x = t(3, 4)
    fast(x)
    assert fast.describe("net") == "net: 2.0"
    fast.factor = 5.0
    assert model.factor == 5.0
    assert "factor" not in vars(fast)
    same(fast(x), model(x))
    fast.left = nn.Linear(4, 4)
    assert model.left is fast.left
    same(fast(x), model(x))
    fast.register_buffer("extra", torch.ones(1))
    assert "extra" in dict(model.named_buffers())
    del fast.extra
    assert not hasattr(model, "extra")
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        _ = fast.nothing
    assert repr(fast) == f"OptimizedModule({model!r})"
    assert "<th>model</th><td>Net</td>" in fast._repr_html_()
    assert "OptimizedModule(ReLU())" in autostream.optimize(nn.ReLU())._repr_html_()


class Namesake(nn.Module):
    """Has attributes with names that a wrapper might use."""

    model = _model = _options = _entries = _shortcut = _watch = _autostream_function = "the class's"

    def __init__(self) -> None:
        super().__init__()
        self._lock, self.reports = nn.Linear(4, 4), nn.ReLU()
        self.static_inputs = nn.Parameter(t(4))
        self.options = "the model's"

    def forward(self, x: Tensor) -> Tensor:
        return self.prepare(self.reports(self._lock(x)))

    def prepare(self, x: Tensor) -> Tensor:
        return x + self.static_inputs


@torch.no_grad()
def test_names_that_the_model_uses_are_the_models() -> None:
    model = Namesake()
    fast = autostream.optimize(model, t(3, 4))
    x = t(3, 4)
    same(fast(x), model(x))
    same(fast.prepare(x), model.prepare(x))
    of_the_class = vars(Namesake).keys() - {"forward"}
    for name in ("_lock", "reports", "static_inputs", "options", *(n for n in of_the_class if "__" not in n)):
        ours, theirs = getattr(fast, name), getattr(model, name)
        assert ours is theirs or ours == theirs, name
    fast.reports, fast._lock = nn.Tanh(), nn.Linear(4, 4)
    assert isinstance(model.reports, nn.Tanh)
    assert fast._lock is model._lock
    same(fast(x), model(x))
    copied = copy.deepcopy(fast)
    same(copied(x), model(x))
    assert {report.mode for report in reports_of(fast)} == {"one stream"}
    assert "runs as    " in autostream.explain(fast)
    other = autostream.optimize(Net())  # which has none of these names
    other.prepare(x)
    assert other.reports == reports_of(other)
    assert other.static_inputs(x)[1] == {}
    assert "torch.ops.aten.sigmoid" in other.lowered(x).code
    assert {"prepare", "reports", "static_inputs", "lowered", "describe", "left", "forward"} <= set(dir(other))
    assert reports_of(Net()) == reports_of(len) == ()


@torch.no_grad()
def test_it_can_be_compiled_in_place() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model = Net()
    fast = autostream.optimize(model)
    fast.compile(backend=backend)
    same(fast(t(3, 4)), model(t(3, 4)))
    assert len(graphs) == 1
    assert model._compiled_call_impl is None


@torch.no_grad()
@pytest.mark.parametrize("wrap", [lambda inner: inner, lambda inner: nn.Sequential(inner, nn.ReLU())])
def test_optimizing_what_is_partly_optimized(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Net()
    whole = wrap(autostream.optimize(model))
    fast = autostream.optimize(whole, t(3, 4))
    x = t(3, 4)
    same(fast(x), wrap(model)(x))
    model.factor = 5.0
    same(fast(x), wrap(model)(x))
    assert set(modes(fast)) == {"one stream"}


def test_it_is_freed_with_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = autostream.optimize(Beside(Net()), t(3, 4), **force_streams(monkeypatch))
    assert modes(fast) == ["threads"]
    gone = weakref.ref(fast)
    del fast
    gc.collect()
    assert gone() is None


# Changes of the model: tests/frontend/test_guards.py has more


@torch.no_grad()
@pytest.mark.parametrize("who", ["optimized", "in inference mode"])
def test_changes_through_the_optimized_module_and_in_inference_mode_are_seen(who: str) -> None:
    model, x = Net(), t(3, 4)
    fast = autostream.optimize(model, strict=True)
    same(fast(x), model(x))
    changed: Any = fast if who == "optimized" else model
    with torch.inference_mode() if who == "in inference mode" else nullcontext():
        changed.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)
        changed.right, changed.tied = nn.Linear(4, 6), nn.Linear(6, 4)
    for _ in range(2):
        same(fast(x), model(x))
    assert set(modes(fast)) == {"one stream"}


calls = 0


def tells(s: Model, x: Tensor) -> Tensor:
    global calls
    calls += 1
    y = s.layer(x) * calls
    s.keep(y.sum().item())
    return y


@pytest.mark.parametrize("grad", [False, True])
def test_side_effects_outside_of_the_model_are_the_same(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each call. The first is traced, and has them once."""
    seen = []
    for optimized in (True, False):
        monkeypatch.setitem(globals(), "calls", 0)
        torch.manual_seed(0)
        told, outputs = list[float](), list[Tensor]()
        model = Model(tells, layer=nn.Linear(4, 4).double(), keep=told.append)
        run = autostream.optimize(model, policy="sequential") if optimized else model
        for number in range(4):
            with torch.set_grad_enabled(grad):
                outputs.append(run(torch.full((2, 4), float(number)).double()))
            if grad:
                outputs[-1].sum().backward()
        seen.append(([y.detach() for y in outputs], told, calls, [own.grad for own in model.parameters()]))
    torch.testing.assert_close(*seen, rtol=1e-10, atol=1e-12)


class Ensemble:
    """An object with modules that is no module."""

    def __init__(self, *modules: nn.Module) -> None:
        self.first, self.second = modules

    def head(self, x: Tensor) -> Tensor:
        return self.second(x)  # type: ignore[no-any-return]

    def __call__(self, x: Tensor) -> Tensor:
        return self.head(self.first(x))


@torch.no_grad()
@pytest.mark.parametrize(
    "make", [lambda own: own, lambda own: own.__call__, lambda own: lambda x: own.head(own.first(x))]
)
def test_modules_of_functions_and_objects_are_updated(make: Callable[..., Any]) -> None:
    """One that was replaced is not updated any more."""
    first, second, third = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    modules = nn.ModuleList([first, second, third])
    expected = copy.deepcopy(modules)
    own, plain = Ensemble(first, second), Ensemble(expected[0], expected[1])
    fast = autostream.optimize(make(own), policy="sequential", strict=True)
    for number in range(4):
        x = t(3, 4) * (1 + number)
        same(fast(x), plain(x))
        same(dict(modules.state_dict()), dict(expected.state_dict()))
        if number == 1:
            own.second, plain.second = third, expected[2]
    assert {report.mode for report in fast.reports} == {"one stream"}


@torch.no_grad()
def test_a_function_has_its_name_and_the_mode_of_its_modules() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout())  # which asks for its mode: others are the same in both

    def project(x: Tensor) -> Tensor:
        return net(x)

    fast = autostream.optimize(project)
    for mode in ("train", "eval"):
        net.train(mode == "train")
        fast(t(3, 4))
        assert fast.training is (mode == "train")
        assert fast.reports[0].model.endswith("project")
        assert f", {mode}, " in fast.reports[0].signature
    fast.train()
    assert net.training
    assert ", eval, " in autostream.optimize(torch.relu, t(3)).reports[0].signature
    model = Net()
    same(autostream.optimize(model.forward, strict=True)(t(3, 4)), model(t(3, 4)))


def test_preparing_does_not_break_a_pending_backward() -> None:
    """Regression: it wrote statistics that the backward needs."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), t(3, 4)
    loss = model(x).sum()
    autostream.optimize(model.train(), x)
    loss.backward()


# Gradients: tests/test_gradients.py has more


@pytest.mark.parametrize("make", [lambda w: Model(lambda s, x: x * s.w, w=w), lambda w: lambda x: x * w])
def test_gradients_of_tensors_that_are_no_parameters(make: Callable[[Tensor], Any]) -> None:
    weight = t(3).requires_grad_()
    fast = autostream.optimize(make(weight))
    with torch.no_grad():
        assert not fast(t(3)).requires_grad
    fast(t(3)).sum().backward()
    same(weight.grad, t(3))


def test_a_frozen_model_is_scheduled_in_grad_mode() -> None:
    fast = autostream.optimize(Net().requires_grad_(False))
    assert not fast(t(3, 4)).requires_grad
    assert modes(fast) == ["one stream"]


# Other modes and tools


class Jagged(Tensor):
    """A tensor subclass."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@torch.no_grad()
def test_subclasses_and_nested_tensors_run_eagerly() -> None:
    fast = autostream.optimize(nn.ReLU())
    assert type(fast(t(3).as_subclass(Jagged))) is Jagged
    x = torch.nested.nested_tensor([torch.ones(2, 3), -torch.ones(1, 3)])
    assert [part.tolist() for part in fast(x).unbind()] == [[[1.0] * 3] * 2, [[0.0] * 3]]
    assert "is a Jagged" in reasons(fast)
    assert "input 0 is nested" in reasons(fast)


@torch.no_grad()
def test_transforms_and_tracers_see_the_plain_model() -> None:
    model = Net().eval()
    fast = autostream.optimize(model)
    outer = nn.Sequential(nn.ReLU(), fast)
    x = t(3, 4)
    fast(x)
    expected = model(x.relu())
    same(torch.vmap(outer)(x).shape, expected.shape)
    same(torch.func.functional_call(outer, dict(outer.named_parameters()), (x,)), expected)
    same(torch.compile(outer, backend="eager", fullgraph=True)(x), expected)
    same(torch.compile(fast, backend="eager", fullgraph=True)(x.relu()), expected)
    same(torch.export.export(outer, (x,)).module()(x), expected)
    same(torch.export.export(outer, (x,), strict=True).module()(x), expected)
    same(torch.export.export(fast, (x.relu(),)).module()(x.relu()), expected)
    same(torch.fx.symbolic_trace(fast)(x.relu()), expected)
    assert list(inspect.signature(type(fast).forward).parameters) == ["self", "x"]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert fast(mode.from_tensor(x)).shape == (3, 4)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        fast(x)
    strict = nn.Sequential(nn.ReLU(), autostream.optimize(model, strict=True))
    same(torch.export.export(strict, (x,)).module()(x), expected)
    assert strict[1].reports == ()
    assert counter.get_total_flops() == 3 * 2 * 3 * 4 * 4
    same(fast(x), model(x))
    with pytest.raises(TraceError, match="function transform"):
        torch.vmap(strict[1])(x)


@torch.no_grad()
@pytest.mark.parametrize("given", ["a symbol", "a tensor"])
@pytest.mark.parametrize("switched", ["on", "off"])
def test_torch_fx_traces_it_with_its_hooks(given: str, switched: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if switched == "off":
        monkeypatch.setenv("AUTOSTREAM_DISABLE", "1")
    model, x = Net(), t(3, 4)
    model.register_forward_hook(lambda module, args, result: result * 3)
    fast = autostream.optimize(model)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fast = fast

        def forward(self, x: Tensor) -> Tensor:
            return x + self.fast(x if given == "a symbol" else torch.ones(3, 4))

    traced = torch.fx.symbolic_trace(Outer())
    model.left.weight.mul_(2)
    same(traced(x), x + model(x if given == "a symbol" else torch.ones(3, 4)))


@torch.no_grad()
def test_torch_jit_traces_the_plain_model() -> None:
    model = Net()
    fast = autostream.optimize(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(fast, t(3, 4))
    same(traced(t(3, 4)), model(t(3, 4)))


# Signatures


@torch.no_grad()
def test_what_is_part_of_a_signature() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
    fast = autostream.optimize(model, max_signatures=99)

    def entries(*args: Any, **kwargs: Any) -> int:
        for _ in range(HITS_PER_COMPILATION):  # so many calls earn another schedule
            same(fast(*args, **kwargs), model(*args, **kwargs))
        return len(fast.reports)

    assert entries(t(3, 4)) == 1
    assert entries(t(3, 4) + 1) == 1
    assert entries(input=t(3, 4)) == 2
    assert entries(t(5, 4)) == 3
    assert entries(t(4, 3).t()) == 4
    with torch.autocast("cpu", torch.bfloat16):
        assert fast(t(3, 4)).dtype is torch.bfloat16
        assert entries(t(3, 4)) == 5
    with torch.inference_mode():
        assert entries(t(3, 4)) == 5
        assert entries(torch.ones(3, 4)) == 5
    fast.eval()
    assert entries(t(3, 4)) == 6
    model[0].train()
    assert entries(t(3, 4)) == 6, "a linear layer does not look at its mode"
    fast.requires_grad_(False)
    with torch.enable_grad():
        assert entries(t(3, 4)) == 7
    same(fast.train()(t(3, 4)), model(t(3, 4)))
    old = torch.__version__ < (2, 13)  # whose guards skip weights in calls without gradients
    assert len(fast.reports) == (7 if old else 8), "its weights require no gradients any more"


@torch.no_grad()
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_inference_tensors_may_be_inputs(configuration: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def writes(s: Model, x: Tensor) -> Any:
        y = x.sin() + x.cos()
        x.add_(1)
        return x[1:], y

    model = Beside(Model(writes))
    fast = autostream.optimize(model, **CONFIGURATIONS[configuration](monkeypatch))
    with torch.inference_mode():
        ours, theirs = t(3) * 2, t(3) * 2
        assert ours.is_inference()
        same(fast(ours), model(theirs))
        same(ours, theirs)
        fresh, other = (torch.empty(3).copy_(t(3)) for _ in range(2))
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        model(other)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        fast(fresh)
    same(fresh, other)
    same(fast(t(3)), model(t(3)))


@torch.inference_mode()
@pytest.mark.parametrize("training", [False, True])
def test_models_made_in_inference_mode(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train(training)
    twin = copy.deepcopy(model)
    fast = autostream.optimize(model, t(3, 4))
    for _ in range(2):
        same(fast(t(3, 4)), twin(t(3, 4)))
    same(dict(model.state_dict()), dict(twin.state_dict()))
    assert training or set(modes(fast)) <= {"one stream", "threads"}


# Preparing


@pytest.mark.parametrize("costs", ["auto", "measured"])
def test_preparing_changes_nothing(costs: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(inplace=True))
    x = t(3, 4)
    model.register_buffer("memory", x)
    x_before = x.clone()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    modes_before = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    fast = autostream.optimize(model, x, costs=costs)
    assert modes(fast) != ["plain"]
    assert fast.training
    same(dict(model.state_dict()), state)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert np.array_equal(np.random.get_state()[1], generators[2])
    assert modes_before == (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
    same(x, x_before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_preparing_for_several_inputs_and_for_keywords() -> None:
    fast = autostream.optimize(Model(lambda s, x, y: x + y), [t(3), t(3)])
    assert fast.reports[0].signature == "3:float32 on cpu, 3:float32 on cpu, train, no gradients"
    fast = autostream.optimize(Net(), example_kwargs={"x": t(3, 4)})
    assert len(fast.reports) == 1
    with torch.inference_mode():
        fast(x=t(3, 4))
    assert len(fast.reports) == 1


# Threads


@torch.no_grad()
@pytest.mark.parametrize("configuration", ["default", "scattered"])
@pytest.mark.parametrize("prepared", [True, False])
def test_threads_may_call_it_at_once(prepared: bool, configuration: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads, twenty calls each; unless it is prepared, their first calls race."""
    model = Beside(Net())
    fast = autostream.optimize(model, t(3, 4) if prepared else None, **CONFIGURATIONS[configuration](monkeypatch))

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            for _ in range(20):
                x = torch.randn(3, 4, generator=generator)
                same(fast(x), model(x))

    in_threads(8, work)
    assert modes(fast) == ["threads" if configuration == "scattered" else "one stream"]


@torch.no_grad()
def test_threads_may_prepare_different_models_that_share_a_part() -> None:
    shared = Net()
    fasts = [autostream.optimize(nn.Sequential(autostream.optimize(shared), nn.ReLU())) for _ in range(4)]
    found = in_threads(4, lambda number: torch.no_grad()(fasts[number])(t(3, 4)))
    same(found, [shared(t(3, 4)).relu().detach()] * 4)
    assert [modes(fast) for fast in fasts] == [["one stream"]] * 4


# Fallbacks and errors


@torch.no_grad()
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSTREAM_DISABLE", "1")
    fast = autostream.optimize(Net())
    fast(t(3, 4))
    assert fast.reports == ()
    monkeypatch.setenv("AUTOSTREAM_DISABLE", "0")
    fast = autostream.optimize(Net())
    fast(t(3, 4))
    assert modes(fast) == ["one stream"]


@torch.no_grad()
def test_what_the_model_raises_reaches_the_caller() -> None:
    fast, model = autostream.optimize(nn.Linear(4, 4)), nn.Linear(4, 4)
    fast(t(3, 4))
    for bad in (t(3, 5), t(3, 4).double(), "text", None):
        with pytest.raises((RuntimeError, TypeError)) as theirs:
            model(bad)
        with pytest.raises(theirs.type) as ours:
            fast(bad)
        assert str(ours.value) == str(theirs.value)
    with pytest.raises(TypeError, match=r"forward\(\) missing 1 required positional argument: 'input'"):
        fast()
    assert fast(t(3, 4)).shape == (3, 4)


@torch.no_grad()
def test_an_internal_error_is_a_fallback(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def faulty(*args: Any, **kwargs: Any) -> None:
        raise autostream.ScheduleError("a hazard is not covered")

    monkeypatch.setattr("autostream.tuning.candidates.verify", faulty)
    model = Net()
    fast = autostream.optimize(model, t(3, 4))
    same(fast(t(3, 4)), model(t(3, 4)))
    assert modes(fast) == ["plain"]
    assert "it cannot be scheduled: ScheduleError: a hazard is not covered" in reasons(fast)
    same(fast(t(5, 4)), model(t(5, 4)))
    assert modes(fast) == ["plain", "plain"]
    assert caplog.text.count("Net runs plainly: it cannot be scheduled") == 1, "once, and not for each signature"
    with pytest.raises(autostream.ScheduleError):
        autostream.optimize(model, t(3, 4), strict=True)


STRICT: Mapping[str, tuple[Any, tuple[Any, ...], str]] = {
    "no graph": (Model(lambda s, x: x if x.sum() > 0 else -x), (t(3),), "Python branches on a number"),
    "a subclass": (Model(lambda s, x: x), (t(3).as_subclass(Jagged),), "input 0 is a Jagged"),
    "sparse": (Model(lambda s, x: x), (t(3, 3).to_sparse(),), "layout torch.sparse_coo"),
    "lazy": (nn.LazyLinear(3), (t(3),), "parameters that its first call makes"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", STRICT)
def test_strict_raises_where_it_would_fall_back(name: str) -> None:
    model, args, reason = STRICT[name]
    with pytest.raises(TraceError, match=reason):
        autostream.optimize(model, strict=True)(*args)
    with pytest.raises(TraceError, match=reason):
        autostream.optimize(model, args, strict=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: autostream.optimize(3), "takes a torch.nn.Module or a function of tensors, not 3"),
        (lambda: autostream.optimize(Net), "not <class 'tests.test_api.Net'>: make one"),
        (lambda: autostream.optimize(Net(), 3), "example_inputs must be a tensor, a list or a tuple, not an int"),
        (lambda: autostream.optimize(Net(), {"x": t(3, 4)}), "use example_kwargs for keyword arguments"),
        (lambda: autostream.optimize(Net(), None, [t(3, 4)]), "example_kwargs must be a dict, not a list"),
        (lambda: autostream.optimize(Net(), None, {1: t(3, 4)}), "example_kwargs must have names for keys, not 1"),
        (
            lambda: autostream.optimize(Net(), t(3, 4).to("meta")),
            r"example input 0 is on meta, the model on cpu: use .to\('cpu'\)",
        ),
        (lambda: autostream.optimize(Net().to("meta"), t(3, 4)), r"example input 0 is on cpu, the model on meta"),
        (lambda: autostream.optimize(Net(), t(3, 5)), "itself fails .*shapes cannot be multiplied"),
    ],
)
def test_bad_input_is_named_in_one_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TargetError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", [{"stream": 2}, {"streams": 0}, {"dynamic": "bucket"}])
def test_options_are_checked_before_the_model_is_called(option: dict[str, Any]) -> None:
    called: list[int] = []
    with pytest.raises(OptionError):
        autostream.optimize(Model(lambda s, x: called.append(1)), t(3), **option)
    assert not called


def test_fused_kernels_of_the_cpu_are_refused_with_the_alternative() -> None:
    with pytest.raises(OptionError, match=r'is not to be had: .* runs on the CPU: use kernels="eager"'):
        autostream.optimize(Net(), kernels="inductor")
    compiled = torch.compile(Net(), backend="autostream", options={"kernels": "inductor"})
    with torch.no_grad(), pytest.raises(OptionError, match="runs on the CPU"):
        compiled(t(3, 4))


def test_a_cuda_graph_cannot_be_required_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r'cuda_graph=True is not to be had: .* runs on the CPU: use "auto"'):
        autostream.optimize(Net(), cuda_graph=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a machine with a GPU, and a model that is not there
    fast = autostream.optimize(Net(), cuda_graph=True)
    with torch.no_grad(), pytest.raises(OptionError, match="runs on the CPU"):
        fast(t(3, 4))


@pytest.mark.parametrize("kernels", ["auto", "inductor"])
def test_an_unknown_setting_of_inductor_is_refused(kernels: str) -> None:
    settings = {"max_autotun": True}
    with pytest.raises(OptionError, match=r"has no setting 'max_autotun' \(did you mean 'max_autotune'"):
        autostream.optimize(Net(), kernels=kernels, inductor_options=settings)
    fast = autostream.optimize(Net(), t(3, 4), inductor_options={"max_autotune": True})
    assert modes(fast) == ["one stream"]
    assert "inductor_options are not used" in reasons(fast)
