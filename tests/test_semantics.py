"""An optimized model does what the eager model does: captured as one graph, split at graph breaks, or run eagerly.

Each case is called in three grad modes, beside a copy of the eager model. These are compared: results, arguments and
state after the call, to the bit; which tensors are the same object or share memory; layouts; random generators.
"""

from __future__ import annotations

import random
import re
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autostream
from autostream.reporting.parts import captured_share
from tests.semantics import CONFIGURATIONS, GRAD_MODES, Beside, Model, check_same, force_streams, same, t

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@dataclass
class Pair:
    """A dataclass that is not registered with pytree."""

    x: Tensor
    n: int = 3


Named = namedtuple("Named", "a b")


def model_output(s: Model, inputs: Any) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(last_hidden_state=inputs.last_hidden_state + 1, pooler_output=None)


def a_model_output() -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=t(3))


def several_views_of_a_result(s: Model, x: Tensor) -> Any:
    z = x * 2
    return z, z.t(), z[0], z, (x + 1).split(1), z.expand(2, 3, 4), z.unfold(0, 2, 1)


def writes_overlapping_inputs(s: Model, x: Tensor, y: Tensor) -> Any:
    x.add_(1)
    z = y * 2
    y.mul_(3)
    return z + x.sum(), x, y


def writes_inputs(s: Model, x: Tensor, y: Tensor) -> Any:
    x.add_(y)
    y.relu_()
    x[0].zero_()
    x[:, 1] = x[:, 0]
    x[x > 1] = 0
    return x.sum(), y[1:]


def writes_and_returns_nothing(s: Model, x: Tensor) -> None:
    x.add_(1)


def counts_in_buffers(s: Model, x: Tensor) -> Any:
    s.count.add_(1)
    s.last.copy_(x)
    return x * s.count, s.last


def chains_of_in_place_ops(s: Model, x: Tensor) -> Tensor:
    for _ in range(6):
        a = x * 2
        a.view(-1).add_(1)
        x = x + a.relu()
        x[1:].mul_(0.5)
    return x


def random_ops(s: Model, x: Tensor) -> Any:
    noise = torch.rand(3), torch.randn(2), torch.randperm(5), torch.rand_like(x)
    return *noise, torch.bernoulli(x.sigmoid()), x.clone().uniform_(), x.exponential_()


def autocasts_a_part(s: Model, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = s.layer(x)
    return y, s.layer(x)


def records_gradients_inside(s: Model, x: Tensor) -> Any:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((y**3).sum(), y)
    return slope


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer(self.layer(x) * 2)


def tied_input() -> Any:
    layer = nn.Linear(3, 3)
    return layer, layer.weight


def overlapping() -> Any:
    base = t(4, 4)
    return base[0:2], base[1:3]


def twice_the_same() -> Any:
    x = t(2, 4)
    return x, x


def buffer_as_input() -> Any:
    buffer = nn.Buffer(torch.zeros(3))

    def writes_the_buffer(s: Model, x: Tensor) -> Any:
        s.buffer.add_(1)
        return x * 2, s.buffer + 1

    return Model(writes_the_buffer, buffer=buffer), buffer


class Handle:
    """An object of a type that no tracer knows."""

    factor = 2

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle)

    __hash__ = None  # type: ignore[assignment]


Case = tuple[Any, Sequence[Any], Mapping[str, Any]]
"""A model, and the arguments of a call."""


def case(model: Any, *args: Any, **kwargs: Any) -> Case:
    return model, args, kwargs


