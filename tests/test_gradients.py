"""Gradients: training with an optimized model and with the model give equal outputs, gradients, state and generators.

model ──┬─▶ model(x), loss.backward(), … ──▶ gradients, buffers, parameters after each step, generator
        └─▶ optimize ────────────────────▶ the same, to 1e-10 in float64
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.convert_frame import register_bytecode_hook
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autostream
from autostream.api import OptimizedModule
from autostream.dispatch import compiled_graph
from autostream.dispatch.compiled_graph import CompiledGraph
from autostream.runtime.saved_activations import SavedActivations
from autostream.utils.storages import storage_of
from tests.captures import Captures
from tests.in_one_place import InOnePlace
from tests.semantics import force_streams
from tests.threads import in_threads

Body = Callable[[Any, Any, torch.optim.Optimizer, int], Any]
"""A training step; takes a model, optimized or not, the model itself, an optimizer, and the number of the step."""


def t(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 100 * seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


class Net(nn.Module):
    """Two branches, batch statistics, dropout, an op in place, a tied weight, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)
        self.norm, self.dropout, self.head = nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 4)
        self.head.weight = self.left.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.left(x)).relu_() + self.right(x).tanh()
        return self.head(self.dropout(x)).sigmoid()  # type: ignore[no-any-return]


class ConvNet(nn.Module):
    """Returns a container, with an output that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.head(self.pool(self.stem(x)).flatten(1))
        return {"logits": x, "kinds": x.argmax(1), "norms": x.detach().square().sum(1)}


class Checkpointed(nn.Module):
    """Recomputes a part of itself in the backward."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 4), nn.Dropout(p), nn.Tanh()), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))  # type: ignore[no-any-return]


def plain(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    loss = fast(t(5, 4, seed=number)).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def two_forwards(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Any]:
    """Then one backward for both, then a third call with two backwards: gradients add up, and hooks see each."""
    seen: list[Tensor] = []
    optimizer.zero_grad()
    with (
        model.left.weight.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2),
        model.right.bias.register_post_accumulate_grad_hook(lambda bias: seen.append(bias.grad.clone())),
    ):
        first, second = fast(t(5, 4)), fast(t(5, 4, seed=1))
        (first * second.detach() + second.sum()).sum().backward()
        third = fast(t(5, 4, seed=2))
        third.sum().backward(retain_graph=True)
        third.square().mean().backward()
    assert len(seen) == 6
    optimizer.step()
    return [first, second, third, *sorted(seen, key=Tensor.dim)]


def freezing(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    model.body.requires_grad_(number > 0)
    return plain(fast, model, optimizer, number)


def evaluating(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Tensor]:
    """Also loads a state, and moves a weight."""
    loss = plain(fast, model, optimizer, number)
    fast.eval()
    with torch.no_grad():
        found = fast(t(5, 4))
    in_eval = fast(t(5, 4))
    in_eval.sum().backward()
    fast.train()
    fast.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})
    model.right.weight.data = model.right.weight.data.clone()
    return [loss, found, in_eval]


def of_inputs(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Any]:
    """Inputs are activations, and they and the gradients of outputs are transposed."""
    x = t(4, 5, seed=number).requires_grad_()
    y = fast((x * 2).t())
    y.t().backward(t(5, 4).t())
    return [y, x.grad]


def of_a_container(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Any]:
    optimizer.zero_grad()
    found = fast(t(2, 3, 4, 4, seed=number))
    assert [value.requires_grad for value in found.values()] == [True, False, False]
    F.cross_entropy(found["logits"], torch.tensor([number % 4, 1])).backward()
    optimizer.step()
    return list(found.values())


def checkpointed(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    """The call is recomputed in the backward. It is traced under hooks for saved tensors."""
    loss: Tensor = checkpoint(fast, t(5, 4), use_reentrant=False).square().sum()  # type: ignore[no-untyped-call]
    loss.backward()
    return loss


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 4))


