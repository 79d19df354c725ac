"""Population-based training of CartPole-v1: bad learners copy good ones, and vary the learning rate.

Each learner is a process with its own arena. The arena has the weights, and in buffers of the same version the
score and the learning rate. After each generation a learner that is much worse than the best one copies it. If a
learner is killed, another one is started under its name, which copies the best one in the same way.

    pip install gymnasium
    python population.py --learners 4 --generations 30
"""

import argparse
import contextlib
import os
import random

import gymnasium
import torch
from torch import nn

import shmsync


class Member(nn.Module):
    """A policy, and what the other learners need to know of it."""

    def __init__(self, learning_rate=0.0):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.register_buffer("score", torch.tensor(0.0))
        self.register_buffer("learning_rate", torch.tensor(learning_rate))

    def forward(self, observation):
        return torch.distributions.Categorical(logits=self.actor(observation), validate_args=False)


def play(env, policy, steps, gamma=0.99):
    """Whole episodes, together of at least so many steps: their moves as tensors, and the mean length of an episode."""
    observations, actions, log_probs, results, lengths = [], [], [], [], []
    while sum(lengths) < steps:
        (observation, _), length, done = env.reset(), 0, False
        while not done:
            observations.append(torch.as_tensor(observation))
            choice = policy(observations[-1])
            actions.append(choice.sample())
            log_probs.append(choice.log_prob(actions[-1]))
            observation, _, terminated, truncated, _ = env.step(int(actions[-1]))
            length, done = length + 1, terminated or truncated
        lengths.append(length)
        # The discounted sum of the rewards, 1 for each step from here to the end of the episode.
        results += [(1 - gamma**left) / (1 - gamma) for left in range(length, 0, -1)]
    moves = torch.stack(observations), torch.stack(actions), torch.stack(log_probs), torch.tensor(results)
    return moves, sum(lengths) / len(lengths)


def learn(member, optimizer, moves, epochs=6, clip=0.2):
    """PPO."""
    observation, action, old_log_prob, result = moves
    with torch.no_grad():
        gain = result - member.critic(observation).squeeze(-1)
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    for _ in range(epochs):
        for pick in torch.randperm(len(action)).split(128):
            choice = member(observation[pick])
            ratio = (choice.log_prob(action[pick]) - old_log_prob[pick]).exp()
            surrogate = torch.min(ratio * gain[pick], ratio.clamp(1 - clip, 1 + clip) * gain[pick]).mean()
            value_loss = (member.critic(observation[pick]).squeeze(-1) - result[pick]).square().mean()
            loss = 0.005 * value_loss - surrogate - 0.01 * choice.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def best_of(names):
    """A private copy of the best member that is published under these names, and its name; or None."""
    found = []
    for name in names:
        try:
            with shmsync.Subscriber(name, timeout=0) as sub:
                found.append((sub.state_dict(), name))  # weights, score and learning rate of one version
        except (shmsync.ArenaNotFound, shmsync.WriterDied):
            pass  # not started yet, or killed
    return max(found, key=lambda each: each[0]["score"], default=None)


def train(referee, names, args):
    """A learner. Each version of the referee's arena starts a generation."""
    rank, env = referee.worker, gymnasium.make("CartPole-v1")
    env.reset(seed=args.seed + rank)
    member = Member(float(torch.logspace(-5, -2, args.learners)[rank]))
    optimizer = torch.optim.Adam(member.parameters(), lr=member.learning_rate.item())
    with shmsync.Publisher(member, name=names[rank], slots=2) as pub:  # others may copy it at any moment
        for _ in referee.versions():
            with torch.no_grad():
                moves, score = play(env, member, args.steps)
            learn(member, optimizer, moves)
            member.score.fill_(score)
            pub.publish()

            best = best_of(names[:rank] + names[rank + 1 :])
            if best and score < 0.5 * best[0]["score"]:
                weights, name = best
                member.load_state_dict(weights)  # exploit, and explore:
                member.learning_rate.mul_(random.choice([0.5, 2.0])).clamp_(1e-5, 1e-2)
                rate = member.learning_rate.item()
                optimizer = torch.optim.Adam(member.parameters(), lr=rate)  # its state is not in the arena
                pub.publish()
                print(
                    f"learner {rank} takes over learner {names.index(name)}: "
                    f"score {score:.0f} -> {member.score:.0f}, learning rate {rate:.1e}",
                    flush=True,
                )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--learners", type=int, default=4, help="processes that train")
    parser.add_argument("--generations", type=int, default=30, help="of each learner")
    parser.add_argument("--steps", type=int, default=1000, help="environment steps of a learner in one generation")
    parser.add_argument("--seed", type=int, default=1, help="of the weights, the environments and the actions")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    names = [f"population-{os.getpid()}-{rank}" for rank in range(args.learners)]
    with contextlib.ExitStack() as stack:
        referee = stack.enter_context(shmsync.Publisher({"generation": torch.tensor(1)}))
        with shmsync.Workers(referee, train, args.learners, args=(names, args), restart=3) as workers:
            print("learners:", *(f"pid {process.pid}" for process in workers.procs), flush=True)
            # follow=True: it moves to the arena of a learner that was started again.
            subs = [stack.enter_context(shmsync.Subscriber(name, follow=True, timeout=60)) for name in names]
            for generation in range(2, args.generations + 1):
                referee.publish({"generation": torch.tensor(generation)}, wait=True, timeout=60)
                members = [sub.state_dict() for sub in subs]
                scores = "  ".join(f"{each['score']:5.0f} ({each['learning_rate']:.0e})" for each in members)
                print(f"generation {generation - 1}: {scores}", flush=True)
        # The learners have closed their arenas. This process still has the last versions.
        env = gymnasium.make("CartPole-v1")
        with torch.no_grad():
            for rank, sub in enumerate(subs):
                policy = sub.bind(Member())
                with sub.read() as section:
                    _, score = play(env, policy, 2000)
                print(f"learner {rank}, version {section.version}: mean return {score:.0f}")


if __name__ == "__main__":
    main()