CAPTURED: Mapping[str, Callable[[], Case]] = {
    # Arguments and results of all kinds.
    "keywords": lambda: case(Model(lambda s, x, y=None, *, z=1: x * z + y), t(3, 4), y=t(3, 4), z=3),
    "nested containers": lambda: case(
        Model(lambda s, d: {"a": [d["x"] + 1, {"b": (d["l"][0] * 2, None, 3, "s")}], "c": d["t"][1]}),
        {"x": t(2), "l": [t(3)], "t": (1, t(2))},
    ),
    "dataclass": lambda: case(Model(lambda s, pair: Pair(pair.x * pair.n, 4)), Pair(t(3))),
    "ModelOutput": lambda: case(Model(model_output), a_model_output()),
    "named tuple": lambda: case(Model(lambda s, n: Named(n.b + 1, n.a * 2)), Named(t(3), t(3))),
    "constants": lambda: case(
        Model(lambda s, x, n, text, f, dtype: (x.to(dtype) * n * f, text, n, f, dtype, None)),
        t(3),
        2,
        "text",
        float("nan"),
        torch.float64,
    ),
    "sizes": lambda: case(Model(lambda s, x: (x.shape, x.size(0), x.dtype, x.device, x.relu().shape)), t(8, 2)),
    "no inputs": lambda: case(Model(lambda s: s.weight * 2, weight=nn.Parameter(t(3)))),
    "complex numbers": lambda: case(
        Model(lambda s, x: (torch.fft.fft(x), torch.fft.fft(x).conj(), torch.fft.ifft(torch.fft.fft(x)).real)), t(8)
    ),
    "several results of an op": lambda: case(
        Model(lambda s, x: (x.topk(2), x.sort(), x.max(0), torch.unique(x), torch.var_mean(x))), t(8)
    ),
    "sizes that depend on data": lambda: case(Model(lambda s, x: (x[x > 0] * 2).sin()), t(8)),
    "parameters as inputs": lambda: case(Model(lambda s, x: (x * 2, x, x[1:])), nn.Parameter(t(3))),
    "a function": lambda: case(lambda x, y=2: (x * y, x + y), t(3), y=4),
    "an object": lambda: case(Model(lambda s, x, h: x * h.factor), t(3), Handle()),
    "vmap inside": lambda: case(Model(lambda s, x: torch.vmap(lambda row: row.sum() * row)(x)), t(3, 4)),
    # Aliases.
    "outputs that are inputs": lambda: case(Model(lambda s, x, y: (x, y, x, y + 1)), t(3), t(3)),
    "outputs that are views of inputs": lambda: case(
        Model(lambda s, x: (x[1:], x.t(), x.view(-1), x.detach(), x.view_as(x), x.contiguous(), x.to(x.dtype))), t(3, 4)
    ),
    "outputs that alias each other": lambda: case(Model(several_views_of_a_result), t(3, 4)),
    "outputs that are state": lambda: case(
        Model(lambda s, x: (s.w, s.w.t(), x @ s.w, s.b), w=nn.Parameter(t(4, 4)), b=nn.Buffer(t(4))), t(3, 4)
    ),
    "a container that is given back": lambda: case(Model(lambda s, d: (d, d["a"] + 1)), {"a": t(3)}),
    "overlapping inputs, written": lambda: case(Model(writes_overlapping_inputs), *overlapping()),
    "one tensor twice, written": lambda: case(Model(writes_overlapping_inputs), *twice_the_same()),
    "a weight as input": lambda: case(*tied_input()),
    "a buffer as input, written": lambda: case(*buffer_as_input()),
    # Layouts.
    "not contiguous": lambda: case(Model(lambda s, x: (x + 1, x.relu(), x.t() @ x)), t(4, 6)[:, ::2]),
    "expanded": lambda: case(Model(lambda s, x: (x + 1, x.contiguous() * 2, x.sum(0))), t(1, 6).expand(4, 6)),
    "zero elements": lambda: case(Model(lambda s, x: (x + 1, x.sum(), x.reshape(0), torch.cat([x, x]))), t(0, 6)),
    # State.
    "a module called twice": lambda: case(Twice(), t(3, 4)),
    "batchnorm in train mode": lambda: case(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.BatchNorm2d(4)), t(2, 3, 8, 8)
    ),
    "counters in buffers": lambda: case(
        Model(counts_in_buffers, count=nn.Buffer(torch.zeros(())), last=nn.Buffer(torch.zeros(3))), t(3)
    ),
    "tensors as plain attributes": lambda: case(Model(lambda s, x: (x + s.shift, s.shift), shift=t(3)), t(3)),
    "parametrized weights": lambda: case(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), t(3)),
    "power iteration in train mode": lambda: case(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), t(3)),
    # Writes.
    "inputs written": lambda: case(Model(writes_inputs), t(3, 4), t(3, 4)),
    "an input written, nothing returned": lambda: case(Model(writes_and_returns_nothing), t(3)),
    "out arguments": lambda: case(Model(lambda s, x, out: torch.add(x, 1, out=out)), t(3), torch.zeros(3)),
    "chains of in-place ops": lambda: case(Model(chains_of_in_place_ops), t(3, 4)),
    # Random numbers.
    "dropout in train mode": lambda: case(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.2), nn.AlphaDropout(0.1)), t(4, 8)
    ),
    "random numbers": lambda: case(Model(random_ops), t(3)),
    "recurrent, with dropout": lambda: case(nn.GRU(4, 5, 2, dropout=0.5), t(2, 3, 4)),
    # Modes and higher-order ops.
    "autocast inside": lambda: case(Model(autocasts_a_part, layer=nn.Linear(4, 4)), t(3, 4)),
    "checkpoint": lambda: case(
        Model(lambda s, x: checkpoint(s.layer, x, use_reentrant=False), layer=nn.Linear(3, 3)), t(3)
    ),
    "cond, and random numbers": lambda: case(
        Model(lambda s, x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)) + torch.rand(3)), t(3)
    ),
    "a number that is returned": lambda: case(Model(lambda s, x: (x * 2, x.sum().item())), t(3)),
    "a buffer that is replaced": lambda: case(Model(replaces_a_buffer, buffer=nn.Buffer(t(3))), t(3)),
    "a plain attribute that is written": lambda: case(Model(writes_a_plain_attribute, shift=t(3)), t(3)),
    "a list that grows": lambda: case(Model(appends), [t(3)]),
    "a dictionary that grows": lambda: case(Model(inserts), {"a": t(3)}),
    "a number taken from a tensor": lambda: case(Model(lambda s, x: x * x.sum().item()), t(3)),
}