def evaluated(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Any]:
    """A call without gradients between forward and backward."""
    found = fast(t(5, 4, seed=number))
    with torch.no_grad():
        seen = fast(t(5, 4, seed=9))
    found.square().sum().backward()
    return [found, seen]


def packed(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    """Hooks for saved tensors, which are other tensors by the time of the backward."""
    saved: list[Tensor] = []
    hooks = (lambda tensor: (saved.append(tensor), tensor.clone())[1], lambda tensor: tensor.clone())
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        found = fast(t(5, 4, seed=number))
    found.sum().backward()
    assert saved
    return found


BODIES: dict[str, tuple[Callable[[], nn.Module], Body]] = {
    "two forwards": (Net, two_forwards),
    "frozen": (Checkpointed, freezing),
    "evaluation": (Net, evaluating),
    "gradients of inputs": (Checkpointed, of_inputs),
    "containers": (ConvNet, of_a_container),
    "recomputed": (dropout, checkpointed),
    "evaluation in between": (Net, evaluated),
    "hooks for saved tensors": (dropout, packed),
}


def assert_trains_alike(make: Callable[[], nn.Module], body: Body, steps: int = 2, **options: Any) -> OptimizedModule:
    """Train two copies of a model, one of them optimized, and compare them after each step."""
    torch.manual_seed(0)
    model = make().double()
    twin = copy.deepcopy(model)
    fast = autostream.optimize(model, **options)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, twin)]
    for number in range(steps):
        torch.manual_seed(number)
        found, generator = body(fast, model, optimizers[0], number), torch.get_rng_state()
        torch.manual_seed(number)
        expected = body(twin, twin, optimizers[1], number)
        assert torch.equal(generator, torch.get_rng_state())
        close(found, expected)
        close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
        close(list(model.state_dict().values()), list(twin.state_dict().values()))
    return fast


def close(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, Tensor):
        assert ours.requires_grad == theirs.requires_grad
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            close(mine, other)


def modes(fast: OptimizedModule) -> set[str]:
    return {report.mode for report in fast.reports}


def reasons(fast: OptimizedModule) -> str:
    return "; ".join(refusal.reason for report in fast.reports for refusal in report.refusals)


@pytest.mark.parametrize("name", BODIES)
def test_it_trains_like_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over one stream; with two forwards, over several."""
    streams = name == "two forwards"
    fast = assert_trains_alike(*BODIES[name], **force_streams(monkeypatch) if streams else {"policy": "sequential"})
    assert modes(fast) - {"one stream", "threads"} == {"forward and backward"}
    parts = {part.mode for report in fast.reports for part in report.parts}
    assert parts == ({"threads"} if streams else {"one stream"})


@pytest.fixture
def in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autostream.dispatch.entries.CompiledGraph", InOnePlace)


@pytest.mark.usefixtures("in_one_place")
@pytest.mark.parametrize("name", ["two forwards", "evaluation", "evaluation in between", "recomputed"])
def test_saved_activations_may_be_overwritten_by_the_next_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """:meth:`SavedActivations.preserve` moves them away; without it, gradients are wrong."""
    fast = assert_trains_alike(*BODIES[name], policy="sequential")
    assert modes(fast) - {"one stream"} == {"forward and backward"}
    monkeypatch.setattr(SavedActivations, "preserve", lambda lending: None)
    if name == "two forwards":
        with pytest.raises(AssertionError):
            assert_trains_alike(*BODIES[name], policy="sequential")


def test_a_backward_has_one_schedule_however_gradients_come() -> None:
    fast = autostream.optimize(Net().double(), policy="sequential")
    ones = torch.ones(5, 4, dtype=torch.float64)
    for gradient in (ones, ones[:1].expand(5, 4), ones.t().contiguous().t()):
        fast(t(5, 4)).backward(gradient)
    (report,) = fast.reports
    assert [part.half for part in report.parts] == ["forward", "backward"]


def test_a_scaler_and_autocast_may_be_around_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    twin = copy.deepcopy(model)
    fast = autostream.optimize(model, policy="sequential")
    x, losses = t(5, 8).float(), []
    for each in (fast, twin):
        scaler, optimizer = torch.amp.GradScaler("cpu", 8.0), torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = each(x).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
    assert losses[:3] == losses[3:]
    assert modes(fast) == {"forward and backward"}


class Careful(nn.Module):
    """Its second layer, and the backward of that, are not autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.second(x.float())  # type: ignore[no-any-return]


