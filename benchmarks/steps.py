"""Training steps with several losses, optimizers, targets and averages, written as their users write them.

    modules ──▶ written(modules, noise) ──▶ update(*batch) ──▶ losses

Example:
    >>> workload = STEPS["dqn"]
    >>> subject = prepare_step(workload, 2, torch.device("cpu"), torch.float32)
    >>> [loss.dim() for loss in subject.update(*subject.data)]
    [0]
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from autostream.cli.zoo import build
from benchmarks import zoo
from benchmarks.harness.steps import StepSubject

OBSERVATIONS, ACTIONS, WIDTH = 376, 17, 256
"""Of MuJoCo's Humanoid, and of the layers."""

Noise = Callable[[Tensor], Tensor]
"""Like ``torch.randn_like``."""
Update = Callable[..., tuple[Tensor, ...]]
Written = Callable[[Any, Noise], tuple[Update, Sequence[Optimizer]]]


@dataclass(frozen=True, slots=True)
class StepWorkload:
    """A training step.

    Attributes:
        name: one word.
        modules: makes all that is trained or followed, in float32 on the CPU.
        data: makes a random batch of this size.
        written: the step of these modules, and its optimizers.
        batch: the batch size that is measured.
        dtype: the dtype that is measured.
    """

    name: str
    modules: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, ...]]
    written: Written
    batch: int
    dtype: str = "float32"


def prepare_step(
    workload: StepWorkload, batch: int, device: torch.device, dtype: torch.dtype, *, random: bool = False
) -> StepSubject:
    """Make a step and its batch: equal ones each time, without a change of the global random state.

    Args:
        workload: the step.
        batch: the batch size.
        device: of the step.
        dtype: of its floating-point tensors.
        random: whether the step draws random numbers; otherwise it gets numbers that depend on the shape only, so that
            results can be compared.
    """
    with zoo.seeded():
        modules, data = workload.modules().train(), zoo.moved(workload.data(batch), device, dtype)
    modules.to(device, dtype)
    update, optimizers = workload.written(modules, torch.randn_like if random else _waves)
    return StepSubject(modules, tuple(optimizers), data, update)


def _waves(x: Tensor) -> Tensor:
    """Numbers with the mean and the variance of random ones."""
    angles = torch.arange(x.numel(), device=x.device, dtype=torch.float64) * 12.9898
    return (angles.sin() * math.sqrt(2)).to(x.dtype).view_as(x)


def _mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), activation())]
    return nn.Sequential(*layers[:-1])


def _follow(targets: nn.Module, model: nn.Module, rate: float) -> None:
    """Move the weights of targets towards a model's."""
    with torch.no_grad():
        torch._foreach_lerp_(list(targets.parameters()), list(model.parameters()), rate)


# Actor and critics, for control. Sizes as in CleanRL and LeanRL.


