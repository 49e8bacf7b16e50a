"""The short way: taken by calls like the last one, and by no others."""

from __future__ import annotations

import copy
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import autostream
from autostream.dispatch import Dispatcher
from autostream.execution.bound import Frozen, Writes
from autostream.shortcut import CapturedRun, Changed, Direct, Shortcut
from autostream.tracing.state import LiveState, ModelWatch
from autostream.frontend.tree import TENSOR, Structure


class Net(nn.Module):
    """Two branches, a plain attribute, a tied weight, batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.tied = self.left.weight
        self.scale = 2.0
        self.offsets = [1.0]

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = x if y is None else y
        return self.norm(self.left(x)) * self.scale + self.offsets[0], self.right(y) @ self.tied


X = torch.randn(3, 4)


class Ways:
    """Which way each call took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._long: list[Dispatcher] = []
        original = Dispatcher._scheduled

        def counted(dispatcher: Dispatcher, *args: Any) -> Any:
            self._long.append(dispatcher)
            return original(dispatcher, *args)

        monkeypatch.setattr(Dispatcher, "_scheduled", counted)

    def took(self, call: Callable[[], object], of: Dispatcher | None = None) -> str:
        """``of``: rather than of any, pieces of a model among them."""
        self._long.clear()
        call()
        return "long" if (self._long if of is None else of in self._long) else "short"


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    return Ways(monkeypatch)


@torch.no_grad()
def test_the_second_of_two_alike_is_short_and_right(ways: Ways) -> None:
    model = Net().eval()
    fast = autostream.optimize(model)
    assert ways.took(lambda: fast(X)) == "long"
    ours: list[Any] = []
    for x in (X, torch.randn(3, 4)):
        assert ways.took(lambda x=x: ours.append(fast(x))) == "short"
        torch.testing.assert_close(ours[-1], model(x), rtol=0, atol=0)
    with torch.no_grad():
        model.left.weight.mul_(2)
    assert ways.took(lambda: ours.append(fast(X))) == "short"
    torch.testing.assert_close(ours[-1], model(X), rtol=0, atol=0)


def replaced(model: Net) -> None:
    model.right.weight = nn.Parameter(torch.randn(4, 4))


def same_values_elsewhere(model: Net) -> None:
    model.right.bias = nn.Parameter(model.right.bias.detach().clone())


def data(model: Net) -> None:
    model.right.weight.data = torch.randn(4, 4)


def transposed(model: Net) -> None:
    model.right.weight.data = model.right.weight.data.t()


def untied(model: Net) -> None:
    model.left.weight = nn.Parameter(torch.randn(4, 4))


def trained(model: Net) -> None:
    model.norm.train()


def hooked(model: Net) -> None:
    model.right.register_forward_hook(lambda module, args, output: output + 1)


def exchanged(model: Net) -> None:
    model.right = nn.Linear(4, 4, bias=False)


def set_otherwise(model: Net) -> None:
    model.scale = 3.0


def listed_otherwise(model: Net) -> None:
    model.offsets[0] = 5.0


def buffer(model: Net) -> None:
    model.norm.running_mean = torch.randn(4)


def cast(model: Net) -> None:
    model.double().float()


@pytest.mark.parametrize(
    "change",
    [
        *(replaced, same_values_elsewhere, data, transposed, untied, trained, hooked, exchanged),
        *(set_otherwise, listed_otherwise, buffer, cast),
    ],
)
@torch.no_grad()
def test_a_model_that_is_another_is_found_out(change: Callable[[Net], None], ways: Ways) -> None:
    model = Net().eval()
    fast = autostream.optimize(model)
    fast(X)
    assert ways.took(lambda: fast(X)) == "short"
    change(model)
    ours: list[Any] = []
    assert ways.took(lambda: ours.append(fast(X))) == "long"
    expected = model.eval()(X) if change is trained else model(X)
    if change is not trained:
        torch.testing.assert_close(ours[0], expected)
        torch.testing.assert_close(fast(X), expected)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.randn(5, 4),), {}),
        ((X.double().float().t().contiguous().t(),), {}),
        ((X,), {"y": X}),
        ((X, X), {}),
        ((X, None), {}),
        ((nn.Parameter(X.clone(), requires_grad=False),), {}),
    ],
    ids=["shape", "strides", "keywords", "two", "none", "parameter"],
)
@torch.no_grad()
def test_other_arguments_go_the_long_way(args: Any, kwargs: Any, ways: Ways) -> None:
    model = Net().eval()
    fast = autostream.optimize(model)
    fast(X)
    ours: list[Any] = []
    assert ways.took(lambda: ours.append(fast(*args, **kwargs))) == "long"
    torch.testing.assert_close(ours[0], model(*args, **kwargs))


