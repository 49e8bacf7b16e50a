"""Tracing: a program computes to the bit what its model does, a refusal says why, and the model never notices."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from autostream.errors import FastPathError, TraceError
from autostream.ir import Program, Role
from autostream.tracing.export import Traced, check_one_device, program_of, trace
from autostream.tracing.state import LiveState
from autostream.frontend.tree import flatten, unflatten

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
BFLOAT16 = {"device_type": "cpu", "dtype": torch.bfloat16}


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.function(*args, **kwargs)


def module(model: nn.Module | Callable[..., object]) -> nn.Module:
    return model if isinstance(model, nn.Module) else Function(model)


def traced(model: nn.Module | Callable[..., object], *args: object, **kwargs: object) -> Traced:
    tensors, structure = flatten((args, kwargs))
    return trace(module(model), tensors, structure)


def refusal(model: nn.Module | Callable[..., object], *args: object, **kwargs: object) -> str:
    with pytest.raises(TraceError) as caught, untouched(module(model)):
        traced(model, *args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Check that a model and the random generators are afterwards what they were, to the object and to the bit."""

    def identities() -> list[object]:
        parts = ("_parameters", "_buffers", "_modules", "_forward_hooks")
        holders = [h for m in model.modules() for h in (vars(m), *(vars(m)[part] for part in parts))]
        return [{name: id(value) for name, value in holder.items() if name != "grad"} for holder in holders]

    def state() -> list[Tensor]:
        return [*model.parameters(), *model.buffers()]

    torch.manual_seed(1)
    before, values, versions = identities(), [t.clone() for t in state()], [t._version for t in state()]
    flags = [(t.requires_grad, t.grad) for t in state()]
    generators = torch.get_rng_state().tolist(), random.getstate()
    yield
    assert identities() == before
    assert [t._version for t in state()] == versions
    assert all(map(torch.equal, state(), values))
    assert [(t.requires_grad, t.grad) for t in state()] == flags
    assert (torch.get_rng_state().tolist(), random.getstate()) == generators