class ActorCritics(nn.Module):
    """An actor, two critics, and their targets."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.actor = _mlp(OBSERVATIONS, WIDTH, WIDTH, outputs)
        self.critics = nn.ModuleList(_mlp(OBSERVATIONS + ACTIONS, WIDTH, WIDTH, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.log_temperature = nn.Parameter(torch.zeros(()))


def _values(critics: Any, state: Tensor, action: Tensor) -> list[Tensor]:
    return [critic(torch.cat([state, action], -1)) for critic in critics]


def _transitions(batch: int) -> tuple[Tensor, ...]:
    return (
        torch.randn(batch, OBSERVATIONS),
        torch.rand(batch, ACTIONS) * 2 - 1,
        torch.randn(batch, 1),
        torch.randn(batch, OBSERVATIONS),
    )


def _sac(agent: ActorCritics, noise: Noise) -> tuple[Update, Sequence[Optimizer]]:
    """Soft actor-critic with a learned temperature (Haarnoja et al., 2018)."""
    critic_adam, actor_adam = (Adam(part.parameters(), lr=3e-4) for part in (agent.critics, agent.actor))
    temperature_adam = Adam([agent.log_temperature], lr=3e-4)

    def act(state: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_deviation = agent.actor(state).chunk(2, dim=-1)
        log_deviation = log_deviation.tanh() * 3.5 - 1.5
        drawn = noise(mean)
        raw = mean + log_deviation.exp() * drawn
        action = raw.tanh()
        likelihood = -0.5 * drawn.square() - log_deviation - 0.919 - torch.log(1 - action.square() + 1e-6)
        return action, likelihood.sum(-1, keepdim=True)

    def update(state: Tensor, action: Tensor, reward: Tensor, following: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            next_action, next_likelihood = act(following)
            worst = torch.min(*_values(agent.targets, following, next_action))
            goal = reward + 0.99 * (worst - agent.log_temperature.exp() * next_likelihood)
        one, other = _values(agent.critics, state, action)
        critic_loss = F.mse_loss(one, goal) + F.mse_loss(other, goal)
        critic_adam.zero_grad()
        critic_loss.backward()  # type: ignore[no-untyped-call]
        critic_adam.step()

        new_action, likelihood = act(state)
        worst = torch.min(*_values(agent.critics, state, new_action))
        actor_loss = (agent.log_temperature.exp().detach() * likelihood - worst).mean()
        actor_adam.zero_grad()
        actor_loss.backward()  # type: ignore[no-untyped-call]
        actor_adam.step()

        temperature_loss = -(agent.log_temperature.exp() * (likelihood.detach() - ACTIONS)).mean()
        temperature_adam.zero_grad()
        temperature_loss.backward()  # type: ignore[no-untyped-call]
        temperature_adam.step()
        _follow(agent.targets, agent.critics, 0.005)
        for adam in (critic_adam, actor_adam, temperature_adam):
            adam.zero_grad()
        return critic_loss.detach(), actor_loss.detach(), temperature_loss.detach()

    return update, (critic_adam, actor_adam, temperature_adam)


def _td3(agent: ActorCritics, noise: Noise) -> tuple[Update, Sequence[Optimizer]]:
    """Twin delayed policy gradients (Fujimoto et al., 2018): two updates of the critics, then one of the actor."""
    critic_adam, actor_adam = (Adam(part.parameters(), lr=3e-4) for part in (agent.critics, agent.actor))

    def criticize(state: Tensor, action: Tensor, reward: Tensor, following: Tensor) -> Tensor:
        with torch.no_grad():
            drawn = (noise(action) * 0.2).clamp(-0.5, 0.5)
            next_action = (agent.target_actor(following).tanh() + drawn).clamp(-1, 1)
            goal = reward + 0.99 * torch.min(*_values(agent.targets, following, next_action))
        one, other = _values(agent.critics, state, action)
        loss = F.mse_loss(one, goal) + F.mse_loss(other, goal)
        critic_adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        critic_adam.step()
        return loss.detach()

    def update(*batches: Tensor) -> tuple[Tensor, ...]:
        losses = [criticize(*batches[:4]), criticize(*batches[4:])]
        state = batches[4]
        actor_loss = -agent.critics[0](torch.cat([state, agent.actor(state).tanh()], -1)).mean()
        actor_adam.zero_grad()
        actor_loss.backward()
        actor_adam.step()
        _follow(agent.targets, agent.critics, 0.005)
        _follow(agent.target_actor, agent.actor, 0.005)
        critic_adam.zero_grad()
        actor_adam.zero_grad()
        return *losses, actor_loss.detach()

    return update, (critic_adam, actor_adam)


class Policy(nn.Module):
    """An actor with a deviation for each action, and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = _mlp(OBSERVATIONS, WIDTH, WIDTH, ACTIONS, activation=nn.Tanh)
        self.critic = _mlp(OBSERVATIONS, WIDTH, WIDTH, 1, activation=nn.Tanh)
        self.log_deviation = nn.Parameter(torch.zeros(ACTIONS))


def _rollout(batch: int) -> tuple[Tensor, ...]:
    state, action, _, _ = _transitions(batch)
    return state, action, torch.randn(batch) - 24, torch.randn(batch), torch.randn(batch), torch.randn(batch)


def _ppo(policy: Policy, noise: Noise) -> tuple[Update, Sequence[Optimizer]]:
    """A minibatch of proximal policy optimization (Schulman et al., 2017), with clipped values and gradients."""
    adam = Adam(policy.parameters(), lr=3e-4, eps=1e-5)

    def update(
        state: Tensor, action: Tensor, old_likelihood: Tensor, advantage: Tensor, returned: Tensor, old_value: Tensor
    ) -> tuple[Tensor, ...]:
        mean, value = policy.actor(state), policy.critic(state).squeeze(-1)
        scaled = (action - mean) / policy.log_deviation.exp()
        likelihood = (-0.5 * scaled.square() - policy.log_deviation - 0.919).sum(-1)
        ratio = (likelihood - old_likelihood).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        actor_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
        clipped = old_value + (value - old_value).clamp(-0.2, 0.2)
        critic_loss = 0.5 * torch.max((value - returned).square(), (clipped - returned).square()).mean()
        loss = actor_loss + 0.5 * critic_loss - 0.01 * policy.log_deviation.sum()
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        adam.step()
        adam.zero_grad()
        return actor_loss.detach(), critic_loss.detach()

    return update, (adam,)


