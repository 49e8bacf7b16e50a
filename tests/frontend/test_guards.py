"""Guards: a change of the model, its globals or its inputs between two calls takes effect in the next call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.dispatch.captured_call import CapturedCall
from autostream.errors import OptionError
from autostream.frontend.capture import capture
from tests.captures import Captures

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

NEW = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)

FACTOR = 2.0
TABLE = {"factor": 1.0}


class Sign(Enum):
    PLUS, MINUS = 1, -1


def with_default(x: Tensor, by: float = 1.0, *, plus: float = 0.0) -> Tensor:
    return x * by + plus


def closed(factor: float) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    """A function that closes over a number, and one that sets that."""

    def scaled(x: Tensor) -> Tensor:
        return x * factor

    def put(value: float) -> None:
        nonlocal factor
        factor = value

    return scaled, put


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale, self.weights = 1.0, [nn.Parameter(torch.full((4,), 1.5))]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * self.scale * self.weights[0]


class Net(nn.Module):
    """Reads all kinds of state: submodules in containers and in plain lists, attributes, globals, functions."""

    sign = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(layer, nn.ReLU()) for layer in (nn.Linear(4, 4), Block()))
        self.named = nn.ModuleDict({"head": nn.Linear(4, 4)})
        self.hidden: Any = [nn.Linear(4, 4), {"inner": Block().eval()}]
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("mask", None)
        self.tensor = torch.ones(4)
        self.scale, self.offsets, self.table, self.pair = 2.0, [1.0], {"a": {"b": 1.0}}, (1.0, 2.0)
        self.settings, self.plus = SimpleNamespace(factor=1.0), Sign.PLUS
        self.function = with_default
        self.closed, self.put = closed(1.0)
        self.partial = partial(with_default, by=1.0)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.named["head"](x) + self.hidden[0](x) + self.hidden[1]["inner"](x)
        x = x * self.sign * self.scale * FACTOR * TABLE["factor"] * self.settings.factor * self.plus.value
        x = x * self.table["a"]["b"] + self.offsets[0] + self.pair[1]
        x = self.closed(self.partial(self.function(x))) * self.tensor + self.shift
        return x if self.mask is None else x * self.mask


def model() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def deep(net: Net) -> Block:
    return net.blocks[1][0]


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def reorder(layers: nn.Sequential) -> None:
    first = layers[0]
    del layers[0]
    layers.add_module("last", first)


Change = Callable[[Net, pytest.MonkeyPatch], object]

TENSORS: dict[str, Change] = {
    "a weight": lambda net, _: setattr(deep(net).linear, "weight", nn.Parameter(torch.randn(4, 4))),
    "a bias that is gone": lambda net, _: setattr(deep(net).linear, "bias", None),
    "a weight's values": lambda net, _: deep(net).linear.weight.mul_(2),
    "a weight's data": lambda net, _: setattr(deep(net).linear.weight, "data", torch.randn(4, 4)),
    "a weight's strides": lambda net, _: setattr(deep(net).linear.weight, "data", deep(net).linear.weight.data.t()),
    "set_": lambda net, _: deep(net).linear.weight.data.set_(torch.randn(4, 4)),
    "a weight in a list": lambda net, _: deep(net).weights.__setitem__(0, nn.Parameter(torch.randn(4))),
    "a tied weight": lambda net, _: setattr(deep(net).linear, "weight", net.named["head"].weight),
    "a buffer": lambda net, _: setattr(deep(net).norm, "running_mean", torch.randn(4)),
    "a buffer's data": lambda net, _: setattr(deep(net).norm.running_var, "data", torch.rand(4)),
    "a buffer that was None": lambda net, _: setattr(net, "mask", torch.randn(4)),
    "a plain tensor": lambda net, _: setattr(net, "tensor", torch.randn(4)),
    "data of a hidden module": lambda net, _: setattr(net.hidden[1]["inner"].linear.weight, "data", torch.randn(4, 4)),
    "load_state_dict(assign=True)": lambda net, _: net.load_state_dict(Net().state_dict(), assign=True),
    "a cast and back": lambda net, _: net.double().float(),
    "requires_grad": lambda net, _: net.requires_grad_(False),
}

CHANGES: dict[str, Change] = {
    **TENSORS,
    "a submodule": lambda net, _: setattr(deep(net), "linear", nn.Linear(4, 4)),
    "an item of a container": lambda net, _: net.blocks.__setitem__(0, nn.Tanh()),
    "one more": lambda net, _: net.blocks.append(nn.Tanh()),
    "an order": lambda net, _: reorder(net.blocks[0]),
    "an entry of a dictionary of modules": lambda net, _: net.named.update({"head": nn.Tanh()}),
    "a hidden module": lambda net, _: net.hidden.__setitem__(0, nn.Tanh()),
    "a mode": lambda net, _: deep(net).norm.train(),
    "a hook": lambda net, _: deep(net).linear.register_forward_hook(lambda module, args, output: output + 1),
    "a pre-hook": lambda net, _: deep(net).linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    "a hook of a hidden module": lambda net, _: net.hidden[0].register_forward_hook(lambda m, a, output: output + 1),
    "a forward of a submodule": lambda net, _: setattr(deep(net).linear, "forward", lambda x: x + 1),
    "a class": lambda net, _: setattr(deep(net).linear, "__class__", Doubled),
    "an attribute": lambda net, _: setattr(net, "scale", 3.0),
    "a forward of the model": lambda net, _: setattr(net, "forward", lambda x: x + 1),
    "an attribute's type": lambda net, _: setattr(net, "scale", 2),
    "a deep attribute": lambda net, _: setattr(deep(net), "scale", 3.0),
    "an attribute of a hidden module": lambda net, _: setattr(net.hidden[1]["inner"], "scale", 3.0),
    "a list item": lambda net, _: net.offsets.__setitem__(0, 5.0),
    "an item of a nested dictionary": lambda net, _: net.table["a"].update(b=3.0),
    "a tuple": lambda net, _: setattr(net, "pair", (1.0, 5.0)),
    "an object's attribute": lambda net, _: setattr(net.settings, "factor", 3.0),
    "an enumeration": lambda net, _: setattr(net, "plus", Sign.MINUS),
    "a function": lambda net, _: setattr(net, "function", torch.sin),
    "a closure": lambda net, _: net.put(3.0),
    "a partial": lambda net, _: setattr(net, "partial", partial(with_default, by=3.0)),
    "a global": lambda net, patch: patch.setitem(globals(), "FACTOR", 3.0),
    "an item of a global": lambda net, patch: patch.setitem(TABLE, "factor", 3.0),
    "a class's attribute": lambda net, patch: patch.setattr(Net, "sign", -1.0),
    "the class's forward": lambda net, patch: patch.setattr(Net, "forward", lambda self, x: x + 1),
    "a default by keyword": lambda net, patch: patch.setattr(with_default, "__kwdefaults__", {"plus": 3.0}),
    # Torch 2.11 does not guard these.
    **(
        {"a default by position": lambda net, patch: patch.setattr(with_default, "__defaults__", (3.0,))} if NEW else {}
    ),
    "a function's code": lambda net, patch: patch.setattr(
        with_default, "__code__", (lambda x, by=1, *, plus=0: x + 1).__code__
    ),
}
"""In groups of three, of which one does not hide the next."""


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def check(fast: nn.Module, net: nn.Module, x: Tensor = X) -> None:
    before = {name: value.clone() for name, value in net.state_dict().items()}
    expected = net(x)
    net.load_state_dict(before)
    torch.testing.assert_close(fast(x), expected)


FEW = ("a weight", "a weight's data", "a buffer's data", "a mode", "a list item", "a closure")
"""Changes of each kind."""

ADDRESSES = (
    *("a weight", "a weight's data", "a weight's strides", "set_", "a buffer's data", "a plain tensor"),
    *("a cast and back", "data of a hidden module", "load_state_dict(assign=True)"),
)
"""Changes after which a tensor lies elsewhere."""


def threes(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Groups of three: with the state before them, as many as are captured at first."""
    listed = tuple(names)
    return [listed[at : at + 3] for at in range(0, len(listed), 3)]


