"""Which Python does nothing but compute, and what is said of the other."""

from __future__ import annotations

import logging
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial, wraps
from random import random as draw
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn, vmap
from torch import set_default_dtype as renamed
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.random import manual_seed
from torch.utils._contextlib import context_decorator
from torch.utils.checkpoint import checkpoint

import autostream.tracing.purity as ours
from autostream import Parallel
from autostream.tracing.purity import impurity
from tests.semantics import Model

SCALE, HISTORY, SIZES = 2.0, list[float](), [1, 2]
log = logging.getLogger(__name__)
alias = Tensor.requires_grad_


class Mode(Enum):
    MEAN = 1
    SUM = 2

    @property
    def label(self) -> str:
        return self.name.lower()


class Pair(NamedTuple):
    first: Tensor
    second: Tensor

    def __add__(self, other: Any) -> Any:
        return self.first + self.second + other


class Level(float, Enum):
    HALF = 0.5

    def __str__(self) -> str:
        return self.name


def scaled(x: Tensor, by: float = SCALE) -> Tensor:
    return F.relu(x) * by


def factorial(x: Tensor, n: int) -> Tensor:
    return x if n == 0 else n * other_factorial(x, n - 1)


def other_factorial(x: Tensor, n: int) -> Tensor:
    return factorial(x, n)


@torch.no_grad()
def without_gradients(x: Tensor) -> Tensor:
    return scaled(x)


@torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
def in_autocast(x: Tensor) -> Tensor:
    return scaled(x)


def mixed(s: Model, x: Tensor) -> Tensor:
    y = torch.stack([scaled(layer(x)) for layer in s.layers]).sum(0)
    if not isinstance(y, Tensor) or len(y) == 0:
        raise ValueError(f"of shape {tuple(y.shape)}")
    with torch.no_grad():
        first, *_ = (y.sin(), y.cos())
    return first if first.sum() > 0 else s.layers[0](max(y.unbind(), key=lambda row: row.norm()))


def fills_own_list(s: Model, x: Tensor) -> Tensor:
    parts, seen = [], set()
    for at, layer in enumerate(s.layers):
        parts.append(layer(x))
        seen.add(at)
    parts[0] = parts[1][0:1]
    parts[0:1] = [x]
    parts.sort(key=len)
    del parts[1]
    return torch.cat(parts)


def fills_own_dict(s: Model, x: Tensor, **kwargs: Any) -> Tensor:
    outputs = OrderedDict()
    by_name = {name: layer(x) for name, layer in enumerate(s.layers)}
    for name, y in by_name.items():
        outputs[name] = y
    by_name.update(outputs)
    kwargs.pop("mask", None)
    return outputs[0]


def fills_own_list_in_another(s: Model, x: Tensor) -> Tensor:
    parts = list()  # noqa: C408

    def keep(y: Tensor) -> None:
        parts.append(y)

    [parts.append(layer(x)) for layer in s.layers]
    keep(x)
    return torch.cat(parts)


def multiplied_list(s: Model, x: Tensor) -> Tensor:
    parts = [x] * len(s.layers)
    parts[0] += s.layers[0](x)
    return torch.cat(parts)


def writes_own_tensor(s: Model, x: Tensor) -> Tensor:
    y, z = torch.zeros(4, x.shape[0], dtype=x.dtype), x.clone()
    y[1] = z[0]
    y[2:] += 1
    z[x > 0] = 0
    z.squeeze_(0)
    return y + z


_NAMESPACE: dict[str, Any] = {"torch": torch, "math": math}
exec(  # in this file, pytest makes another code of what asserts
    """def asserts(s, x):
    assert x.dim() == 2, f"{x.__class__.__name__} of {x.dim()} dimensions"
    torch._assert(x.dim() == 2, "dimensions")
    return x if torch.is_floating_point(x) and not torch.jit.is_tracing() else x * math.pi
""",
    _NAMESPACE,
)


def calls_back(s: Model, x: Tensor) -> Tensor:
    return vmap(lambda row: row.sin())(checkpoint(scaled, x, use_reentrant=False))


