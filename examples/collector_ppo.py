"""PPO on CartPole-v1 with MultiprocessCollector: workers collect, this process learns.

    python collector_ppo.py --total-frames 100000 --num-workers 4

Workers act with the weights of the last update_policy_weights_(); each frame says which version that was.
"""

from __future__ import annotations

import argparse
import time

import gymnasium
import torch
from torch import nn

from shmsync.collectors import MultiprocessCollector


def make_env():
    return gymnasium.make("CartPole-v1")


class ActorCritic(nn.Module):
    """Two heads; calling it acts."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observation):
        """What a worker calls: observations `[n, 4]` in; everything returned is stored in the batch."""
        distribution = torch.distributions.Categorical(logits=self.actor(observation))
        action = distribution.sample()
        return {"action": action, "log_prob": distribution.log_prob(action)}


def advantages(batch, policy, gamma=0.99, lam=0.95):
    """Generalised advantage estimates and value targets, each `[environments, steps]`."""
    with torch.no_grad():
        value = policy.critic(batch["observation"]).squeeze(-1)
        next_value = policy.critic(batch["next", "observation"]).squeeze(-1)
    reward = batch["next", "reward"].squeeze(-1)
    alive = ~batch["next", "terminated"].squeeze(-1)  # a terminated state has no future; a truncated one has
    same_episode = ~batch["next", "done"].squeeze(-1)
    delta = reward + gamma * next_value * alive - value
    advantage, running = torch.empty_like(delta), torch.zeros(len(delta))
    for t in reversed(range(delta.shape[1])):
        running = delta[:, t] + gamma * lam * same_episode[:, t] * running
        advantage[:, t] = running
    return advantage, advantage + value


def learn(batch, policy, optimizer, epochs=6, minibatches=8, clip=0.2):
    advantage, target = advantages(batch, policy)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    flat = [x.flatten(0, 1) for x in (batch["observation"], batch["action"], batch["log_prob"], advantage, target)]
    for _ in range(epochs):
        for index in torch.randperm(len(flat[0])).chunk(minibatches):
            observation, action, old_log_prob, adv, value_target = (x[index] for x in flat)
            distribution = torch.distributions.Categorical(logits=policy.actor(observation))
            ratio = (distribution.log_prob(action) - old_log_prob).exp()
            surrogate = torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv).mean()
            value_loss = (policy.critic(observation).squeeze(-1) - value_target).square().mean()
            loss = 0.5 * value_loss - surrogate - 0.01 * distribution.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-frames", type=int, default=100_000)
    parser.add_argument("--frames-per-batch", type=int, default=2_048)
    parser.add_argument("--num-workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    policy = ActorCritic()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    returns: list[float] = []
    start = time.time()
    with MultiprocessCollector(
        make_env,
        policy,
        num_workers=args.num_workers,
        frames_per_batch=args.frames_per_batch,
        total_frames=args.total_frames,
        seed=args.seed,
    ) as collector:
        for batch in collector:
            assert int(batch["policy_version"].min()) == collector.stats().version  # sync: on policy, always
            ended = batch["next", "episode_return"]
            returns += ended[~ended.isnan()].tolist()
            learn(batch, policy, optimizer)
            version = collector.update_policy_weights_()
            frames = collector.stats().frames
            recent = returns[-50:]
            print(
                f"{frames:7d} frames  {frames / (time.time() - start):6.0f} frames/s  version {version:3d}  "
                f"mean return of the last {len(recent)} episodes {sum(recent) / max(1, len(recent)):5.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
