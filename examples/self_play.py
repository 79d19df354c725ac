"""Self-play of Connect Four: a learner plays against 100 frozen versions of itself.

Each opponent is an arena with one slot, whose weights all workers share. A worker attaches to an opponent when it first
plays against it. It keeps a few attached, and closes the least recently used one.

    pip install pettingzoo pygame-ce
    python self_play.py --opponents 100 --attached 8
"""

import argparse
import contextlib
import multiprocessing
import os
import random
from collections import Counter, OrderedDict, defaultdict
from queue import Empty

os.environ["PYGAME_HIDE_SUPPORT_PROMPT"] = "1"  # PettingZoo's board games import pygame

import numpy as np
import psutil
import torch
from pettingzoo.classic import connect_four_v3
from torch import nn

import shmsync


class Policy(nn.Module):
    """From boards `[n, 6, 7, 2]` the logits of the seven columns and the expected results."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(84, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.actor, self.critic = nn.Linear(128, 7), nn.Linear(128, 1)
        self.register_buffer("opponents", torch.tensor(0))  # how many there are; published with the weights

    def forward(self, board, legal):
        hidden = self.body(board.float())
        return self.actor(hidden).masked_fill(~legal, -1e9), self.critic(hidden).squeeze(-1)


def random_player(board, legal):
    return torch.zeros(legal.shape).masked_fill(~legal, -1e9), None


class Opponents:
    """The opponents that this process is attached to, at most `most` of them, by number."""

    def __init__(self, name, most, worker=None):
        self.name, self.worker = name, worker
        # A bound module keeps its opponent mapped, even after the Subscriber is closed. Binding the module to the next
        # opponent unmaps it, so a few modules serve for all.
        self.free = [Policy() for _ in range(most)]
        self.attached = OrderedDict()  # number -> (Subscriber, policy); the least recently used one is first

    def __getitem__(self, number):
        if number not in self.attached:
            if not self.free:
                _, (sub, policy) = self.attached.popitem(last=False)
                sub.close()
                self.free.append(policy)
            sub = shmsync.Subscriber(f"{self.name}-{number}", worker=self.worker)
            self.attached[number] = sub, sub.bind(self.free.pop())
        self.attached.move_to_end(number)
        return self.attached[number][1]

    def close(self):
        for sub, _ in self.attached.values():
            sub.close()


@torch.no_grad()
def play(policy, opponent, games):
    """Play games side by side; the opponent begins every other one.

    Returns the policy's moves as arrays (board, legal columns, action, its log-probability, result of the game) and the
    results of the games: 1 won, 0 drawn, -1 lost.
    """
    envs = [connect_four_v3.raw_env() for _ in range(games)]
    for env in envs:
        env.reset()
    results, moves, turn, running = torch.zeros(games), [], 0, list(range(games))
    while running:
        for player in (policy, opponent):
            group = [game for game in running if (game + turn) % 2 == (player is opponent)]  # those in which it moves
            if not group:
                continue
            seen = [envs[game].observe(envs[game].agent_selection) for game in group]
            board = torch.stack([torch.from_numpy(each["observation"]) for each in seen])
            legal = torch.stack([torch.from_numpy(each["action_mask"]) for each in seen]).bool()
            choice = torch.distributions.Categorical(logits=player(board, legal)[0], validate_args=False)
            action = choice.sample()
            if player is policy:
                moves.append((torch.tensor(group), board, legal, action, choice.log_prob(action)))
            for game, column in zip(group, action.tolist(), strict=True):
                envs[game].step(column)
        for game in running:
            results[game] = envs[game].rewards[f"player_{game % 2}"]
        running = [game for game in running if not any(envs[game].terminations.values())]
        turn += 1
    game, *rest = (torch.cat(each) for each in zip(*moves, strict=True))
    return [each.numpy() for each in (*rest, results[game])], results.numpy()


def win_rate(policy, opponent, games=200):
    return (play(policy, opponent, games)[1] > 0).mean()


def work(sub, args, queue):
    """A worker: for each version of the policy, games against one opponent."""
    policy = sub.bind(Policy())
    with contextlib.closing(Opponents(sub.name, args.attached, sub.worker)) as opponents:
        for _ in sub.versions():
            # One version, in all games. The learner publishes when all games are over; else it needs more slots.
            with sub.read() as section:
                number = random.randrange(int(section.numpy()["opponents"]))
                moves, results = play(policy, opponents[number], args.games)
            queue.put((sub.worker, number, moves, results))  # arrays: torch would put tensors into shared files


def learn(policy, optimizer, moves, epochs=4, clip=0.2):
    """PPO, in which the return of a move is the result of its game."""
    for _ in range(epochs):
        for pick in torch.randperm(len(moves[0])).split(256):
            board, legal, action, old_log_prob, result = (each[pick] for each in moves)
            logits, value = policy(board, legal)
            choice = torch.distributions.Categorical(logits=logits, validate_args=False)
            ratio, gain = (choice.log_prob(action) - old_log_prob).exp(), result - value.detach()
            surrogate = torch.min(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain).mean()
            loss = 0.5 * (value - result).square().mean() - surrogate - 0.01 * choice.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def receive(queue, workers):
    """The next result. A worker that has died would send none."""
    while len(workers.alive) == len(workers.procs):
        with contextlib.suppress(Empty):
            return queue.get(timeout=1)
    raise SystemExit("a worker has died")  # leaving `Workers` logs which one, and its traceback


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--opponents", type=int, default=100, help="frozen versions, at most one for each round")
    parser.add_argument("--attached", type=int, default=8, help="opponents that a worker keeps attached")
    parser.add_argument("--workers", type=int, default=2, help="processes that play")
    parser.add_argument("--rounds", type=int, default=150, help="versions of the policy")
    parser.add_argument("--games", type=int, default=48, help="games of each worker in one round")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the moves")
    args = parser.parse_args()
    if args.opponents > args.rounds:
        parser.error("--opponents is at most --rounds")

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    policy, name = Policy(), f"self-play-{os.getpid()}"
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    untrained = win_rate(policy, random_player)
    queue = multiprocessing.get_context("forkserver").Queue()  # the start method of Workers
    frozen, played, attached = [], defaultdict(set), Counter()
    with contextlib.ExitStack() as stack:

        def freeze():
            """Make an opponent of the policy as it is now: an arena that is never published again."""
            frozen.append(stack.enter_context(shmsync.Publisher(policy, name=f"{name}-{len(frozen)}")))
            policy.opponents.fill_(len(frozen))

        freeze()
        pub = stack.enter_context(shmsync.Publisher(policy, name=name))
        workers = stack.enter_context(shmsync.Workers(pub, work, args.workers, args=(args, queue)))
        for step in range(1, args.rounds + 1):
            batches = [receive(queue, workers) for _ in range(args.workers)]
            for worker, number, _, _ in batches:
                played[worker].add(number)
            attached |= Counter(row.worker for each in frozen for row in each.readers())  # the most so far
            columns = zip(*(moves for _, _, moves, _ in batches), strict=True)
            learn(policy, optimizer, [torch.from_numpy(np.concatenate(column)) for column in columns])
            if len(frozen) < args.opponents * step / args.rounds:
                freeze()
            if step % 20 == 0:
                won = np.mean([results > 0 for *_, results in batches])
                print(f"round {step}: {len(frozen)} opponents; {won:.0%} of this round's games won", flush=True)
            if step < args.rounds:  # the results of a further round would stay in the queue
                pub.publish()  # the workers begin the next round

        trained = win_rate(policy, random_player)
        print(f"win rate against a random player: {untrained:.0%} untrained, {trained:.0%} trained")
        with contextlib.closing(Opponents(name, args.attached)) as opponents:
            for number in sorted({0, len(frozen) // 2, len(frozen) - 1}):
                print(f"win rate against opponent {number}: {win_rate(policy, opponents[number]):.0%}")
        print(f"{len(frozen)} opponents exist; the learner has {psutil.Process().num_fds()} descriptors")
        for worker, process in enumerate(psutil.Process(each.pid) for each in workers.procs):
            met, most, private = len(played[worker]), attached[worker], process.memory_full_info().uss / 2**20
            print(
                f"worker {worker}: played {met} opponents, at most {most} attached at once; "
                f"{process.num_fds()} descriptors, {private:.0f} MiB of private memory"
            )


if __name__ == "__main__":
    main()
