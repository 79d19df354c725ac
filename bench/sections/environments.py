"""MultiprocessCollector beside Gymnasium's own loops and vector environments.

All loops step the same environments with the same policy, on one thread, and record the same frames in tensors. They
take turns, a stretch of frames each. Every frame is checked: from its observation and its action the checksum computes
again what the policy must have chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from common.clock import Clock
from common.measure import rate
from common.row import OK, Row
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from torch import nn

Turn = Callable[[int], tuple[int, float]]  # collects so many frames: (frames, seconds)


def rows(clock: Clock, rounds: int = 3, scale: int = 1, only: str = "") -> Iterator[Row]:
    """Those whose names have this word in them, with `scale` times as many frames in a turn."""

    def measure(name: str) -> Iterator[Row]:
        found = speeds(name, rounds if clock.left > 10 else 1, scale)
        what, _, peer = name.partition(" / ")
        ours, theirs = map(rate, zip(*found, strict=True))
        # Actions are computed again from the recorded observations in each turn; another one ends the section.
        yield Row(f"frames, {what}", ours, peer, theirs, aim(name), OK, unit="/s")

    return clock.cells({name.partition(" / ")[0]: (name,) for name in pairs() if only in name}, 6, measure)


def aim(name: str) -> str:
    if "a loop over 1" in name:
        return ">= 0.95 x"
    return ">= 1.2 x" if "SyncVectorEnv" in name and "AsyncVectorEnv" not in name else ">= 1 x"


class Greedy(nn.Module):
    """The best of two actions, by an MLP of the flat observation."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.mlp = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.mlp(observation.flatten(1)[:, : self.inputs].float()).argmax(-1)


class Steps(gymnasium.Env):
    """Episodes of a hundred steps that show random frames."""

    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._frame(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._frame(), 1.0, False, self._steps == 100, {}

    def _frame(self) -> Any:
        raise NotImplementedError


class Sleeping(Steps):
    """Waits a millisecond for each step, as for a simulator elsewhere."""

    observation_space = spaces.Box(-1e9, 1e9, (4,), np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.001)
        return super().step(action)

    def _frame(self) -> Any:
        return self.np_random.normal(size=4).astype(np.float32)


class Pixels(Steps):
    """Frames of 84 x 84 x 4 bytes."""

    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)

    def _frame(self) -> Any:
        return np.full((84, 84, 4), self.np_random.integers(256), np.uint8)


def cartpole() -> Any:
    return gymnasium.make("CartPole-v1")


def check(policy: Greedy, observation: torch.Tensor, action: torch.Tensor) -> None:
    with torch.no_grad():
        chosen = policy(observation.reshape(-1, *observation.shape[2:]))
    wrong = int((chosen != action.reshape(-1)).sum())
    if wrong > len(chosen) // 1000:  # a sum in another order may choose another way, where both are as good
        raise SystemExit(f"{wrong} of {len(chosen)} actions are not those of the policy for the recorded observations")


@contextmanager
def ours(make: Any, policy: Greedy, workers: int, each: int, batch: int) -> Iterator[Turn]:
    from shmsync.collectors import MultiprocessCollector

    with MultiprocessCollector(
        make, policy, num_workers=workers, envs_per_worker=each, frames_per_batch=batch
    ) as collector:
        for _ in range(2):  # the first touch of both batches is of the start
            next(collector)

        def turn(frames: int) -> tuple[int, float]:
            done, seconds = 0, 0.0
            while done < frames:
                start = time.perf_counter()
                found = next(collector)
                seconds += time.perf_counter() - start
                done += found.numel()
                check(policy, found["observation"], found["action"])
            return done, seconds

        yield turn


