"""PPO in a single file, in the manner of CleanRL, made asynchronous with shmsync.

Worker processes act without a pause while the learner trains. They read the newest weights from shared memory; a whole
rollout is made by one version of them, and carries its number. By the time it is used the learner may be a few versions
further. The log-probabilities that were stored while acting correct for that: PPO's ratio compares the newest policy
with the one that acted, whichever that was.

The lines that a synchronous file does not have are marked with "ASYNC", and say what would stand there instead. The
rest is the same.

    python cleanrl_ppo_async.py --num-workers 2 --seed 1
"""

import argparse
import dataclasses
import multiprocessing
import signal
import time
from collections import deque
from multiprocessing.connection import wait

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import shmsync


def arg(default, help):
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass
class Args:
    """The options of the command line."""

    env_id: str = arg("CartPole-v1", "a Gymnasium environment with a flat observation and discrete actions")
    seed: int = arg(1, "of the weights, the environments and the actions")
    total_timesteps: int = arg(500_000, "stop after so many environment steps")
    target_return: float = arg(195.0, "stop when the last 50 episodes return so much on average; 0: never")
    num_workers: int = arg(2, "processes that act")  # ASYNC
    num_envs: int = arg(4, "environments of each worker")
    num_steps: int = arg(128, "steps of each environment in one rollout")
    learning_rate: float = arg(1e-3, "of Adam")
    gamma: float = arg(0.98, "discount per step")
    gae_lambda: float = arg(0.9, "0: advantages look one step ahead, 1: to the end of the episode")
    update_epochs: int = arg(6, "times each rollout is used")
    minibatch_size: int = arg(256, "steps per gradient")
    clip_coef: float = arg(0.2, "how far the ratio may move from 1 and still be rewarded")
    ent_coef: float = arg(0.003, "weight of the entropy")
    vf_coef: float = arg(0.5, "weight of the critic's loss")
    max_grad_norm: float = arg(0.5, "gradients are cut to this length")
    log_every: int = arg(10, "updates from one line of output to the next")

    @classmethod
    def from_command_line(cls):
        """The defaults, and what sys.argv says instead."""
        show = argparse.ArgumentDefaultsHelpFormatter
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=show)
        for field in dataclasses.fields(cls):
            option = "--" + field.name.replace("_", "-")
            parser.add_argument(option, type=type(field.default), default=field.default, help=field.metadata["help"])
        return cls(**vars(parser.parse_args()))


def make_env(env_id):
    return gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))


def mlp(inputs, outputs, gain):
    net = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
    for layer, scale in ((net[0], 2**0.5), (net[2], 2**0.5), (net[4], gain)):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return net


class Agent(nn.Module):
    """Two networks: one chooses the action, one judges the state."""

    def __init__(self, env):
        super().__init__()
        inputs, actions = env.observation_space.shape[0], int(env.action_space.n)
        self.actor = mlp(inputs, actions, gain=0.01)
        self.critic = mlp(inputs, 1, gain=1.0)

    def get_value(self, obs):
        """Expected discounted return from here."""
        return self.critic(obs).squeeze(-1)

    def get_action_and_value(self, obs, action=None):
        """Action (drawn, unless given), its log-probability, the entropy of the policy, and the value."""
        policy = Categorical(logits=self.actor(obs), validate_args=False)
        action = policy.sample() if action is None else action
        return action, policy.log_prob(action), policy.entropy(), self.get_value(obs)


@torch.no_grad()
def collect(agent, envs, next_obs, args):
    """One rollout: arrays [steps, envs], the returns of the episodes that ended in it, and the next observations."""
    shape = (args.num_steps, len(envs))
    rollout = {"obs": np.zeros((*shape, *next_obs.shape[1:]), np.float32), "actions": np.zeros(shape, np.int64)}
    rollout |= {name: np.zeros(shape, np.float32) for name in ("logprobs", "values", "rewards", "dones")}
    returns = []
    for t in range(args.num_steps):
        action, logprob, _, value = agent.get_action_and_value(torch.from_numpy(next_obs))
        rollout["obs"][t], rollout["actions"][t] = next_obs, action
        rollout["logprobs"][t], rollout["values"][t] = logprob, value
        next_obs = next_obs.copy()
        for i, env in enumerate(envs):
            obs, reward, terminated, truncated, info = env.step(int(action[i]))
            if truncated and not terminated:  # it would have gone on, so the last state has a value too
                reward += args.gamma * agent.get_value(torch.as_tensor(obs, dtype=torch.float32)).item()
            if terminated or truncated:
                returns.append(float(info["episode"]["r"]))
                obs, _ = env.reset()
            rollout["rewards"][t, i], rollout["dones"][t, i] = reward, terminated or truncated
            next_obs[i] = obs
    return rollout, returns, next_obs


@torch.no_grad()
def advantages(agent, rollout, next_obs, args):
    """Generalised advantage estimates, [steps, envs]."""
    result, later, next_value = torch.zeros_like(rollout["rewards"]), 0.0, agent.get_value(next_obs)
    for t in reversed(range(args.num_steps)):
        goes_on = 1.0 - rollout["dones"][t]
        delta = rollout["rewards"][t] + args.gamma * goes_on * next_value - rollout["values"][t]
        result[t] = later = delta + args.gamma * args.gae_lambda * goes_on * later
        next_value = rollout["values"][t]
    return result