def same(ours: Tensor, theirs: Tensor) -> bool:
    alike = (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    return alike and torch.equal(ours, theirs)


def assert_same_as_plain(
    model: nn.Module | Callable[..., object],
    *args: object,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    **kwargs: object,
) -> Traced:
    """Trace, run the program on the live state, and compare with the model: outputs, buffers and mutated inputs."""
    model = module(model)
    twin, twin_args, twin_kwargs = copy.deepcopy((model, args, kwargs))
    with around():
        with untouched(model):
            result = traced(model, *args, **kwargs)
        inputs, _ = flatten((args, kwargs))
        state = LiveState(model, result.program.placeholders, result.constants).tensors()
        with torch.no_grad():
            torch.manual_seed(2)
            expected = twin(*twin_args, **twin_kwargs)
            torch.manual_seed(2)
            outputs = unflatten(result.structure, result.program.module(*state, *inputs))
    ours, structure = flatten(outputs)
    theirs, expected_structure = flatten(expected)
    assert structure == expected_structure
    for mine, plain in [
        (ours, theirs),
        (inputs, flatten((twin_args, twin_kwargs))[0]),
        ([*model.parameters(), *model.buffers()], [*twin.parameters(), *twin.buffers()]),
    ]:
        assert len(mine) == len(plain)
        assert all(map(same, mine, plain))
    return result


# What a program consists of.


class Net(nn.Module):
    """Parameters, a buffer, a plain tensor and a literal; one layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.plain = torch.ones(4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.layer(x) + self.shift + self.plain + torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_placeholders_say_what_they_are_and_unused_state_has_none() -> None:
    result = assert_same_as_plain(Net(), X, X[0])
    placeholders = {p.target: p.role for p in result.program.placeholders}
    literal = next(iter(result.constants))
    assert placeholders == {
        "layer.weight": Role.PARAMETER,
        "layer.bias": Role.PARAMETER,
        "shift": Role.BUFFER,
        "plain": Role.CONSTANT,
        literal: Role.CONSTANT,
        "0": Role.INPUT,
        "1": Role.INPUT,
    }
    assert list(result.constants) == [literal]
    assert result.constants[literal].tolist() == [1, 2, 3, 4]


def test_a_program_is_a_flat_graph_of_fake_tensors_with_the_users_lines() -> None:
    result = traced(Net(), X)
    graph = result.program.module.graph
    assert [node.name for node in graph.find_nodes(op="placeholder")] == [p.name for p in result.program.placeholders]
    assert tuple(node.name for node in graph.output_node().args[0]) == result.program.outputs
    (linear,) = [node for node in graph.nodes if node.target == torch.ops.aten.linear.default]
    assert linear.meta["val"].shape == (3, 4)
    assert "return self.layer(x)" in linear.meta["stack_trace"]
    assert (result.program.level, result.program.device) == ("aten", "cpu")


def test_checks_that_the_signature_makes_are_not_repeated() -> None:
    graph = traced(lambda x: x.to(torch.float64).to(torch.float32), X).program.module.graph
    assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == [
        "aten.to.dtype",
        "aten.to.dtype",
    ]


def storages(result: Traced) -> dict[str, str]:
    names = {p.name: p.target for p in result.program.placeholders}
    return {p.target: names[p.storage] for p in result.program.placeholders}


def test_inputs_that_share_memory_share_a_storage() -> None:
    base = torch.ones(2, 4)
    result = assert_same_as_plain(lambda a, b, c: (a.add_(1), b * 2, c), base[:, :2], base[1], base[1].clone())
    assert storages(result) == {"0": "0", "1": "0", "2": "2"}
    placeholders = result.program.module.graph.find_nodes(op="placeholder")
    values = [node.meta["val"].untyped_storage()._cdata for node in placeholders]
    assert values[0] == values[1] != values[2]


def test_weights_that_share_memory_share_a_storage() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(4, 4))
            self.b = nn.Parameter(self.a.data[:2])
            self.register_buffer("c", self.a.data.t())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.a @ self.b.t() @ self.c[:2]

    result = traced(Shared(), X)
    assert storages(result) == {"a": "a", "b": "a", "c": "a", "0": "0"}


def test_a_tied_weight_has_one_placeholder() -> None:
    one, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
    other.weight = one.weight
    result = assert_same_as_plain(nn.Sequential(one, other), X)
    assert len([p for p in result.program.placeholders if p.target.endswith("weight")]) == 1


def test_constants_of_the_same_name_in_nested_modules_are_told_apart() -> None:
    class Scaled(nn.Module):
        def __init__(self, factor: float, model: nn.Module) -> None:
            super().__init__()
            self.c, self.model = torch.tensor(factor), model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x) * self.c + self.c

    result = assert_same_as_plain(Scaled(2.0, Scaled(3.0, Scaled(5.0, nn.ReLU()))), X)
    assert sorted(p.target for p in result.program.placeholders) == ["0", "c", "model.c", "model.model.c"]


# Models that must come out the same.


def one_of_many() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Flatten())


class Twice(nn.Module):
    """One norm, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(x) * 2)


MODELS: dict[str, tuple[Callable[[], nn.Module], Sequence[Tensor]]] = {
    "convolutions": (one_of_many, [torch.randn(2, 3, 8, 8)]),
    "channels last": (one_of_many, [torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)]),
    "a norm twice": (Twice, [X]),
    "dropout": (lambda: nn.Sequential(nn.Dropout(), nn.AlphaDropout(), nn.Dropout(inplace=True)), [X]),
    "lstm": (lambda: nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True), [X[None]]),
    "gru": (lambda: nn.GRU(4, 4, bidirectional=True), [X[None]]),
    "attention": (lambda: nn.MultiheadAttention(4, 2), [X[None], X[None] + 1, X[None] + 2]),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), [X[None]]),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), [X]),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), [X]),
    "embedding": (lambda: nn.Embedding(9, 3, max_norm=1.0), [torch.tensor([1, 8, 1])]),
    "bag": (lambda: nn.EmbeddingBag(9, 3), [torch.tensor([1, 2, 4]), torch.tensor([0, 2])]),
}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_models_come_out_the_same(name: str, mode: str) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make().train(mode == "train")
    assert_same_as_plain(model, *[tensor.clone() for tensor in inputs])