def in_other_modes(s: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        y = torch.nn.functional.gelu(x)
    return torch.ops.aten.sin.default(torch.linalg.norm(y)) + torch.finfo(y.dtype).eps


def chooses_by_members(s: Model, x: Tensor) -> Pair:
    pair = Pair(x.mean() if s.mode is Mode.MEAN else x.sum(), x.max(dim=0).values)
    return Pair(pair.first * s.sizes[0], pair.second + SIZES[1] * Level.HALF)


def converts_tensors(s: Model, x: Tensor) -> Tensor:
    y = x.float().to(s.scale.dtype)
    return (y + s.scale.double()).type(x.dtype) * s.layers[0].weight.to(x.device).half().bfloat16()


def catches_errors(s: Model, x: Tensor) -> Tensor:
    try:
        return torch.linalg.cholesky(x) * s.root
    except (torch.linalg.LinAlgError, torch.OutOfMemoryError):
        return x


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(mixed, id="comprehensions, errors and lambdas"),
        pytest.param(fills_own_list, id="a list and a set that it has made"),
        pytest.param(fills_own_dict, id="dictionaries that it has made, and its keyword arguments"),
        pytest.param(fills_own_list_in_another, id="a list that a function around it has made"),
        pytest.param(multiplied_list, id="a list that is made of another that nobody else has"),
        pytest.param(writes_own_tensor, id="tensors that it has made"),
        pytest.param(_NAMESPACE["asserts"], id="what tells what is so, or complains"),
        pytest.param(calls_back, id="what calls what code names, which is looked at"),
        pytest.param(in_other_modes, id="modes that end with a block; functions in modules"),
        pytest.param(chooses_by_members, id="enumerations, named tuples, and lists that are read"),
        pytest.param(converts_tensors, id="conversions of tensors and of parameters"),
        pytest.param(catches_errors, id="errors of torch's, and NumPy's numbers"),
        pytest.param(lambda s, x: factorial(x, 3), id="functions that name each other"),
        pytest.param(lambda s, x: without_gradients(x), id="a function that torch wraps"),
        pytest.param(lambda s, x: in_autocast(x), id="one that it wraps with constants"),
    ],
)
def test_what_computes_is_pure(forward: Callable[..., Any]) -> None:
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())])
    model = Model(forward, layers=layers, mode=Mode.SUM, sizes=[4, 2], root=np.sqrt(2.0))
    model.register_buffer("scale", torch.ones(1))
    assert impurity(model) == ""


def test_modules_of_torch_are_pure() -> None:
    assert impurity(nn.TransformerEncoderLayer(8, 2)) == ""
    assert impurity(nn.LSTM(2, 2)) == ""


def writes_global(s: Any, x: Tensor) -> Tensor:
    global SCALE
    SCALE = 3.0
    return x


def counts(s: Any, x: Tensor) -> Tensor:
    s.calls += 1
    return x


def counts_as_variable(s: Any, x: Tensor) -> Tensor:
    calls = 1
    s.calls = (lambda: calls)()
    return x


def fills(s: Any, x: Tensor) -> Tensor:
    s.seen["x"] = True
    return x


def imports(s: Any, x: Tensor) -> Tensor:
    import math

    return x * math.pi


def by_helper(s: Any, x: Tensor) -> Tensor:
    return tagged(x)


def tagged(x: Tensor) -> Tensor:
    x.tag = 1  # type: ignore[attr-defined]
    return x


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def counting(*args: Any) -> Any:
        HISTORY.append(1.0)
        return function(*args)

    return counting


@counted
def wrapped(x: Tensor) -> Tensor:
    return x


class Through:
    """An object whose methods nobody looks into."""

    def __call__(self, x: Tensor) -> Tensor:
        return x


class Later:
    """A property of a user's own kind."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        return HISTORY


class Tracked(torch.no_grad):  # type: ignore[misc]
    """A mode that does more than one of torch's."""

    def __enter__(self) -> None:
        HISTORY.append(1.0)


@Tracked()
def in_mode_of_a_users(x: Tensor) -> Tensor:
    return x


in_modes_that_nobody_knows = context_decorator(lambda: Tracked(), scaled)


