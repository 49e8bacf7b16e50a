"""Live models: what replaces a tensor or a module is noticed without a walk."""

from __future__ import annotations

import copy
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream import optimize
from autostream.tracing.export import trace
from autostream.tracing.functions import module_of
from autostream.tracing.state import LiveState, ModelWatch
from autostream.frontend.tree import flatten


class Net(nn.Module):
    """Two tied layers, a norm, a buffer and a plain tensor."""

    inherited: float | None = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        self.other.weight = self.one.weight
        self.register_buffer("shift", torch.ones(2))
        self.plain = torch.ones(2)
        self.empty = None
        self.factor, self.mode, self.options = 2.0, "sum", [1]

    def forward(self, x: Tensor) -> Tensor:
        y = self.other(self.one(self.body(x))) + self.shift + self.plain + torch.tensor([1.0, 2.0])
        return y * self.factor


@pytest.fixture
def net() -> Net:
    return Net().eval()


class Live:
    """The state of a traced model, by name."""

    def __init__(self, net: nn.Module) -> None:
        tensors, structure = flatten(((torch.ones(3, 2),), {}))
        traced = trace(net, tensors, structure)
        self.names = [placeholder.target for placeholder in traced.program.placeholders[:-1]]
        self.state = LiveState(net, traced.program.placeholders, traced.constants)

    def __getitem__(self, name: str) -> Tensor | None:
        return self.state.tensors()[self.names.index(name)]

    @property
    def tied(self) -> bool:
        return self.state.tied(self.state.tensors())


def test_tensors_stand_in_the_order_of_the_placeholders(net: Net) -> None:
    """The tied weight has one placeholder, under one of its names; the literal of ``forward`` stands nowhere else."""
    live = Live(net)
    named = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers()), "plain": net.plain}
    held = {name: tensor for name, tensor in zip(live.names, live.state.tensors(), strict=True) if name in named}
    assert all(tensor is named[name] for name, tensor in held.items())
    assert {"one.weight", "other.weight"} - held.keys() in ({"one.weight"}, {"other.weight"})
    (literal,) = set(live.names) - held.keys()
    assert torch.equal(live[literal], torch.tensor([1.0, 2.0]))  # type: ignore[arg-type]
    assert "body.1.num_batches_tracked" not in live.names, "nobody reads it"
    assert live.tied


def test_a_replaced_parameter_is_what_the_next_call_gets(net: Net) -> None:
    live = Live(net)
    net.body[0].bias = nn.Parameter(torch.zeros(2))
    assert live["body.0.bias"] is net.body[0].bias
    net.body[0].bias.data = torch.full((2,), 3.0)
    assert live["body.0.bias"].tolist() == [3, 3]  # type: ignore[union-attr]


@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_state_is_what_the_next_call_gets(net: Net, assign: bool) -> None:
    live = Live(net)
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()}, assign=assign)
    assert live["body.0.weight"] is net.body[0].weight
    assert live["shift"] is net.shift
    assert net.shift.tolist() == [2, 2]
    assert live.tied is not assign, "two loaded tensors are not one"


def test_converted_buffers_and_replaced_attributes_are_what_the_next_call_gets(net: Net) -> None:
    live = Live(net)
    net.half()
    assert live["shift"].dtype == live["body.1.running_mean"].dtype == torch.float16  # type: ignore[union-attr]
    net.plain = torch.zeros(2)
    assert live["plain"] is net.plain


@pytest.mark.parametrize(
    ("name", "remove"),
    [
        ("shift", lambda net: delattr(net, "shift")),
        ("shift", lambda net: setattr(net, "shift", None)),
        ("body.0.bias", lambda net: net.body[0].register_parameter("bias", None)),
        ("plain", lambda net: delattr(net, "plain")),
        ("plain", lambda net: setattr(net, "plain", 3.0)),
        ("plain", lambda net: setattr(net, "plain", nn.Parameter(torch.ones(2)))),
    ],
)
def test_what_was_removed_or_moved_is_none(net: Net, name: str, remove: Callable[[Net], Any]) -> None:
    live = Live(net)
    assert live[name] is not None
    remove(net)
    assert live[name] is None


@pytest.mark.parametrize("layer", ["one", "other"])
def test_a_tie_that_is_cut_at_either_end_is_noticed(net: Net, layer: str) -> None:
    live = Live(net)
    getattr(net, layer).weight = nn.Parameter(torch.zeros(2, 2))
    assert not live.tied


