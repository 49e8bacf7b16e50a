"""Training with an optimized model beside training with the model: outputs, gradients, state and random numbers agree.

model ──┬─▶ model(x), loss.backward(), … ──▶ gradients, buffers, parameters after each step, generator
        └─▶ optimize ────────────────────▶ the same, to 1e-10 in float64
"""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autostream
from autostream.api import OptimizedModule
from autostream.dispatch import compiled_graph
from autostream.dispatch.compiled_graph import CompiledGraph
from autostream.errors import TraceError
from autostream.runtime.saved_activations import SavedActivations
from autostream.utils.storages import storage_of
from tests.captures import Captures
from tests.semantics import force_streams
from tests.threads import in_threads

Body = Callable[[Any, Any, torch.optim.Optimizer, int], Any]
"""What is done in a step with a model, optimized or not, its plain self, an optimizer, and the step's number."""


def t(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 100 * seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


class Net(nn.Module):
    """Two branches, a norm with statistics, dropout, an op in place, a tied weight, and a layer that is not used."""

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
    """Computes a part of itself once more in the backward."""

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
    """Then one backward for both, then a third call that goes back twice: gradients add up, and hooks see each."""
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
    """And loading a state, and moving a weight."""
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
    """Inputs are activations, in another layout, and gradients come in another layout too."""
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
    """The call is computed once more in the backward. It is traced under hooks that keep what it saves."""
    loss: Tensor = checkpoint(fast, t(5, 4), use_reentrant=False).square().sum()  # type: ignore[no-untyped-call]
    loss.backward()
    return loss


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 4))


BODIES: dict[str, tuple[Callable[[], nn.Module], Body]] = {
    "two forwards": (Net, two_forwards),
    "frozen": (Checkpointed, freezing),
    "evaluation": (Net, evaluating),
    "gradients of inputs": (Checkpointed, of_inputs),
    "containers": (ConvNet, of_a_container),
    "computed once more": (dropout, checkpointed),
}


def assert_trains_alike(make: Callable[[], nn.Module], body: Body, steps: int = 2, **options: Any) -> OptimizedModule:
    """Train twins, one of them optimized; after each step all that can be seen of them is the same."""
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
def test_it_trains_as_the_model_does(name: str) -> None:
    fast = assert_trains_alike(*BODIES[name], policy="sequential")
    assert modes(fast) - {"one stream"} == {"forward and backward"}
    assert {part.mode for report in fast.reports for part in report.parts} == {"one stream"}


def test_so_it_does_over_several_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = assert_trains_alike(*BODIES["two forwards"], **force_streams(monkeypatch))
    assert {part.mode for report in fast.reports for part in report.parts} == {"threads"}


class InOnePlace(CompiledGraph):
    """A forward leaves what it lends in the same memory each time, as a captured graph does."""

    shared: frozenset[int] = frozenset()

    def share_outputs(self, values: Sequence[Any], places: frozenset[int]) -> frozenset[int]:
        results: Any = self._module.graph.output_node().args[0]
        self.shared = frozenset(at for at in places if results[at].op == "call_function")
        return self.shared

    def __call__(self, *values: Any) -> list[Any]:
        outputs = list(super().__call__(*values))
        memory = self.__dict__.setdefault("memory", {})
        for at in self.shared:
            outputs[at] = memory.setdefault(at, outputs[at].clone()).copy_(outputs[at])
        return outputs


@pytest.fixture
def in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autostream.dispatch.dispatcher.CompiledGraph", InOnePlace)