@torch.no_grad()
def test_inputs_that_begin_to_share_memory_go_the_long_way(ways: Ways) -> None:
    model = Net().eval()
    fast = autostream.optimize(model)
    both = torch.randn(6, 4)
    fast(X, X.clone())
    assert ways.took(lambda: fast(X.clone(), X)) == "short"
    assert ways.took(lambda: fast(both[:3], both[3:])) == "long"
    assert ways.took(lambda: fast(X, X)) == "long"


@pytest.mark.parametrize("count", [0, 2])
@torch.no_grad()
def test_calls_that_could_not_take_it_have_no_short_way(count: int) -> None:
    fast = autostream.optimize(lambda *xs: torch.ones(3, 4) + sum(xs))
    for _ in range(2):
        torch.testing.assert_close(fast(*[X] * count), 1 + count * X)
        assert fast._autostream._shortcut is None


def test_gradients_modes_and_settings_go_the_long_way(ways: Ways) -> None:
    model = Net().eval()
    fast = autostream.optimize(model)
    with torch.no_grad():
        fast(X)
    ours: list[Any] = []
    assert ways.took(lambda: ours.append(fast(X))) == "long"
    assert ours[0][0].requires_grad
    with torch.no_grad():
        fast(X)
        assert ways.took(lambda: fast(X)) == "short"
        with torch.autocast("cpu", torch.bfloat16):
            assert ways.took(lambda: ours.append(fast(X))) == "long"
        assert ours[-1][1].dtype == torch.bfloat16
        fast(X)
        assert ways.took(lambda: torch.vmap(fast)(torch.randn(2, 3, 4))) == "long"


FACTOR = 2
DURING: list[Callable[[], object]] = []
"""What happens in another thread while a model runs."""


