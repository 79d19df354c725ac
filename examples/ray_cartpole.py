"""Actors of Ray play CartPole-v1 for a learner, and get its weights through RayWeightSyncScheme.

    python ray_cartpole.py --actors 2 --iterations 15     # also: --kill-one, --address auto

It prints where each actor runs, and for each iteration the version of the weights that each actor played with and how
long the episodes were: about 20 steps at first, over 100 after some 10 iterations.

On several nodes (--address auto, on a machine of a Ray cluster) nothing changes in this file: with fan_out="node" one
copy of the weights goes to each node. There one of the actors publishes it into shared memory, and all actors of the
node use it from there. On the learner's own node the learner publishes it itself.
"""

import argparse
import contextlib
import os
import socket

import gymnasium
import ray
import torch
from torch import nn
from torch.distributions import Categorical

import shmsync


def make_policy():
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
class Actor:
    """An actor that plays; Ray calls its methods one after the other."""

    def __init__(self, scheme, index):
        torch.set_num_threads(1)
        torch.manual_seed(index)
        self.env = gymnasium.make("CartPole-v1")
        self.env.reset(seed=index)
        self.policy = make_policy()  # the first send() gives it the learner's weights
        scheme.init_on_worker("policy", model=self.policy, worker_idx=index)
        self.receiver = scheme.get_receiver()

    def update_policy_weights_(self, policy_or_weights):
        """The scheme calls this, by this name. When it returns, the new weights are in use."""
        self.receiver.apply_weights(policy_or_weights)

    def where(self):
        """Where this actor runs, for the learner to print."""
        return f"pid {os.getpid()} on {socket.gethostname()}"

    @torch.no_grad()
    def play(self, steps=600):
        """Whole episodes, at least so many steps: observations, actions, returns; lengths; version of the weights."""
        rows, lengths = [], []
        while len(rows) < steps:
            (observation, _), done, episode, value = self.env.reset(), False, [], 0.0
            while not done:
                seen = torch.from_numpy(observation)
                action = Categorical(logits=self.policy(seen)).sample()
                observation, _, terminated, truncated, _ = self.env.step(action.item())
                done = terminated or truncated
                episode.append((seen, action))
            for seen, action in reversed(episode):
                value = 1.0 + 0.98 * value  # the discounted return from here: each step is worth one
                rows.append((seen, action, torch.tensor(value)))
            lengths.append(len(episode))
        return [torch.stack(column) for column in zip(*rows, strict=True)], lengths, self.receiver.version


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


def main(args):
    local = {"num_cpus": args.actors, "include_dashboard": False, "object_store_memory": 200 << 20}
    ray.init(args.address, log_to_driver=False, logging_level="ERROR", **(local if args.address == "local" else {}))
    torch.manual_seed(0)
    policy, scheme = make_policy(), shmsync.RayWeightSyncScheme(fan_out="node")
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    actors = [Actor.remote(scheme, index) for index in range(args.actors)]
    for index, actor in enumerate(actors):
        print(f"actor {index}: {ray.get(actor.where.remote())}", flush=True)
    scheme.init_on_sender("policy", remote_collectors=actors, model=policy)
    sender = scheme.get_sender()
    for iteration in range(1, args.iterations + 1):
        if args.kill_one and iteration == 3:
            ray.kill(actors[-1])  # which does not wait for its death
            with contextlib.suppress(ray.exceptions.RayActorError):
                while True:
                    ray.get(actors[-1].where.remote())
        try:
            sender.send()  # returns when every actor uses the learner's weights
        except shmsync.WorkerDied as error:  # the others use them, and from now on the dead are left out
            print(f"WorkerDied: {error}", flush=True)
        alive = [index for index in sender.worker_ids if not sender.is_dead(index)]
        played = []
        for call in [actors[index].play.remote() for index in alive]:
            with contextlib.suppress(ray.exceptions.RayActorError):  # it died while it played; the next send() raises
                played.append(ray.get(call))
        if not played:
            raise SystemExit("every actor has died")
        rollouts, lengths, versions = zip(*played, strict=True)
        learn(policy, optimizer, *(torch.cat(column) for column in zip(*rollouts, strict=True)))
        mean = sum(map(sum, lengths)) / sum(map(len, lengths))
        print(f"iteration {iteration}: versions {versions}, mean episode {mean:.1f} steps", flush=True)
    scheme.shutdown()
    ray.shutdown()
    print(f"end: version {sender.version}, {len(played)} actors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--kill-one", action="store_true", help="kill an actor before iteration 3; the rest go on")
    parser.add_argument("--address", default="local", help="auto: the Ray cluster that this machine belongs to")
    main(parser.parse_args())