@contextmanager
def noted(x: Tensor) -> Iterator[None]:
    HISTORY.append(1.0)
    yield


def in_context_of_a_users(s: Any, x: Tensor) -> Tensor:
    with noted(x):
        return x


def maybe_own(s: Any, x: Tensor) -> Tensor:
    seen = [] if x.dim() else s.history
    seen.append(x)
    return x


def own_and_then_not(s: Any, x: Tensor) -> Tensor:
    seen = []
    if x.dim():
        (seen, y) = s.history, x
        seen.append(y)
    return x


def of_a_pair(s: Any, x: Tensor) -> Tensor:
    y, z = torch.split(x, 1)
    z[0] = 1
    return y


def default_of_its_own(s: Any, x: Tensor, seen: Any = HISTORY) -> Tensor:
    if x.dim():
        seen = []
    seen.append(x)
    return x


def in_own_list(s: Any, x: Tensor) -> Tensor:
    kept = [s.history]
    kept[0][0] = x
    return x


def changed_in_place(s: Any, x: Tensor) -> Tensor:
    seen = s.history
    seen += [1.0]
    return x


def of_a_method(s: Any, x: Tensor) -> Tensor:
    seen = s.clone()
    seen[0] = x
    return x


def of_memory(s: Any, x: Tensor) -> Tensor:
    memory = x.numpy()
    memory[0] = 1
    return x


def default_that_nobody_knows(s: Any, x: Tensor, by: Any = Through()) -> Tensor:  # noqa: B008
    return by(x)


LIBRARY = torch.library.Library("users_own", "FRAGMENT")
LIBRARY.define("noted(Tensor x) -> Tensor")
LAYER = nn.Linear(1, 1)
HOLDER = Model(scaled, layer=LAYER)


class Act(Enum):
    PLAIN = 1
    CALLED = 2

    def __call__(self, x: Tensor) -> Tensor:
        HISTORY.append(1.0)
        return x


class Held(Enum):
    FIRST = (Through(),)


class Noting(NamedTuple):
    x: Tensor

    def __getitem__(self, at: Any) -> Any:
        HISTORY.append(1.0)
        return at


class Shaped(NamedTuple):
    x: Tensor

    @property
    def shape(self) -> int:
        HISTORY.append(1.0)
        return 1


class Cached(NamedTuple):
    x: Tensor

    real = Later()


class Number(int):
    def __rmul__(self, other: Any) -> Any:
        HISTORY.append(1.0)
        return other


class Special(Tensor):
    def sin(self) -> Tensor:
        HISTORY.append(1.0)
        return self


