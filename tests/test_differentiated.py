"""Training with an optimized model beside training with the model: outputs, gradients, state and random numbers agree.

model ──┬─▶ model(x), loss.backward(), … ──▶ gradients, buffers, parameters after each step, generator
        └─▶ optimize ────────────────────▶ the same, to 1e-10 in float64
"""

from __future__ import annotations

import copy
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
from autostream import differentiated
from autostream.api import OptimizedModule
from autostream.build import Scheduled
from autostream.errors import TraceError
from autostream.execution.lending import Lending
from tests.data_branches import DYNAMOS_OWN
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


class Two(nn.Module):
    """Two outputs that share no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.left(x), self.right(x)]


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


def one_output(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> list[Tensor]:
    """What the other one alone depends on has no gradient, so that it does not decay."""
    optimizer.zero_grad()
    found: list[Tensor] = fast(t(5, 4))
    found[number % 2].sum().backward()
    optimizer.step()
    return found


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
    "one of two outputs": (Two, one_output),
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


class InOnePlace(Scheduled):
    """Leaves what it lends in the same memory each time, as a captured graph does."""

    def lend(self, places: frozenset[int]) -> frozenset[int]:
        self.memory: dict[int, Tensor] = dict.fromkeys(places, torch.empty(0))
        return places

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        outputs = super().__call__(tensors)
        self.memory = {at: kept if kept.numel() else outputs[at].clone() for at, kept in self.memory.items()}
        for at, kept in self.memory.items():
            outputs[at] = kept.copy_(outputs[at])
        return list(outputs)


@pytest.mark.parametrize("name", BODIES)
def test_so_it_does_where_what_is_saved_is_overwritten_by_the_next_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked by leaving out what saves it from that: :meth:`Lending.recall` moves it away."""
    monkeypatch.setattr(differentiated, "Scheduled", InOnePlace)
    fast = assert_trains_alike(*BODIES[name], policy="sequential")
    assert modes(fast) - {"one stream"} == {"forward and backward"}
    monkeypatch.setattr(Lending, "recall", lambda lending: None)
    if name == "two forwards":
        with pytest.raises(AssertionError):
            assert_trains_alike(*BODIES[name], policy="sequential")


def test_what_is_saved_is_not_copied_where_each_call_goes_back_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differentiated, "Scheduled", InOnePlace)
    memory = set[int]()
    put_back = Lending.put_back

    def noting(lending: Lending, tensors: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        assert tensors
        memory.update(tensor.data_ptr() for tensor in (*tensors, *places))
        put_back(lending, tensors, places)

    monkeypatch.setattr(Lending, "put_back", noting)
    fast = autostream.optimize(Checkpointed().double(), policy="sequential")
    for seed in range(3):
        loss = fast(t(5, 4, seed=seed)).sum()  # the last one is still there when the next call is made
        loss.backward()
    assert len(memory) == 1


def test_a_backward_has_one_schedule_however_gradients_come() -> None:
    fast = autostream.optimize(Net().double(), policy="sequential")
    ones = torch.ones(5, 4, dtype=torch.float64)
    for gradient in (ones, ones[:1].expand(5, 4), ones.t().contiguous().t(), ones.to_sparse()):
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
    assert all(map(torch.equal, [p.grad for p in model.parameters()], [p.grad for p in twin.parameters()]))


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


def test_where_a_backward_needs_one_the_model_says_that_there_is_no_way() -> None:
    """As far as it gets, and no farther: what comes after it is not computed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    fast = autostream.optimize(model, policy="sequential")
    fast(torch.ones(2, 4)).sum().backward()
    with torch.inference_mode():
        x = torch.ones(2, 4)
    before = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        fast(x)
    assert torch.equal(before[0], torch.get_rng_state())
    close(list(before[1].values()), list(model.state_dict().values()))
    assert "made in inference mode" in reasons(fast)


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


# What runs as it is


class Branching(nn.Linear):
    """Chooses by data what to compute."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


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
    """Remembers gradients of its outputs, as some visualizations do."""

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


@pytest.mark.filterwarnings("ignore:Error detected in LogBackward0")
def test_anomaly_detection_sees_each_op_of_a_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Hidden()).double()
    fast = autostream.optimize(model, policy="sequential")
    x = t(3, 4, seed=0)
    fast(x).sum().backward()
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="LogBackward0' returned nan"):
        fast(x).sum().backward()
    fast(x).sum().backward()
    assert "anomaly detection" in "; ".join(own.reason for report in fast.reports for own in report.refusals)
    assert fast.reports[0].mode == "forward and backward"


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "an output shares memory": partial(Views, 4, 4),
    "a state that is put back": partial(Checkpointed, 0.5),
    "a gradient is sparse": Sparse,
    "backward hooks": hooked,
    "the model calls register_hook": partial(Listening, 4, 4),
    "not registered with it": Unregistered,
    "leaves its backward what that needs": Recurrent,
    "the model writes to its input": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)),
}