@dataclass
class Answer:
    """What a model returns."""

    value: Tensor
    note: str = "fine"
    extra: Tensor | None = None


FUNCTIONS: dict[str, tuple[Callable[..., object], tuple[object, ...], dict[str, object]]] = {
    "keywords alone": (lambda *, a, b=2: a * b, (), {"b": 3, "a": X}),
    "numbers, flags, strings": (lambda x, a, b, c: x * a + 1 if b and c == "s" else x, (X, 1.5, True, "s"), {}),
    "a dtype": (lambda x, dtype: x.to(dtype), (X, torch.float16), {}),
    "nested arguments": (lambda batch: batch["x"][0] + batch["y"], ({"x": [X], "y": X},), {}),
    "nothing returned": (lambda x: None, (X,), {}),
    "an empty tuple returned": (lambda x: (), (X,), {}),
    "constants returned": (lambda x: {"a": None, "b": x + 1, "c": 3, "d": "s"}, (X,), {}),
    "a dataclass returned": (lambda x: Answer(x + 1), (X,), {}),
    "an input returned": (lambda x: [x, x[0], x], (X,), {}),
    "one tensor thrice": (lambda x: (y := x + 1, y, y[0]), (X,), {}),
    "no elements": (lambda x: torch.cat([x, x + 1]), (torch.ones(0, 4),), {}),
    "a transposed input": (lambda x: x * 2, (X.t(),), {}),
    "gaps": (lambda x: x.relu_(), (torch.randn(4, 8)[:, ::2],), {}),
    "an expanded input": (lambda x: x + 1, (torch.ones(1).expand(4),), {}),
    "an input written": (lambda x: x.mul_(2), (X.clone(),), {}),
    "a view of an input written": (lambda x: (x[0].zero_(), x.sum())[1], (X.clone(),), {}),
    "new tensors": (lambda x: torch.zeros(3, 4) + torch.arange(4) + torch.full_like(x, 2) + x, (X,), {}),
    "random numbers": (lambda x: torch.rand_like(x) + torch.randn(4) + torch.randint(3, (4,)), (X,), {}),
    "integers": (lambda x: (x // 2, x.bool(), x.float()), (torch.arange(6),), {}),
    "complex numbers": (lambda x: torch.fft.fft(x).conj(), (X,), {}),
    "a number taken out": (lambda x: x * x.sum().item(), (X,), {}),
    "sizes that depend on data": (lambda x: (x[x > 0], x.nonzero()), (X,), {}),
    "an inner autocast": (lambda x: within(torch.autocast(**BFLOAT16), lambda: x @ x.t()), (X,), {}),
    "a gradient taken inside": (lambda x: within(torch.enable_grad(), lambda: slope(x)), (X,), {}),
    "a vectorised function": (lambda x: torch.vmap(lambda row: row * 2 + row.sum())(x), (X,), {}),
}


def slope(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad((x**2).sum(), x)[0]


def within(context: AbstractContextManager[object], run: Callable[[], object]) -> object:
    with context:
        return run()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_come_out_the_same(name: str) -> None:
    function, args, kwargs = FUNCTIONS[name]
    assert_same_as_plain(function, *args, **kwargs)


def test_a_model_without_inputs_or_with_numbers_alone_can_be_traced() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, factor: int = 2) -> tuple[Tensor, Tensor]:
            return self.weight, self.weight[1:] * factor

    assert_same_as_plain(Alone())
    assert_same_as_plain(Alone(), 5)


def test_tensors_in_closures_and_lists_are_refused_for_they_could_be_replaced_unseen() -> None:
    held = [torch.ones(4)]
    assert "uses (add) a tensor that is not registered with it: make it a buffer" in refusal(lambda x: x + held[0], X)
    assert "uses (cat) a tensor" in refusal(lambda x: torch.cat([x, held[0][None]]), X)
    layer = nn.Linear(4, 4)
    assert "uses (linear) a tensor" in refusal(lambda x: layer(x), X)


def test_tensors_that_the_model_makes_are_constants() -> None:
    (constant,) = traced(lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), X).constants.values()
    assert constant.tolist() == [1, 2, 3, 4]


def test_casts_of_an_ambient_autocast_happen_when_the_program_runs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Softmax(-1))
    result = assert_same_as_plain(model, X, around=lambda: torch.autocast(**BFLOAT16))
    assert result.program.module.graph.find_nodes(op="call_function", target=torch.ops.aten.to.dtype) == []


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_any_grad_mode_traces_the_same(around: Callable[[], AbstractContextManager[object]]) -> None:
    model = one_of_many()
    with around():
        code = traced(model, torch.randn(2, 3, 8, 8)).program.module.code
    assert code == traced(model, torch.randn(2, 3, 8, 8)).program.module.code