def test_autocast_may_be_disabled_for_a_part() -> None:
    model = Careful()
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (each(t(5, 8).float()) for each in (autostream.optimize(model, policy="sequential"), twin))
    found.square().sum().backward()
    expected.square().sum().backward()
    assert found.dtype is expected.dtype is torch.float32
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0.02, atol=0.2)


def test_forward_and_backward_are_compiled_outside_of_dispatch_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a mode saw what was traced and timed, and TorchInductor's tracing failed under it."""
    active: list[int] = []
    program_of = compiled_graph.program_of
    monkeypatch.setattr(
        compiled_graph,
        "program_of",
        lambda *call: (active.append(torch._C._len_torch_dispatch_stack()), program_of(*call))[1],
    )
    autostream.optimize(nn.Linear(4, 4), policy="sequential")(torch.ones(2, 4)).sum().backward()
    assert active == [0, 0]


def test_a_buffer_may_come_to_require_gradients() -> None:
    model = nn.Linear(4, 4)
    del model.bias
    model.bias = nn.Buffer(torch.ones(4))
    fast = autostream.optimize(model, policy="sequential")
    fast(torch.ones(2, 4)).sum().backward()
    model.bias.requires_grad_()
    fast(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model.bias.grad, torch.full((4,), 2.0))
    assert modes(fast) == {"forward and backward"}


def test_an_inference_tensor_may_be_an_input_unless_the_backward_needs_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fast = autostream.optimize(model, policy="sequential")
    fast(torch.ones(2, 4)).sum().backward()
    with torch.inference_mode():
        x = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        fast(x)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    autostream.optimize(model, policy="sequential")(x).sum().backward()
    assert torch.equal(model[1].bias.grad, torch.full((4,), 2.0))


def test_batched_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4, requires_grad=True)
    each = torch.eye(12).view(12, 3, 4)
    found, expected = (
        torch.autograd.grad(run(x), x, each, is_grads_batched=True)
        for run in (autostream.optimize(model, policy="sequential"), model)
    )
    torch.testing.assert_close(found, expected)


def test_inputs_are_freed_after_the_backward_though_the_loss_is_kept() -> None:
    fast, kept = autostream.optimize(nn.Linear(4, 4), policy="sequential"), []
    for again in (True, False):
        x = torch.ones(2, 4)
        kept.append((fast(x).sum(), ref(x)))
        kept[-1][0].backward(retain_graph=again)
        del x
    assert [x() is None for _, x in kept] == [False, True]
    kept[0][0].backward()
    assert kept[0][1]() is None


def test_distributed_data_parallel_may_be_around_it() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, twin = Checkpointed().double(), Checkpointed().double()
        twin.load_state_dict(model.state_dict())
        fast = autostream.optimize(model, policy="sequential")
        for each in (nn.parallel.DistributedDataParallel(fast), twin):
            each(t(5, 4)).square().mean().backward()
        close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
        assert modes(fast) == {"forward and backward"}
    finally:
        dist.destroy_process_group()


# Models