def test_what_it_holds_are_these_very_tensors_tied_as_they_were(net: Net) -> None:
    state = Live(net).state
    held = [tensor for tensor in state.tensors() if tensor is not None]
    assert state.holds(held)
    assert not state.holds([held[0].detach(), *held[1:]])
    assert not state.holds([*held[1:], held[0]])


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net.body[0], "bias", nn.Parameter(net.body[0].bias.detach())),
        lambda net: setattr(net.one, "weight", nn.Parameter(net.one.weight.detach())),
        lambda net: setattr(net.other, "weight", nn.Parameter(net.one.weight.detach())),
        lambda net: delattr(net, "shift"),
        lambda net: setattr(net, "factor", 3.0),
        lambda net: setattr(net, "forward", lambda x: x),
        lambda net: setattr(net, "factor", float("2")),
    ],
    ids=["weight", "tied", "other tied", "removed", "setting", "forward", "equal"],
)
def test_one_look_at_all_entries_sees_what_is_not_the_very_same(net: Net, change: Callable[[Net], Any]) -> None:
    state = Live(net).state
    held = [tensor for tensor in state.tensors() if tensor is not None]
    entries = state.entries(held)
    assert entries.unchanged()
    assert state.contents_intact()
    net.options.append(2)
    assert entries.unchanged()
    assert not state.contents_intact()
    change(net)
    assert not entries.unchanged()


def test_a_tie_within_one_module_is_watched_too() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = self.right = nn.Parameter(torch.ones(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.left @ self.right

    square = Square()
    live = Live(square)
    assert live.tied
    square.right = nn.Parameter(torch.ones(2, 2))
    assert not live.tied


def test_a_tie_to_a_new_tensor_is_still_a_tie(net: Net) -> None:
    live = Live(net)
    net.one.weight = net.other.weight = nn.Parameter(torch.zeros(2, 2))
    assert live.tied
    (name,) = {"one.weight", "other.weight"} & set(live.names)
    assert live[name] is net.one.weight


@pytest.mark.parametrize(
    ("change", "configured"),
    [
        (lambda net: setattr(net, "factor", 3.0), False),
        (lambda net: setattr(net, "factor", 2), False),
        (lambda net: setattr(net, "factor", torch.ones(2)), False),
        (lambda net: setattr(net, "mode", "mean"), False),
        (lambda net: setattr(net, "empty", 1), False),
        (lambda net: delattr(net, "mode"), False),
        (lambda net: setattr(net, "factor", float("2")), True),
        (lambda net: setattr(net, "unrelated", 1), True),
        (lambda net: net.train(), True),
        (lambda net: setattr(net.body[1], "eps", 1.0), False),
    ],
)
def test_a_changed_setting_is_noticed(net: Net, change: Callable[[Net], Any], configured: bool) -> None:
    live = Live(net)
    assert live.state.configured()
    change(net)
    assert live.state.configured() is configured


class Asking(nn.Module):
    """Goes by what tensors are like, without reading them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.ones(3, 3))
        self.register_buffer("mask", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype) + torch.arange(self.table.shape[0]).sum()
        return x + 1 if self.mask is not None else x


ASKED: dict[str, Callable[[Asking], object]] = {
    "dtype": lambda model: model.double(),
    "shape": lambda model: setattr(model.table, "data", torch.ones(5, 3)),
    "another": lambda model: setattr(model, "table", torch.ones(5, 3)),
    "none": lambda model: setattr(model, "mask", None),
}


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "factor", 3.0),
        lambda net: setattr(net, "empty", torch.ones(1)),
        lambda net: delattr(net, "mode"),
        lambda net: setattr(net.body[1], "eps", 1.0),
        lambda net: setattr(net.body[1], "forward", lambda x: x),
        lambda net: setattr(net.body[0], "bias", None),
        lambda net: setattr(net, "inherited", None),
        lambda net: delattr(net, "empty"),
        lambda net: net.options.append([2]),
        lambda net: net.sizes.update(new=1),
        lambda net: net.sizes["deep"].clear(),
        lambda net: net.sizes.__setitem__("deep", 2),
    ],
)
def test_settings_are_for_a_while_as_they_were_traced(net: Net, change: Callable[[Net], Any]) -> None:
    net.body[0].bias = None
    net.sizes = {"deep": {1, 2}, "other": [3]}
    live, x = Live(net), torch.ones(3, 2)
    expected, then = net(x), copy.deepcopy((net.options, net.sizes))
    change(net)
    now = [dict(vars(module)) for module in net.modules()]
    held = copy.deepcopy((net.options, net.sizes))
    with live.state.as_traced():
        torch.testing.assert_close(net(x), expected, rtol=0, atol=0)
        assert live.state.configured()
        assert (net.options, net.sizes) == then
    assert [dict(vars(module)) for module in net.modules()] == now
    assert (net.options, net.sizes) == held


def test_settings_are_put_back_where_the_call_fails(net: Net) -> None:
    live = Live(net)
    net.factor = 3.0
    with pytest.raises(ZeroDivisionError), live.state.as_traced():
        raise ZeroDivisionError
    assert net.factor == 3.0


@pytest.mark.parametrize("change", ASKED.values(), ids=ASKED)
@torch.no_grad()
def test_what_a_tensor_is_like_that_nobody_reads_is_watched(change: Callable[[Asking], object]) -> None:
    model, x = Asking(), torch.ones(2)
    fast = optimize(model)
    fast(x), fast(x)
    change(model)
    for _ in range(2):
        torch.testing.assert_close(fast(x), model(x))


def test_values_of_tensors_that_nobody_reads_make_no_difference() -> None:
    model = Asking()
    state = Live(model).state
    model.table, model.weight.data = torch.zeros(3, 3), torch.zeros(2)
    assert state.configured()


# The watch.


class Deep(nn.Module):
    """Modules at several depths, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Net(), Net()])
        self.again = self.blocks[0]
        self.register_module("vacant", None)