def test_a_model_may_ask_for_the_grad_mode_where_that_of_its_call_is_the_one_that_it_is_traced_in() -> None:
    model = Function(lambda x: x + 1 if torch.is_grad_enabled() else x - 1)
    assert_same_as_plain(model, X, around=torch.no_grad)
    assert_same_as_plain(model, X, around=torch.inference_mode)
    with pytest.raises(FastPathError, match=r"asks \(is_grad_enabled\) what may change"):
        traced(model, X)


def test_a_model_may_set_the_grad_mode() -> None:
    @torch.no_grad()
    def doubled(x: Tensor) -> Tensor:
        with torch.set_grad_enabled(mode=False), torch.enable_grad():
            return x * 2

    assert_same_as_plain(doubled, X)


def test_dynamo_does_not_come_to_know_what_stands_in_for_pytorchs_functions_in_a_trace() -> None:
    """It looks them up when it first compiles something, which may be the branches of a torch.cond."""
    looked_up = TorchInGraphFunctionVariable._get_handlers
    looked_up.cache_clear()
    traced(lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)), X)
    functions = {torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.overrides.has_torch_function}
    assert functions <= set(looked_up())


def test_a_graph_that_asks_what_a_tensor_is_to_autograd_is_refused() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.mul, (x, graph.call_function(getattr, (x, "requires_grad")))))
    assert "asks (requires_grad)" in refusal(torch.fx.GraphModule({}, graph), X)


def test_inputs_made_in_inference_mode_alias_as_they_do() -> None:
    with torch.inference_mode():
        base = torch.randn(4, 4)
    kept = base.clone()
    result = traced(lambda a, b: (a.relu_(), a + b)[1], base[:2], base[1:3])
    assert storages(result) == {"0": "0", "1": "0"}
    assert torch.equal(base, kept)


def test_inputs_that_are_views_keep_their_sizes_and_those_of_their_base() -> None:
    """Export takes a view's base for a part of the view, whose sizes it need not know."""
    base = torch.randn(4, 4)
    result = traced(lambda a, b, c: (a + b.sum(), b.max(0), c + 1), base[1:], base, base[1:])
    assert storages(result) == {"0": "0", "1": "0", "2": "0"}
    values = tree_leaves([node.meta.get("val") for node in result.program.module.graph.nodes])
    assert {type(size) for value in values if isinstance(value, Tensor) for size in value.shape} == {int}


def test_inputs_that_require_grad_are_left_alone() -> None:
    leaf = torch.ones(3, 4, requires_grad=True)
    traced(lambda a, b: a * b, leaf, leaf * 2)
    assert leaf.grad is None
    assert leaf.requires_grad


# Refusals.


class Stateful(nn.Module):
    """Does something to itself in each call."""

    def __init__(self, act: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.act = act
        self.layer = nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4))
        self.plain = torch.zeros(4)
        self.count, self.past, self.table, self.mask = 0, [], {"k": [1]}, None

    def forward(self, x: Tensor) -> Tensor:
        self.act(self, x)
        return self.layer(x)


CHANGES: dict[str, Callable[[Any, Tensor], object]] = {
    "count": lambda model, x: setattr(model, "count", model.count + 1),
    "fresh": lambda model, x: setattr(model, "fresh", x),
    "mask": lambda model, x: setattr(model, "mask", torch.ones(4)),
    "past": lambda model, x: model.past.append(1),
    "table.k": lambda model, x: model.table["k"].append(2),
    "shift": lambda model, x: setattr(model, "shift", model.shift + 1),
    "plain": lambda model, x: setattr(model, "plain", model.plain + 1),
    "training": lambda model, x: model.eval(),
    "layer.note": lambda model, x: setattr(model.layer, "note", 1),
    "layer._forward_hooks": lambda model, x: model.layer.register_forward_hook(lambda *arguments: None),
    "layer": lambda model, x: setattr(model, "layer", nn.Linear(4, 4)),
}