@pytest.mark.usefixtures("in_one_place")
@pytest.mark.parametrize("name", BODIES)
def test_so_it_does_where_what_is_saved_is_overwritten_by_the_next_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked by leaving out what saves it from that: :meth:`SavedActivations.preserve` moves it away."""
    fast = assert_trains_alike(*BODIES[name], policy="sequential")
    assert modes(fast) - {"one stream"} == {"forward and backward"}
    monkeypatch.setattr(SavedActivations, "preserve", lambda lending: None)
    if name == "two forwards":
        with pytest.raises(AssertionError):
            assert_trains_alike(*BODIES[name], policy="sequential")


@pytest.mark.usefixtures("in_one_place")
def test_what_is_saved_is_not_copied_where_each_call_goes_back_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[int] = []
    preserve, share_outputs = SavedActivations.preserve, SavedActivations.alias

    def recalled(lending: SavedActivations) -> None:
        assert not any(borrowed() is not None for borrowed in lending._borrowed)
        preserve(lending)

    monkeypatch.setattr(SavedActivations, "preserve", recalled)
    monkeypatch.setattr(
        SavedActivations,
        "share_outputs",
        lambda own, memory: (shared.append(len(memory)), share_outputs(own, memory))[1],
    )
    monkeypatch.setattr("autostream.runtime.saved_activations.copier", lambda *_: pytest.fail("copied"))
    fast = autostream.optimize(dropout().double(), policy="sequential")
    for seed in range(3):
        loss = fast(t(5, 4, seed=seed)).sum()  # the last one is still there when the next call is made
        loss.backward()
    assert len(shared) == 3
    assert all(shared)


def test_a_backward_has_one_schedule_however_gradients_come() -> None:
    fast = autostream.optimize(Net().double(), policy="sequential")
    ones = torch.ones(5, 4, dtype=torch.float64)
    for gradient in (ones, ones[:1].expand(5, 4), ones.t().contiguous().t()):
        fast(t(5, 4)).backward(gradient)
    (report,) = fast.reports
    assert [part.half for part in report.parts] == ["forward", "backward"]


def test_a_scaler_and_autocast_are_around_it() -> None:
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
    """Computes its second layer without autocast, and so is its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.second(x.float())  # type: ignore[no-any-return]


def test_what_autocast_is_switched_off_for_is_so_both_ways() -> None:
    model = Careful()
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (each(t(5, 8).float()) for each in (autostream.optimize(model, policy="sequential"), twin))
    found.square().sum().backward()
    expected.square().sum().backward()
    assert found.dtype is expected.dtype is torch.float32
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0.02, atol=0.2)


def test_nobody_looks_on_while_a_schedule_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatch mode would see what is traced and timed, and TorchInductor's tracing fails under one."""
    active: list[int] = []
    program_of = compiled_graph.program_of

    def noted(*args: Any, **kwargs: Any) -> Any:
        active.append(torch._C._len_torch_dispatch_stack())
        return program_of(*args, **kwargs)

    monkeypatch.setattr(compiled_graph, "program_of", noted)
    fast = autostream.optimize(nn.Linear(4, 4), policy="sequential")
    fast(torch.ones(2, 4)).sum().backward()
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


def test_inputs_may_be_made_in_inference_mode_where_no_backward_needs_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    with torch.inference_mode():
        x = torch.ones(2, 4)
    autostream.optimize(model, policy="sequential")(x).sum().backward()
    assert torch.equal(model[1].bias.grad, torch.full((4,), 2.0))


def test_where_a_backward_needs_one_there_is_no_way() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fast = autostream.optimize(model, policy="sequential")
    fast(torch.ones(2, 4)).sum().backward()
    with torch.inference_mode():
        x = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        fast(x)


def test_many_gradients_of_an_output_may_go_back_at_once() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4, requires_grad=True)
    each = torch.eye(12).view(12, 3, 4)
    found, expected = (
        torch.autograd.grad(run(x), x, each, is_grads_batched=True)
        for run in (autostream.optimize(model, policy="sequential"), model)
    )
    torch.testing.assert_close(found, expected)


def test_inputs_are_let_go_after_a_backward_where_losses_are_kept() -> None:
    fast, kept = autostream.optimize(nn.Linear(4, 4), policy="sequential"), []
    for again in (True, False):
        x = torch.ones(2, 4)
        kept.append((fast(x).sum(), ref(x)))
        kept[-1][0].backward(retain_graph=again)
        del x
    assert [x() is None for _, x in kept] == [False, True]
    kept[0][0].backward()
    assert kept[0][1]() is None


def test_data_in_parallel_is_around_it() -> None:
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


# Models of all kinds


class Views(nn.Linear):
    """An output is a view of another."""

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
    """Remembers the gradients of what it computes, as some visualizations do."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x.register_hook(partial(setattr, self, "seen"))
        return x * 1


class Unregistered(nn.Linear):
    """Holds a tensor that others may take the place of, or that may come to require gradients."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.mask = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.mask