class Untraceable(nn.Module):
    """Asks what a graph would not: calls of it run as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor, options: dict[str, Any] | None = None) -> Any:
        self.calls += 1
        twice = x * (1 if x.requires_grad else FACTOR)
        for call in DURING:
            call()
        if x.isnan().any():
            raise torch.OutOfMemoryError("none left")
        return self.layer(x) + self.calls, twice


def called_twice(model: nn.Module, mode: str) -> tuple[Any, Any]:
    """A model optimized, and the model itself, after two calls, which ran in this mode."""
    fast = autostream.optimize(model.eval())
    with torch.no_grad():
        for _ in range(2):
            fast(X)
    assert [report.mode for report in fast.reports] == [mode]
    return fast, model


@torch.no_grad()
def test_what_runs_as_it_is_has_a_short_way_too_and_each_call_is_one_call(ways: Ways) -> None:
    fast, model = called_twice(Untraceable(), "plain")
    calls = model.calls
    for number in range(1, 4):
        x, found = torch.randn(3, 4), []
        assert ways.took(lambda x=x, found=found: found.append(fast(x))) == "short"
        assert model.calls == calls + number
        torch.testing.assert_close(found[0], (model.layer(x) + model.calls, x * 2))


@pytest.mark.parametrize(
    ("change", "calls"),
    [
        (lambda model: model.train(), 1),
        (lambda model: model.layer.register_forward_hook(lambda *_: None), 1),
        (lambda model: setattr(model, "layer", nn.Linear(4, 4)), 8),
        (lambda model: model.add_module("more", nn.ReLU()), 8),
    ],
    ids=["mode", "hook", "module", "more modules"],
)
@torch.no_grad()
def test_a_model_that_may_have_a_schedule_now_is_looked_at(
    change: Callable[[Any], object], calls: int, ways: Ways
) -> None:
    fast, model = called_twice(Untraceable(), "plain")
    assert ways.took(lambda: fast(X)) == "short"
    change(model)
    assert "long" in [ways.took(lambda: fast(X)) for _ in range(calls)]


def test_so_are_calls_that_may(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, _ = called_twice(Untraceable(), "plain")
    assert ways.took(lambda: fast(X)) == "long", "it records gradients"
    with torch.no_grad():
        for call in (lambda: fast(torch.randn(5, 4)), lambda: fast(x=X), lambda: fast(X, {"other": 1})):
            fast(X)
            assert ways.took(lambda: fast(X)) == "short"
            assert ways.took(call) == "long"
        fast(X)
        with torch.autocast("cpu", torch.bfloat16):
            assert ways.took(lambda: fast(X)) == "long"
        fast(X)
        with sdpa_kernel(SDPBackend.MATH):
            assert "long" in [ways.took(lambda: fast(X)) for _ in range(8)]
        fast(X)
        assert ways.took(lambda: fast(X)) == "short"
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3)
        assert "long" in [ways.took(lambda: fast(X)) for _ in range(8)]


@torch.no_grad()
def test_structured_arguments_of_what_runs_as_it_is_are_handed_on(ways: Ways) -> None:
    fast, _ = called_twice(Untraceable(), "plain")
    options = {"tensor": torch.ones(2), "number": 3}
    for _ in range(2):
        fast(X, options)
    assert ways.took(lambda: fast(X, options)) == "short"
    assert ways.took(lambda: fast(X, {**options, "number": 4})) == "long"


class Unlike(nn.Module):
    """Two inputs that must not be one."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x is y:
            torch.is_inference(x)  # which no graph does
        return x.sin() * y.cos()


@torch.no_grad()
def test_two_inputs_that_are_one_tell_nothing_of_two(ways: Ways) -> None:
    fast, other = autostream.optimize(Unlike()), torch.randn(3, 4)
    for _ in range(2):
        fast(X, X)
    assert [report.mode for report in fast.reports] == ["plain"]
    for _ in range(2):
        fast(X, other)
    assert [report.mode for report in fast.reports] == ["one stream", "plain"]
    assert ways.took(lambda: fast(X, X)) == "long"


@torch.no_grad()
def test_what_runs_as_it_is_goes_the_long_way_with_inputs_in_one_memory(ways: Ways) -> None:
    fast = autostream.optimize(Untraceable().eval())
    fast._autostream.model.forward = lambda x, y: (x + y, x.requires_grad)[0]
    both = torch.randn(2, 3, 4)
    for _ in range(2):
        fast(X, both[0])
    assert ways.took(lambda: fast(X, both[1])) == "short"
    assert ways.took(lambda: fast(*both)) == "long"


@torch.no_grad()
def test_outer_models_that_fx_traces_find_the_module_in_them() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fast, _ = called_twice(Untraceable(), "plain")

        def forward(self, x: Tensor) -> Tensor:
            return x + self.fast(torch.ones(3, 4))[1]

    outer = Outer()
    outer(X)
    traced = torch.fx.symbolic_trace(outer)
    torch.testing.assert_close(traced(X), outer(X))