@pytest.mark.parametrize("path", CHANGES)
def test_a_model_that_changes_its_own_attributes_is_refused_and_put_back(path: str) -> None:
    model = Stateful(CHANGES[path])
    assert f"changes its own attribute {path}" in refusal(model, X)
    assert (model.past, model.table) == ([], {"k": [1]})


@pytest.mark.parametrize(
    "write",
    [
        lambda model, x: model.plain.add_(1),
        lambda model, x: model.plain.__setitem__(0, 1.0),
        lambda model, x: torch.add(model.plain, 1, out=model.plain),
        lambda model, x: torch._foreach_add_([model.plain], 1),
        lambda model, x: torch.ops.aten.add_(model.plain, 1),
        lambda model, x: model.plain.__iadd__(1),
    ],
)
def test_a_write_to_a_tensor_that_is_no_buffer_is_refused_and_not_executed(write: Callable[..., object]) -> None:
    model = Stateful(write)
    assert "to a tensor that is no buffer: register it as one (at " in refusal(model, X)
    assert model.plain.tolist() == [0] * 4


def test_a_write_to_a_buffer_to_a_new_tensor_or_through_a_view_is_recorded() -> None:
    def act(model: Any, x: Tensor) -> None:
        model.shift.add_(torch.zeros(4).add_(1)).mul_(torch.tensor([1.0, 2.0, 3.0, 4.0]).sub_(1))
        model.plain[2:].add_(1)

    model = Stateful(act)
    result = traced(model, X)
    assert model.plain.tolist() == model.shift.tolist() == [0] * 4
    state = LiveState(model, result.program.placeholders, result.constants).tensors()
    result.program.module(*state, X)
    assert model.shift.tolist() == [0, 1, 2, 3]
    assert model.plain.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.unsqueeze_(0),
        lambda x: x.t_(),
        lambda x: x.resize_(2),
        lambda x: x.set_(torch.ones(3)),
    ],
)
def test_an_input_that_gets_another_shape_or_memory_is_refused(change: Callable[[Tensor], object]) -> None:
    x = X.clone()
    assert "shape or the memory" in refusal(lambda x: (change(x), x.sum())[1], x)
    assert torch.equal(x, X)


def test_a_weight_that_gets_another_memory_is_refused() -> None:
    def act(model: Any, x: Tensor) -> None:
        model.layer.weight.data = model.layer.weight.detach() * 2

    assert "gives a tensor other memory" in refusal(Stateful(act), X)


@pytest.mark.parametrize("of", [lambda x: x, lambda x: x + 1])
def test_an_input_or_a_result_that_gets_the_memory_of_another_is_refused(of: Callable[[Tensor], Tensor]) -> None:
    """No op of ATen says so: a trace would go on with what it had before."""
    x = X.clone()
    assert "gives a tensor other memory" in refusal(lambda x: (setattr(y := of(x), "data", x * 2), y + 1)[1], x)
    assert torch.equal(x, X)


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch["list"].append(1),
        lambda batch: batch.pop("x"),
        lambda batch: batch.update(x=batch["x"] + 1),
    ],
)
def test_a_model_that_changes_what_it_is_given_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    assert "container" in refusal(lambda batch: (change(batch), X + 1)[1], {"x": X, "list": []})