class Recurrent(nn.LSTM):
    """In float32, whatever others are: the kernel is for that alone."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.float())[0] * 1

    def double(self) -> Recurrent:
        return self


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_full_backward_pre_hook(lambda module, out: tuple(2 * gradient for gradient in out))
    return model


def backward_only(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    optimizer.zero_grad()
    found = fast(t(5, 4, seed=number))
    (found[0] if isinstance(found, list) else found).sum().backward()
    return found


class Hidden(nn.Module):
    """A gradient within is not a number, and those that come out are."""

    def forward(self, x: Tensor) -> Tensor:
        large = x > 1e9
        return torch.where(large, torch.where(large, x, 0.0).log(), x)


KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an output is a view of another": (partial(Views, 4, 4), "forward and backward"),
    "a part is checkpointed and draws": (partial(Checkpointed, 0.5), "forward and backward"),
    "a gradient is sparse": (Sparse, "forward and backward"),
    "it registers a hook": (partial(Listening, 4, 4), "graph breaks"),
    "it holds a tensor": (Unregistered, "forward and backward"),
    "it writes to its input": (
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)),
        "forward and backward",
    ),
    "Module-level backwards hooks": (hooked, "plain"),
    "leaves its backward nothing": (Recurrent, "plain"),
}
"""What is peculiar, by which the report may say why it runs plainly."""


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_all_kinds_are_trained_alike(kind: str) -> None:
    make, mode = KINDS[kind]
    fast = assert_trains_alike(make, backward_only, policy="sequential")
    assert modes(fast) == {mode}
    assert (kind in reasons(fast)) == (mode == "plain")


class Configured(nn.Linear):
    """Finds out in its first call what it is for, as classifiers of transformers do."""

    factors: list[float] | None = None

    def forward(self, x: Tensor) -> Any:
        if self.factors is None:
            self.factors = [float(x.shape[-1])]
        return (super().forward(x) * self.factors[0]).sin()


def test_what_a_first_call_makes_for_all_others_is_no_obstacle_to_these() -> None:
    fast = assert_trains_alike(partial(Configured, 4, 4), backward_only, steps=3, policy="sequential")
    assert modes(fast) == {"forward and backward"}


class Featured(nn.Sequential):
    """Returns what its first layer has computed, too."""

    def forward(self, x: Tensor) -> Any:
        first, last = self
        features = first(x).sin() * 1
        return [last(features), features]


def test_a_loss_may_take_an_output_and_another_that_is_computed_from_it() -> None:
    """And go back from one after the other, where the graph is kept."""

    def body(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
        optimizer.zero_grad()
        y, features = found = fast(t(5, 4, seed=number))
        if number:
            (y.sum() + features.square().sum()).backward()
        else:
            y.sum().backward(retain_graph=True)
            features.square().sum().backward()
        return found

    fast = assert_trains_alike(lambda: Featured(nn.Linear(4, 4), nn.Linear(4, 3)), body, policy="sequential")
    assert modes(fast) == {"forward and backward"}


class Outputs:
    """What no tracer knows."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


class Returning(nn.Linear):
    """Returns an object, as models do that keep a cache of keys and values."""

    def forward(self, x: Tensor) -> Any:
        return Outputs(super().forward(x).sin())


def test_an_object_that_no_tracer_knows_may_be_returned() -> None:
    models = [Returning(4, 4).double() for _ in range(2)]
    models[0].load_state_dict(models[1].state_dict())
    fast = autostream.optimize(models[0], policy="sequential")
    for number in range(3):
        for model, run in zip(models, (fast, models[1]), strict=True):
            run(t(5, 4, seed=number)).y.square().sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        close(list(models[0].state_dict().values()), list(models[1].state_dict().values()))
        close([own.grad for own in models[0].parameters()], [own.grad for own in models[1].parameters()])
    assert modes(fast) == {"forward and backward"}


def test_on_a_cpu_the_model_does_it_unless_somebody_asks_for_a_schedule() -> None:
    """There a schedule takes the host longer than small models take: nothing is captured."""
    fast = assert_trains_alike(partial(nn.Linear, 4, 4), backward_only)
    assert modes(fast) == {"plain"}
    assert "gradients are recorded on a CPU" in reasons(fast)
    fast = assert_trains_alike(partial(nn.Linear, 4, 4), backward_only, strict=True)
    assert modes(fast) == {"forward and backward"}


