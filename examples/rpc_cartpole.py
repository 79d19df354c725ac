"""Workers of torch.distributed.rpc play CartPole-v1 for a learner, and get its weights through RPCWeightSyncScheme.

    python rpc_cartpole.py --workers 2 --iterations 15

It prints for each iteration the version of the weights that each worker played with and how long the episodes were:
about 20 steps at first, over 100 after some 10 iterations. A worker that is killed is named, and the rest go on.

On several machines let torchrun start the processes: rank 0 learns, and the others are workers.

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint host:29500 rpc_cartpole.py --workers 3
"""

import argparse
import contextlib
import multiprocessing
import os
import queue
import socket
import time

import gymnasium
import torch
from torch import nn
from torch.distributed import rpc
from torch.distributions import Categorical

import shmsync

goodbye = queue.SimpleQueue()  # a worker serves calls until there is something in it


def make_policy():
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


class Player:
    """Lives in a worker. RPC calls come on threads, but the learner never sends while it waits for play()."""

    def __init__(self, scheme, rank):
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        self.env = gymnasium.make("CartPole-v1")
        self.env.reset(seed=rank)
        self.policy = make_policy()  # the first send() gives it the learner's weights
        scheme.init_on_worker("policy", model=self.policy, worker_idx=rank)
        self.scheme, self.receiver = scheme, scheme.get_receiver()

    @staticmethod
    def update_policy_weights_(player, weights):
        """The scheme calls this, by this name, in the worker. When it returns, the new weights are in use."""
        player.local_value().receiver.apply_weights(weights)

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

    def finish(self, graceful):
        """Leave the shared memory, and let run() go on to the end."""
        self.scheme.shutdown()
        goodbye.put(graceful)


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


def lead(args):
    """Run the learner. Returns whether all workers lived to the end."""
    torch.manual_seed(0)
    policy, scheme = make_policy(), shmsync.RPCWeightSyncScheme()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    infos = [rpc.get_worker_info(f"rank{rank}") for rank in range(1, args.workers + 1)]
    players = [rpc.remote(info, Player, args=(scheme, info.id)) for info in infos]
    scheme.init_on_sender(
        "policy", collector_infos=infos, collector_rrefs=players, collector_class=Player, model=policy
    )
    sender = scheme.get_sender()
    for iteration in range(1, args.iterations + 1):
        try:
            sender.send()  # returns when every worker uses the learner's weights
        except shmsync.WorkerDied as error:  # the others use them, and from now on the dead are left out
            print(f"WorkerDied: {error}", flush=True)
        alive = [index for index in sender.worker_ids if not sender.is_dead(index)]
        played = []
        for call in [players[index].rpc_async().play() for index in alive]:
            with contextlib.suppress(RuntimeError):  # it died while it played; the next send() raises
                played.append(call.wait())
        if not played:
            raise SystemExit("every worker has died")
        rollouts, lengths, versions = zip(*played, strict=True)
        learn(policy, optimizer, *(torch.cat(column) for column in zip(*rollouts, strict=True)))
        mean = sum(map(sum, lengths)) / sum(map(len, lengths))
        print(f"iteration {iteration}: versions {versions}, mean episode {mean:.1f} steps", flush=True)
    print(f"end: version {sender.version}, {len(played)} workers", flush=True)
    scheme.shutdown()
    graceful = len(played) == len(players)
    for index in alive:
        with contextlib.suppress(RuntimeError):  # it died, or is gone before its answer
            players[index].rpc_sync().finish(graceful)
    return graceful


def serve():
    """A worker. RPC's threads do what is called; this waits for finish(), or for the learner's death."""
    learner = multiprocessing.parent_process()  # None under torchrun, which ends the workers
    while goodbye.empty() and (learner is None or learner.is_alive()):
        time.sleep(0.1)
    return not goodbye.empty() and goodbye.get()


def run(rank, args):
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=args.workers + 1)
    # A graceful shutdown waits for every rank, and hangs if one was killed.
    rpc.shutdown(graceful=serve() if rank else lead(args))


def main(args):
    if "RANK" in os.environ:  # torchrun
        run(int(os.environ["RANK"]), args)
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    start = multiprocessing.get_context("spawn").Process
    processes = [start(target=run, args=(rank, args), daemon=True) for rank in range(1, args.workers + 1)]
    for process in processes:
        process.start()
    run(0, args)
    for process in processes:
        process.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=15)
    main(parser.parse_args())