@pytest.mark.parametrize(
    ("names", "path"),
    [
        *((names, "replay") for names in threes(CHANGES)),
        *((names, "slow path") for names in threes(FEW)),
        *((names, "gradients") for names in threes(FEW)),
        *((names, "captured") for names in threes(ADDRESSES)),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_a_change_takes_effect_in_the_next_call(
    names: Sequence[str], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "slow path":
        monkeypatch.setattr(CapturedCall, "replay", lambda *_, **__: None)
    if path == "captured":  # emulates a CUDA graph, which reads the addresses that weights had
        Captures(monkeypatch)
    net = model()
    fast = autostream.optimize(net, policy="sequential")
    with torch.set_grad_enabled(path == "gradients"):
        for name in names:
            for _ in range(3):
                fast(X)
            with torch.no_grad():
                CHANGES[name](net, monkeypatch)
            for x in (X, X + 1):
                check(fast, net, x)
    assert "plain" not in {report.mode for report in fast.reports}


class Bound(nn.Module):
    """Reads containers through bound methods, which Dynamo takes to be as immutable as functions."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.listed, self.named = [1.0, 2.0], {"a": 2.0}
        self.count, self.get = self.listed.count, self.named.get
        self.linear, self.breaks = nn.Linear(4, 4), breaks

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return y * float(self.count(1.0)) + float(self.get("a", 0.0))


@torch.no_grad()
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "split"])
def test_containers_that_bound_methods_read_are_guarded(breaks: bool) -> None:
    net = Bound(breaks)
    fast = autostream.optimize(net)
    changes: list[Callable[[], object]] = [
        lambda: net.listed.append(1.0),
        lambda: net.named.update(a=3.0),
        lambda: net.named.clear(),
        lambda: setattr(net, "count", [1.0, 1.0, 1.0].count),
    ]
    for change in (lambda: None, *changes):
        change()
        for _ in range(3):
            check(fast, net)


class Appending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = list[Tensor]()
        self.append, self.linear = self.seen.append, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.append(self.linear(x))
        return self.seen[-1] * len(self.seen)


@torch.no_grad()
def test_what_a_bound_method_writes_is_there_after_each_call() -> None:
    ours, theirs = Appending(), Appending()
    theirs.load_state_dict(ours.state_dict())
    fast = autostream.optimize(ours)
    for number in range(6):
        torch.testing.assert_close(fast(X + number), theirs(X + number))
        torch.testing.assert_close(ours.seen, theirs.seen)
        if number == 3:
            ours.seen.clear(), theirs.seen.clear()


def test_states_in_turn_need_no_new_graphs() -> None:
    """An attribute that changes back, and weights that are frozen and unfrozen."""
    net = model()
    fast = autostream.optimize(net, policy="sequential")
    with torch.no_grad():
        for turn in range(8):
            net.scale = 2.0 + turn % 2
            check(fast, net)
        assert len(fast.reports) == 2
        for turn in range(8):
            net.requires_grad_(turn % 2 == 0)
            check(fast, net)
    assert len(fast.reports) <= 3
    assert "plain" not in {report.mode for report in fast.reports}


@torch.no_grad()
def test_guards_stay_right_when_the_model_keeps_writing_attributes() -> None:
    """Dynamo's checks become slow with the first such write, and are built again after a number of calls."""
    net = nn.Sequential(Block(), nn.Sequential(Block())).eval()
    captured = capture(net, (X,), {})
    assert captured is not None
    for number in range(700):
        if number in (10, 300):
            net[1][0].noted = number
        assert captured.guards(net, (X,), {})
    net[1][0].scale = 3.0
    assert not captured.guards(net, (X,), {})
    failed = captured.guards.failed(net, (X,), {})
    assert failed is not None
    assert failed.name == "scale"


class Shifted(nn.Linear):
    shift: Tensor | float

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.shift = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


@torch.no_grad()
def test_a_change_of_type_before_the_first_check_of_guards_fails_them() -> None:
    """In a first check, torch 2.13 would raise at a value of another type, and leave torch functions disabled."""
    net = Shifted()
    captured = capture(net, (torch.ones(2, 4),), {})
    assert captured is not None
    net.shift = 7.0
    assert not captured.guards(net, (torch.ones(2, 4),), {})


# guards="inputs"


@torch.no_grad()
def test_with_guards_on_inputs_only_weights_may_change_in_place_and_other_changes_are_not_seen() -> None:
    net = model()
    fast = autostream.optimize(net, guards="inputs")
    for number in range(4):
        check(fast, net, X + number)
        deep(net).linear.weight.mul_(2)
    for x in (torch.randn(5, 4), X, X.double().float().t().contiguous().t()):
        check(fast, net, x)
    with torch.inference_mode():
        check(fast, net)
    expected = fast(X)
    net.scale, net.settings.factor = 5.0, 7.0
    torch.testing.assert_close(fast(X), expected)
    with pytest.raises(AssertionError):
        check(fast, net)
    with pytest.raises(OptionError, match="guards"):
        autostream.optimize(net, guards="Dynamo")


@torch.no_grad()
@pytest.mark.parametrize("guards", ["dynamo", "inputs"])
def test_shapes_strides_keywords_and_requires_grad_of_inputs_are_guarded(guards: str) -> None:
    net = model()
    fast = autostream.optimize(net, guards=guards)
    fast(X), fast(X)
    for other in (torch.randn(5, 4), X.t().contiguous().t(), X.clone().requires_grad_()):
        for _ in range(2):
            torch.testing.assert_close(fast(other), net(other))
            check(fast, net)
    torch.testing.assert_close(fast(x=X), net(x=X))


# Replays whose guards fail afterwards


class Tracked(nn.Module):
    """Reads a number that is guarded, and has effects that running it twice would show."""

    def __init__(self, does: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.does, self.scale = does, 1.0
        self.register_buffer("total", torch.zeros(4))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x) * self.scale


@torch.no_grad()
@pytest.mark.parametrize("captured", [False, True], ids=["op by op", "captured"])
@pytest.mark.parametrize(
    "does",
    [
        lambda s, x: s.drop(x),
        lambda s, x: s.total.add_(x.sum(0)) * x,
        lambda s, x: x.mul_(2).sin(),
        lambda s, x: x.sin(),
    ],
    ids=["random", "writes state", "writes its input", "reads"],
)
def test_a_replay_whose_guards_fail_has_no_visible_effects(
    does: Callable[..., Tensor], captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if captured:
        Captures(monkeypatch)
    ours, theirs = Tracked(does), Tracked(does)
    fast = autostream.optimize(ours)
    for scale in (1.0, 1.0, 1.0, 3.0, 3.0, 1.0):
        ours.scale = theirs.scale = scale
        x, y = X.clone(), X.clone()
        torch.manual_seed(1)
        ours_output = fast(x)
        state = torch.get_rng_state()
        torch.manual_seed(1)
        torch.testing.assert_close(ours_output, theirs(y), rtol=0, atol=0)
        assert torch.equal(state, torch.get_rng_state())
        assert torch.equal(x, y)
        assert torch.equal(ours.total, theirs.total)


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.__setitem__(0, nn.Embedding(20, 4)),
        lambda net: setattr(net[0], "weight", nn.Parameter(torch.randn(20, 4))),
        lambda net: setattr(net[0].weight, "data", torch.randn(20, 4)),
        lambda net: net[0].register_forward_pre_hook(lambda module, args: (args[0] % 10,)),
    ],
    ids=["table", "weight", "data", "hook"],
)
def test_an_index_that_is_valid_for_the_changed_model_only_is_no_error(change: Callable[[Any], object]) -> None:
    """Guards are checked before a replay that computes with indices."""
    net = nn.Sequential(nn.Embedding(10, 4))
    fast = autostream.optimize(net)
    small, large = torch.tensor([1]), torch.tensor([15])
    fast(small), fast(small)
    change(net)
    for _ in range(2):
        torch.testing.assert_close(fast(large), net(large))


class Config:
    """Settings that two modules share."""

    def __init__(self) -> None:
        self.scale = 2.0


class Scaled(nn.Module):
    def __init__(self, config: Config, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.config, self.inner = config, inner

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.inner is None else self.inner(x)) * self.config.scale  # type: ignore[no-any-return]


def test_an_object_that_two_modules_share_is_compared_with_itself() -> None:
    """One that is equal counts as another: only one of the two modules may follow it later."""
    config = Config()
    model, x = Scaled(config, Scaled(config)), torch.ones(2)
    captured = capture(model, (x,), {})
    assert captured is not None
    assert captured.guards(model, (x,), {})
    model.inner.config = Config()  # type: ignore[union-attr]
    assert not captured.guards(model, (x,), {})
    model.inner.config = config  # type: ignore[union-attr]
    assert captured.guards(model, (x,), {})
    config.scale = 3.0
    assert not captured.guards(model, (x,), {})