@pytest.mark.parametrize("configuration", ["default", "scattered"])
@pytest.mark.parametrize("name", CAPTURED)
def test_a_model_that_is_captured_as_one_graph(name: str, configuration: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, kwargs = CAPTURED[name]()
    options = CONFIGURATIONS[configuration](monkeypatch)
    model = Beside(model) if configuration == "scattered" else model
    fast = check_same(model, (list(args), kwargs), {**options, "strict": True})
    modes = {report.mode for report in fast.reports}
    assert modes == {"threads"} if configuration == "scattered" else modes <= {"threads", "one stream"}


@pytest.mark.xfail(torch.__version__ < (2, 13), reason="Dynamo of 2.11 breaks at requires_grad_()", strict=True)
def test_gradients_recorded_inside() -> None:
    """Not in inference mode, where the eager model cannot record any."""
    fast = check_same(Model(records_gradients_inside), ([t(3)], {}), {"strict": True}, [torch.no_grad] * 2)
    assert fast.reports[0].mode == "one stream"


class WithGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def __deepcopy__(self, memo: object) -> WithGenerator:
        return WithGenerator()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(3, generator=self.generator)


def fork_rng(s: Model, x: Tensor) -> Any:
    with torch.random.fork_rng():
        apart = torch.rand(3)
    return x + apart, torch.rand(3)


def appends(s: Model, values: list[Tensor]) -> list[Tensor]:
    values.append(values[0] * 2)
    return values


def inserts(s: Model, values: dict[str, Tensor]) -> dict[str, Tensor]:
    values["b"] = values["a"] * 2
    return values


def replaces_a_buffer(s: Model, x: Tensor) -> Tensor:
    s.buffer = s.buffer + x
    return s.buffer * 2


def writes_a_plain_attribute(s: Model, x: Tensor) -> Tensor:
    s.shift.add_(1)
    return x + s.shift


def raises_a_lookup_error(s: Model, x: Tensor) -> Tensor:
    raise KeyError("no such thing")


def raises_at_positive_sums(s: Model, x: Tensor) -> Tensor:
    x.add_(1)
    if x.sum() > -1e9:
        raise ValueError("the sum is too large")
    return x


def writes_breaks_and_raises(s: Model, x: Tensor) -> Tensor:
    x.add_(1)
    print(end="")
    if x.sum() > 0:
        x.mul_(2)
    return x @ x


def shrinks(s: Model, x: Tensor) -> torch.Size:
    x.resize_(2)
    return x.shape


def gives_a_result_other_memory(s: Model, x: Tensor) -> Tensor:
    y = x + 1
    y.data = x * 2
    return y + 1


SPLIT: Mapping[str, tuple[Callable[[], Case], str]] = {
    "control flow that depends on data": (
        lambda: case(Model(lambda s, x: x + 1 if x.sum() > 0 else x - 1), t(3)),
        "Python branches on",
    ),
    "averages over all batches": (
        lambda: case(nn.BatchNorm1d(4, momentum=None), t(5, 4)),
        "Python branches on",
    ),
    "sparse inside": (lambda: case(Model(lambda s, x: x.to_sparse().sum().sin()), t(3, 3)), "sparse"),
    "an input that is resized": (lambda: case(Model(shrinks), t(3)), ""),
    "an input that is transposed in place": (lambda: case(Model(lambda s, x: x.t_()), t(3, 4)), ""),
    "NumPy": (lambda: case(Model(lambda s, x: torch.from_numpy(x.numpy() + 1)), t(3)), "numpy"),
    "random numbers of Python": (lambda: case(Model(lambda s, x: x * random.random()), t(3)), ""),
    "random numbers whose generator is put back": (lambda: case(Model(fork_rng), t(3)), ""),
    "a generator of its own": (lambda: case(WithGenerator(), t(3)), ""),  # each version of torch says it otherwise
    "an exception": (lambda: case(Model(raises_a_lookup_error), t(3)), "exception"),
    "an exception that depends on data": (
        lambda: case(Model(raises_at_positive_sums), t(3)),
        "Python branches on",
    ),
    "an exception after a graph break": (lambda: case(Model(writes_breaks_and_raises), t(2, 3).abs()), ""),
    "a result that is given other memory": (lambda: case(Model(gives_a_result_other_memory), t(3)), "data"),
}


@pytest.mark.parametrize("name", SPLIT)
def test_a_model_with_graph_breaks_or_errors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, reason = SPLIT[name]
    model, args, kwargs = make()
    np.random.seed(3)
    fast = check_same(model, (list(args), kwargs), CONFIGURATIONS["scattered"](monkeypatch))
    refused = [report for report in fast.reports if report.refusals]
    assert refused
    assert {report.mode for report in refused} <= {"graph breaks", "plain"}
    assert all(reason in refusal.reason for report in refused for refusal in report.refusals[:1])


def random_numbers_of_numpy(s: Model, x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.random.rand(4).astype("float32"))


@torch.no_grad()
def test_random_numbers_of_numpy_are_those_of_eager_calls() -> None:
    model, x = Model(random_numbers_of_numpy), t(3, 4)
    fast = autostream.optimize(model)
    for _ in range(3):
        np.random.seed(0)
        expected, after = model(x), np.random.rand()
        np.random.seed(0)
        torch.testing.assert_close(fast(x), expected, rtol=0, atol=0)
        assert np.random.rand() == after


class WithDice(nn.Module):
    """Uses a generator of its own, Python's or NumPy's."""

    def __init__(self, dice: Any) -> None:
        super().__init__()
        self.dice = dice

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dice.random()


@torch.no_grad()
@pytest.mark.parametrize("make", [random.Random, np.random.default_rng])
def test_generators_that_are_attributes_are_used_in_every_call(make: Callable[[int], Any]) -> None:
    model, x = WithDice(make(0)), t(3)
    fast = autostream.optimize(WithDice(make(0)))
    fast.prepare(x)
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0)