@contextmanager
def theirs(make: Any, policy: Greedy, batch: int, single: bool = False) -> Iterator[Turn]:
    """A loop in this process over a vector environment, or a single one, that records into tensors."""
    env = make()
    count, steps = (1, batch) if single else (env.num_envs, batch // env.num_envs)
    space = env.observation_space if single else env.single_observation_space
    shape, dtype = space.shape, torch.from_numpy(np.empty(0, space.dtype)).dtype
    before, after = (torch.empty(steps, count, *shape, dtype=dtype) for _ in range(2))
    action = torch.empty(steps, count, dtype=torch.int64)
    reward, terminated, truncated = (
        torch.empty(steps, count, dtype=kind) for kind in (torch.float32, torch.bool, torch.bool)
    )
    now = [env.reset(seed=1)[0]]

    def turn(frames: int) -> tuple[int, float]:
        done, seconds = 0, 0.0
        while done < frames:
            start = time.perf_counter()
            with torch.no_grad():
                for t in range(steps):
                    seen = torch.from_numpy(now[0])
                    chosen = policy(seen[None] if single else seen)
                    before[t], action[t] = seen, chosen
                    found = env.step(int(chosen) if single else chosen.numpy())
                    now[0] = found[0]
                    after[t] = torch.from_numpy(found[0])
                    for target, value in zip((reward, terminated, truncated), found[1:4], strict=True):
                        target[t] = value if single else torch.from_numpy(value)
                    if single and (found[2] or found[3]):
                        now[0] = env.reset()[0]
            seconds += time.perf_counter() - start
            done += steps * count
            check(policy, before, action)
        return done, seconds

    yield turn
    env.close()


def pairs() -> dict[str, tuple[tuple[Any, ...], Any, int]]:
    """By name: the arguments of ours, Gymnasium's, and the frames of a turn."""
    low, high = Greedy(4), Greedy(64)
    half = partial(SyncVectorEnv, [cartpole] * 4)
    async4, async8 = (partial(AsyncVectorEnv, [Sleeping] * count) for count in (4, 8))
    loop = partial(theirs, cartpole, low, 400, True)
    eight = partial(theirs, partial(SyncVectorEnv, [cartpole] * 8), low, 800)
    many = partial(theirs, partial(SyncVectorEnv, [cartpole] * 64), low, 3200)
    sleeps = partial(theirs, async8, low, 160)
    pixels = partial(theirs, partial(SyncVectorEnv, [Pixels] * 8), high, 160)
    return {
        "CartPole, 1 worker / a loop over 1": ((cartpole, low, 1, 1, 400), loop, 800),
        "CartPole, 2 workers x 4 / SyncVectorEnv(8)": ((cartpole, low, 2, 4, 800), eight, 1600),
        "CartPole, 2 workers x SyncVectorEnv(4) / SyncVectorEnv(8)": ((half, low, 2, 1, 800), eight, 1600),
        "CartPole, 2 workers x 32 / SyncVectorEnv(64)": ((cartpole, low, 2, 32, 3200), many, 6400),
        "sleeps 1 ms, 2 workers x 4 / AsyncVectorEnv(8)": ((Sleeping, low, 2, 4, 160), sleeps, 320),
        "sleeps 1 ms, 2 workers x AsyncVectorEnv(4) / AsyncVectorEnv(8)": ((async4, low, 2, 1, 160), sleeps, 320),
        "sleeps 1 ms, 1 worker x AsyncVectorEnv(8) / AsyncVectorEnv(8)": ((async8, low, 1, 1, 160), sleeps, 320),
        "84 x 84 x 4 bytes, 2 workers x 4 / SyncVectorEnv(8)": ((Pixels, high, 2, 4, 160), pixels, 480),
    }


def speeds(name: str, rounds: int, scale: int) -> list[tuple[float, float]]:
    """Ours and Gymnasium's frames/s in the turns of a row; every frame of both was checked."""
    arguments, peer, frames = pairs()[name]
    with ExitStack() as stack:
        turns = [stack.enter_context(each) for each in (ours(*arguments), peer())]
        found: list[tuple[float, float]] = []
        for _ in range(rounds):
            (done, seconds), (other_done, other_seconds) = (turn(frames * scale) for turn in turns)
            found.append((done / seconds, other_done / other_seconds))
    return found
