"""PPO on CartPole-v1 in TorchRL, with two collector workers.

    python torchrl_ppo.py --total-frames 50000 --num-workers 2

Two lines make it use shmsync, both marked. Without them it is a plain TorchRL program.
"""

from __future__ import annotations

import argparse
import time

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from shmsync.integrations.torchrl import ShmWeightSyncScheme  # 1


def make_env():
    return TransformedEnv(GymEnv("CartPole-v1"), RewardSum())


def mlp(outputs):
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def learn(batch, loss, advantage, optimizer, epochs=6, minibatch=250):
    with torch.no_grad():
        advantage(batch)
    frames = batch.reshape(-1)
    for _ in range(epochs):
        for index in torch.randperm(len(frames)).split(minibatch):
            losses = loss(frames[index])
            optimizer.zero_grad()
            sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimizer.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-frames", type=int, default=50_000)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    actor = ProbabilisticActor(
        TensorDictModule(mlp(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    critic = ValueOperator(mlp(1), in_keys=["observation"])
    loss = ClipPPOLoss(actor, critic, entropy_coeff=0.01)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)

    collector = MultiSyncCollector(
        [make_env] * options.num_workers,
        actor,
        frames_per_batch=2000,
        total_frames=options.total_frames,
        track_policy_version=True,
        weight_sync_schemes={"policy": ShmWeightSyncScheme()},  # 2
    )
    collector.set_seed(options.seed)
    frames, started, syncing = 0, time.monotonic(), 0.0
    try:
        for batch in collector:
            frames += batch.numel()
            ended = batch["next", "done"].squeeze(-1)
            returns = batch["next", "episode_reward"].squeeze(-1)[ended]
            version = batch["next", "policy_version"]
            learn(batch, loss, advantage, optimizer)
            before = time.monotonic()
            collector.update_policy_weights_()
            syncing += time.monotonic() - before
            mean = returns.float().mean().item() if len(returns) else float("nan")
            versions = f"{version.min()} to {version.max()}"
            print(f"{frames} frames, mean return {mean:.1f}, policy version {versions}", flush=True)
    finally:
        collector.shutdown()
    seconds = time.monotonic() - started
    print(f"{frames / seconds:.0f} frames/s, {syncing:.3f} s of {seconds:.1f} s in update_policy_weights_()")


if __name__ == "__main__":
    main()