def inner_changes(s: Any, x: Tensor) -> Tensor:
    seen = []

    def other() -> None:
        nonlocal seen
        seen = s.history

    other()
    seen.append(x)
    return x


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (writes_global, "writes_global writes SCALE"),
        (counts, "counts writes calls"),
        (fills, "fills writes an item"),
        (imports, "imports writes math"),
        (by_helper, "tagged writes tag"),
        (counts_as_variable, "counts_as_variable writes calls"),
        (maybe_own, "uses append"),
        (own_and_then_not, "uses append"),
        (default_of_its_own, "uses append"),
        (default_that_nobody_knows, "uses a default of Model.function"),
        (inner_changes, "other writes seen"),
        (lambda s, x: alias(x), "uses alias"),
        (in_own_list, "writes an item"),
        (of_a_pair, "writes an item"),
        (of_a_method, "what clone returns"),
        (of_memory, "writes an item"),
        (changed_in_place, "it may change Model.history"),
        (lambda s, x: [x, s.history.sort()][0], "it may change Model.history"),
        (lambda s, x: in_mode_of_a_users(x), "uses in_mode_of_a_users"),
        (lambda s, x: in_modes_that_nobody_knows(x), "uses in_modes_that_nobody_knows"),
        (in_context_of_a_users, "uses _GeneratorContextManager"),
        (lambda s, x: wrapped(x), "counting uses append"),
        (lambda s, x: checkpoint(tagged, x), "tagged writes tag"),
        (lambda s, x: vmap(lambda row: HISTORY.append(1.0))(x), "uses append"),
        (lambda s, x: partial(tagged)(x), "tagged writes tag"),
        (lambda s, x: [x, manual_seed(0)][0], "uses manual_seed"),
        (lambda s, x: [x, renamed(torch.float64)][0], "uses renamed"),
        (lambda s, x: saved_tensors_hooks(scaled, scaled), "uses saved_tensors_hooks"),
        (lambda s, x: [x, torch.save(x, "x")][0], "uses torch.save"),
        (lambda s, x: [x, torch.distributed.all_reduce(x)][0], "uses torch.distributed.all_reduce"),
        (lambda s, x: [x, torch.use_deterministic_algorithms(True)][0], "uses torch.use_deterministic_algorithms"),
        (lambda s, x: [x, torch.set_grad_enabled(True)][0], "uses torch.set_grad_enabled"),
        (lambda s, x: torch.compile(scaled)(x), "uses torch.compile"),
        (lambda s, x: torch.func.grad(scaled)(x), "uses torch.func.grad"),
        (lambda s, x: torch.from_file("x"), "uses torch.from_file"),
        (lambda s, x: torch.Tensor.backward(x), "uses backward"),
        (lambda s, x: x * draw(), "uses draw"),
        (lambda s, x: [x, ours][0], "uses ours"),
        (lambda s, x: x.put_away(), "asks for put_away"),
        (lambda s, x: x.squeeze_(), "uses squeeze_"),
        (lambda s, x: x.__class__(x), "uses __class__"),
        (lambda s, x: [x, s.eval()][0], "uses eval"),
        (lambda s, x: [x, s.w.requires_grad_(False)][0], "uses requires_grad_"),
        (lambda s, x: [x, torch.set_default_dtype(torch.float64)][0], "uses torch.set_default_dtype"),
        (lambda s, x: [x, torch.manual_seed(0)][0], "uses torch.manual_seed"),
        (lambda s, x: [x, HISTORY.append(1.0)][0], "uses append"),
        (lambda s, x: [x, print(x)][0], "print"),
        (lambda s, x: [x, log.warning("x")][0], "log"),
        (lambda s, x: [x, warnings.warn("x", stacklevel=1)][0], "warnings"),
        (lambda s, x: getattr(s, "w") + x, "getattr"),  # noqa: B009
        (lambda s, x: s.through(x), "Model.through"),
        (lambda s, x: x * s.settings.scale, "Model.settings"),
        (lambda s, x: vars(s), "vars"),
        (lambda s, x: s.w.half() + s.layer.half()(x), "converts layer, a module"),
        (lambda s, x: [x, s.layer.to(x.dtype)][0], "converts layer, a module"),
        (lambda s, x: LAYER.double()(x), "converts LAYER, a module"),
        (lambda s, x: [x, HOLDER.layer.float()][0], "converts layer, a module"),
        (lambda s, x: [x, s.layer.share_memory()][0], "uses share_memory"),
        (lambda s, x: [x, s.layer._apply(scaled)][0], "uses _apply"),
        (lambda s, x: [x, torch.detach_(x)][0], "uses torch.detach_"),
        (lambda s, x: torch.ops.aten.set_.source_Tensor(x, x), "uses torch.ops.aten.set_.source_Tensor"),
        (lambda s, x: torch.ops.users_own.noted(x), "uses torch.ops.users_own.noted"),
        (lambda s, x: torch.ops.users_own.noted.default(x), "uses torch.ops.users_own.noted.default"),
        (lambda s, x: Act.CALLED(x), "__call__ uses append"),
        (lambda s, x: s.act(x), "__call__ uses append"),
        (lambda s, x: [x, Held.FIRST][0], "uses Held.FIRST"),
        (lambda s, x: Noting(x)[0], "__getitem__ uses append"),
        (lambda s, x: s.shaped.shape, "shape uses append"),
        (lambda s, x: s.cached.real, "uses Cached.real"),
        (lambda s, x: x * s.number, "uses Model.number"),
        (lambda s, x: s.special.sin(), "uses Model.special"),
    ],
)
def test_what_may_do_more_is_not(forward: Callable[..., Any], said: str) -> None:
    attributes = {
        "history": [],
        "clone": scaled,
        "settings": SimpleNamespace(scale=2.0),
        "through": Through(),
        "calls": 0,
        "seen": {},
        "layer": nn.Linear(1, 1),
        "act": Act.CALLED,
        "noting": Noting(torch.ones(1)),
        "shaped": Shaped(torch.ones(1)),
        "cached": Cached(torch.ones(1)),
        "number": Number(2),
        "special": torch.ones(1).as_subclass(Special),
    }
    model = Model(forward, w=nn.Parameter(torch.ones(1)), **attributes)
    assert said in impurity(nn.Sequential(model))