def branches(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


def test_control_flow_that_depends_on_data_is_refused_with_the_users_line(capfd: pytest.CaptureFixture[str]) -> None:
    reason = refusal(branches, X)
    line = branches.__code__.co_firstlineno + 1
    assert reason.startswith("torch.export cannot trace Function: ")
    assert reason.endswith(f"{Path(__file__).name}:{line}: if x.sum() > 0:)")
    assert capfd.readouterr().err == "", "what PyTorch says at length is ours to sum up"


def test_an_error_of_the_model_itself_is_a_refusal_with_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert "test_export.py" in refusal(lambda x: x @ x, X)
    assert "my words" in refusal(lambda x: [][0] if x is None else exec("raise ValueError('my words\\nmore')"), X)
    assert capfd.readouterr().err == ""


def test_what_no_graph_can_return_is_refused() -> None:
    assert "builtins.object is neither" in refusal(lambda x: object(), X)
    assert "the number of a tensor goes to Python" in refusal(lambda x: x.sum().item(), X)


def test_a_function_transform_that_export_forgets_to_follow_is_refused() -> None:
    reason = refusal(lambda x: torch.func.grad(lambda y: (y**2).sum())(x), X)
    assert "function transform" in reason or "torch.export cannot trace" in reason, "2.11 notices it by itself"


def test_a_random_generator_of_the_models_own_is_refused() -> None:
    reason = refusal(lambda x: torch.rand(3, generator=torch.Generator()), X)
    assert "from a generator of the model's own" in reason or "torch._C.Generator" in reason, (
        "2.11 notices it by itself"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused() -> None:
    with pytest.raises(TraceError, match="TorchScript"):
        traced(nn.Sequential(torch.jit.script(nn.Linear(4, 4))), X)


def test_state_that_is_not_ordinary_is_refused_by_name() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.eye(4).to_sparse())
    with pytest.raises(TraceError, match=r"the model's table has the layout torch.sparse_coo"):
        traced(model, X)
    with pytest.raises(TraceError, match=r"weight is a UninitializedParameter|weight is an UninitializedParameter"):
        traced(nn.LazyLinear(3), X)


def test_recurrent_layers_in_modules_of_the_users_are_no_change() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.LSTM(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            output, _ = self.read(x)
            return F.relu(output)

    assert_same_as_plain(Reader(), X[None])


# While others use PyTorch.


def test_other_threads_run_their_models_while_one_is_traced() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))).eval()
    with torch.no_grad():
        expected = model(X)
    wrong: list[object] = []
    done = threading.Event()

    def use() -> None:
        while not done.is_set():
            with torch.no_grad():
                result = model(X)
            if type(result) is not Tensor or not torch.equal(result, expected):
                wrong.append(result)

    user = threading.Thread(target=use)
    user.start()
    try:
        for _ in range(3):
            traced(one_of_many(), torch.randn(2, 3, 8, 8))
    finally:
        done.set()
        user.join()
    assert wrong == []


def test_nothing_is_left_over_after_a_refusal() -> None:
    refusal(branches, X)
    assert not torch.compiler.is_compiling()
    assert not torch.compiler.is_exporting()
    assert_same_as_plain(one_of_many(), torch.randn(2, 3, 8, 8))


def referenced(*tensors: Tensor) -> list[bool]:
    """Whether each is weakly referenced, which ``torch.utils.swap_tensors`` does not allow."""
    return [bool(weakref.getweakrefs(tensor)) for tensor in tensors]


def test_neither_state_nor_inputs_are_referenced_by_what_was_traced() -> None:
    model, x = Net(), X.clone()
    result = traced(model, x)
    assert not any(referenced(x, *model.parameters(), *model.buffers(), model.plain, *result.constants.values()))


def test_neither_state_nor_inputs_are_referenced_after_a_refusal() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Function(branches)), X.clone()
    with pytest.raises(TraceError) as kept:  # with all that led to it
        traced(model, x)
    assert kept.value.__cause__ is not None
    assert not any(referenced(x, *model.parameters()))


def test_pieces_of_dynamo_do_not_reference_the_model_they_are_of() -> None:
    model, x, pieces = nn.Linear(4, 4), X.clone(), []

    def backend(module: torch.fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., object]:
        pieces.append(module)
        return module.forward

    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=False)(x)
    assert all(referenced(x, *model.parameters()))  # what it is about
    placeholders = [node.target for node in pieces[0].graph.find_nodes(op="placeholder")]
    traced(pieces[0], *(torch.zeros(4, 4), torch.zeros(4), x)[: len(placeholders)])
    assert not any(referenced(x, *model.parameters()))