@pytest.fixture
def deep() -> Deep:
    return Deep()


@pytest.mark.parametrize(
    "change",
    [
        lambda deep: deep.blocks[1].body.__setitem__(0, nn.Linear(2, 2)),
        lambda deep: deep.blocks[1].body.__delitem__(1),
        lambda deep: deep.blocks.append(nn.ReLU()),
        lambda deep: deep.blocks[0].body.add_module("new", nn.ReLU()),
        lambda deep: deep.blocks[0].one.add_module("new", nn.ReLU()),
        lambda deep: deep.blocks[1]._modules.update(one=nn.Linear(2, 2)),
        lambda deep: deep.blocks[1]._modules.update(renamed=deep.blocks[1]._modules.pop("one")),
        lambda deep: setattr(deep, "vacant", nn.ReLU()),
        lambda deep: setattr(deep, "again", None),
        lambda deep: setattr(deep, "again", deep.blocks[1]),
        lambda deep: delattr(deep, "again"),
    ],
)
def test_another_module_anywhere_is_noticed(deep: Deep, change: Callable[[Deep], Any]) -> None:
    watch = ModelWatch(deep)
    assert watch.intact()
    change(deep)
    assert not watch.intact()


def test_another_module_that_a_function_refers_to_is_noticed() -> None:
    layer = nn.Linear(2, 2)
    model = nn.Sequential(module_of(lambda x: layer(x)))
    watch = ModelWatch(model)
    layer = nn.Linear(2, 2)
    assert not watch.intact()
    watch = ModelWatch(model)
    assert layer in watch.modules
    assert watch.intact()


def test_what_changes_no_module_leaves_the_watch_intact(deep: Deep) -> None:
    watch = ModelWatch(deep)
    deep.half()
    deep.eval()
    deep.blocks[0].shift = torch.zeros(2)
    assert watch.intact()


def test_the_mode_of_each_module_counts(deep: Deep) -> None:
    watch = ModelWatch(deep)
    modes = {watch.training()}
    deep.blocks[1].body[1].eval()
    modes.add(watch.training())
    deep.eval()
    modes.add(watch.training())
    assert len(modes) == 3
    assert watch.training() == bytes(len(list(deep.modules())))


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_count_while_they_are_there(deep: Deep, register: str) -> None:
    watch = ModelWatch(deep)
    assert not watch.hooked()
    handle = getattr(deep.blocks[1].body[0], register)(lambda *arguments: None)
    assert watch.hooked()
    handle.remove()
    assert not watch.hooked()


@pytest.mark.parametrize("register", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_hooks_of_all_modules_count_too(deep: Deep, register: str) -> None:
    watch = ModelWatch(deep)
    handle = getattr(nn.modules.module, register)(lambda *arguments: None)
    try:
        assert watch.hooked()
    finally:
        handle.remove()
    assert not watch.hooked()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_can_be_watched() -> None:
    watch = ModelWatch(nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(1, 1))), nn.ReLU()))
    assert watch.intact()
    assert watch.training() == b"\1" * 4
    assert not watch.hooked()


class _Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.pair, self.factors, self.names = (1, 2), [2.0], {"a": 1}
        self.function = torch.relu
        self.deep: Any = ([0.0, True], {"b": [1], "a": 2}, _Kind.ONE, {3})
        self.kinds = [_Kind.ONE]