class Views(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return [x, x[0]]


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed((x > 0).long().sum(1))  # type: ignore[no-any-return]


class Listening(nn.Linear):
    """Has a hook on the gradient of its output, as some visualizations do."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x.register_hook(partial(setattr, self, "seen"))
        return x * 1


class Unregistered(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.mask = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.mask


class Recurrent(nn.LSTM):
    """In float32, the only dtype of its kernel."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.float())[0] * 1

    def double(self) -> Recurrent:
        return self


class Configured(nn.Linear):
    """Configures itself in the first call, as classifiers of transformers do."""

    factors: list[float] | None = None

    def forward(self, x: Tensor) -> Any:
        if self.factors is None:
            self.factors = [float(x.shape[-1])]
        return (super().forward(x) * self.factors[0]).sin()


class Outputs:
    def __init__(self, y: Tensor) -> None:
        self.y = y


class Returning(nn.Linear):
    """Returns an object, as models do that return a cache of keys and values."""

    def forward(self, x: Tensor) -> Any:
        return Outputs(super().forward(x).sin())


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_full_backward_pre_hook(lambda module, out: tuple(2 * gradient for gradient in out))
    return model


def backward_only(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    optimizer.zero_grad()
    found = fast(t(5, 4, seed=number))
    found = found.y if isinstance(found, Outputs) else found
    (found[0] if isinstance(found, list) else found).sum().backward()
    return found


class Hidden(nn.Module):
    """An intermediate gradient is nan, but those of inputs are numbers."""

    def forward(self, x: Tensor) -> Tensor:
        large = x > 1e9
        return torch.where(large, torch.where(large, x, 0.0).log(), x)


KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an output is a view of another": (partial(Views, 4, 4), "forward and backward"),
    "a part is checkpointed and draws": (partial(Checkpointed, 0.5), "forward and backward"),
    "a gradient is sparse": (Sparse, "forward and backward"),
    "it registers a hook": (partial(Listening, 4, 4), "graph breaks"),
    "it returns an object": (partial(Returning, 4, 4), "forward and backward"),
    "it holds a tensor": (Unregistered, "forward and backward"),
    "it sets an attribute in its first call": (partial(Configured, 4, 4), "forward and backward"),
    "it writes to its input": (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), "forward and backward"),
    "Module-level backwards hooks": (hooked, "plain"),
    "leaves its backward nothing": (Recurrent, "plain"),
}
"""Models, and their mode; where that is "plain", the key is part of the reason."""


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_all_kinds(kind: str) -> None:
    make, mode = KINDS[kind]
    fast = assert_trains_alike(make, backward_only, policy="sequential")
    assert modes(fast) == {mode}
    assert (kind in reasons(fast)) == (mode == "plain")


def test_on_a_cpu_it_runs_eagerly_by_default() -> None:
    """A schedule would take the host longer than eager calls take."""
    fast = assert_trains_alike(partial(nn.Linear, 4, 4), backward_only)
    assert modes(fast) == {"plain"}
    assert "gradients are recorded on a CPU" in reasons(fast)
    fast = assert_trains_alike(partial(nn.Linear, 4, 4), backward_only, strict=True)
    assert modes(fast) == {"forward and backward"}


# Outputs, compared with torch.compile's