# Real models.


@pytest.fixture(scope="module")
def transformers() -> Any:
    from autostream import zoo

    module = pytest.importorskip("transformers", exc_type=ImportError)
    zoo.build("squeezenet1_1")  # makes torchvision importable beside a CPU torch, which transformers then imports
    return module


TOKENS = torch.tensor([[1, 5, 9, 2], [3, 3, 0, 0]])


def test_bert_comes_out_the_same(transformers: Any) -> None:
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    result = assert_same_as_plain(
        transformers.BertModel(config).eval(), input_ids=TOKENS, attention_mask=(TOKENS > 0).long()
    )
    assert result.structure.kind.__name__ == "BaseModelOutputWithPoolingAndCrossAttentions"


def test_t5_comes_out_the_same_without_a_cache_and_is_refused_with_one(transformers: Any) -> None:
    config = transformers.T5Config(
        vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    tokens = {"input_ids": TOKENS, "decoder_input_ids": TOKENS}
    assert_same_as_plain(model, **tokens, use_cache=False)
    assert "Cache is neither a tensor" in refusal(model, **tokens)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_googlenet_comes_out_the_same(mode: str) -> None:
    from autostream import zoo

    model, (image,) = zoo.build("googlenet")
    result = assert_same_as_plain(model.train(mode == "train"), image[..., :64, :64].expand(2, 3, 64, 64).contiguous())
    written = {"aten.batch_norm.default", "aten.add_.Tensor"}
    ops = {str(node.target) for node in result.program.module.graph.nodes if node.op == "call_function"}
    assert (written <= ops) is (mode == "train")


def test_a_seed_set_inside_is_refused() -> None:
    def model(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return torch.dropout(x, 0.5, True)

    assert "sets a seed" in refusal(model, X)


def test_padding_that_eager_encoders_pack_is_refused() -> None:
    """Eager yields zeros at the padding, and no tracer follows it there."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x, mask = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    for kwargs in ({}, {"src_key_padding_mask": None}):
        tensors, structure = flatten(((x,), kwargs))
        trace(encoder, tensors, structure)
    tensors, structure = flatten(((x,), {"src_key_padding_mask": mask}))
    with pytest.raises(FastPathError, match="packs padded input"):
        trace(encoder, tensors, structure)
    assert not encoder._forward_pre_hooks
    trace(encoder.train(), tensors, structure)


def test_a_program_knows_all_of_its_devices() -> None:
    """A number on the host is none; and of several, one is scheduled at a time."""

    def over(*devices: str) -> Program:
        graph = fx.Graph()
        nodes = [graph.placeholder(f"x_{at}") for at in range(len(devices))]
        graph.output(tuple(nodes))
        with FakeTensorMode():
            for node, device in zip(nodes, devices, strict=True):
                node.meta["val"] = torch.empty(2, device=device)
        return program_of(fx.GraphModule(nn.Module(), graph), ())

    assert over("cuda:1", "cpu", "cuda:0").devices == ("cuda:0", "cuda:1")
    assert (over("cuda:1", "cpu").device, over("cuda:1", "cpu").peers) == ("cuda:1", ())
    assert over("cpu").devices == over().devices == ("cpu",)
    check_one_device(over("cuda:1", "cpu"))
    with pytest.raises(TraceError, match=r"several devices \(cuda:0, cuda:1\); one is scheduled at a time"):
        check_one_device(over("cuda:1", "cuda:0"))


def test_a_model_that_cannot_be_exported_is_not_kept_by_what_was_made_for_it() -> None:
    """PyTorch 2.11 keeps that for good, and each time such a model is optimized, its weights would stay."""

    class Breaking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x

    def optimized_and_dropped() -> weakref.ref[Tensor]:
        model = nn.Sequential(nn.Linear(2, 2), Breaking())
        with pytest.raises(TraceError):
            trace(model, *flatten(((torch.ones(2, 2),), {})))
        assert len(list(model.parameters())) == 2
        return weakref.ref(model[0].weight)

    dropped = [optimized_and_dropped() for _ in range(2)]
    gc.collect()
    assert [weight() for weight in dropped] == [None, None]
