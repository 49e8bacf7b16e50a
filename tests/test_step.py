"""Training steps as users write them: any losses, optimizers and averages, in one graph that computes the same."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

import autostream
from autostream import MismatchError, TargetError

Update = Callable[..., Any]
Made = tuple[Update, Sequence[Optimizer], nn.Module]
"""A step function, its optimizers, and all modules."""


def layers(*widths: int) -> nn.Sequential:
    parts = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*parts[:-1]).double()


def sac() -> Made:
    """Twin critics with target networks, an actor that samples, and a temperature: three optimizers."""
    actor, critics = layers(3, 8, 4), nn.ModuleList([layers(5, 8, 1), layers(5, 8, 1)])
    targets = copy.deepcopy(critics).requires_grad_(False)
    log_temperature = nn.Parameter(torch.zeros((), dtype=torch.double))
    critic_adam = torch.optim.Adam(critics.parameters(), lr=1e-2)
    actor_adam = torch.optim.AdamW(actor.parameters(), lr=1e-2)
    temperature_adam = torch.optim.Adam([log_temperature], lr=1e-2)

    def sample(state: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_deviation = actor(state).chunk(2, dim=-1)
        policy = torch.distributions.Normal(mean, log_deviation.exp())
        action = policy.rsample()
        return action.tanh(), policy.log_prob(action).sum(-1, keepdim=True)

    def values(models: nn.ModuleList, state: Tensor, action: Tensor) -> list[Tensor]:
        return [model(torch.cat([state, action], -1)) for model in models]

    def update(state: Tensor, action: Tensor, reward: Tensor, following: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            next_action, next_likelihood = sample(following)
            worst = torch.min(*values(targets, following, next_action))
            goal = reward + 0.99 * (worst - log_temperature.exp() * next_likelihood)
        critic_loss = sum(F.mse_loss(value, goal) for value in values(critics, state, action))
        critic_adam.zero_grad()
        critic_loss.backward()
        critic_adam.step()

        new_action, likelihood = sample(state)
        actor_loss = (
            log_temperature.exp().detach() * likelihood - torch.min(*values(critics, state, new_action))
        ).mean()
        actor_adam.zero_grad()
        actor_loss.backward()
        actor_adam.step()

        temperature_loss = -(log_temperature * (likelihood.detach() - 2)).mean()
        temperature_adam.zero_grad()
        temperature_loss.backward()
        temperature_adam.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(targets.parameters()), list(critics.parameters()), 0.005)
        return {"critic": critic_loss, "actor": actor_loss, "temperature": temperature_loss}

    whole = nn.ModuleList([actor, critics, targets])
    whole.log_temperature = log_temperature
    return update, (critic_adam, actor_adam, temperature_adam), whole


def gan() -> Made:
    """Two models that train in turn, the one against the other, with dropout in one of them."""
    generator, critic = layers(2, 8, 3), nn.Sequential(layers(3, 8), nn.Dropout(0.2), layers(8, 1))
    generator_optimizer = torch.optim.RMSprop(generator.parameters(), lr=1e-2)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=1e-2, momentum=0.9, nesterov=True)

    def update(real: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        fake = generator(torch.randn(len(real), 2, dtype=torch.double))
        critic_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        critic_loss.backward()
        critic_optimizer.step()
        critic_optimizer.zero_grad()
        generator_loss = F.softplus(-critic(fake)).mean()
        generator_loss.backward()
        nn.utils.clip_grad_value_(generator.parameters(), 0.1)
        generator_optimizer.step()
        generator_optimizer.zero_grad()
        critic_optimizer.zero_grad()
        return critic_loss, generator_loss

    return update, (generator_optimizer, critic_optimizer), nn.ModuleList([generator, critic])


def accumulated() -> Made:
    """Three parts of a batch whose gradients add up, batch statistics, and an average of the weights."""
    model = nn.Sequential(layers(3, 8), nn.BatchNorm1d(8).double(), nn.Linear(8, 2).double())
    model[2].bias.requires_grad_(False)
    average = copy.deepcopy(model).requires_grad_(False)
    # The gradient of a bias before batch norm is rounding, which differs, and must not become a step of full size.
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-1, eps=1e-4)

    def update(x: Tensor, *_: Tensor) -> list[Tensor]:
        losses = []
        for part in x.chunk(3):
            loss = model(part).square().mean() / 3
            loss.backward()
            losses.append(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, now in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(now, 0.1)
        return losses

    return update, (optimizer,), nn.ModuleList([model, average])


def written_with_grad() -> Made:
    """Gradients by ``torch.autograd.grad``, given to the optimizer by hand; a penalty on the gradient of an input."""
    model = layers(3, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(x: Tensor, *_: Tensor) -> Tensor:
        loss = model(x).square().mean()
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()
        return loss

    return update, (optimizer,), model


EAGER_KERNELS = {"policy": "critical_path", "kernels": "eager"}


def batch(at: int) -> tuple[Tensor]:
    return (torch.randn(4, 3, dtype=torch.double),)


def course(
    make: Callable[[], Made],
    wrap: Callable[[Any, Sequence[Optimizer]], Update] = lambda update, _: update,
    between: Callable[[int, Any, Sequence[Optimizer]], object] = lambda at, modules, optimizers: None,
    arguments: Callable[[int], tuple[Any, ...]] = batch,
    steps: int = 8,
) -> list[Any]:
    """After each step: its results, weights, buffers, gradients, all of the optimizers, and the random generator."""
    torch.manual_seed(0)
    update, optimizers, modules = make()
    step, seen = wrap(update, optimizers), list[Any]()
    torch.manual_seed(1)
    for at in range(steps):
        between(at, modules, optimizers)
        results = tree_leaves(step(*arguments(at)))
        weights = [*modules.parameters(), *modules.buffers()]
        gradients = [parameter.grad for parameter in modules.parameters()]
        states = [optimizer.state_dict() for optimizer in optimizers]
        now = [results, weights, gradients, states, torch.get_rng_state()]
        seen.append(tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), now))
    return seen


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def assert_steps_alike(make: Callable[[], Made], options: Mapping[str, Any] = EAGER_KERNELS, **how: Any) -> Any:
    """Scheduled steps leave what eager ones do. Returns the scheduled function."""
    steps: list[Any] = []

    def scheduled(update: Update, optimizers: Sequence[Optimizer]) -> Update:
        steps.append(autostream.step(optimizers=optimizers, **options)(update))
        return steps[0]

    assert_same(course(make, scheduled, **how), course(make, **how))
    return steps[0]


def modes(step: Any) -> list[str]:
    return [report.mode for report in step.reports]


STRICT = {**EAGER_KERNELS, "strict": True}
STEPS = {make.__name__: make for make in (sac, gan, accumulated, written_with_grad)}


def four_tensors(at: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(12, wide, dtype=torch.double) for wide in (3, 2, 1, 3))


@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
def test_twenty_steps_are_the_eager_ones(make: Callable[[], Made]) -> None:
    def halve_rates(at: int, modules: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers if at == 11 else ():
            optimizer.param_groups[0]["lr"] /= 2

    step = assert_steps_alike(make, STRICT, between=halve_rates, arguments=four_tensors, steps=20)
    (report,) = step.reports
    assert report.graph is not None
    assert report.model == f"{make.__name__}.<locals>.update"


def small(**options: Any) -> tuple[Any, nn.Linear, Optimizer]:
    """A step of one layer, which has run once, eagerly, to make the optimizer's state."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    @autostream.step(optimizers=[optimizer], **options)
    def update(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    update(torch.ones(2, 3))
    return update, model, optimizer


def test_results_are_detached() -> None:
    update, *_ = small(strict=True)
    assert not update(torch.ones(2, 3)).requires_grad


def test_gradients_that_go_from_call_to_call_keep_the_step_eager() -> None:
    """Without a ``zero_grad`` each step adds to the gradients of the one before."""

    def make() -> Made:
        model = nn.Linear(3, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def update(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return update, [optimizer], model

    (report,) = assert_steps_alike(make, steps=4).reports
    assert "gradient of module_0.weight (1x3), which is there when" in report.refusals[0].reason
    assert "call zero_grad() before each backward" in report.refusals[0].reason


def test_a_step_may_clear_the_gradients_of_a_module() -> None:
    """``Module.zero_grad`` asks whether there are gradients, and leaves none in either case."""
    _, model, optimizer = small()

    @autostream.step(optimizers=[optimizer], strict=True, kernels="eager", policy="sequential")
    def update(x: Tensor) -> Tensor:
        model.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    for _ in range(4):
        update(torch.ones(2, 3))
    assert modes(update) == ["one stream"]


@pytest.mark.parametrize("cleared", ["first", "last"])
def test_an_optimizer_that_a_call_leaves_alone_does_not_matter(cleared: str) -> None:
    """TD3: the actor learns in every other step, and what it leaves in the gradients of the critic is cleared later."""

    def make() -> Made:
        actor, critic = layers(3, 4, 2), layers(5, 4, 1)
        target = copy.deepcopy(critic).requires_grad_(False)
        adams = actor_adam, critic_adam = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (actor, critic)]

        def update(x: Tensor, delayed: bool) -> Tensor:
            with torch.no_grad():
                goal = target(torch.cat([x, actor(x)], -1))
            loss = F.mse_loss(critic(torch.cat([x, torch.ones_like(x)[:, :2]], -1)), goal + 1)
            critic_adam.zero_grad()
            loss.backward()
            critic_adam.step()
            if delayed:
                value = -critic(torch.cat([x, actor(x)], -1)).mean()
                actor_adam.zero_grad()
                value.backward()
                actor_adam.step()
                if cleared == "last":
                    actor_adam.zero_grad()
                    critic_adam.zero_grad()
                with torch.no_grad():
                    torch._foreach_lerp_(list(target.parameters()), list(critic.parameters()), 0.1)
            return loss

        return update, adams, nn.ModuleList([actor, critic, target])

    step = assert_steps_alike(make, STRICT, arguments=lambda at: (*batch(at), at % 2 == 0))
    assert modes(step) == ["one stream"] * 2


@pytest.mark.parametrize("flag", ["an argument", "read"])
def test_an_optimizer_may_make_its_state_later_than_another(flag: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each optimizer's first update is an eager step, like the first call, and nothing to report."""

    def make() -> Made:
        actor, critic = layers(3, 4, 3), layers(3, 4, 1)
        adams = actor_adam, critic_adam = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (actor, critic)]

        def update(x: Tensor, delayed: bool | None) -> Tensor:
            actor_adam.zero_grad()
            critic_adam.zero_grad()
            loss = critic(actor(x).detach()).square().mean()
            loss.backward()
            critic_adam.step()
            if delayed is True or critic.delayed:
                (-critic(actor(x)).mean()).backward()
                actor_adam.step()
            return loss

        return update, adams, nn.ModuleList([actor, critic])

    def delay(at: int, modules: Any, optimizers: Sequence[Optimizer]) -> None:
        modules[1].delayed = flag == "read" and at % 3 == 2

    def arguments(at: int) -> tuple[Any, ...]:
        return *batch(at), at % 3 == 2 if flag == "an argument" else None

    with caplog.at_level(logging.WARNING, "autostream"):
        step = assert_steps_alike(make, STRICT, between=delay, arguments=arguments, steps=9)
    assert {*modes(step)} == {"one stream"}
    assert not caplog.records


@pytest.mark.parametrize("how", ["step", "train_step"])
def test_updates_that_are_skipped_at_first_make_the_state_later(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """A scaler begins with a scale that is too large, and so skips updates, which would make the state."""
    states = []
    for wrapped in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        adam, scaler = torch.optim.Adam(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**127)

        def update(x: Tensor, model: Any = model, adam: Any = adam, scaler: Any = scaler) -> Tensor:
            adam.zero_grad()
            loss: Tensor = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(adam)
            scaler.update()
            return loss.detach()

        step: Any = update
        options: dict[str, Any] = {"kernels": "eager", "policy": "sequential", "strict": True}
        if wrapped and how == "step":
            step = autostream.step(optimizers=[adam], **options)(update)
        elif wrapped:
            step = autostream.train_step(model, adam, _mean_square, scaler=scaler, **options)
        with caplog.at_level(logging.WARNING, "autostream"):
            losses = [step(torch.full((2, 3), 4.0)) for _ in range(12)]
        states.append([*losses, *(each.detach() for each in model.parameters()), torch.tensor(scaler.get_scale())])
        assert not wrapped or [report.mode for report in step.reports] == ["one stream"]
    assert 3 < len(set(map(float, states[1][:12]))) < 11, "the first updates are skipped"
    torch.testing.assert_close(*states)
    assert not caplog.records


def _mean_square(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


PRIOR = torch.distributions.Normal(0.0, 2.0)


def normal(outputs: Tensor) -> Tensor:
    policy = torch.distributions.Normal(outputs, 1.0)
    action = policy.rsample()
    return action.square().mean() - policy.log_prob(action).mean() - PRIOR.log_prob(action).mean()


def categorical(outputs: Tensor) -> Tensor:
    policy = torch.distributions.Categorical(logits=outputs)
    return -(policy.log_prob(policy.sample()) * outputs[:, 0].detach()).mean() - policy.entropy().mean()


def squashed(outputs: Tensor) -> Tensor:
    normal = torch.distributions.Normal(outputs, outputs.exp())
    transform = torch.distributions.TanhTransform(cache_size=1)
    policy = torch.distributions.Independent(torch.distributions.TransformedDistribution(normal, [transform]), 1)
    return -policy.log_prob(policy.rsample()).mean()


@pytest.mark.parametrize("loss_of", [normal, categorical, squashed])
def test_distributions_need_no_validate_args(loss_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under ``torch.compile``, a graph checks no arguments; eager code in the same process still does."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    states = []
    for wrap in ("step", "optimize", ""):
        torch.manual_seed(0)
        model = layers(3, 4)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_at(x: Tensor, model: nn.Module = model) -> Tensor:
            return loss_of(model(x))

        options: dict[str, Any] = {"kernels": "eager", "policy": "sequential", "strict": True}
        loss: Any = autostream.optimize(loss_at, **options) if wrap == "optimize" else loss_at

        def update(x: Tensor, sgd: Optimizer = sgd, loss: Any = loss) -> Tensor:
            sgd.zero_grad()
            found: Tensor = loss(x)
            found.backward()
            sgd.step()
            return found.detach()

        step = autostream.step(optimizers=[sgd], **options)(update) if wrap == "step" else update
        losses = [step(torch.ones(6, 3, dtype=torch.double)) for _ in range(4)]
        states.append([*losses, *(each.detach() for each in model.parameters())])
        reports = {"step": step, "optimize": loss}[wrap].reports if wrap else ()
        assert {report.mode for report in reports} <= {"one stream", "forward and backward"}
    for state in states:
        torch.testing.assert_close(state, states[-1], rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        torch.distributions.Normal(0.0, -1.0)


@pytest.mark.parametrize("listed", ["both", "own"])
def test_steps_of_two_functions_take_turns_over_the_same_modules(listed: str) -> None:
    """Each leaves gradients, which the other neither reads nor clears."""

    def make() -> tuple[Any, Sequence[Optimizer], nn.Module]:
        actor, critic = layers(3, 4, 3), layers(3, 4, 1)
        adams = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (actor, critic)]

        def follow(x: Tensor) -> Tensor:
            adams[0].zero_grad()
            loss = (actor(x) - critic(x).detach()).square().mean()
            loss.backward()
            adams[0].step()
            return loss

        def criticize(x: Tensor) -> Tensor:
            adams[1].zero_grad()
            loss = critic(actor(x).detach()).square().mean()
            loss.backward()
            adams[1].step()
            return loss

        return [follow, criticize], adams, nn.ModuleList([actor, critic])

    steps: list[Any] = []

    def in_turn(updates: Sequence[Update], _: Any) -> Update:
        return lambda x: [update(x) for update in updates]

    def scheduled(updates: Sequence[Update], adams: Sequence[Optimizer]) -> Update:
        for own, update in zip(adams, updates, strict=True):
            steps.append(autostream.step(optimizers=adams if listed == "both" else [own], **STRICT)(update))
        return in_turn(steps, adams)

    assert_same(course(make, scheduled, steps=5), course(make, in_turn, steps=5))
    assert {mode for step in steps for mode in modes(step)} == {"one stream"}


def test_each_shape_has_a_graph_and_explain_tells_of_them() -> None:
    update, *_ = small()
    for rows in (2, 4, 2, 4):
        update(torch.ones(rows, 3))
    assert [report.signature for report in update.reports] == ["4x3:float32 on cpu", "2x3:float32 on cpu"]
    assert "measured" in autostream.explain(update)
    assert repr(update) == "StepFunction(small.<locals>.update)"


def test_what_python_reads_is_guarded() -> None:
    """A number that a closure holds, a flag that is an argument: each value has a graph of its own."""
    model, scale = nn.Linear(3, 1), [1.0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    @autostream.step(optimizers=[optimizer])
    def update(x: Tensor, flag: bool) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).sum() * scale[0] * (2 if flag else 1)
        loss.backward()
        optimizer.step()
        return loss

    x = torch.ones(2, 3)
    update(x, False)
    first = update(x, False)
    for number, flag in ((1.0, True), (3.0, False), (3.0, True), (1.0, False)):
        scale[0] = number
        torch.testing.assert_close(update(x, flag), first * number * (2 if flag else 1))
    assert len(update.reports) == 4


def test_an_integer_that_nothing_reads_needs_no_graph_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the number of a batch; each value of one that is read has a graph."""

    def made() -> Made:
        model = layers(3, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)

        def update(x: Tensor, index: int, times: int) -> Tensor:
            loss = times * model(x).square().mean()
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            return loss.detach()

        return update, [sgd], model

    step = assert_steps_alike(made, STRICT, arguments=lambda at: (*batch(at), at, 2 + at // 6), steps=12)
    assert len(step.reports) == 2
    update, (sgd,), _ = made()
    fast = autostream.step(optimizers=[sgd], **STRICT)(lambda x, index: update(x, index, 2))
    for index in range(4):
        fast(*batch(0), index)
    monkeypatch.delattr("autostream.dispatch.step_graphs.call_of")  # of the slow path
    fast(*batch(0), 5)
    with pytest.raises(NameError):
        fast(*batch(0), 5.0)


def test_with_guards_of_inputs_only_arguments_and_rates_count() -> None:
    """What else the step's Python reads is taken to be as it was at the capture."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer, scale = torch.optim.SGD(model.parameters(), lr=0.5), [2.0]

    def update(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = scale[0] * model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = autostream.step(optimizers=[optimizer], guards="inputs")(update)
    x = torch.ones(2, 3)
    for _ in range(3):
        step(x)
    scale[0], optimizer.param_groups[0]["lr"] = 4.0, 0.0
    before = model.weight.detach().clone()
    loss = step(2 * x)
    torch.testing.assert_close(loss, (2 * model(2 * x).square().mean()).detach())
    torch.testing.assert_close(model.weight, before)
    step(torch.ones(4, 3))  # another shape is another graph, for which Python is read again
    torch.testing.assert_close(step(torch.ones(4, 3)), (4 * model(torch.ones(4, 3)).square().mean()).detach())


def test_a_bound_method_is_scheduled_and_a_method_of_a_class_is_refused() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.weight = nn.Parameter(torch.ones(2))
            self.sgd = torch.optim.SGD([self.weight], lr=0.5)

        def update(self, x: Tensor) -> Tensor:
            self.sgd.zero_grad()
            loss = (self.weight * x).sum()
            loss.backward()
            self.sgd.step()
            return loss

    trainer = Trainer()
    update = autostream.step(optimizers=[trainer.sgd], strict=True)(trainer.update)
    assert [update(torch.ones(2)).item() for _ in range(3)] == [2.0, 1.0, 0.0]
    Trainer.update = autostream.step(optimizers=[trainer.sgd])(Trainer.update)  # type: ignore[method-assign, assignment]
    with pytest.raises(TargetError, match=r"write self\.update = autostream\.step"):
        trainer.update(torch.ones(2))


def test_disabled_it_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSTREAM_DISABLE", "1")
    update, *_ = small()
    update(torch.ones(2, 3))
    assert update.reports == ()
    assert "AUTOSTREAM_DISABLE" in autostream.explain(update)


def test_a_buffer_that_a_layer_sets_to_itself_keeps_its_graph() -> None:
    """As spectral norms of GANs do: ``self._u = normalize(..., out=self._u)``."""

    def make() -> Made:
        model = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def update(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss

        return update, [optimizer], model

    buffers: set[Tensor] = set()
    step = assert_steps_alike(make, between=lambda at, model, _: buffers.add(model.parametrizations.weight[0]._u))
    assert len(buffers) == 2, "that of ours and that of theirs"
    assert len(step.reports) == 1


def test_paranoid_steps_are_compared_with_eager_ones_from_the_same_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, targets, states and random numbers; then with a number that the graph does not see."""
    monkeypatch.setenv("AUTOSTREAM_VERIFY", "paranoid")
    assert "plain" not in modes(assert_steps_alike(sac, arguments=four_tensors, steps=4))

    update, model, _ = small()
    update(torch.ones(2, 3))
    model.register_forward_hook(hidden := lambda module, args, output: output * UNSEEN[0])
    update(torch.ones(2, 3))
    monkeypatch.setitem(hidden.__globals__, "UNSEEN", [2.0])
    monkeypatch.setattr("autostream.frontend.guards.Guards.__call__", lambda *_: True)
    with pytest.raises(MismatchError, match=r"small.<locals>.update, scheduled"):
        update(torch.ones(2, 3))


UNSEEN = [1.0]


@pytest.mark.parametrize(
    "change",
    [
        *("weight replaced", "state replaced", "state loaded", "group added", "frozen"),
        *("gradient left", "batch is a weight", "autocast"),
    ],
)
def test_a_change_between_steps_counts_though_the_batch_is_alike(change: str) -> None:
    """Each call of one signature is checked quickly; a change of anything else makes the full check."""
    (ours, model, optimizer), (eager, other, other_optimizer) = small(), small()
    x = torch.randn(1, 3)
    for at in range(6):
        for step, net, adam in ((ours, model, optimizer), (eager.__wrapped__, other, other_optimizer)):
            if at == 3 and change == "weight replaced":
                net.weight.data = torch.ones(1, 3)
            if at == 3 and change == "state replaced":
                adam.state[net.weight]["exp_avg"] = torch.full((1, 3), 0.5)
            if at == 3 and change == "state loaded":
                net.load_state_dict({name: value / 2 for name, value in net.state_dict().items()})
                adam.load_state_dict(copy.deepcopy(adam.state_dict()))
            if at == 3 and change == "gradient left":
                net.weight.grad = torch.ones(1, 3)
            if at == 3 and change == "group added":
                adam.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.5})
            if at == 3 and change == "frozen":
                net.weight.requires_grad_(False)
            batch = net.weight.detach() if at >= 3 and change == "batch is a weight" else x
            with torch.autocast("cpu", torch.bfloat16, enabled=at >= 3 and change == "autocast"):
                loss = step(batch)
            if net is model:
                result = loss
        torch.testing.assert_close(result, loss.detach())
    torch.testing.assert_close([*model.parameters()], [*other.parameters()])


def gradients_stay(model: nn.Module, optimizer: Optimizer) -> Update:
    """Gradients are cleared first: after a step they are there, to be read."""

    def update(x: Tensor, at: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return update


def cleared_at_first_of_three(model: nn.Module, optimizer: Optimizer) -> Update:
    """Gradients add up over three calls, of which the first clears them."""

    def update(x: Tensor, at: int) -> Tensor:
        if at % 3 == 0:
            optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if at % 3 == 2:
            optimizer.step()
        return loss

    return update


def backward_and_step_in_turns(model: nn.Module, optimizer: Optimizer) -> Update:
    def update(x: Tensor, at: int) -> Tensor:
        loss = model(x).square().mean()
        if at % 2 == 0:
            optimizer.zero_grad()
            loss.backward()
        else:
            optimizer.step()
        return loss

    return update


def checkpointed(model: nn.Module, optimizer: Optimizer) -> Update:
    """A part with dropout is computed again in the backward, with the same random numbers."""
    part = nn.Sequential(model, nn.Dropout(0.5))

    def update(x: Tensor, at: int) -> Tensor:
        optimizer.zero_grad()
        loss = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return update


def rate_set_inside(model: nn.Module, optimizer: Optimizer) -> Update:
    def update(x: Tensor, at: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = 0.5 if at % 2 else 0.01
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return update


def asks_for_gradients(model: nn.Module, optimizer: Optimizer) -> Update:
    def update(x: Tensor, at: int) -> Tensor:
        scale = 0.1 if model[0].weight.grad is None else 1.0
        optimizer.zero_grad()
        loss = model(x).square().mean() * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return update


def returns_none(model: nn.Module, optimizer: Optimizer) -> Update:
    """Gradients of a layer that is not trained are cleared, too."""
    del optimizer.param_groups[0]["params"][:2]

    def update(x: Tensor, at: int) -> tuple[Tensor, None]:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss, None

    return update


def deletes_gradients(model: nn.Module, optimizer: Optimizer) -> Update:
    def update(x: Tensor, at: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        for parameter in model.parameters():
            del parameter.grad
        return loss

    return update


def says_whether_gradients_were_there(model: nn.Module, optimizer: Optimizer) -> Update:
    """The graph is the same with and without them, the result is not."""

    def update(x: Tensor, at: int) -> tuple[Tensor | None, ...]:
        before = model[0].weight.grad is None
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if at < 3:
            optimizer.zero_grad()
        return (loss, None) if before else (loss,)

    return update


def by_hand(model: nn.Module, optimizer: Optimizer) -> Update:
    """A layer that no optimizer has is trained by hand, until it is frozen."""
    del optimizer.param_groups[0]["params"][:2]

    def update(x: Tensor, at: int) -> Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model[0].parameters():
                if parameter.requires_grad:
                    parameter.sub_(0.1 * parameter.grad)
        return loss

    return update


def hooks_of_its_own(model: nn.Module, optimizer: Optimizer) -> Update:
    def update(x: Tensor, at: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        handle = model[1].weight.register_hook(lambda gradient: gradient * 3)
        loss.backward()
        handle.remove()
        optimizer.step()
        return loss

    return update


def gradients_that_share_memory(model: nn.Module, optimizer: Optimizer) -> Update:
    """One tensor, an argument at that, is the gradient of two parameters. Clipping writes both gradients in place."""

    def update(x: Tensor, at: int) -> Tensor:
        optimizer.zero_grad()
        given = x[0]
        (model[0].bias + model[0].weight.sum(0)).backward(given)
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        return x.sum() + given.sum()

    return update


HABITS = (
    *(gradients_stay, cleared_at_first_of_three, backward_and_step_in_turns, checkpointed, rate_set_inside),
    *(
        asks_for_gradients,
        deletes_gradients,
        says_whether_gradients_were_there,
        returns_none,
        by_hand,
        hooks_of_its_own,
        gradients_that_share_memory,
    ),
)


@pytest.mark.parametrize(
    ("write", "between"),
    [
        *((write, "nothing") for write in HABITS),
        *((write, between) for write in (gradients_stay, by_hand) for between in ("a hook", "frozen")),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_steps_with_habits_of_their_own_are_the_eager_ones(write: Callable[..., Update], between: str) -> None:
    def make() -> Made:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        return write(model, optimizer), [optimizer], model

    def change(at: int, model: Any, _: Sequence[Optimizer]) -> None:
        if at == 5 and between == "a hook":
            model[0].weight.register_hook(lambda gradient: gradient * 3)
        if at == 5 and between == "frozen":
            model[0].weight.requires_grad_(False)

    assert_steps_alike(make, between=change, arguments=lambda at: (*batch(at), at))


class Agent:
    """An object whose step is scheduled, as the docs have it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)
        self.adam = torch.optim.Adam(self.net.parameters(), lr=0.1)
        self.update = autostream.step(optimizers=[self.adam], **STRICT)(self.update)  # type: ignore[method-assign]

    def update(self, x: Tensor) -> Tensor:
        self.adam.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.adam.step()
        return loss


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    "again",
    [
        copy.deepcopy,
        lambda agent: pickle.loads(pickle.dumps(agent)),
        lambda agent: pickle.loads(pickle.dumps(agent.update))._function.__self__,
    ],
    ids=["copied", "pickled", "pickled by its step"],
)
def test_an_object_with_a_step_is_copied_and_pickled_with_it(again: Callable[[Agent], Agent], steps: int) -> None:
    """The copy trains its own weights, and as the original would."""
    agent, x = Agent(), torch.ones(2, 3)
    for _ in range(steps):
        agent.update(x)
    other = again(agent)
    before = copy.deepcopy(agent.net.state_dict())
    found = [other.update(x) for _ in range(3)]
    torch.testing.assert_close(agent.net.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(found, [agent.update(x) for _ in range(3)], rtol=0, atol=0)
    torch.testing.assert_close(other.net.state_dict(), agent.net.state_dict(), rtol=0, atol=0)
    assert "plain" not in modes(other.update)


@autostream.step(optimizers=[torch.optim.SGD([nn.Parameter(torch.ones(1))])])
def decorated(x: Tensor) -> Tensor:
    return x


def test_a_decorated_function_is_copied_and_pickled_by_reference() -> None:
    assert copy.deepcopy(decorated) is decorated
    assert pickle.loads(pickle.dumps(decorated)) is decorated


@pytest.mark.parametrize("decorates", [True, False], ids=["step", "train_step"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_step_is_a_graph_break_of_what_compiles_its_caller(decorates: bool) -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    def written(x: Tensor) -> Tensor:
        sgd.zero_grad()
        loss = loss_of(net, x)
        loss.backward()
        sgd.step()
        return loss

    decorated, made = autostream.step(optimizers=[sgd], **STRICT), autostream.train_step(net, sgd, loss_of, **STRICT)
    step: Any = decorated(written) if decorates else made

    def epoch(batches: Tensor) -> Tensor:
        return torch.stack([step(batch) * 2 for batch in batches])

    batches, before = torch.ones(4, 2, 3), copy.deepcopy(net.state_dict())
    expected = epoch(batches)
    net.load_state_dict(before)
    torch.testing.assert_close(torch.compile(epoch, backend="eager")(batches), expected)
    assert modes(step) == ["one stream"]
