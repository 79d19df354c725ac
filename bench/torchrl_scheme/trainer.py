"""The trainer process of one contestant: a real collector of TorchRL, which it updates and collects with on demand."""

from __future__ import annotations

import importlib
import os
import resource
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from common.trainer import serve, turn
from tensordict import TensorDict, TensorDictBase

from torchrl_scheme import policies
from torchrl_scheme.rows import NONE, OWN

EVERY = 0.010  # seconds between two updates of an asynchronous collector
CAPACITY = 100_000  # frames of the replay buffer, more than one turn collects
_LOOKED_AT = ("low", "high", "seconds", "policy_version", ("next", "policy_version"))


class Session:
    """One collector, and the policy and the learner that its updates are from."""

    def __init__(self, scheme: Any, policy: str, kind: str, workers: int, frames: int) -> None:
        from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector

        torch.set_num_threads(1)  # a collector that was shut down has set more
        self.policy, self.learner = policies.build(policy), policies.build(policy)
        self.kind = kind
        self.updates = 0
        self.slowest = 0.0
        self.pause: Any = None
        common: dict[str, Any] = {
            "create_env_fn": [policies.make_env] * workers,
            "policy": self.policy,
            "total_frames": -1,
            "weight_sync_schemes": {"policy": scheme},
            "track_policy_version": True,
        }
        if kind == "sync":
            self.collector = MultiSyncCollector(frames_per_batch=frames * workers, cat_results="stack", **common)
            self.batches: Iterator[TensorDictBase] = iter(self.collector)
            next(self.batches)
        else:
            self.buffer = _buffer()
            self.collector = MultiAsyncCollector(frames_per_batch=frames, replay_buffer=self.buffer, **common)
            self.collector.start()
            while self.buffer.write_count == 0:
                time.sleep(0.01)
            self.rest()
        self.learner_weights = TensorDict.from_module(self.learner).data

    def rest(self) -> None:
        """An asynchronous collector: until work()."""
        if self.kind == "async":
            self.pause = self.collector.pause()
            self.pause.__enter__()

    def work(self) -> None:
        if self.pause is not None:
            self.pause.__exit__(None, None, None)
            self.pause = None

    def update(self, whose: str, *, everything: bool = False) -> float:
        """How long one took; `everything`: all values have changed before it, not only the echo."""
        module = self.policy if whose == OWN else self.learner
        self.updates += 1
        with torch.no_grad():
            if everything:
                torch._foreach_neg_([parameter.data for parameter in module.parameters()])
            module.module.echo.fill_(self.updates)
        start = time.perf_counter()
        self.collector.update_policy_weights_(None if whose == OWN else self.learner_weights)
        return time.perf_counter() - start

    def idle(self, whose: str, seconds: float) -> list[float]:
        """Updates in a row, while the workers have nothing to do."""
        return turn(self, lambda: self.update(whose), lambda: self.update(whose, everything=True), seconds)

    def collect(self, whose: str, seconds: float) -> dict[str, Any]:
        """One turn of it; the first moments do not count for the speed, but every frame is looked at."""
        work = self._every_batch if self.kind == "sync" else self._every_ten_milliseconds
        counted, spent, updates, frames = work(whose, seconds)
        return {"frames_per_s": counted / spent, "seconds": spent, "updates": updates, **_seen(frames)}

    def _every_batch(self, whose: str, seconds: float) -> tuple[int, float, list[float], TensorDictBase]:
        frames, updates, start = [], [], 0.0
        while not start or time.perf_counter() < start + seconds:
            frames.append(next(self.batches).select(*_LOOKED_AT).reshape(-1))
            start = start or time.perf_counter()
            if whose != NONE:
                updates.append(self.update(whose))
        elapsed = time.perf_counter() - start
        return sum(each.numel() for each in frames[1:]), elapsed, updates, torch.cat(frames)

    def _every_ten_milliseconds(self, whose: str, seconds: float) -> tuple[int, float, list[float], TensorDictBase]:
        first = self.buffer.write_count
        self.work()
        self._updates_until(time.perf_counter() + 0.1, whose)
        start, written = time.perf_counter(), self.buffer.write_count
        updates = self._updates_until(start + seconds, whose)
        counted, elapsed = self.buffer.write_count - written, time.perf_counter() - start
        self.rest()
        positions = torch.arange(first, self.buffer.write_count) % CAPACITY
        return counted, elapsed, updates, self.buffer[positions].select(*_LOOKED_AT)

    def _updates_until(self, end: float, whose: str) -> list[float]:
        samples = []
        due = time.perf_counter()
        while due < end:
            if whose != NONE:
                samples.append(self.update(whose))
            due = max(due + EVERY, time.perf_counter())  # what was missed is not made up for
            time.sleep(max(0.0, due - time.perf_counter()))
        return samples

    def check(self) -> str:
        """Has every worker exactly the weights of the last update, and has the learner still its own?"""
        self.work()
        for parameter in self.learner.parameters():
            parameter.data.uniform_()
        expected = policies.digest(self.learner.state_dict())
        self.collector.update_policy_weights_(self.learner_weights)
        state = self.collector.state_dict()
        found = {name: each["policy_state_dict"] for name, each in state.items() if name.startswith("worker")}
        self.rest()
        if policies.digest(self.learner.state_dict()) != expected:
            return "the learner's own weights changed"
        wrong = [name for name, weights in found.items() if policies.digest(weights) != expected]
        return f"{', '.join(wrong)} have other weights" if wrong else "ok"

    def close(self) -> None:
        self.work()
        self.collector.shutdown()


def _buffer() -> Any:
    """The first worker makes its storage: made here it would have no policy_version."""
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    return ReplayBuffer(storage=LazyTensorStorage(CAPACITY, shared_init=True), shared=True)


def _seen(frames: TensorDictBase) -> dict[str, float]:
    low, high, seconds = frames["low"], frames["high"], frames["seconds"].double()
    whole = low == high
    beyond = (seconds - seconds.median()).clamp(min=0.0)
    return {
        "frames": frames.numel(),
        "torn": int((~whole).sum()),
        "wrong_version": int((frames["next", "policy_version"] != low)[whole].sum()),
        "wrong_root": int((frames["policy_version"] != low)[whole].sum()),
        "stall_us": float(beyond.mean()) * 1e6,
    }


def _count(pid: int) -> dict[str, int]:
    return {what: len(os.listdir(f"/proc/{pid}/{folder}")) for what, folder in (("fds", "fd"), ("threads", "task"))}


def main(made_by: str, options: dict[str, Any], conn: Connection) -> None:
    """Of the process; a scheme is made by calling `made_by`, module:class, with these options."""
    warnings.simplefilter("ignore")
    os.setpgid(0, 0)  # it can be stopped and killed together with its workers
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # torch shares each tensor by a separate descriptor
    torch.set_num_threads(1)
    module, _, kind = made_by.partition(":")
    make = getattr(importlib.import_module(module), kind)
    importlib.import_module("torchrl.collectors.utils")  # else the first update would
    session: Session | None = None

    def answer(command: str, *arguments: Any) -> Any:
        nonlocal session
        if command == "open":
            session = Session(make(**options), *arguments)
            return None
        if command == "count":
            found = {"trainer": _count(os.getpid())}
            return found if session is None else found | {"worker": _count(session.collector.procs[0].pid)}
        assert session is not None
        found = getattr(session, command)(*arguments)
        session = None if command == "close" else session
        return found

    serve(conn, answer)
    if session is not None:
        session.close()
