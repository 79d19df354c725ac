"""The actor processes as the learner sees them: it starts them, hears them, notices deaths and ends them.

One pipe per actor and no lock anywhere: `multiprocessing.Queue` would share a lock between the actors,
and an actor killed while holding it would silence the others for good.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.multiprocessing  # noqa: F401  teaches multiprocessing to hand over shared tensors

from . import actor, helper
from .options import Options
from .rollout import BUFFERS, ENVIRONMENTS, Message, Rollout


@dataclass
class Actor:
    """One actor process."""

    worker: int
    process: Any
    pipe: Connection
    rollouts: list[Rollout]
    last: Message | None = None


@dataclass(frozen=True)
class Lost:
    """An actor that exited or was killed."""

    worker: int
    pid: int
    exitcode: int
    seconds: float  # since the fleet was started

    def __str__(self) -> str:
        try:
            how = f"killed by {signal.Signals(-self.exitcode).name}"
        except ValueError:
            how = f"exit code {self.exitcode}"
        return f"actor {self.worker} (pid {self.pid}): {how}, after {self.seconds:.1f} s"


@dataclass
class Fleet:
    """All actors, the living and the lost."""

    actors: list[Actor] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    ended: list[Actor] = field(default_factory=list)  # kept for their counters
    begin: float = field(default_factory=time.perf_counter)

    def start(self, handle: Any, options: Options) -> None:
        """Start `options.workers` actors on the arena behind `handle`; does not wait for them."""
        start = helper.context()
        for worker in range(options.workers):
            ours, theirs = start.Pipe()
            rollouts = [Rollout.shared() for _ in range(BUFFERS)]
            job = actor.Job(
                worker, handle, options.consistency, options.one_version_per_rollout,
                options.seed * 100_003 + worker * ENVIRONMENTS, rollouts, theirs,
            )  # fmt: skip
            process = start.Process(target=actor.main, args=(job,), name=f"actor-{worker}", daemon=True)
            process.start()
            theirs.close()  # or the end of this actor would never show as end of file
            self.actors.append(Actor(worker, process, ours, rollouts))

    def hear(self, timeout: float) -> list[tuple[Actor, Rollout, Message]]:
        """Rollouts that are full, waiting up to `timeout` seconds for the first; notes who died."""
        waiting = {a.process.sentinel: a for a in self.actors}
        waiting |= {a.pipe: a for a in self.actors if not a.pipe.closed}
        ready = wait(list(waiting), timeout)
        full = []
        for one in {id(waiting[r]): waiting[r] for r in ready}.values():
            try:
                while one.pipe.poll():
                    one.last = one.pipe.recv()
                    full.append((one, one.rollouts[one.last.buffer], one.last))
            except (EOFError, OSError):
                one.pipe.close()  # it is on its way out; its exit will wake us
            if not one.process.is_alive():
                self._lose(one)
        return full

    def release(self, full: list[tuple[Actor, Rollout, Message]]) -> None:
        """Give rollouts back to be filled again."""
        for one, _, message in full:
            try:
                one.pipe.send(message.buffer)
            except OSError:
                pass  # it died; `hear` will say so

    def _lose(self, one: Actor) -> None:
        self.lost.append(Lost(one.worker, one.process.pid, one.process.exitcode, time.perf_counter() - self.begin))
        self._end(one)

    def _end(self, one: Actor) -> None:
        one.pipe.close()
        self.actors.remove(one)
        self.ended.append(one)

    def stop(self, patience: float = 0.4) -> None:
        """End all actors: close their pipes, and after `patience` seconds kill who has not left."""
        for one in self.actors:
            one.pipe.close()
        deadline = time.perf_counter() + patience
        for one in list(self.actors):
            one.process.join(max(0.0, deadline - time.perf_counter()))
            if one.process.is_alive():
                one.process.kill()
                one.process.join()
            self._end(one)

    def messages(self) -> list[Message]:
        """The last message of every actor, dead or alive: its counters."""
        return [a.last for a in self.actors + self.ended if a.last is not None]