def test_variables_of_a_function_are_looked_at() -> None:
    seen, factor = [], 2.0

    def one(x: Tensor) -> Tensor:
        return x * factor

    def other(x: Tensor) -> Tensor:
        seen.append(1)
        return x

    assert impurity(Model(lambda s, x: one(x))) == ""
    assert "other uses append" in impurity(Model(lambda s, x: other(x)))


def test_a_function_is_looked_at_for_all_variables_that_it_has() -> None:
    def calling(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda s, x: function(x)

    model = nn.Sequential(Model(calling(scaled)), Model(calling(tagged)))
    assert "tagged writes tag" in impurity(model)


def test_functions_that_name_themselves_are_looked_at_once() -> None:
    def shrunk(x: Tensor) -> Tensor:
        return x if x.shape[0] < 2 else shrunk(x[1:])

    def counting(x: Tensor) -> Tensor:
        x.calls = 1  # type: ignore[attr-defined]
        return counting(x)

    assert impurity(Model(lambda s, x: shrunk(x))) == ""
    assert "counting writes calls" in impurity(Model(lambda s, x: counting(x)))


def test_a_variable_that_hides_another_is_not_that() -> None:
    part: Any = math

    def forward(s: Model, x: Tensor) -> Any:
        def inner(part: Any) -> Any:
            return lambda: part.put_away()

        return inner(x)() * part.pi

    assert "asks for put_away" in impurity(Model(forward))


def noted_gelu(x: Tensor) -> Tensor:
    HISTORY.append(1.0)
    return F.gelu(x)


class Convolution(nn.Conv1d):
    def _conv_forward(self, *args: Any) -> Tensor:
        HISTORY.append(1.0)
        return super()._conv_forward(*args)


class Norm(nn.BatchNorm1d):
    def _check_input_dim(self, input: Tensor) -> None:
        HISTORY.append(1.0)


class Encoder(nn.TransformerEncoderLayer):
    def _sa_block(self, *args: Any, **kwargs: Any) -> Tensor:
        HISTORY.append(1.0)
        return super()._sa_block(*args, **kwargs)


class Unbiased(nn.Linear):
    @property
    def bias(self) -> None:  # type: ignore[override]
        HISTORY.append(1.0)

    def register_parameter(self, name: str, param: Any) -> None:
        if name != "bias":
            super().register_parameter(name, param)


class Told(nn.Linear):
    def extra_repr(self) -> str:
        HISTORY.append(1.0)
        return ""


class Shown(nn.Linear):
    def __repr__(self) -> str:
        HISTORY.append(1.0)
        return ""


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.TransformerEncoderLayer(4, 2, 8, activation=noted_gelu), "noted_gelu uses append"),
        (nn.TransformerEncoderLayer(4, 2, 8, activation=Through()), "uses TransformerEncoderLayer.activation"),
        (nn.Dropout(Number(0)), "uses Dropout.p"),
        (Convolution(1, 1, 1), "_conv_forward uses append"),
        (Norm(1), "_check_input_dim uses append"),
        (Encoder(4, 2, 8), "_sa_block uses append"),
        (Unbiased(1, 1, bias=False), "bias uses append"),
        (Told(1, 1), "extra_repr uses append"),
        (Shown(1, 1), "__repr__ uses append"),
        (Model(scaled, w=nn.Parameter(torch.ones(1).as_subclass(Special))), "uses the model"),
        (Parallel(nn.Identity(), nn.Identity(), reduce=lambda x, y: [x, HISTORY.append(1.0)]), "uses append"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_code_of_torchs_layers_asks_for_is_looked_at(module: nn.Module, said: str) -> None:
    assert said in impurity(nn.Sequential(module))


def test_what_torchs_layers_are_given_may_be_pure() -> None:
    class Trained(nn.Linear):
        calls = 0

        def train(self, mode: bool = True) -> Trained:
            self.calls = 1
            return super().train(mode)

        def add(self) -> None:  # as PyTorch's code asks sets of modules for
            self.calls = 1

        def reset_parameters(self) -> None:
            self.calls = 1
            super().reset_parameters()

        def extra_repr(self) -> str:
            return f"{super().extra_repr()}, calls={self.calls}"

    encoder = nn.TransformerEncoderLayer(4, 2, 8, activation=scaled)
    assert impurity(nn.Sequential(encoder, Trained(1, 1), nn.LSTM(2, 2))) == ""
    assert impurity(Parallel(nn.ReLU(), Trained(1, 1), reduce=torch.add)) == ""


def test_the_line_is_told() -> None:
    line = counts.__code__.co_firstlineno + 1
    assert impurity(Model(counts)).endswith(f"test_purity.py:{line}: s.calls += 1)")


def test_hooks_and_replaced_methods_are_looked_at() -> None:
    hooked, before, replaced = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    hooked.register_forward_hook(lambda module, args, output: HISTORY.append(1.0))
    before.register_forward_pre_hook(lambda module, args: HISTORY.append(1.0))
    replaced.forward = tagged  # type: ignore[method-assign]
    assert "uses append" in impurity(nn.Sequential(hooked))
    assert "uses append" in impurity(nn.Sequential(before))
    assert "tagged writes tag" in impurity(nn.Sequential(replaced))


def test_methods_that_no_code_names_are_looked_at() -> None:
    class Indexed(nn.Module):
        def __getitem__(self, at: int) -> int:
            self.asked = at
            return at

    model = Model(lambda s, x: x * s.part[0], part=Indexed())
    assert "__getitem__ writes asked" in impurity(model)


def test_inherited_methods_and_properties_are_looked_at() -> None:
    class Counting(nn.Module):
        def counted(self, x: Tensor) -> Tensor:
            self.calls = 1
            return x

        @property
        def scale(self) -> float:
            self.asked = True
            return 2.0

    class Derived(Counting):
        def forward(self, x: Tensor) -> Tensor:
            return self.counted(x)

    class Super(Counting):
        def counted(self, x: Tensor) -> Tensor:
            return super().counted(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.counted(x)

    class Layers(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    class Scaled(Counting):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    class Formatted(Counting):
        def forward(self, x: Tensor) -> Tensor:
            return x * float("{.scale}".format(self))  # noqa: UP032

    assert "counted writes calls" in impurity(Derived())
    assert "counted writes calls" in impurity(Super())
    assert impurity(Layers(nn.Linear(1, 1))) == ""
    assert "scale writes asked" in impurity(Scaled())
    assert "scale writes asked" in impurity(Formatted())


def test_what_cannot_be_looked_at_is_not_known() -> None:
    def outer() -> Callable[..., Any]:
        if False:
            later = 1
        return lambda s, x: x * later

    assert "cannot be looked at (ValueError)" in impurity(Model(outer()))


def test_a_users_code_is_not_run_to_look() -> None:
    class Delicate:
        def __getattr__(self, name: str) -> Any:
            pytest.fail(f"asked for {name}")

        def __eq__(self, other: object) -> bool:
            pytest.fail("compared")

        def __hash__(self) -> int:
            pytest.fail("hashed")

    class Items(list[int]):
        def __iter__(self) -> Iterator[int]:
            pytest.fail("iterated")

    lazy: Any = ModuleType("lazy")
    lazy.__getattr__ = lambda name: pytest.fail(f"asked for {name}")
    assert "uses lazy" in impurity(Model(lambda s, x: lazy.function(x)))
    assert "uses Model.function" in impurity(Model(Delicate()))
    assert "uses Model.items" in impurity(Model(lambda s, x: s.items[0] * x, items=Items()))