class Branching(nn.Linear):
    """Chooses by data what to compute."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def test_strict_says_why_not() -> None:
    with pytest.raises(TraceError, match=r"Data-dependent branching \(.*test_gradients.py:\d+: .* if x.sum\(\) > 0"):
        autostream.optimize(Branching(4, 4), strict=True)(torch.ones(2, 4))


def test_shapes_beyond_the_limit_run_as_they_are() -> None:
    """A schedule for each of many shapes would take longer than to train."""

    def growing(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
        found = fast(t(2 + number, 4))
        found.sum().backward()
        return found

    fast = assert_trains_alike(partial(nn.Linear, 4, 4), growing, policy="sequential", max_signatures=1)
    assert modes(fast) == {"forward and backward", "plain"}
    assert "as many signatures as max_signatures allows" in reasons(fast)


# What torch.compile does otherwise than the model


class Chain(nn.Module):
    """Some of its outputs are computed from others, d is not, and e is nothing that is trained.

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
"""What is done with the outputs of a call, and what is seen of it."""


def parameters(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def loss_of_all(model: nn.Module, found: list[Tensor]) -> list[Tensor | None]:
    a, b, c, d, _ = found
    (a.sum() + 2 * b.square().sum() + c.sum() + d.sum()).backward()
    return parameters(model)


def one_of_them(model: nn.Module, found: list[Tensor]) -> list[Tensor | None]:
    """Weights that only others depend on have gradients of zero, so that they decay."""
    found[3].sum().backward()
    assert parameters(model)[0] is not None
    return parameters(model)


def retained(model: nn.Module, found: list[Tensor]) -> list[Tensor | None]:
    """What comes by way of others is left out."""
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


def for_some_alone(model: nn.Module, found: list[Tensor]) -> list[Tensor | None]:
    found[2].sum().backward(inputs=[model.second.weight])
    return parameters(model)


def twice(model: nn.Module, found: list[Tensor]) -> list[Tensor | None]:
    _, b, c, d, _ = found
    c.sum().backward(retain_graph=True)
    (b.sum() + d.sum()).backward()
    return parameters(model)


def written(model: nn.Module, found: list[Tensor]) -> list[Tensor | None]:
    _, _, c, d, _ = found
    c.mul_(2)
    (c.sum() + d.sum()).backward()
    return parameters(model)


def kept_by_the_model(model: nn.Module, found: list[Tensor]) -> list[Tensor | None]:
    """What it keeps is an output as any other is."""
    kept: Any = model.kept
    kept.retain_grad()
    found[2].sum().backward()
    return [kept.detach(), kept.grad, *parameters(model)]


def penalized(model: nn.Module, found: list[Tensor]) -> list[Tensor | None]:
    """Gradients of gradients are refused, where they are asked for."""
    (slope,) = torch.autograd.grad(found[2].sum(), model.first.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        slope.square().sum().backward()
    return [slope.detach()]


def looking_for_nans(model: nn.Module, found: list[Tensor]) -> list[Tensor | None]:
    with torch.autograd.set_detect_anomaly(True):
        found[2].sum().backward()
    return parameters(model)


USES: list[Use] = [
    *(loss_of_all, one_of_them, retained, hooked_outputs, asked_for, for_some_alone, twice, written),
    *(kept_by_the_model, penalized, looking_for_nans),
]


def assert_as_compiled(use: Use, device: str) -> None:
    """Twins, one of them compiled by ``torch.compile``, with outputs that are computed from others."""
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
def test_who_looks_sees_what_torch_compile_shows(use: Use) -> None:
    assert_as_compiled(use, "cpu")


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_so_it_is_with_captured_graphs(use: Use) -> None:
    assert_as_compiled(use, "cuda")


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection_sees_a_backward_as_one_op() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Hidden()).double()
    fast, x = autostream.optimize(model, policy="sequential"), t(3, 4)
    with torch.autograd.set_detect_anomaly(True):
        fast(x).sum().backward()
        with pytest.raises(RuntimeError, match="CompiledFunctionBackward' returned nan"):
            fast(x * torch.nan).sum().backward()


# What autograd refuses


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
def test_mistakes_are_found_as_ever(mistake: Callable[[nn.Module, Tensor], None]) -> None:
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


def test_a_backward_has_the_weights_of_its_forward() -> None:
    make = partial(nn.Sequential, nn.Linear(4, 6).double(), nn.Tanh(), nn.Linear(6, 2).double())
    assert modes(assert_trains_alike(lambda: copy.deepcopy(make()), given_other_memory, policy="sequential")) == {
        "forward and backward"
    }


def test_a_backward_may_come_behind_a_change_of_dtype() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    found = autostream.optimize(layer, policy="sequential")(t(5, 4))
    expected = torch.autograd.grad(layer(t(5, 4)).sum(), layer[0].weight)[0]
    layer.float()
    found.sum().backward()
    torch.testing.assert_close(layer[0].weight.grad, expected, check_dtype=False)


def test_it_can_be_explained() -> None:
    fast = autostream.optimize(nn.Linear(4, 4), policy="sequential")
    fast(torch.ones(2, 4)).sum().backward()
    (report,) = fast.reports
    assert [(part.half, part.model) for part in report.parts] == [("forward", "Linear"), ("backward", "Linear")]
    assert "\n\nBackward\nmodel        Linear\n" in autostream.explain(fast)
    forward, backward = json.loads(report.to_json())["parts"]
    assert (forward["half"], forward["summary"]["width"]) == ("forward", 1)
    assert (backward["half"], backward["summary"]["width"]) == ("backward", 2), "the weight's gradient and the bias'"


class Counts(nn.Linear):
    """Returns as many as there are numbers above zero."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum() + torch.arange((x > 0).sum().item())  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("back", [Tensor.sum, Tensor.mean, lambda y: (y * torch.ones_like(y)).sum()])
def test_an_output_of_a_length_that_a_run_tells_has_the_plain_models_gradients(
    back: Callable[[Tensor], Tensor],
) -> None:
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
    """Asks tensors for numbers, and writes to them afterwards."""

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


@pytest.mark.parametrize("between", ["nothing", "a write", "a write that nobody counts", "another forward"])
def test_a_backward_has_the_numbers_that_its_forward_had(between: str) -> None:
    torch.manual_seed(0)
    ours, theirs = Asks(), Asks()
    theirs.load_state_dict(ours.state_dict())
    fast, x = autostream.optimize(ours, strict=True), torch.randn(2, 4)
    for run, own in ((fast, ours), (theirs, theirs)):
        loss = run(x).sum()
        if between == "a write":
            own.ema.add_(1)
        elif between == "a write that nobody counts":
            own.ema.data.add_(1)
        elif between == "another forward":
            run(x)
        loss.backward()
    torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])
    torch.testing.assert_close(ours.ema, theirs.ema)


# What stays of a call


def test_nothing_of_a_call_stays_when_its_outputs_go() -> None:
    """Neither with a backward nor without one, and of the first call no more than of others."""
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


def test_a_model_takes_its_graphs_along() -> None:
    gc.collect()
    others = {id(found) for found in gc.get_objects() if type(found) is CompiledGraph}
    model = Chain().double()
    fast = autostream.optimize(model, policy="sequential")
    fast(t(5, 4))[2].sum().backward()
    held = [ref(found) for found in gc.get_objects() if type(found) is CompiledGraph and id(found) not in others]
    assert len(held) >= 2
    weights = [ref(own) for own in model.parameters()]
    del model, fast
    gc.collect()
    assert not any(own() for own in (*held, *weights))


def test_what_is_saved_stays_where_it_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured: unless another call comes before the backward. Then it is copied, and the backward is as ever."""
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


# Others who look on


def test_hooks_of_saved_tensors_are_called() -> None:
    """What is packed is elsewhere by the time of the backward."""
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    def body(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.clone()):
            found = fast(t(5, 4, seed=number))
        found.sum().backward()
        return found

    fast = assert_trains_alike(dropout, body, policy="sequential")
    assert packed
    assert modes(fast) == {"forward and backward"}


@pytest.mark.usefixtures("in_one_place")
def test_so_they_are_where_what_is_saved_is_lent() -> None:
    test_hooks_of_saved_tensors_are_called()


@pytest.mark.parametrize("shared", [False, True])
def test_threads_have_gradients_of_their_own_calls(shared: bool, request: pytest.FixtureRequest) -> None:
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


@pytest.mark.usefixtures("in_one_place")
def test_evaluation_between_forward_and_backward_does_no_harm() -> None:
    def body(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
        found = fast(t(5, 4, seed=number))
        with torch.no_grad():
            seen = fast(t(5, 4, seed=9))
        found.square().sum().backward()
        return [found, seen]

    fast = assert_trains_alike(Net, body, policy="sequential")
    assert modes(fast) == {"forward and backward", "one stream"}


def test_gradients_of_a_convolution_are_ops_of_their_own() -> None:
    fast = autostream.optimize(nn.Sequential(*(nn.Conv2d(3, 3, 3) for _ in range(2))), policy="sequential")
    fast(torch.ones(1, 3, 6, 6)).sum().backward()
    ((_, backward),) = (report.parts for report in fast.reports)
    assert sum("convolution_backward" in op.name for op in backward.graph.ops.values()) == 3