@torch.no_grad()
def test_what_was_forgotten_meanwhile_has_no_short_way(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as by another thread, which moves the model."""
    fast, _ = called_twice(Untraceable(), "plain")
    fast._autostream.forget()
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "DURING", [fast._autostream.forget])
        fast(X)
    assert fast.reports == ()
    assert ways.took(lambda: fast(X)) == "long"
    assert [report.mode for report in fast.reports] == ["plain"]


@torch.no_grad()
def test_each_signature_keeps_its_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, _ = called_twice(Untraceable(), "plain")
    other = torch.randn(5, 4)
    fast(other)
    made: list[Direct] = []
    original = Direct.__init__

    def counted(self: Direct, *args: Any) -> None:
        made.append(self)
        original(self, *args)

    monkeypatch.setattr(Direct, "__init__", counted)
    for _ in range(3):
        fast(X)
        fast(other)
    assert made == []


class Branching(nn.Module):
    """Two pieces, since which is the second depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y.sin() if y.sum() > 0 else y.cos()


@torch.no_grad()
def test_what_runs_in_pieces_has_a_short_way_to_them(ways: Ways) -> None:
    fast, model = called_twice(Branching(), "graph breaks")
    dispatcher = fast._autostream
    for x in (X, -X, torch.randn(3, 4), torch.full((3, 4), 3.0)):
        fast(x)  # which may make pieces
        found: list[Tensor] = []
        assert ways.took(lambda x=x, found=found: found.append(fast(x)), dispatcher) == "short"
        torch.testing.assert_close(found[0], model(x))


@torch.no_grad()
def test_pieces_are_left_where_somebody_looks_on(ways: Ways) -> None:
    """Whoever counts ops or modules sees those of the model."""
    fast, model = called_twice(Branching(), "graph breaks")
    dispatcher, called = fast._autostream, list[str]()

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    with Counted():
        assert ways.took(lambda: fast(X), dispatcher) == "long"
        ours = called.copy()
        called.clear()
        model(X)
    assert ours == called != []
    fast(X)
    assert ways.took(lambda: fast(X), dispatcher) == "short"
    hook = model.layer.register_forward_hook(lambda *_: called.append("hook"))
    assert ways.took(lambda: fast(X), dispatcher) == "long"
    assert called.count("hook") == 1
    hook.remove()


@torch.no_grad()
def test_pieces_are_left_where_somebody_captures(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    """By turns, they would wait for the device, which no capture allows."""
    fast, model = called_twice(Branching(), "graph breaks")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    found: list[Tensor] = []
    assert ways.took(lambda: found.append(fast(X)), fast._autostream) == "long"
    torch.testing.assert_close(found[0], model(X))


@torch.no_grad()
def test_pieces_that_are_gone_are_made_anew() -> None:
    fast, model = called_twice(Branching(), "graph breaks")
    dispatcher = fast._autostream
    shortcut = dispatcher._shortcut
    dispatcher.forget()
    gc.collect()
    with pytest.raises(Changed):
        shortcut((X,))
    dispatcher._shortcut = shortcut
    torch.testing.assert_close(fast(X), model(X))
    assert [report.mode for report in fast.reports] == ["graph breaks"]


@torch.no_grad()
def test_a_model_without_memory_is_called_once(ways: Ways) -> None:
    fast, model = called_twice(Untraceable(), "plain")
    calls = model.calls
    with pytest.raises(torch.OutOfMemoryError):
        fast(X * torch.nan)
    assert model.calls == calls + 1
    assert ways.took(lambda: fast(X)) == "long"


def test_no_short_way_while_gradients_could_be_recorded(ways: Ways) -> None:
    model = Net().eval().requires_grad_(False)
    fast = autostream.optimize(model)
    fast(X)
    assert ways.took(lambda: fast(X)) == "long"
    model.requires_grad_()
    assert fast(X)[0].requires_grad


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.BatchNorm1d(4)).train(), nn.Dropout().train(), nn.ReLU(inplace=True)],
    ids=["learns", "draws", "writes its input"],
)
@torch.no_grad()
def test_what_can_be_seen_is_never_run_once_too_often(model: nn.Module, ways: Ways) -> None:
    twin = copy.deepcopy(model)
    fast = autostream.optimize(model)
    fast(X.clone()), twin(X.clone())
    ours, theirs = X.clone(), X.clone()
    torch.manual_seed(0)
    assert ways.took(lambda: fast(ours)) == "short"
    state = torch.get_rng_state()
    torch.manual_seed(0)
    twin(theirs)
    assert torch.equal(ours, theirs)
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()))