class _Kind(Enum):
    ONE, TWO = 1, 2


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.norm, "momentum", 0.9),
        lambda model: setattr(model.norm, "eps", 1.0),
        lambda model: setattr(model.dropout, "p", 0.0),
        lambda model: setattr(model, "pair", (1, 5)),
        lambda model: model.factors.append(3.0),
        lambda model: model.names.update(a=2),
        lambda model: setattr(model, "function", torch.tanh),
        lambda model: setattr(model, "forward", lambda x: x),
        lambda model: setattr(model, "pair", (1, 2.0)),
        lambda model: setattr(model, "deep", ([0.0, True], {"a": 2, "b": [1]}, _Kind.ONE, {3})),
        lambda model: model.factors.__setitem__(0, 2),
        lambda model: model.deep[0].__setitem__(0, -0.0),
        lambda model: model.deep[0].__setitem__(1, 1),
        lambda model: model.deep[1].update(b=model.deep[1].pop("b")),
        lambda model: model.deep[1]["b"].clear(),
        lambda model: model.deep[3].add(4),
        lambda model: model.kinds.__setitem__(0, _Kind.TWO),
    ],
)
def test_whatever_a_graph_takes_for_granted_is_watched(change: Callable[[nn.Module], object]) -> None:
    model = _Configured()
    state = LiveState(model, (), {})
    assert state.configured()
    model.norm.eps, model.pair = float("1e-5"), (1, 2)
    model.factors[0], model.deep[1]["b"] = float("2"), [1]
    assert state.configured(), "set again to what it was"
    change(model)
    assert not state.configured()


LOSSES = [
    (nn.CrossEntropyLoss(), "label_smoothing", 0.1),
    (nn.CrossEntropyLoss(), "ignore_index", 1),
    (nn.MSELoss(), "reduction", "sum"),
    (nn.SmoothL1Loss(), "beta", 0.1),
    (nn.HuberLoss(), "delta", 0.1),
    (nn.TripletMarginLoss(), "margin", 0.1),
    (nn.TripletMarginLoss(), "swap", True),
    (nn.PoissonNLLLoss(), "log_input", False),
    (nn.CosineSimilarity(), "dim", 0),
]
LAYERS = [
    (nn.ELU(), "alpha", 0.5),
    (nn.Softplus(), "beta", 2.0),
    (nn.Threshold(0.1, 1.0), "value", 2.0),
    (nn.Hardtanh(), "max_val", 2.0),
    (nn.Softshrink(), "lambd", 0.1),
    (nn.RReLU(), "upper", 0.5),
    (nn.MultiheadAttention(2, 1), "dropout", 0.5),
]


@pytest.mark.parametrize(("module", "name", "value"), [*LOSSES, *LAYERS])
def test_settings_of_pytorchs_losses_and_numbers_of_its_layers_are_watched(
    module: nn.Module, name: str, value: object
) -> None:
    state = LiveState(nn.Sequential(nn.Linear(2, 2), module), (), {})
    assert state.configured()
    assert hasattr(module, name)
    setattr(module, name, value)
    assert not state.configured()


def test_of_layers_that_a_model_has_by_the_thousand_little_is_looked_at() -> None:
    """What stands in the place of ``forward``, and numbers that schedules change."""
    for layer, names in (
        (nn.Linear(2, 2), ["forward"]),
        (nn.Conv2d(2, 2, 1), ["forward"]),
        (nn.ReLU(), ["forward"]),
        (nn.Dropout(), ["forward", "p"]),
        (nn.LayerNorm(2), ["forward", "eps"]),
    ):
        assert LiveState(layer, (), {})._setting_names == names


@pytest.mark.parametrize("module", [nn.Sequential(), nn.Linear(2, 2), nn.LSTM(2, 2), nn.MultiheadAttention(2, 1)])
def test_what_a_user_has_put_on_a_layer_is_watched(module: Any) -> None:
    """As a scale that the loss multiplies by."""
    module.scale, module.notes = 1.0, object()
    state = LiveState(nn.Sequential(nn.Linear(2, 2), module), (), {})
    module.notes = object()
    assert state.configured()
    module.scale = 2.0
    assert not state.configured()


def test_parameters_that_require_gradients_are_told_without_a_walk() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1))
    watch = ModelWatch(model)
    model[1].bias.requires_grad_(False)
    assert watch.required() == bytes([True, False, True, False])  # a bias that is missing requires none
    model[0].weight = nn.Parameter(torch.ones(1, 1), requires_grad=False)
    assert watch.required() == bytes([False, False, True, False])
