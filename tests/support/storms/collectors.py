"""Storms over collectors: every frame must have been chosen by the weights whose version it carries."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from functools import partial

import torch
from torch import nn

import shmsync
from shmsync.collectors import MultiprocessCollector
from support import processes
from support.storms.fleets import timed
from support.storms.judge import CALM, Violation
from support.storms.model import FINE, Weather
from support.storms.trouble import Hand

LARGEST = 2.0  # of an action of Pendulum-v1
STEP = 1 / 4096  # between the actions of two numbers: exact in float32


def action_of(number):
    """What every frame of these weights does."""
    return (number % 16384) * STEP - LARGEST


class Forecast(nn.Module):
    """A policy whose action tells which weights it saw: more than LARGEST when they were not of one number."""

    def __init__(self):
        super().__init__()
        self.weather = Weather()

    def forward(self, observation):
        number, matter, _ = self.weather()
        action = action_of(number) if matter == FINE else 100.0 + matter
        return torch.full((len(observation), 1), action)


def pendulum():
    import gymnasium

    return gymnasium.make("Pendulum-v1")


class OverCollector:
    """A storm over a collector. `trouble`: how likely a step has one."""

    def __init__(self, sky):
        self.sky, self.random, self.counts = sky, sky.random, sky.counts
        self.hand = Hand(hurt)
        self._number = 0
        self.begin()

    def step(self):
        troubled = self.random.random() < self.trouble
        if troubled:
            self.throw()
        try:
            self.call()
        finally:
            if troubled:
                self.hand.await_one()
        if self.over():
            self.counts["trainer restarts"] += 1
            self.end()
            self.begin()

    def throw(self):
        """Order a trouble for one of the processes."""
        who, process = self.victim()
        if process is None:
            self.hand.skip()
            return
        kind = self.random.choice(self.kinds)
        self.counts[kind] += 1
        self.counts["kills"] += kind == "kill"
        self.sky.note(f"{kind} worker {who} (pid {process.pid})")
        self.thrown(kind, who)
        self.hand.order(kind, process, self.longest * self.random.random())

    def thrown(self, kind, who):
        """This was ordered for this worker."""

    def close(self):
        self.hand.close()
        self.end()


def hurt(kind, process):
    """Do it now. The process may have died before."""
    with contextlib.suppress(ProcessLookupError, ValueError):
        if kind == "kill":
            os.kill(process.pid, signal.SIGKILL)
        else:
            os.kill(process.pid, signal.SIGSTOP)
            processes.until(lambda: processes.state(process.pid) in ("T", "Z", ""))  # or it died before
            time.sleep(0.03)
            processes.resume(process.pid)


class CollectorStorm(OverCollector):
    """Over shmsync's own collector, with a real environment. The dead are started again by the collector."""

    trouble, longest, kinds = 0.6, 0.05, ("kill", "kill", "stop and go on")

    def begin(self):
        self.policy = Forecast()
        self._number += 1
        self.policy.weather.become(self._number)
        self.sync = self.random.random() < 0.5
        scheme = self.random.choice(
            [shmsync.SharedMemWeightSyncScheme(timeout=CALM), shmsync.MultiProcessWeightSyncScheme(timeout=CALM)]
        )
        self.sky.note(f"a new collector, sync={self.sync}, {type(scheme).__name__}")
        self.collector = MultiprocessCollector(
            pendulum,
            self.policy,
            num_workers=3,
            frames_per_batch=60,
            weight_sync_scheme=scheme,
            sync=self.sync,
            restart_workers=True,
            timeout=60,
        )
        self.numbers = {0: self._number, self.collector.stats().version: self._number}
        self.seen = []
        self._batches = iter(self.collector)
        next(self._batches)  # every worker has delivered: from now on the dead are started again
        if not self.sync:
            for _ in range(6):
                next(self._batches)

    def call(self):
        if self.random.random() < 0.5:
            self.update()
        else:
            self.check(next(self._batches))

    def over(self):
        return self.random.random() < 0.01

    def victim(self):
        delivered = [member for member in self.collector._pool.members.values() if member.delivered]
        member = self.random.choice(delivered) if delivered else None
        return (None, None) if member is None else (member.index, member.process)

    def update(self):
        self._number += 1
        self.policy.weather.become(self._number)
        restarts = self.collector.stats().restarts
        start, end, machine, version, error = timed(self.collector.update_policy_weights_, {})
        if isinstance(error, shmsync.AckTimeout):
            version = error.version
        elif error is not None:
            raise error
        self.counts["send"] += 1
        self.counts["failed"] += error is not None
        self.numbers[version] = self._number
        self.sky.note(f"update to {self._number} -> version {version}, {error!r}, {(end - start) / 1e9:.3f} s")
        self.counts["worker restarts"] += self.collector.stats().restarts - restarts
        if self.collector.stats().restarts == restarts:  # starting a worker again has a separate deadline
            self.sky.judge.ended("an update", start, end, CALM, machine)

    def check(self, batch):
        versions, actions = batch["policy_version"].flatten().tolist(), batch["action"].flatten().tolist()
        for version, action in zip(versions, actions, strict=True):
            if action > LARGEST:
                raise Violation(f"a frame of version {version} saw weights that were torn or wrong: {action}")
            number = self.numbers.get(version)
            if number is None or action != action_of(number):
                raise Violation(
                    f"a frame of version {version} has the action {action}, which is that of "
                    f"{(action + LARGEST) / STEP}, not of {number}"
                )
        self.counts["frames"] += len(actions)

    def end(self):
        self.collector.shutdown()


