"""Ranks of torch.distributed play CartPole-v1 for rank 0, which learns; DistributedWeightSyncScheme brings the weights.

    torchrun --nproc-per-node 3 torchrun_cartpole.py     # options of the script: --iterations 15, --fan-out node

It prints for each iteration the version of the weights that each rank played with and how long the episodes were:
about 20 steps at first, over 100 after some 10 iterations.

On several machines run it on each of them, as any torchrun job:

    torchrun --nnodes 2 --nproc-per-node 3 --rdzv-backend c10d --rdzv-endpoint learner-host:29500 torchrun_cartpole.py

By default each rank gets a copy of the weights. With --fan-out node one copy goes to each machine: one of the ranks
there publishes it into shared memory, which all ranks of the machine use. When a rank dies torchrun ends the others.
"""

import argparse

import gymnasium
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical

import shmsync


def make_policy():
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


@torch.no_grad()
def play(env, policy, steps=600):
    """Whole episodes, at least so many steps: observations, actions, returns; and the lengths of the episodes."""
    rows, lengths = [], []
    while len(rows) < steps:
        (observation, _), done, episode, value = env.reset(), False, [], 0.0
        while not done:
            seen = torch.from_numpy(observation)
            action = Categorical(logits=policy(seen)).sample()
            observation, _, terminated, truncated, _ = env.step(action.item())
            done = terminated or truncated
            episode.append((seen, action))
        for seen, action in reversed(episode):
            value = 1.0 + 0.98 * value  # the discounted return from here: each step is worth one
            rows.append((seen, action, torch.tensor(value)))
        lengths.append(len(episode))
    return [torch.stack(column) for column in zip(*rows, strict=True)], lengths


def learn(policy, optimizer, observation, action, value):
    """PPO's update, where a return above the mean is a good one."""
    advantage = (value - value.mean()) / value.std()
    with torch.no_grad():  # the weights are still those that played
        old = Categorical(logits=policy(observation)).log_prob(action)
    for _ in range(8):
        for i in torch.randperm(len(action)).split(256):
            ratio = (Categorical(logits=policy(observation[i])).log_prob(action[i]) - old[i]).exp()
            loss = -torch.min(ratio * advantage[i], ratio.clamp(0.8, 1.2) * advantage[i]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def lead(scheme, iterations):
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    scheme.init_on_sender("policy", model=policy)  # to every other rank, through the process group's own store
    sender = scheme.get_sender()
    for iteration in range(1, iterations + 1):
        version = sender.send()  # returns when every rank has been in receive() and uses the learner's weights
        played = [None] * dist.get_world_size()
        dist.gather_object(None, played)
        rollouts, lengths, versions = zip(*played[1:], strict=True)
        learn(policy, optimizer, *(torch.cat(column) for column in zip(*rollouts, strict=True)))
        mean = sum(map(sum, lengths)) / sum(map(len, lengths))
        print(f"iteration {iteration}: versions {versions}, mean episode {mean:.1f} steps", flush=True)
    print(f"end: version {version}, {len(versions)} ranks", flush=True)


def work(scheme, iterations):
    env, policy = gymnasium.make("CartPole-v1"), make_policy()  # the first send() brings the learner's weights
    env.reset(seed=dist.get_rank())
    scheme.init_on_worker("policy", model=policy, worker_idx=dist.get_rank())
    receiver = scheme.get_receiver()
    for _ in range(iterations):
        while not receiver.receive(timeout=1.0):  # applied between two rollouts, never within one
            pass  # the learner is learning
        dist.gather_object((*play(env, policy), receiver.version))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--fan-out", choices=["node"], help="one copy of the weights for each machine")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    scheme = shmsync.DistributedWeightSyncScheme(fan_out=args.fan_out)
    (work if dist.get_rank() else lead)(scheme, args.iterations)
    dist.barrier()
    scheme.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