def train(agent, optimizer, rollout, next_obs, args):
    """PPO's update."""
    advantage = advantages(agent, rollout, next_obs, args)
    rollout = {name: value.flatten(0, 1) for name, value in rollout.items()}
    target, advantage = advantage.flatten() + rollout["values"], advantage.flatten()
    for _ in range(args.update_epochs):
        for pick in torch.randperm(len(target)).split(args.minibatch_size):
            _, logprob, entropy, value = agent.get_action_and_value(rollout["obs"][pick], rollout["actions"][pick])
            ratio = (logprob - rollout["logprobs"][pick]).exp()  # newest policy / the one that acted
            gain = (advantage[pick] - advantage[pick].mean()) / (advantage[pick].std(correction=0) + 1e-8)
            policy_loss = -torch.min(gain * ratio, gain * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
            value_loss = 0.5 * (value - target[pick]).square().mean()
            loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()


def work(rank, args, handle, pipe):  # ASYNC: what is in here would be part of main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the learner; we go when its end of the pipe is closed
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + 1 + rank)
    envs = [make_env(args.env_id) for _ in range(args.num_envs)]
    seed = 1000 * args.seed + rank * args.num_envs
    obs = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(envs)]).astype(np.float32)
    try:
        with shmsync.Subscriber(handle, worker=rank) as sub:
            agent = sub.bind(Agent(envs[0]))  # its parameters are views of the shared weights
            while pipe.recv():  # the learner has the last rollout, and asks for another one
                with sub.read() as section:  # in here the weights are those of one version: the newest at this moment
                    rollout, returns, obs = collect(agent, envs, obs, args)
                # Arrays, not tensors: torch would put each tensor into a separate shared file.
                pipe.send((section.version, rollout, returns, obs))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the learner is gone


def start_workers(args, handle):  # ASYNC: nothing would be started
    """Worker processes by the learner's end of their pipes."""
    context, workers = multiprocessing.get_context("spawn"), {}
    for rank in range(args.num_workers):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(rank, args, handle, theirs), name=f"worker {rank}", daemon=True)
        process.start()
        ours.send(True)
        theirs.close()  # so that the worker's death is the end of the pipe
        workers[ours] = process
        print(f"{process.name}: pid {process.pid}", flush=True)
    return workers


def take_rollouts(workers):  # ASYNC: collect() would make one, here
    """The rollouts that are ready, at least one while a worker lives; each of these workers begins another one."""
    ready = []
    while workers and not ready:
        for pipe in wait(list(workers)):
            try:
                ready.append(pipe.recv())
                pipe.send(True)
            except (EOFError, OSError):  # also in the middle of a rollout
                process = workers.pop(pipe)
                process.join()
                print(f"{process.name} died, exit code {process.exitcode}; {len(workers)} left", flush=True)
    return ready


def stop_workers(workers):  # ASYNC
    for pipe in workers:
        pipe.close()
    for process in workers.values():
        process.join(5)  # it finishes its rollout
        process.kill()
        process.join()


def main(args):
    torch.set_num_threads(1)  # each process has a processor's worth of work
    torch.manual_seed(args.seed)
    agent = Agent(make_env(args.env_id))
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate)
    last, episodes, lags, global_step, update, start = deque(maxlen=50), 0, [], 0, 0, None
    # A slot for each worker's rollout, one for the newest version and one to write: no process waits for another.
    with shmsync.Publisher(agent, slots=args.num_workers + 2) as pub:  # ASYNC
        workers = start_workers(args, pub.handle)  # ASYNC: environments would be made here
        try:
            while global_step < args.total_timesteps:
                ready = take_rollouts(workers)  # ASYNC: [collect(agent, envs, obs, args)]
                if not ready:  # ASYNC
                    raise SystemExit("every worker has died")
                start = start or time.perf_counter()
                lags += [pub.version - version for version, *_ in ready]  # ASYNC: always 0
                rollout = {
                    name: torch.from_numpy(np.concatenate([rollout[name] for _, rollout, _, _ in ready], axis=1))
                    for name in ready[0][1]
                }
                next_obs = torch.from_numpy(np.concatenate([obs for *_, obs in ready]))
                train(agent, optimizer, rollout, next_obs, args)
                pub.publish()  # ASYNC: from now on workers begin rollouts with these weights
                update += 1
                global_step += rollout["rewards"].numel()
                for _, _, returns, _ in ready:
                    last.extend(returns)
                    episodes += len(returns)
                mean = float(np.mean(last)) if last else 0.0
                sps = int(global_step / (time.perf_counter() - start))
                if update % args.log_every == 0:
                    print(
                        f"global_step={global_step} episodic_return={mean:.1f} SPS={sps} version={pub.version} "
                        f"lag={np.mean(lags[-args.log_every :]):.1f}",
                        flush=True,
                    )
                if args.target_return and len(last) == last.maxlen and mean >= args.target_return:
                    print(f"target reached after {time.perf_counter() - start:.1f} s")
                    break
        finally:
            stop_workers(workers)  # ASYNC
        print(
            f"end: global_step={global_step} episodes={episodes} episodic_return={mean:.1f} SPS={sps} "
            f"versions={pub.version} mean_lag={np.mean(lags):.1f} max_lag={max(lags)}"
        )


if __name__ == "__main__":
    main(Args.from_command_line())