class Atari(nn.Module):
    """The network of Mnih et al. (2015), and its target."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(
            *(nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 18)),
        )
        self.target = copy.deepcopy(self.online).requires_grad_(False)


def _frames(batch: int) -> tuple[Tensor, ...]:
    before, after = torch.rand(batch, 4, 84, 84), torch.rand(batch, 4, 84, 84)
    return before, torch.randint(18, (batch, 1)), torch.randn(batch, 1), after


def _dqn(agent: Atari, noise: Noise) -> tuple[Update, Sequence[Optimizer]]:
    """Double deep Q-learning (van Hasselt et al., 2015) with a target that follows."""
    adam = Adam(agent.online.parameters(), lr=1e-4)

    def update(before: Tensor, action: Tensor, reward: Tensor, after: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            best = agent.online(after).argmax(1, keepdim=True)
            goal = reward + 0.99 * agent.target(after).gather(1, best)
        loss = F.smooth_l1_loss(agent.online(before).gather(1, action), goal)
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        _follow(agent.target, agent.online, 0.005)
        adam.zero_grad()
        return (loss.detach(),)

    return update, (adam,)


# Images.


class Adversaries(nn.Module):
    """The generator and the discriminator of DCGAN (Radford et al., 2015), for images of 64 x 64."""

    def __init__(self, latent: int = 100, width: int = 64) -> None:
        super().__init__()
        self.latent = latent
        up = (latent, 8 * width, 4 * width, 2 * width, width, 3)
        self.generator = nn.Sequential()
        for at, (a, b) in enumerate(pairwise(up)):
            self.generator.append(nn.ConvTranspose2d(a, b, 4, 2 if at else 1, 1 if at else 0, bias=False))
            self.generator.extend([nn.BatchNorm2d(b), nn.ReLU()] if at < 4 else [nn.Tanh()])
        self.discriminator = nn.Sequential()
        for at, (a, b) in enumerate(pairwise((3, width, 2 * width, 4 * width, 8 * width, 1))):
            self.discriminator.append(nn.Conv2d(a, b, 4, 2 if at < 4 else 1, 1 if at < 4 else 0, bias=False))
            if at < 4:
                self.discriminator.extend([nn.BatchNorm2d(b)] * (at > 0) + [nn.LeakyReLU(0.2)])
        for part in self.modules():
            if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.normal_(part.weight, 0.0, 0.02)


def _dcgan(pair: Adversaries, noise: Noise) -> tuple[Update, Sequence[Optimizer]]:
    adams = [Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999)) for part in (pair.discriminator, pair.generator)]
    discriminator_adam, generator_adam = adams

    def update(real: Tensor) -> tuple[Tensor, ...]:
        # The generator goes first: `torch.compile` goes back once only through a graph that it cuts at a `backward`.
        fake = pair.generator(noise(real.new_empty(len(real), pair.latent, 1, 1)))
        generator_loss = F.softplus(-pair.discriminator(fake)).mean()
        generator_adam.zero_grad()
        generator_loss.backward()  # type: ignore[no-untyped-call]
        generator_adam.step()
        real_loss = F.softplus(-pair.discriminator(real)).mean()
        fake_loss = F.softplus(pair.discriminator(fake.detach())).mean()
        discriminator_adam.zero_grad()
        (real_loss + fake_loss).backward()  # type: ignore[no-untyped-call]
        discriminator_adam.step()
        discriminator_adam.zero_grad()
        generator_adam.zero_grad()
        return (real_loss + fake_loss).detach(), generator_loss.detach()

    return update, adams


class Views(nn.Module):
    """An encoder with its projector and predictor, and the average of encoder and projector (Grill et al., 2020)."""

    def __init__(self) -> None:
        super().__init__()
        encoder = build("resnet18")[0]
        encoder.fc = _mlp(512, 1024, 256)
        self.encoder, self.predictor = encoder, _mlp(256, 1024, 256)
        self.teacher = copy.deepcopy(encoder).requires_grad_(False)


def _byol(views: Views, noise: Noise) -> tuple[Update, Sequence[Optimizer]]:
    sgd = SGD([*views.encoder.parameters(), *views.predictor.parameters()], lr=0.05, momentum=0.9)

    def update(one: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            goals = [F.normalize(views.teacher(view), dim=-1) for view in (other, one)]
        found = [F.normalize(views.predictor(views.encoder(view)), dim=-1) for view in (one, other)]
        losses = [2 - 2 * (left * right).sum(-1).mean() for left, right in zip(found, goals, strict=True)]
        loss = losses[0] + losses[1]
        sgd.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        _follow(views.teacher, views.encoder, 0.01)
        sgd.zero_grad()
        return (loss.detach(),)

    return update, (sgd,)


class Block(nn.Module):
    """A residual block that is shifted by an embedding of the time."""

    def __init__(self, inside: int, outside: int, embedding: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, inside), nn.SiLU(), nn.Conv2d(inside, outside, 3, padding=1))
        self.shift = nn.Linear(embedding, outside)
        self.second = nn.Sequential(nn.GroupNorm(8, outside), nn.SiLU(), nn.Conv2d(outside, outside, 3, padding=1))
        self.skip = nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """The same size, with other channels."""
        hidden = self.first(x) + self.shift(embedding)[:, :, None, None]
        return self.skip(x) + self.second(hidden)  # type: ignore[no-any-return]


class Denoiser(nn.Module):
    """A U-Net of three resolutions for images of 32 x 32 (after Ho et al., 2020)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width, self.embed = width, _mlp(width, 4 * width, 4 * width, activation=nn.SiLU)
        sizes = (width, 2 * width, 4 * width)
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList(Block(a, b, 4 * width) for a, b in pairwise((width, *sizes)))
        self.middle = Block(sizes[-1], sizes[-1], 4 * width)
        self.up = nn.ModuleList(Block(2 * b, a, 4 * width) for a, b in pairwise((width, *sizes)))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The noise in images at these times, from 0 to 1."""
        rates = torch.exp(torch.arange(self.width // 2, device=x.device) * (-math.log(1e4) / (self.width // 2)))
        angles = 1000 * time[:, None] * rates.to(x.dtype)
        embedding = self.embed(torch.cat([angles.sin(), angles.cos()], -1))
        x = self.stem(x)
        skipped: list[Tensor] = []
        for block in self.down:
            x = block(x, embedding)
            skipped.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, embedding)
        for block in reversed(self.up):
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skipped.pop()], 1), embedding)
        return self.head(x)  # type: ignore[no-any-return]


class Averaged(nn.Module):
    """A denoiser, and the average of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.denoiser = Denoiser()
        self.average = copy.deepcopy(self.denoiser).requires_grad_(False)