class Adding(nn.Module):
    """Writes to its state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x
        return self.total * x


@torch.no_grad()
def test_an_input_in_the_memory_of_what_is_written_goes_the_long_way(ways: Ways) -> None:
    model = Adding()
    fast = autostream.optimize(model)
    fast(X)
    assert ways.took(lambda: fast(X)) == "short"
    assert ways.took(lambda: fast(model.total)) == "long"
    torch.testing.assert_close(model.total, 4 * X)


@torch.no_grad()
def test_what_writes_and_has_no_memory_fails_and_is_not_run_once_more(ways: Ways) -> None:
    model = Adding()
    fast = autostream.optimize(model)
    fast(X)
    launch = fast._autostream._shortcut._run.launch

    def failing(tensors: Sequence[Tensor]) -> Any:
        launch(tensors)
        raise torch.OutOfMemoryError

    fast._autostream._shortcut._run.launch = failing
    with pytest.raises(torch.OutOfMemoryError):
        fast(X)
    torch.testing.assert_close(model.total, 2 * X)
    assert ways.took(lambda: fast(X)) == "long"
    torch.testing.assert_close(model.total, 3 * X)


@torch.no_grad()
def test_constants_and_containers_are_alike_where_they_are_equal(ways: Ways) -> None:
    def function(pair: tuple[Tensor, dict[str, Tensor]], scale: float, flag: bool | None) -> Tensor:
        return pair[0] * scale + pair[1]["y"] if flag else pair[0]

    fast = autostream.optimize(function)
    fast((X, {"y": X * 2}), 2.0, True)
    assert ways.took(lambda: fast((X, {"y": X * 2}), 2.0, True)) == "short"
    ours: list[Tensor] = []
    for args in (((X, {"y": X * 2}), 3.0, True), ((X, {"y": X * 2}), 3.0, 1), ((X, {"z": X * 2}), 3.0, None)):
        assert ways.took(lambda args=args: ours.append(fast(*args))) == "long"
        torch.testing.assert_close(ours[-1], function(*args))


class Breaks(nn.Module):
    """A graph break between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x + float(x.sum() > 1e9))


@torch.no_grad()
def test_weights_that_move_under_a_piece_are_found_out() -> None:
    """Dynamo gives a piece its weights as inputs that stay where they are."""
    torch._dynamo.reset()
    model = Breaks().eval()
    fast = autostream.optimize(model)
    for _ in range(3):
        torch.testing.assert_close(fast(X), model(X))
    model.second.weight.data = torch.randn(4, 4)
    model.first.bias.data = torch.randn(4)
    for _ in range(2):
        torch.testing.assert_close(fast(X), model(X))


