"""Stable-Baselines3 trains; evaluator processes play with the newest weights all the while, and report what they got.

A callback publishes the policy's weights into shared memory before each rollout: one copy, a few microseconds to
milliseconds, however many evaluators there are. Training never waits for an evaluator. Each evaluation is played from
its first to its last episode by one version of the weights, and reported with the number of that version.

    pip install stable-baselines3
    python sb3_evaluators.py --evaluators 2 --timesteps 40000
"""

import argparse
import multiprocessing
import signal
import time
from collections import defaultdict
from multiprocessing.connection import wait

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

import shmsync

EPISODES = 8  # of one evaluation


def make_model(seed):
    """The trainer's model and its environments. Evaluators make their own, and put the shared weights into it."""
    return PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", n_envs=8, seed=seed), seed=seed, device="cpu",
        n_steps=64, batch_size=128, n_epochs=10, learning_rate=1e-3, gamma=0.98, gae_lambda=0.9,
    )  # fmt: skip


def evaluate(rank, seed, handle, pipe):
    """An evaluator process: evaluations without end, until the trainer closes the pipe or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    torch.set_num_threads(1)
    model = make_model(seed)
    with shmsync.Subscriber(handle, worker=rank) as sub:
        sub.bind(model.policy)  # its parameters are views of the shared weights
        while True:
            # Each predict() alone would be one section. This section makes all episodes be played by one version.
            with sub.read() as section:
                returns, _ = evaluate_policy(model, model.get_env(), EPISODES, return_episode_rewards=True)
            try:
                pipe.send((section.version, returns))
            except (BrokenPipeError, ConnectionResetError):
                return


class Evaluators(BaseCallback):
    """Publishes the policy of the model that it is a callback of, and keeps what the evaluators report.

    `with Evaluators(2) as callback: model.learn(..., callback=callback)`; leaving ends the processes.
    """

    def __init__(self, count, seed=1):
        super().__init__()
        self.count, self.seed = count, seed
        self.pub = None
        self.processes = {}  # by our end of their pipes
        self.steps = {}  # version -> timesteps that it was trained for
        self.returns = defaultdict(list)  # version -> returns of all its episodes
        self.reporters = defaultdict(set)  # version -> who reported them
        self.lost = []

    def _on_rollout_start(self):
        """The model is new, or train() has just changed it."""
        if self.pub is None:
            self._start()
        else:
            self.pub.publish()
        self.steps[self.pub.version] = self.num_timesteps
        self._hear(timeout=0)

    def _on_step(self):
        return True

    def _on_training_end(self):
        """Publish the final weights, and give every evaluator the time to judge them too."""
        print("training has ended", flush=True)
        final, deadline = self.pub.publish(), time.monotonic() + 60
        self.steps[final] = self.num_timesteps
        while len(self.reporters[final]) < len(self.processes) and time.monotonic() < deadline:
            self._hear(timeout=1)

    def _start(self):
        # A slot for each evaluator, one for the newest version and one to write: publish() never waits.
        # device="cpu": a policy on a GPU is fetched from there.
        self.pub = shmsync.Publisher(self.model.policy, slots=self.count + 2, device="cpu")
        context = multiprocessing.get_context("spawn")
        for rank in range(self.count):
            ours, theirs = context.Pipe(duplex=False)
            seed = self.seed + 1000 + rank
            process = context.Process(
                target=evaluate, args=(rank, seed, self.pub.handle, theirs), name=f"evaluator {rank}", daemon=True
            )
            process.start()
            theirs.close()  # so that the evaluator's death is the end of the pipe
            self.processes[ours] = process
        while len(self.pub.readers()) < len(self.processes):  # once: let them see the untrained policy too
            self._hear(timeout=0.1)
        print(f"{len(self.processes)} evaluators are playing", flush=True)

    def _hear(self, timeout):
        """Take in what has been reported, and notice who is dead."""
        for pipe in wait(list(self.processes), timeout):
            try:
                while pipe.poll():
                    version, returns = pipe.recv()
                    self.returns[version] += returns
                    self.reporters[version].add(self.processes[pipe].name)
            except (EOFError, OSError):
                process = self.processes.pop(pipe)
                process.join()
                self.lost.append(f"{process.name} died, exit code {process.exitcode}")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for pipe in self.processes:
            pipe.close()
        for process in self.processes.values():
            process.join(5)  # it finishes its evaluation
            process.kill()
            process.join()
        if self.pub is not None:
            self.pub.close()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--evaluators", type=int, default=2, help="processes that play")
    parser.add_argument("--timesteps", type=int, default=40_000, help="steps of training")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the environments")
    args = parser.parse_args()

    torch.set_num_threads(1)
    model = make_model(args.seed)
    with Evaluators(args.evaluators, args.seed) as callback:
        model.learn(args.timesteps, callback=callback)

        print(f"{'version':>8} {'timesteps':>10} {'episodes':>9} {'mean return':>12}  reported by")
        for version in sorted(callback.returns):
            returns, names = callback.returns[version], ", ".join(sorted(callback.reporters[version]))
            steps, mean = callback.steps[version], sum(returns) / len(returns)
            print(f"{version:>8} {steps:>10} {len(returns):>9} {mean:>12.1f}  {names}")
        slowest = callback.pub.stats().publish.max
        print(
            f"end: {callback.pub.version} versions published, {len(callback.returns)} evaluated; "
            f"the slowest publish took {slowest * 1e3:.2f} ms",
            *callback.lost,
            sep="\n",
        )


if __name__ == "__main__":
    main()