def _images_and_times(batch: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 3, 32, 32), torch.rand(batch)


def _diffusion(models: Averaged, noise: Noise) -> tuple[Update, Sequence[Optimizer]]:
    adam = AdamW(models.denoiser.parameters(), lr=1e-3, fused=True)

    def update(images: Tensor, time: Tensor) -> tuple[Tensor, ...]:
        drawn, angle = noise(images), (time * (math.pi / 2))[:, None, None, None]
        noisy = angle.cos() * images + angle.sin() * drawn
        loss = F.mse_loss(models.denoiser(noisy, time).float(), drawn.float())
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(models.denoiser.parameters(), 1.0)
        adam.step()
        _follow(models.average, models.denoiser, 0.05)
        adam.zero_grad()
        return (loss.detach(),)

    return update, (adam,)


STEPS: Mapping[str, StepWorkload] = {
    workload.name: workload
    for workload in (
        StepWorkload("sac", lambda: ActorCritics(2 * ACTIONS), _transitions, _sac, 256),
        StepWorkload("td3", lambda: ActorCritics(ACTIONS), lambda n: _transitions(n) + _transitions(n), _td3, 256),
        StepWorkload("ppo", Policy, _rollout, _ppo, 256),
        StepWorkload("dqn", Atari, _frames, _dqn, 32),
        StepWorkload("dcgan", Adversaries, lambda n: (torch.randn(n, 3, 64, 64),), _dcgan, 32, "bfloat16"),
        StepWorkload(
            "byol",
            Views,
            lambda n: (torch.randn(n, 3, 224, 224), torch.randn(n, 3, 224, 224)),
            _byol,
            8,
            "bfloat16",
        ),
        StepWorkload("diffusion", Averaged, _images_and_times, _diffusion, 16, "bfloat16"),
    )
}
"""Steps by name."""
