"""Soft actor-critic: two critics, an actor, a temperature and target networks, updated by one scheduled graph.

    python examples/sac.py --steps 1000

The environment pushes a point towards the origin: position and velocity are observed, the action is a force. Two equal
agents are trained, one by the update as it is written and one by its graph. It prints the time of an update of each,
how far their weights are apart in the first ten updates, and the mean return before and after training.
"""

from __future__ import annotations

import argparse
import copy
import time
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autostream


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers = [layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    """What is trained, and the update."""

    def __init__(self, observations: int, actions: int, width: int) -> None:
        super().__init__()
        self.actor = mlp(observations, width, width, 2 * actions)
        self.critics = nn.ModuleList(mlp(observations + actions, width, width, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = nn.Parameter(torch.tensor(-2.0))
        self.adams = [
            torch.optim.Adam(parameters, lr=1e-3)
            for parameters in (self.critics.parameters(), self.actor.parameters(), [self.log_temperature])
        ]

    def act(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """A random action, and the logarithm of its likelihood."""
        mean, log_deviation = self.actor(state).chunk(2, dim=-1)
        deviation = log_deviation.clamp(-5, 1).exp()
        noise = torch.randn_like(mean)
        raw = mean + deviation * noise
        likelihood = -0.5 * noise.square() - deviation.log() - 2 * (0.693 - raw - F.softplus(-2 * raw))
        return raw.tanh(), likelihood.sum(-1, keepdim=True)

    def update(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """One step of everything."""
        critic_adam, actor_adam, temperature_adam = self.adams
        temperature = self.log_temperature.exp().detach()
        with torch.no_grad():
            next_action, next_likelihood = self.act(following)
            worst = torch.min(*[target(torch.cat([following, next_action], -1)) for target in self.targets])
            goal = reward + 0.95 * (worst - temperature * next_likelihood)
        values = [critic(torch.cat([state, action], -1)) for critic in self.critics]
        critic_loss = torch.stack([F.mse_loss(value, goal) for value in values]).sum()
        critic_adam.zero_grad()
        critic_loss.backward()  # type: ignore[no-untyped-call]
        critic_adam.step()

        new_action, likelihood = self.act(state)
        worst = torch.min(*[critic(torch.cat([state, new_action], -1)) for critic in self.critics])
        actor_loss = (temperature * likelihood - worst).mean()
        actor_adam.zero_grad()
        actor_loss.backward()
        actor_adam.step()

        temperature_adam.zero_grad()
        temperature_loss = -self.log_temperature.exp() * (likelihood.detach() - 1).mean()
        temperature_loss.backward()  # type: ignore[no-untyped-call]
        temperature_adam.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.targets.parameters()), list(self.critics.parameters()), 0.01)
        return critic_loss, actor_loss


def push(state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The next state of each point, and its reward."""
    velocity = 0.9 * state[:, 1:] + 0.2 * action
    following = np.concatenate([state[:, :1] + 0.2 * velocity, velocity], 1)
    return following, -np.abs(following[:, :1])


@torch.no_grad()
def mean_return(agent: Agent, device: torch.device) -> float:
    """The reward of 50 steps, over 256 points."""
    state, total = np.random.default_rng(0).uniform(-1, 1, (256, 2)), 0.0
    for _ in range(50):
        mean = agent.actor(torch.tensor(state, dtype=torch.float32, device=device)).chunk(2, dim=-1)[0]
        state, reward = push(state, mean.tanh().cpu().numpy())
        total += float(reward.mean())
    return total


def main() -> None:
    """Train, and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    device, random = torch.device(arguments.device), np.random.default_rng(1)
    torch.manual_seed(0)
    plain, fast = Agent(2, 1, 64).to(device), Agent(2, 1, 64).to(device)
    fast.load_state_dict(plain.state_dict())
    update = autostream.step(optimizers=fast.adams)(fast.update)
    before, apart, seconds = mean_return(plain, device), 0.0, np.zeros((2, arguments.steps))
    for at in range(arguments.steps):
        state, action = random.uniform(-1, 1, (256, 2)), random.uniform(-1, 1, (256, 1))
        following, reward = push(state, action)
        batch = [torch.tensor(x, dtype=torch.float32, device=device) for x in (state, action, reward, following)]
        for which in range(2):
            torch.manual_seed(at)
            start = time.perf_counter()
            (update if which else plain.update)(*batch)[0].item()  # waits for the device
            seconds[which, at] = time.perf_counter() - start
        if at < 10:
            weights = zip(plain.state_dict().values(), fast.state_dict().values(), strict=True)
            apart = max(apart, *(float((one - other).abs().max()) for one, other in weights))
    print(autostream.explain(update, ops=5))
    for how, agent, median in zip(("as written", "as one graph"), (plain, fast), np.median(seconds, 1), strict=True):
        after = mean_return(agent, device)
        print(f"{how:13} {1e6 * median:8.0f} µs an update, mean return {before:.2f} before, {after:.2f} after")
        assert after > before, "it learns"
    print(f"weights are at most {apart:.1e} apart in the first ten updates")
    assert apart < 1e-4 or device.type != "cpu", "it learns the same"


if __name__ == "__main__":
    main()