@pytest.mark.parametrize("reason", PLAIN)
def test_what_no_graph_would_do_runs_as_it_is_and_the_report_says_why(reason: str) -> None:
    fast = assert_trains_alike(PLAIN[reason], backward_only, policy="sequential")
    assert modes(fast) == {"plain"}
    assert reason in reasons(fast)


class Keeping(nn.Sequential):
    """Keeps what its first layer has computed, for others to ask for its gradient."""

    def forward(self, x: Tensor) -> Any:
        first, last = self
        self.kept = first(x).sin()
        return last(self.kept)


class Remembering(nn.Linear):
    """Goes on from where the last call has ended."""

    def forward(self, x: Tensor) -> Any:
        try:
            state = self.state
        except AttributeError:
            state = torch.zeros_like(x)
        state = super().forward(x + state).tanh()
        self.state = state.detach().clone()
        return state


def test_a_model_that_remembers_runs_as_it_is() -> None:
    """In pieces, TorchDynamo would go on to find that there is nothing to remember."""
    fast = assert_trains_alike(partial(Remembering, 4, 4), backward_only, steps=3, policy="sequential")
    assert modes(fast) == {"plain"}


def test_a_model_that_keeps_what_it_computes_runs_as_it_is() -> None:
    model = Keeping(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    fast = autostream.optimize(model, policy="sequential")
    for _ in range(2):
        y = fast(t(5, 4))
        model.kept.retain_grad()
        y.sum().backward()
        torch.testing.assert_close(model.kept.grad, model[1].weight.sum(0).expand(5, 4))
    assert modes(fast) == {"plain"}
    assert "changes its own attribute kept" in reasons(fast)


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


def test_a_model_that_goes_on_changing_is_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = list[object]()
    trace = differentiated.trace_gradients
    monkeypatch.setattr(differentiated, "trace_gradients", lambda *given: traces.append(given) or trace(*given))
    fast = autostream.optimize(Keeping(nn.Linear(4, 4), nn.Linear(4, 4)).double(), policy="sequential")
    for number in range(5):
        fast(t(5, 4)).sum().backward()
        assert modes(fast) == {"plain"}
        assert len(traces) == min(number + 1, 2)


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


@DYNAMOS_OWN
@pytest.mark.usefixtures("fresh_dynamo")
def test_an_object_that_no_tracer_knows_is_made_after_a_piece() -> None:
    """The tensors in it are computed by a scheduled forward, and their gradients by a scheduled backward."""
    models = [Returning(4, 4).double() for _ in range(2)]
    models[0].load_state_dict(models[1].state_dict())
    fast = autostream.optimize(models[0], policy="sequential")
    for number in range(3):
        for model, run in zip(models, (fast, models[1]), strict=True):
            run(t(5, 4, seed=number)).y.square().sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        close(list(models[0].state_dict().values()), list(models[1].state_dict().values()))
        close([own.grad for own in models[0].parameters()], [own.grad for own in models[1].parameters()])
    assert "Outputs is neither a tensor" in reasons(fast)
    assert modes(fast) == {"graph breaks"}
    assert {part.mode for report in fast.reports for part in report.parts} == {"forward and backward"}


def test_on_a_cpu_the_model_does_it_unless_somebody_asks_for_a_schedule() -> None:
    """There a schedule takes the host longer than small models take: nothing is captured."""
    fast = assert_trains_alike(partial(nn.Linear, 4, 4), backward_only)
    assert modes(fast) == {"plain"}
    assert "gradients are recorded on a CPU" in reasons(fast)
    fast = assert_trains_alike(partial(nn.Linear, 4, 4), backward_only, strict=True)
    assert modes(fast) == {"forward and backward"}


def test_strict_says_why_not() -> None:
    with pytest.raises(TraceError, match="data-dependent"):
        autostream.optimize(Branching(4, 4), strict=True)(torch.ones(2, 4))


def test_shapes_beyond_the_limit_run_as_they_are() -> None:
    """A schedule for each of many shapes would take longer than to train."""

    def growing(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
        found = fast(t(2 + number, 4))
        found.sum().backward()
        return found

    fast = assert_trains_alike(partial(nn.Linear, 4, 4), growing, policy="sequential", max_signatures=1)
    assert modes(fast) == {"forward and backward", "plain"}
    assert "as many schedules as max_signatures allows" in reasons(fast)


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


def noisy() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 4), nn.Tanh())


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))