class Chain(nn.Module):
    """Some outputs are computed from others; d is not, and e requires no gradient.

    x ── first ──▶ a ── second ──▶ b ── * a ── third ──▶ c
    └── other ──▶ d, e
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third, self.other = (nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Any:
        a = self.norm(self.first(x)).tanh()
        self.kept = a * 2
        b = self.second(self.kept).sigmoid()
        c = self.third(a * b).square()
        return [a, b, c, self.other(x).sin(), x.sum() * 2]


Use = Callable[[nn.Module, list[Tensor]], list[Tensor | None]]
"""Uses the outputs of a call; returns gradients."""


def parameters(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def one_of_them(model: nn.Module, found: list[Tensor]) -> list[Tensor | None]:
    """Weights of the other outputs have gradients of zero, so that they decay."""
    found[3].sum().backward()
    assert parameters(model)[0] is not None
    return parameters(model)


def retained(model: nn.Module, found: list[Tensor]) -> list[Tensor | None]:
    """Retained gradients leave out what comes through other outputs."""
    a, b, c, d, _ = found
    a.retain_grad()
    b.retain_grad()
    (c.sum() + 3 * a.sum() + d.sum()).backward()
    return [a.grad, b.grad, *parameters(model)]


def hooked_outputs(model: nn.Module, found: list[Tensor]) -> list[Tensor | None]:
    a, b, c, *_ = found
    seen: list[Tensor | None] = []
    a.register_hook(lambda gradient: (seen.append(gradient), gradient * 2)[1])
    b.register_hook(lambda gradient: (seen.append(gradient), gradient * 0)[1])
    (c.sum() + b.sum() + a.sum()).backward()
    return [*seen, *parameters(model)]


def asked_for(model: nn.Module, found: list[Tensor]) -> list[Tensor | None]:
    a, b, c, d, _ = found
    some = torch.autograd.grad(c.sum() + a.sum(), [a, b], allow_unused=True, retain_graph=True)
    others = torch.autograd.grad(c.sum(), [a, model.first.weight, b], allow_unused=True, retain_graph=True)
    (c.sum() + d.sum()).backward()
    return [*some, *others, *parameters(model)]


def twice(model: nn.Module, found: list[Tensor]) -> list[Tensor | None]:
    _, b, c, d, _ = found
    c.sum().backward(retain_graph=True)
    (b.sum() + d.sum()).backward()
    return parameters(model)


def kept_by_the_model(model: nn.Module, found: list[Tensor]) -> list[Tensor | None]:
    """A tensor that the model keeps is an output like any other."""
    kept: Any = model.kept
    kept.retain_grad()
    found[2].sum().backward()
    return [kept.detach(), kept.grad, *parameters(model)]


def penalized(model: nn.Module, found: list[Tensor]) -> list[Tensor | None]:
    (slope,) = torch.autograd.grad(found[2].sum(), model.first.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        slope.square().sum().backward()
    return [slope.detach()]


def looking_for_nans(model: nn.Module, found: list[Tensor]) -> list[Tensor | None]:
    with torch.autograd.set_detect_anomaly(True):
        found[2].sum().backward()
    return parameters(model)


USES: list[Use] = [
    *(one_of_them, retained, hooked_outputs, asked_for, twice),
    *(kept_by_the_model, penalized, looking_for_nans),
]


def assert_as_compiled(use: Use, device: str) -> None:
    """Compare with a copy that ``torch.compile`` compiles."""
    seen = []
    for how in (
        lambda model: autostream.optimize(model, policy="sequential"),
        lambda model: torch.compile(model, backend="aot_eager"),
    ):
        model = Chain().to(device).double()
        run: Any = how(model)
        donated = isinstance(run, OptimizedModule)  # torch.compile's would not let graphs be kept
        seen.append([])
        for number in range(2):
            x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number)).to(device)
            model.zero_grad()
            with torch._functorch.config.patch(donated_buffer=donated):
                found = run(x)
            assert [own.requires_grad for own in found] == [True] * 4 + [False]
            with torch._functorch.config.patch(donated_buffer=donated):
                seen[-1] += [*use(model, found), *model.state_dict().values()]
        if isinstance(run, OptimizedModule):
            assert modes(run) == {"forward and backward"}
    torch.testing.assert_close(*seen, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_uses_of_outputs(use: Use) -> None:
    assert_as_compiled(use, "cpu")


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_uses_of_outputs_of_captured_graphs(use: Use) -> None:
    assert_as_compiled(use, "cuda")


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection_sees_a_backward_as_one_op() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Hidden()).double()
    fast, x = autostream.optimize(model, policy="sequential"), t(3, 4)
    with torch.autograd.set_detect_anomaly(True):
        fast(x).sum().backward()
        with pytest.raises(RuntimeError, match="CompiledFunctionBackward' returned nan"):
            fast(x * torch.nan).sum().backward()


# Mistakes


def write_to_the_output(model: nn.Module, y: Tensor) -> None:
    y.mul_(2).sum().backward()


def write_to_a_weight(model: nn.Module, y: Tensor) -> None:
    with torch.no_grad():
        model[1].weight.mul_(2)  # type: ignore[index, union-attr, operator]
    y.sum().backward()


def go_back_twice(model: nn.Module, y: Tensor) -> None:
    y.sum().backward()
    y.sum().backward()


@pytest.mark.parametrize("mistake", [write_to_the_output, write_to_a_weight, go_back_twice])
def test_mistakes_raise_as_in_eager(mistake: Callable[[nn.Module, Tensor], None]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Sigmoid())
    for each in (model, autostream.optimize(model, policy="sequential")):
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|a second time"):
            mistake(model, each(torch.ones(2, 4)))


def given_other_memory(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    found = fast(t(5, 4, seed=number))
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    found.square().sum().backward()
    return found


def test_a_backward_uses_the_weights_of_its_forward() -> None:
    make = partial(nn.Sequential, nn.Linear(4, 6).double(), nn.Tanh(), nn.Linear(6, 2).double())
    assert modes(assert_trains_alike(lambda: copy.deepcopy(make()), given_other_memory, policy="sequential")) == {
        "forward and backward"
    }
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    found = autostream.optimize(layer, policy="sequential")(t(5, 4))
    expected = torch.autograd.grad(layer(t(5, 4)).sum(), layer[0].weight)[0]
    layer.float()
    found.sum().backward()
    torch.testing.assert_close(layer[0].weight.grad, expected, check_dtype=False)


class Counts(nn.Linear):
    """Returns as many numbers as there are above zero in its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum() + torch.arange((x > 0).sum().item())  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("back", [Tensor.sum, Tensor.mean, lambda y: (y * torch.ones_like(y)).sum()])
