"""Soft actor-critic: two critics, an actor, a temperature and target networks, updated by one scheduled graph.

    python examples/sac.py --steps 1000

A force pushes a point towards the origin. Two equal agents are trained, one by the update as it is written.
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from comparison import compare, mlp, options
from torch import Tensor, nn


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critics = mlp(2, 64, 64, 2), nn.ModuleList(mlp(3, 64, 64, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_weight = nn.Parameter(torch.tensor(-2.0))
        trained = self.critics.parameters(), self.actor.parameters(), [self.log_weight]
        self.optimizers = [torch.optim.Adam(parameters, lr=1e-3) for parameters in trained]

    def act(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """A random action, and the logarithm of its likelihood."""
        mean, log_deviation = self.actor(state).chunk(2, dim=-1)
        normal = torch.distributions.Normal(mean, log_deviation.clamp(-5, 1).exp())
        raw = normal.rsample()
        return raw.tanh(), normal.log_prob(raw) - 2 * (0.693 - raw - F.softplus(-2 * raw))  # type: ignore[no-untyped-call]

    def update(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        critic_adam, actor_adam, weight_adam = self.optimizers
        weight = self.log_weight.exp().detach()
        with torch.no_grad():
            next_action, next_likelihood = self.act(following)
            worst = torch.min(*[target(torch.cat([following, next_action], -1)) for target in self.targets])
            goal = reward + 0.95 * (worst - weight * next_likelihood)
        values = [critic(torch.cat([state, action], -1)) for critic in self.critics]
        critic_loss = torch.stack([F.mse_loss(value, goal) for value in values]).sum()
        critic_loss.backward()  # type: ignore[no-untyped-call]
        critic_adam.step()

        new_action, likelihood = self.act(state)
        worst = torch.min(*[critic(torch.cat([state, new_action], -1)) for critic in self.critics])
        actor_loss = (weight * likelihood - worst).mean()
        (actor_loss - self.log_weight.exp() * (likelihood.detach() - 1).mean()).backward()
        actor_adam.step()
        weight_adam.step()
        for adam in self.optimizers:  # clears the gradients of critics by the actor's loss, too
            adam.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.targets.parameters()), list(self.critics.parameters()), 0.01)
        return critic_loss, actor_loss


def push(state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    velocity = 0.9 * state[:, 1:] + 0.2 * action
    position = state[:, :1] + 0.2 * velocity
    return -np.abs(position), np.concatenate([position, velocity], 1)


def batch(random: np.random.Generator, device: torch.device) -> list[Tensor]:
    state, action = random.uniform(-1, 1, (256, 2)), random.uniform(-1, 1, (256, 1))
    return [torch.tensor(x, dtype=torch.float32, device=device) for x in (state, action, *push(state, action))]


@torch.no_grad()
def scores(agent: Agent, device: torch.device) -> dict[str, float]:
    state, total = np.random.default_rng(0).uniform(-1, 1, (256, 2)), 0.0
    for _ in range(50):
        mean = agent.actor(torch.tensor(state, dtype=torch.float32, device=device))[:, :1]
        reward, state = push(state, mean.tanh().cpu().numpy())
        total += float(reward.mean())
    return {"mean return": total}


if __name__ == "__main__":
    compare(Agent, batch, scores, *options(steps=100), rise=True)