@torch.no_grad()
def test_scalars_of_numpy_stay_scalars() -> None:
    model = Model(lambda s, x: (x + 1, x.numpy().mean()))
    fast = autostream.optimize(model)
    assert type(fast(t(3))[1]) is type(model(t(3))[1]) is np.float32


def test_graphs_before_and_after_an_item_are_scheduled_and_say_why_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two branches before it, and two after it, whose sign depends on the number.

    sin ─┐                 ┌─ sin ─┐
         ├─ add ── item ───┤       ├─ mul
    cos ─┘                 └─ cos ─┘
    """

    def sign_of_sum(s: Model, x: Tensor) -> Tensor:
        y = x.sin() + x.cos()
        sign = 1 if y.sum().item() < 1e9 else -1
        return sign * y.sin() * y.cos()

    options = force_streams(monkeypatch)
    fast = check_same(Model(sign_of_sum), ([t(3)], {}), options, [torch.no_grad] * 2)
    (report,) = fast.reports
    first, last = report.parts
    assert [part.mode for part in report.parts] == ["threads", "threads"]
    assert [sorted(op.partition("_")[0] for op in part.graph.ops) for part in report.parts] == [
        ["add", "cos", "sin", "sum"], ["cos", "mul", "mul", "sin"],
    ]  # fmt: skip
    assert re.search(r"Tensor\.item\(\).* \(.*test_semantics\.py:\d+: sign = .*y\.sum\(\)\.item\(\) .*\)", first.ended)
    assert last.ended == "", "the model returns"
    told = autostream.explain(fast)
    assert first.ended in told
    assert "the model returns" in told
    assert captured_share(report) is None, "nothing is captured on a CPU"


def requires_an_input(s: Model, x: Tensor) -> Tensor:
    x.requires_grad_()
    return x * 2


def returns_what_requires(s: Model, x: Tensor) -> Any:
    with torch.enable_grad():
        y = x.detach().clone()
        y.requires_grad = True
        return y, y * 2


def makes_doubles(s: Model, x: Tensor) -> Tensor:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    ones = torch.ones(3)
    torch.set_default_dtype(default)
    return x + ones


EAGER: Mapping[str, tuple[Callable[[], Case], str]] = {
    "a number alone": (lambda: case(Model(lambda s: 3)), "computes nothing"),
    "a sparse tensor": (lambda: case(Model(lambda s, x: (x * 2).to_dense()), t(3, 3).to_sparse()), "torch.sparse_coo"),
    "a meta tensor": (lambda: case(Model(lambda s, x: (x * 2).shape), t(3).to("meta")), "is on meta"),
    "an input that is said to require gradients": (lambda: case(Model(requires_an_input), t(3)), "requires_grad_"),
    "a result that is said to": (lambda: case(Model(lambda s, x: x.clone().requires_grad_()), t(3)), "requires_grad"),
    "a result of what is said to": (lambda: case(Model(returns_what_requires), t(3)), "requires_grad"),
    "another default dtype": (lambda: case(Model(makes_doubles), t(3)), "default_dtype"),
    "lazy parameters": (lambda: case(nn.LazyLinear(3), t(3)), "first call"),
}


@pytest.mark.parametrize("name", EAGER)
def test_a_model_that_runs_eagerly(name: str) -> None:
    make, reason = EAGER[name]
    model, args, kwargs = make()
    fast = check_same(model, (list(args), kwargs), {}, (*GRAD_MODES, torch.enable_grad))
    assert any(reason in refusal.reason for report in fast.reports for refusal in report.refusals)
    assert any(report.mode in ("plain", "graph breaks") for report in fast.reports)
    assert torch.get_default_dtype() is torch.float32


@torch.no_grad()
@pytest.mark.parametrize("lazy", [torch.conj, torch._neg_view])
def test_lazily_conjugated_or_negated_inputs_run_eagerly(lazy: Callable[[Tensor], Tensor]) -> None:
    x = lazy(torch.view_as_complex(t(4, 2)))
    model = Model(lambda s, x: (x * 2, x))
    fast = autostream.optimize(model)
    same(fast(x), model(x))
    assert fast.reports[0].mode == "plain"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrap", [nn.Sequential, torch.jit.script, torch.jit.freeze])
def test_torchscript_runs_eagerly(wrap: Callable[[Any], nn.Module]) -> None:
    """``torch.compile`` refuses TorchScript, and a frozen module has no mode."""
    model = wrap(torch.jit.script(nn.Linear(3, 3).eval()))
    with torch.no_grad():
        fast = autostream.optimize(model, t(3))
        same(fast(t(3)), model(t(3)))
    assert [report.mode for report in fast.reports] == ["plain"]