@pytest.mark.parametrize("looks_first", [True, False])
def test_a_run_says_whether_its_tensors_moved(looks_first: bool) -> None:
    """Arguments that stay where they are among them, as those of a piece do."""
    model = nn.Linear(1, 1)
    weight, x, launched = torch.randn(2, 2), torch.randn(2), []

    class Product:
        repeatable = True

        def guess(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
            if looks_first:
                return None
            outputs = self.launch(tensors)
            return outputs if self.unmoved(tensors) else None

        def find(self, tensors: Sequence[Tensor]) -> Product | None:
            return self if self.unmoved(tensors) else None

        def holds(self, tensors: Sequence[Tensor]) -> bool:
            return True

        def launch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
            launched.append(tensors)
            return [weight @ tensors[1]]

        def unmoved(self, tensors: Sequence[Tensor]) -> bool:
            return tensors[0] is weight

    with torch.no_grad():
        state, watch = LiveState(model, (), {}), ModelWatch(model)
        call = Structure(tuple, children=(TENSOR, TENSOR))
        shortcut = Shortcut(Product(), TENSOR, call, (weight, x), (), state, watch, watch.training())
        torch.testing.assert_close(shortcut((weight, x.clone())), weight @ x)
        assert shortcut.fits((weight.clone(), x)) is not None
        with pytest.raises(Changed):
            shortcut((weight.clone(), x))
        assert len(launched) == (1 if looks_first else 2)
        with pytest.raises(Changed):
            shortcut((weight, x))
    assert shortcut.outdated


@torch.no_grad()
def test_a_setting_set_to_an_equal_value_keeps_calls_short(ways: Ways) -> None:
    """Another object: the look at all entries by identity says no, the look at each one's value yes."""
    model = Net().eval()
    fast = autostream.optimize(model)
    fast(X)
    model.scale = float("2")
    assert ways.took(lambda: fast(X)) == "short"
    model.scale = 2  # type: ignore[assignment]
    assert ways.took(lambda: fast(X)) == "long"


@torch.no_grad()
def test_hooks_on_the_outer_module_are_called(ways: Ways) -> None:
    fast = autostream.optimize(Net().eval())
    fast(X)
    calls: list[str] = []
    with fast.register_forward_pre_hook(lambda *_: calls.append("before")):
        assert ways.took(lambda: fast(X)) == "short"
    assert calls == ["before"]


@torch.no_grad()
def test_moving_the_model_drops_it(ways: Ways) -> None:
    fast = autostream.optimize(Net().eval())
    fast(X)
    fast.double()
    assert fast(X.double())[0].dtype == torch.float64
    fast.float()
    assert ways.took(lambda: fast(X)) == "long"


@torch.no_grad()
def test_signatures_keep_theirs(ways: Ways) -> None:
    """Alternating calls go the long way, but nothing is made anew for them."""
    fast = autostream.optimize(Net().eval())
    small, large = torch.randn(2, 4), torch.randn(5, 4)
    fast(small), fast(large)
    made = []
    for x in (small, large, small, large):
        assert ways.took(lambda x=x: fast(x)) == "long"
        made.append(fast._autostream._shortcut)
    assert made[0] is made[2]
    assert made[1] is made[3]


# Found by reviews


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@torch.no_grad()
def test_a_nested_tensor_goes_the_long_way(ways: Ways) -> None:
    """Asked for its strides, it would end the process."""
    model = nn.Linear(4, 4)
    fast = autostream.optimize(model)
    fast(X), fast(X)
    ours: list[Any] = []
    nested = torch.nested.nested_tensor([X, X])
    assert ways.took(lambda: ours.append(fast(nested))) == "long"
    torch.testing.assert_close(ours[0].unbind(), model(nested).unbind())


@pytest.mark.parametrize("change", ["table", "weight", "data", "hook"])
@torch.no_grad()
def test_an_index_that_only_the_new_model_has_is_no_error(change: str) -> None:
    model = nn.Sequential(nn.Embedding(10, 4))
    fast = autostream.optimize(model)
    small, large = torch.tensor([1]), torch.tensor([15])
    fast(small), fast(small)
    if change == "table":
        model[0] = nn.Embedding(20, 4)
    elif change == "weight":
        model[0].weight = nn.Parameter(torch.randn(20, 4))
    elif change == "data":
        model[0].weight.data = torch.randn(20, 4)
    else:
        model[0].register_forward_pre_hook(lambda module, args: (args[0] % 10,))
    for _ in range(2):
        torch.testing.assert_close(fast(large), model(large))


@torch.no_grad()
def test_another_thread_that_changes_the_model_meanwhile_is_found_out() -> None:
    """What a shortcut holds the model against is as of before the call, not after it."""
    model = Net().eval()
    fast = autostream.optimize(model, X)
    entry = next(iter(fast._autostream._entries.values()))
    run = type(entry).__call__

    def changed_meanwhile(entry: Any, tensors: Any) -> Any:
        outputs = run(entry, tensors)
        model.train()
        model.right.weight.data = torch.zeros(4, 4)
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(entry), "__call__", changed_meanwhile)
        fast(X)
    twin = Net()
    twin.load_state_dict(model.state_dict())
    twin.train()
    torch.testing.assert_close(fast(X), twin(X))
    model.eval()
    torch.testing.assert_close(fast(X), model(X))


