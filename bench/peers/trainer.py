"""The trainer process of one peer, which times its own publications when the contest asks for a turn.

    python -m peers.trainer MODULE:CLASS DESCRIPTOR

Its environment is the peer's own. The descriptor is that of a pipe for commands and answers.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from common.trainer import serve

from peers.session import CONTEXT, Hold, Session
from peers.weights import value

MOST = 100  # rounds of a turn
PATIENCE = 5.0  # seconds that the other workers have while one reads, and after it was killed


class PeerTrainer:
    def __init__(self, kind: type[Session]) -> None:
        self.kind = kind
        self.session: Session | None = None
        self.version = 0

    def open(self, size: str, workers: int, folder: str | None = None) -> float:
        """Seconds from before the workers start until each has computed with its first version."""
        self.session = self.kind(size, workers, folder)
        began = time.perf_counter()
        self.session.start()
        self.round()
        return time.perf_counter() - began

    def round(self) -> tuple[float, float]:
        """Seconds from the start of a publication until all workers have computed, and the trainer's processor time."""
        self.version += 1
        expected = value(self.version)
        self.session.prepare(expected)
        spent, began = time.process_time(), time.perf_counter()
        self.session.send()
        found = self.session.answers()
        seconds, spent = time.perf_counter() - began, time.process_time() - spent
        if found != [(expected, expected)] * self.session.count:
            raise AssertionError(f"WRONG: workers computed {found}, the weights are all {expected}")
        return seconds, spent

    def turn(self, seconds: float) -> tuple[list[float], float]:
        """The seconds of each round; the processor time of all, of the trainer and all processes below it."""
        self.round()  # what others have put into the caches, the first round throws out
        below = [each.pid for each in psutil.Process().children(recursive=True)]
        before = sum(map(processor_time, below))
        end, rounds = time.perf_counter() + seconds, []
        while not rounds or (time.perf_counter() < end and len(rounds) < MOST):
            rounds.append(self.round())
        spent = sum(map(processor_time, below)) - before
        return [each for each, _ in rounds], spent + sum(each for _, each in rounds)

    def memory(self) -> tuple[float, int]:
        """PSS of all workers in MB, and the most descriptors of one."""
        workers = [psutil.Process(pid) for pid in self.session.pids]
        return sum(each.memory_full_info().pss for each in workers) / 1e6, max(each.num_fds() for each in workers)

    def kill(self, folder: str) -> None:
        """SIGKILL of the first worker, which stops in the middle of reading a version."""
        hold = Hold(folder)
        hold.wanted.touch()
        self.version += 1
        self.session.prepare(value(self.version))
        self.session.send()
        until(hold.reached.exists)
        with suppress(TimeoutError):  # they may wait for a lock that it holds
            self.session.answers(skip=1, patience=PATIENCE)
        hold.wanted.unlink()
        victim = self.session.pids[0]
        os.kill(victim, signal.SIGKILL)
        until(lambda: has_ended(victim))

    def publish_again(self) -> tuple[float, str, str]:
        """After a kill: seconds until the publication returned, what it raised, and whether the others have it."""
        self.version += 1
        expected, raised = value(self.version), ""
        began = time.perf_counter()
        try:
            self.session.prepare(expected)
            self.session.send()
        except Exception as error:
            raised = type(error).__name__
        seconds = time.perf_counter() - began
        try:
            found = self.session.answers(skip=1, patience=PATIENCE)
            others = "have it" if set(found) == {(expected, expected)} else f"WRONG: have {found}"
        except Exception as error:
            others = f"do not have it: {type(error).__name__}"
        return seconds, raised, others

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
        self.session = None


def processor_time(pid: int) -> float:
    """Of all threads of a process, in nanoseconds' resolution; 0 if it has ended. A clock id is made of a pid."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(reached: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "the reader did not get where it is to be killed"
        time.sleep(0.002)


def main() -> None:
    kind, descriptor = sys.argv[1:]
    module, _, name = kind.partition(":")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    peer = PeerTrainer(getattr(importlib.import_module(module), name))
    gc.freeze()  # later collections skip the objects of the imports
    CONTEXT.set_forkserver_preload([module])
    first = CONTEXT.Process(target=int)
    first.start()  # and with it the fork server, which imports
    first.join()
    serve(Connection(int(descriptor)), lambda command, *arguments: getattr(peer, command)(*arguments))
    peer.close()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