def test_an_output_whose_shape_depends_on_data(back: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    ours = Counts(4, 4)
    theirs, fast = copy.deepcopy(ours), autostream.optimize(ours, policy="critical_path")
    for seed in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        for run in (fast, theirs):
            run.zero_grad()
            back(run(x)).backward()
        torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


class Asks(nn.Module):
    """Reads numbers from tensors, and writes to these afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.ema = nn.Linear(4, 4), nn.Buffer(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        number = self.ema.item()
        with torch.no_grad():
            self.ema.mul_(0.5)
        hidden = self.lin(x) * number
        other = hidden.detach().mean(1)
        scale = other[0].item()
        other.add_(1)
        return (hidden * scale * other[0].item()).tanh()


@pytest.mark.parametrize("between", ["nothing", "a write", "a write without a version", "another forward"])
def test_a_backward_uses_the_numbers_that_its_forward_read(between: str) -> None:
    torch.manual_seed(0)
    ours, theirs = Asks(), Asks()
    theirs.load_state_dict(ours.state_dict())
    fast, x = autostream.optimize(ours, strict=True), torch.randn(2, 4)
    for run, own in ((fast, ours), (theirs, theirs)):
        loss = run(x).sum()
        if between == "a write":
            own.ema.add_(1)
        elif between == "a write without a version":
            own.ema.data.add_(1)
        elif between == "another forward":
            run(x)
        loss.backward()
    torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])
    torch.testing.assert_close(ours.ema, theirs.ema)


# Memory


def test_nothing_of_a_call_stays_when_its_outputs_are_freed() -> None:
    """With a backward and without one, also of the first call. Graphs are freed with the model."""
    gc.collect()
    others = {id(graph) for graph in gc.get_objects() if type(graph) is CompiledGraph}
    fast = autostream.optimize(Chain().double(), policy="sequential")
    for backward in (True, True, False):
        x = t(5, 4)
        found = fast(x)
        held = [ref(own.untyped_storage()) for own in (x, *found[:4])]
        if backward:
            found[2].sum().backward()
        fast._autostream.model.kept = None
        del found, x
        gc.collect()
        assert not any(own() for own in held)
    graphs = [ref(graph) for graph in gc.get_objects() if type(graph) is CompiledGraph and id(graph) not in others]
    assert len(graphs) >= 2
    del fast
    gc.collect()
    assert not any(graph() for graph in graphs)


def test_saved_activations_are_copied_only_if_another_forward_comes_before_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With captured graphs. Else they stay in the memory of the forward's graph."""
    Captures(monkeypatch)
    model = Net().double()
    fast = autostream.optimize(model, policy="sequential")
    given = {storage_of(own) for own in (*model.parameters(), *model.buffers())}

    def computed(output: Tensor) -> set[int]:
        saved_by: Any = output.grad_fn
        return {storage_of(saved) for saved in saved_by.saved_tensors if saved.numel()} - given

    inputs, places = [t(5, 4, seed=seed) for seed in range(3)], []
    for x in inputs:
        output = fast(x)
        places.append(computed(output) - {storage_of(x)})
        output.sum().backward()
    kept = set.intersection(*places)
    assert kept
    first, _ = fast(inputs[0]), fast(inputs[1])
    assert kept.isdisjoint(computed(first))
    first.sum().backward()


# Threads


@pytest.mark.parametrize("shared", [False, True])
def test_threads_get_the_gradients_of_their_calls(shared: bool, request: pytest.FixtureRequest) -> None:
    if shared:
        request.getfixturevalue("in_one_place")
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).double()
    fast = autostream.optimize(model, policy="sequential")

    def gradient(run: Any, number: int) -> Tensor:
        x = t(5, 4, seed=number).requires_grad_()
        return torch.autograd.grad(run(x).square().sum(), x)[0]

    found = in_threads(8, lambda number: [gradient(fast, number + 8 * turn) for turn in range(4)])
    for number, own in enumerate(found):
        close(own, [gradient(model, number + 8 * turn) for turn in range(4)])