class Scaling(nn.Linear):
    """Writes to its weight, and to a count that its result depends on."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("count", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x) * self.count.add_(1)  # type: ignore[operator]


def penalized(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    """The gradient of a gradient's norm, as some losses have it."""
    optimizer.zero_grad()
    x = t(5, 4, seed=number).requires_grad_()
    found = fast(x * 2)
    (gradient,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
    (gradient.norm() + found.sum()).backward()
    optimizer.step()
    return [found, gradient, x.grad]


@pytest.mark.parametrize("make", [Checkpointed, noisy, spectral, Scaling])
def test_gradients_of_gradients_are_those_of_the_model_itself(make: Callable[[], nn.Module]) -> None:
    """It draws the same numbers once more, and what it writes once more are copies of its state."""
    assert modes(assert_trains_alike(make, penalized, policy="sequential")) == {"forward and backward"}


def test_a_graph_that_is_kept_has_gradients_of_gradients_afterwards() -> None:
    def kept(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
        loss = fast(t(5, 4, seed=number)).square().sum()
        loss.backward(retain_graph=True)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        torch.stack([gradient.square().sum() for gradient in gradients]).sum().backward()
        return list(gradients)

    assert modes(assert_trains_alike(Checkpointed, kept, policy="sequential")) == {"forward and backward"}


def test_gradients_of_gradients_are_refused_where_weights_have_changed() -> None:
    layer = nn.Linear(4, 4).double()
    loss = autostream.optimize(layer, policy="sequential")(t(5, 4)).sum()
    with torch.no_grad():
        layer.bias.add_(1)  # nothing in the backward itself needs it
    with pytest.raises(RuntimeError, match=r"have changed since the call: call the model itself"):
        torch.autograd.grad(loss, list(layer.parameters()), create_graph=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "weight", nn.Parameter(model.weight.detach().clone())),
        lambda model: setattr(model.weight, "data", model.weight.data * 2),
    ],
)
def test_so_they_are_where_weights_lie_elsewhere(change: Callable[[nn.Linear], object]) -> None:
    layer = nn.Linear(4, 4).double()
    loss = autostream.optimize(layer, policy="sequential")(t(5, 4)).square().sum()
    weight = layer.weight
    change(layer)
    if layer.weight is weight:
        with pytest.raises(RuntimeError, match=r"weights or inputs have changed since the call"):
            torch.autograd.grad(loss, weight, create_graph=True)
    else:  # the call was made with the other, which is as it was
        assert torch.autograd.grad(loss, weight, create_graph=True)[0].requires_grad