@torch.no_grad()
def test_a_shortcut_that_was_left_is_left(ways: Ways) -> None:
    """Else it would run the whole model for nothing at every call."""
    model = Net().eval()
    fast = autostream.optimize(model)
    fast(X)
    hooked(model)
    fast(X)
    assert fast._autostream._shortcut is None


@torch.no_grad()
def test_one_made_in_another_mode_is_made_again(ways: Ways) -> None:
    fast = autostream.optimize(Net().eval())
    fast(X)
    with torch.inference_mode():
        fast(X)
        assert ways.took(lambda: fast(X)) == "short"
    fast(X)
    assert ways.took(lambda: fast(X)) == "short"


@torch.no_grad()
def test_a_signature_that_is_dropped_has_none() -> None:
    fast = autostream.optimize(Net().eval(), max_signatures=1)
    fast(X)
    fast.prepare(torch.randn(5, 4))
    assert fast._autostream._shortcut is None


class Mode(Enum):
    ADD, SUBTRACT = 1, -1


class Settings:
    def __init__(self, factor: float) -> None:
        self.factor = factor


class Configured(nn.Module):
    """Everything that may decide what a module computes."""

    sign = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.register_buffer("mask", None)
        self.mode, self.settings, self.nested = Mode.ADD, Settings(1.0), {"a": {"b": 1.0}}
        self.extras = nn.ParameterList([nn.Parameter(torch.ones(4))])

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.sign * self.settings.factor * self.nested["a"]["b"]
        y = y if self.mask is None else y * self.mask
        for extra in self.extras:
            y = y + self.mode.value * extra
        return y


CONFIGURATIONS: dict[str, Callable[[Configured], object]] = {
    "a bias": lambda m: setattr(m.linear, "bias", nn.Parameter(torch.ones(4))),
    "a buffer that was None": lambda m: setattr(m, "mask", torch.zeros(4)),
    "one more parameter": lambda m: m.extras.append(nn.Parameter(torch.ones(4))),
    "an enum": lambda m: setattr(m, "mode", Mode.SUBTRACT),
    "an object": lambda m: setattr(m, "settings", Settings(2.0)),
    "a default of the class": lambda m: setattr(m, "sign", -1.0),
    "a nested container": lambda m: m.nested["a"].update(b=3.0),
}


@pytest.mark.parametrize("change", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
@pytest.mark.parametrize("calls", [0, 2])
@torch.no_grad()
def test_whatever_a_module_is_given_is_seen(change: Callable[[Configured], object], calls: int) -> None:
    torch.manual_seed(0)
    model = Configured()
    fast = autostream.optimize(model, X)
    for _ in range(calls):
        fast(X)
    change(model)
    for _ in range(2):
        torch.testing.assert_close(fast(X), model(X))


@torch.no_grad()
def test_modules_in_another_order_are_seen() -> None:
    model = nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.ReLU()))
    fast = autostream.optimize(model)
    fast(X), fast(X)
    first = model.a
    del model.a
    model.add_module("a", first)
    torch.testing.assert_close(fast(X), model(X))


@torch.no_grad()
def test_a_key_that_is_no_constant_goes_the_long_way(ways: Ways) -> None:
    fast = autostream.optimize(lambda named: next(iter(named.values())) * 2)
    fast({"a": X})
    assert ways.took(lambda: fast({"a": X})) == "short"
    ours: list[Tensor] = []
    assert ways.took(lambda: ours.append(fast({frozenset([1]): X}))) == "long"
    torch.testing.assert_close(ours[0], X * 2)


@torch.no_grad()
def test_a_short_way_sees_that_frozen_weights_have_changed() -> None:
    weight = torch.ones(2)
    places: Any = SimpleNamespace(guess=None, find=None)
    run = CapturedRun(places, Frozen([0], [weight], Writes([weight])), looks_first=False, repeatable=True)
    assert run.holds([weight])
    weight.mul_(2)
    assert not run.holds([weight])
