"""What all peers have: a trainer's session, and worker processes that compute with each version that they get.

A worker waits for a version, reads it, and answers with the extremes of its elements over a pipe. The same pipe wakes
the workers of peers that cannot wait for a version themselves.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from common.environment import more_files

from peers.weights import Extremes, build, extremes

FILES = "bench_peers_{pid}_"  # how the names in /dev/shm of a trainer's peer begin; the contest removes what is left
CONTEXT = multiprocessing.get_context("forkserver")
WAKE = b"wake"
ANSWER = struct.Struct("dd")


class Hold:
    """Where the first worker stops in the middle of reading, so that it can be killed there."""

    def __init__(self, folder: str) -> None:
        self.wanted, self.reached = Path(folder, "wanted"), Path(folder, "reached")

    def __call__(self) -> None:
        if self.wanted.exists():
            self.reached.touch()
            threading.Event().wait()


class Reader:
    """A worker's side. Peers whose workers can wait for a version themselves replace wait()."""

    def __init__(self, pipe: Connection, hold: Callable[[], None]) -> None:
        self.pipe, self.hold = pipe, hold

    def wait(self) -> None:
        self.pipe.recv_bytes()

    @contextmanager
    def read(self) -> Iterator[list[torch.Tensor]]:
        """The newest weights. A copy is made on entry; a lock or a section is left on exit."""
        raise NotImplementedError


class Crew:
    """Worker processes, each with a Reader that is made there: `make(pipe, hold, *arguments)`."""

    def __init__(self, make: Callable[..., Reader], arguments: list[tuple[Any, ...]], folder: str | None) -> None:
        pairs = [CONTEXT.Pipe() for _ in arguments]
        holds = [Hold(folder) if folder and number == 0 else _pass for number in range(len(arguments))]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            CONTEXT.Process(target=_work, args=(make, theirs, hold, each), daemon=True)
            for (_, theirs), hold, each in zip(pairs, holds, arguments, strict=True)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()  # so that the end of a worker is the end of its pipe

    def wake(self) -> None:
        for pipe in self.pipes:
            try:
                pipe.send_bytes(WAKE)
            except BrokenPipeError:
                pass  # a killed worker

    def answers(self, skip: int, patience: float) -> list[Extremes]:
        return [self._answer(pipe, patience) for pipe in self.pipes[skip:]]

    def _answer(self, pipe: Connection, patience: float) -> Extremes:
        if not pipe.poll(patience):
            raise TimeoutError(f"a worker has not answered for {patience:.0f} s")
        return ANSWER.unpack(pipe.recv_bytes())  # type: ignore[return-value]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _pass() -> None:
    """Most workers stop nowhere."""


def _work(make: Callable[..., Reader], pipe: Connection, hold: Callable[[], None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    more_files()
    reader = make(pipe, hold, *arguments)
    gc.freeze()  # later collections skip the objects of the imports
    try:
        while True:
            reader.wait()
            with reader.read() as tensors:
                hold()
                found = extremes(tensors)
            pipe.send_bytes(ANSWER.pack(*found))
    except (EOFError, BrokenPipeError):
        os._exit(0)


class Session:
    """A trainer's side, with weights of one size and a number of workers."""

    crew: Crew

    def __init__(self, size: str, workers: int, folder: str | None) -> None:
        more_files()
        self.module = build(size)
        self.leaves = [parameter.data for parameter in self.module]  # where the trainer makes new weights
        self.size, self.count, self.folder = size, workers, folder

    def start(self) -> None:
        """Start the workers."""
        raise NotImplementedError

    def prepare(self, value: float) -> None:
        """What an optimizer's step does: every element changes. This is not timed."""
        for leaf in self.leaves:
            leaf.fill_(value)

    def send(self) -> None:
        """Give the new weights to the workers."""
        raise NotImplementedError

    def answers(self, skip: int = 0, patience: float = 60.0) -> list[Extremes]:
        """What the workers computed, without the first `skip` of them."""
        return self.crew.answers(skip, patience)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.crew.processes]

    def close(self) -> None:
        self.crew.kill()