class Tempered(nn.Module):
    """A number that is a plain attribute, one of a layer, and features beside what is computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 4)
        self.temperature, self.notes, self.factors = 1.0, [1.0], {"two": 1.0}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.dropout(self.first(x).tanh())
        factor = self.factors["two"] * FACTORS["one"]
        return (self.second(features) * self.temperature * self.notes[0] * factor).sin(), features


FACTORS = {"one": 1.0}


def annealed(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    """Two temperatures, one penalty."""
    x, found = t(5, 4, seed=number).requires_grad_(), list[Tensor]()
    for temperature in (1.0, 3.0):
        model.temperature, model.dropout.p, model.factors = temperature, temperature / 10, {"two": temperature}
        found.append(fast(x)[0].sum())
        model.notes[0] = 1 + temperature
        model.notes.append(found[-1].item())
    (gradient,) = torch.autograd.grad(torch.stack(found).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return [gradient.detach(), model.temperature, model.dropout.p, torch.tensor(model.notes)]


def looked_at(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    """Gradients of features at two temperatures."""
    losses, kept = [], []
    for temperature in (1.0, 3.0):
        model.temperature = temperature
        found, features = fast(t(5, 4, seed=number))
        features.retain_grad()
        losses.append(found.sum())
        kept.append(features)
    torch.stack(losses).sum().backward()
    return [features.grad for features in kept]


def frozen_since(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    """As a critic is, behind its forward."""
    x = t(5, 4, seed=number).requires_grad_()
    found, features = fast(x)
    features.retain_grad()
    model.first.requires_grad_(False)
    found.sum().backward(retain_graph=True)
    found = fast(x)[0]
    model.requires_grad_(False)
    (gradient,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    gradient.square().sum().backward()
    model.requires_grad_(True)
    return [features.grad, gradient.detach()]


@pytest.mark.parametrize("body", [annealed, looked_at, frozen_since])
def test_what_is_computed_once_more_is_the_call_as_it_was(body: Body) -> None:
    """Numbers that the model holds, and what requires gradients, have changed since."""
    assert modes(assert_trains_alike(Tempered, body, policy="sequential")) == {"forward and backward"}


def with_a_hook(model: Tempered) -> None:
    model.first.register_forward_hook(lambda module, args, output: output * 5)


def with_another_layer(model: Tempered) -> None:
    model.dropout = nn.Identity()  # type: ignore[assignment]


def with_another_global(model: Tempered) -> None:
    FACTORS["one"] = 2.0


@pytest.mark.parametrize("change", [with_a_hook, with_another_layer, with_another_global])
def test_gradients_of_gradients_are_refused_where_the_model_is_another(
    change: Callable[[Tempered], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FACTORS, "one", 1.0)
    model, x = Tempered().double(), t(5, 4).requires_grad_()
    found, _ = autostream.optimize(model, policy="sequential")(x)
    change(model)
    with pytest.raises(RuntimeError, match=r"the model has changed since the call: call the model itself"):
        torch.autograd.grad(found.sum(), x, create_graph=True)


@pytest.mark.parametrize("look", [Tensor.retain_grad, lambda own: own.register_hook(lambda gradient: -gradient)])
@pytest.mark.parametrize("at", [0, 1])
def test_gradients_of_gradients_are_refused_where_an_output_is_looked_at(
    look: Callable[[Tensor], Any], at: int
) -> None:
    """They lead to weights and inputs, and not by way of the outputs that the caller has."""
    x = t(5, 4).requires_grad_()
    outputs = autostream.optimize(Tempered().double(), policy="sequential")(x)
    look(outputs[at])
    with pytest.raises(RuntimeError, match=r"a hook of an output, or an output that retains its gradient, would miss"):
        torch.autograd.grad(outputs[0].sum(), x, create_graph=True)


def test_what_was_written_to_in_place_is_another_ops_output() -> None:
    x = t(5, 4).requires_grad_()
    found, _ = autostream.optimize(Tempered().double(), policy="sequential")(x)
    found.mul_(2)
    found.retain_grad()
    (gradient,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    assert gradient.requires_grad


def test_an_output_that_no_derivative_has_may_be_looked_at() -> None:
    x = t(5, 4).requires_grad_()
    found = autostream.optimize(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double(), policy="sequential"
    )(x)
    seen = list[Tensor]()
    found.register_hook(seen.append)
    (gradient,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert len(seen) == 1


def test_threads_that_go_back_leave_the_model_as_it_is() -> None:
    """From calls at other temperatures: each is put back for a while, by one after the other."""
    model = Tempered().double().eval()
    fast = autostream.optimize(model, policy="sequential")
    calls, expected = [], []
    for number in range(12):
        model.temperature = 1.0 + number % 2
        for run, kept in ((fast, calls), (model, expected)):
            x = t(5, 4, seed=number).requires_grad_()
            kept.append((run(x)[0].sum(), x))
    model.temperature = 3.0

    def penalty(loss: Tensor, x: Tensor) -> Tensor:
        return torch.autograd.grad(loss, x, create_graph=True)[0]

    found = in_threads(len(calls), lambda number: penalty(*calls[number]))
    close([gradient.detach() for gradient in found], [penalty(*call).detach() for call in expected])
    assert model.temperature == 3.0


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


def test_gradients_of_gradients_are_those_of_each_call_where_one_calls_the_other() -> None:
    """The second call's input depends on the weights as well, which is no business of the second call."""

    def twice(fast: Any, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
        found = fast(fast(t(5, 4)))
        gradients = torch.autograd.grad(found.square().sum(), list(model.parameters()), create_graph=True)
        torch.stack([gradient.square().sum() for gradient in gradients]).sum().backward()
        return list(gradients)

    assert_trains_alike(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), twice, steps=1, policy="sequential")


def test_autocast_is_as_it_was_for_gradients_of_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8, requires_grad=True)
    found = []
    for each in (model, autostream.optimize(model, policy="sequential")):
        with torch.autocast("cpu", torch.bfloat16):
            y = each(x)
        (gradient,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
        found += torch.autograd.grad(gradient.square().sum(), x)
    assert torch.equal(*found), "to the bit: what is not rounded to bfloat16 is not far off"


def test_it_can_be_explained() -> None:
    fast = autostream.optimize(nn.Linear(4, 4), policy="sequential")
    fast(torch.ones(2, 4)).sum().backward()
    (report,) = fast.reports
    assert [(part.half, part.model) for part in report.parts] == [("forward", "Linear"), ("backward", "LinearBackward")]
    assert "\n\nBackward\nmodel        LinearBackward\n" in autostream.explain(fast)
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
    assert any("the shape of an output depends on data" in own.reason for r in fast.reports for own in r.refusals)


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


def test_gradients_of_gradients_have_those_numbers_too() -> None:
    torch.manual_seed(0)
    ours, theirs = Asks(), Asks()
    theirs.load_state_dict(ours.state_dict())
    fast, x = autostream.optimize(ours, strict=True), torch.randn(2, 4)
    found = [
        torch.autograd.grad(run(x).sum(), own.lin.weight, create_graph=True)[0]
        for run, own in ((fast, ours), (theirs, theirs))
    ]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(
        *(torch.autograd.grad(each.sum(), own.lin.weight)[0] for each, own in zip(found, (ours, theirs), strict=True))
    )