@pytest.mark.parametrize("where", ["before", "in a graph before"])
def test_a_backward_of_a_loss_that_was_computed_before_reaches_the_weights(where: str) -> None:
    """Though Dynamo finds no weight in the graph in which it would trace the backward."""
    losses: dict[str, Tensor] = {}

    def update(linear: nn.Linear, x: Tensor) -> Tensor:
        if where == "in a graph before":
            losses["loss"] = linear(x).square().mean()
            torch._dynamo.graph_break()
        losses["loss"].backward()  # type: ignore[no-untyped-call]
        return x * 2

    torch.manual_seed(0)
    linear, x = nn.Linear(4, 1), torch.ones(3, 4)
    fast = autostream.optimize(update, policy="critical_path", streams=2)
    for _ in range(2):
        linear.zero_grad()
        losses["loss"] = linear(x).square().mean()
        torch.testing.assert_close(fast(linear, x), x * 2)
        found = linear.weight.grad
        (expected,) = torch.autograd.grad(linear(x).square().mean(), [linear.weight])
        torch.testing.assert_close(found, expected)


def test_dynamo_compiles_nothing_of_what_a_backward_behind_a_graph_break_runs() -> None:
    """It would compile 800 frames of autostream's own, in seconds, and go through them in each later call."""

    def update(linear: nn.Linear, x: Tensor) -> Tensor:
        loss = linear(x).square().mean()
        torch._dynamo.graph_break()
        loss.backward()  # type: ignore[no-untyped-call]
        return x * 2

    fast, files = autostream.optimize(update, policy="critical_path", streams=2), set[str]()
    handle = register_bytecode_hook(lambda code, new: files.add(code.co_filename))
    try:
        fast(nn.Linear(4, 1), torch.ones(3, 4))
    finally:
        handle.remove()
    assert __file__ in files
    assert not [name for name in files if "/autostream/dispatch/" in name or "/autostream/tuning/" in name]