class TorchRLStorm(OverCollector):
    """Over ShmWeightSyncScheme in TorchRL's collectors. These do not outlive a worker: each death needs a new one."""

    trouble, longest, kinds = 0.3, 0.02, ("kill", "stop and go on", "stop and go on")

    def __init__(self, sky):
        from support.torchrl import parts

        self._method = parts.starting()
        self._method.__enter__()
        super().__init__(sky)

    def begin(self):
        from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector

        from shmsync.integrations.torchrl import ShmWeightSyncScheme
        from support.torchrl.environments import Steps
        from support.torchrl.policies import Forecaster

        kind = self.random.choice([MultiSyncCollector, MultiAsyncCollector])
        self.policy = Forecaster()
        self._number += 1
        self.policy.become(self._number)
        self.scheme = ShmWeightSyncScheme(slots=self.random.choice([1, 3]), timeout=CALM)
        self.sky.note(f"a new {kind.__name__}, slots={self.scheme.slots}")
        self.collector = kind(
            [Steps] * 3,
            self.policy,
            frames_per_batch=30,
            total_frames=-1,
            track_policy_version=True,
            weight_sync_schemes={"policy": self.scheme},
        )
        self.workers = list(self.collector.procs)
        self.sky.pids |= {process.pid for process in self.workers}
        self.dead, self.killed, self.stopped = set(), set(), set()
        self.newest = self._number
        self._batches = iter(self.collector)

    def call(self):
        if self.random.random() < 0.6 or self.killed:
            self.update()
        else:
            self.collect()

    def over(self):
        return self.killed and (self.dead or self.random.random() < 0.3)

    def victim(self):
        living = [index for index in range(3) if index not in self.killed]
        index = self.random.choice(living) if living else None
        return index, None if index is None else self.workers[index]

    def thrown(self, kind, who):
        if kind == "kill":
            self.killed.add(who)

    def update(self):
        self._number += 1
        self.policy.become(self._number)
        timeout = self.random.choice([0.1, CALM, CALM])
        self.newest = self._number
        start, end, machine, _, error = timed(partial(self.scheme.send, self.policy), {"timeout": timeout})
        if not isinstance(error, (shmsync.WorkerDied, shmsync.AckTimeout, shmsync.ReaderStalled, type(None))):
            raise error
        self.counts["send"] += 1
        self.counts["failed"] += error is not None
        self.sky.note(f"send of {self._number}, timeout={timeout} -> {error!r} after {(end - start) / 1e9:.3f} s")
        self.sky.judge.ended("a send", start, end, timeout, machine)
        if isinstance(error, shmsync.WorkerDied):
            self.sky.judge.counts["named"] += len(error.missing)
            named = set(error.missing)
            if timeout == CALM and not named <= self.killed:
                raise Violation(f"killed were {self.killed}, but it names {named}: {error}")
            if not named & self.killed:
                raise Violation(f"it names {named}, but dead are {self.killed}: {error}")
            self.dead |= named & self.killed
        elif error is not None and timeout == CALM:
            raise Violation(f"nobody was stopped for so long: {error!r}")

    def collect(self):
        frames = next(self._batches)
        forecast = frames["forecast"].flatten().tolist()
        for each in forecast:
            if each < 0:
                raise Violation(f"a frame saw weights that were torn or wrong: {each}")
            if each > self.newest:
                raise Violation(f"a frame was computed with {each}, newer than the newest, {self.newest}")
        self.counts["frames"] += len(forecast)

    def end(self):
        with contextlib.suppress(Exception):
            self.collector.shutdown()
        for process in self.workers:
            with contextlib.suppress(Exception):
                process.kill()
        for process in self.workers:
            with contextlib.suppress(ValueError):  # TorchRL has closed it
                process.join()
        self.scheme.shutdown()

    def close(self):
        super().close()
        self._method.__exit__(None, None, None)


COLLECTORS = {"collector": CollectorStorm, "torchrl": TorchRLStorm}
