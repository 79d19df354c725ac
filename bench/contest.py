"""A contestant: a trainer and its workers, which time their own sends when they are told to.

Every library has a trainer process of its own, so that nobody pays for another's threads and memory. Workers are
stopped while others have their turn. Whoever hangs is killed with the other
contestants of its library, and started again for the next row.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

import models
import torch
from torch import nn

CONTEXT = multiprocessing.get_context("forkserver")
MOST_SENDS = 20  # in one turn
SLOW = 0.1  # seconds; the first send of a turn, which is not timed, would cost more than it is worth


class Session(Protocol):
    """One model, one number of workers."""

    module: nn.Module  # the trainer's
    workers: Workers
    slowest: float  # send of the last turn, in seconds

    def send(self) -> None:
        """Returns when every worker has the trainer's weights."""

    def close(self) -> None: ...


class Workers:
    """N processes: a thread receives, the main thread answers questions. Every contestant's are made like this."""

    def __init__(self, size: str, receive: Callable[..., None], arguments: list[tuple[Any, ...]]) -> None:
        pairs = [CONTEXT.Pipe() for _ in arguments]
        self.controls = [ours for ours, _ in pairs]
        self.processes = [
            CONTEXT.Process(target=_work, args=(size, theirs, receive, each), daemon=True)
            for (_, theirs), each in zip(pairs, arguments, strict=True)
        ]
        for process in self.processes:
            process.start()
        for control in self.controls:
            control.recv()  # it runs

    def digests(self) -> list[int]:
        for control in self.controls:
            control.send("digest")
        return [control.recv() for control in self.controls]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _work(size: str, control: Connection, receive: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what the imports left is nobody's cost
    module = models.build(size)
    weights: dict[str, Any] = {"of": lambda: models.tensors(module)}
    thread = threading.Thread(target=_received, args=(receive, module, weights, arguments), daemon=True)
    thread.start()
    control.send("running")
    try:
        while control.recv() == "digest":
            control.send(models.digest(weights["of"]()))
    except EOFError:
        pass
    os._exit(0)


def _received(
    receive: Callable[..., None], module: nn.Module, weights: dict[str, Any], arguments: tuple[Any, ...]
) -> None:
    try:
        receive(module, weights, *arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def trainer(module: str, conn: Connection) -> None:
    """The main function of a trainer process, which has the sessions that are classes of `module`."""
    torch.set_num_threads(1)
    kinds = importlib.import_module(module)
    gc.freeze()
    CONTEXT.set_forkserver_preload([module])
    first = CONTEXT.Process(target=int)
    first.start()  # and with it the fork server, which imports
    first.join()
    sessions: dict[str, Any] = {}
    conn.send(("done", None))
    try:
        while True:
            command, name, *arguments = conn.recv()
            try:
                answer: Any = None
                if command == "open":
                    session = sessions[name] = getattr(kinds, name)(*arguments)
                    session.send()
                    session.slowest = 0.0
                    answer = [process.pid for process in session.workers.processes]
                elif command == "turn":
                    answer = _turn(sessions[name], *arguments)
                elif command == "check":
                    answer = _check(sessions[name])
                elif name in sessions:
                    sessions.pop(name).close()
                conn.send(("done", answer))
            except Exception:
                conn.send(("failed", traceback.format_exc()))
    except EOFError:
        pass


def _turn(session: Session, seconds: float) -> list[float]:
    if session.slowest < SLOW:
        session.send()  # the workers were stopped a moment ago
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while not samples or (time.perf_counter() < end and len(samples) < MOST_SENDS):
        models.step(session.module)
        start = time.perf_counter()
        session.send()
        samples.append(time.perf_counter() - start)
    session.slowest = max(samples)
    return samples


def _check(session: Session) -> str:
    """Has every worker exactly the weights of the last send, and has the trainer still its own?"""
    models.randomize(session.module)
    expected = models.digest(models.tensors(session.module))
    session.send()
    wrong = [index for index, found in enumerate(session.workers.digests()) if found != expected]
    if models.digest(models.tensors(session.module)) != expected:
        return "the trainer's own weights changed"
    return f"workers {wrong} have other weights" if wrong else "ok"


class Company:
    """A trainer process, for all contestants of one library."""

    def __init__(self, module: str) -> None:
        self._module = module
        self.trouble: str | None = None
        self.start()

    def start(self) -> None:
        self.trouble = None
        self._conn, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=trainer, args=(self._module, theirs))
        self._process.start()
        theirs.close()

    def answer(self, patience: float | None) -> Any:
        """To the oldest question. Raises TimeoutError, EOFError, RuntimeError: no more questions then."""
        if not self._conn.poll(patience):
            raise TimeoutError("hung")
        state, answer = self._conn.recv()
        if state == "failed":
            raise RuntimeError(answer)
        return answer

    def ask(self, question: tuple[Any, ...], patience: float) -> Any:
        self._conn.send(question)
        return self.answer(patience)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._conn.close()

    def stop(self) -> None:
        self._conn.close()
        self._process.join(5)
        self._process.kill()


class Contestant:
    """One session after the other, seen from the benchmark."""

    def __init__(self, name: str, kind: str, company: Company, patience: float) -> None:
        self.name = name
        self._kind = kind
        self.company = company
        self._patience = patience
        self._workers: list[int] = []
        self.trouble: str | None = None  # why it takes no part in the rest of a row

    def ask(self, command: str, *arguments: Any) -> Any:
        """None when it is in trouble, perhaps since now."""
        self.trouble = self.trouble or self.company.trouble
        if self.trouble is not None:
            return None
        try:
            return self.company.ask((command, self._kind, *arguments), self._patience)
        except (EOFError, OSError, RuntimeError) as error:  # TimeoutError is an OSError
            print(f"{self.name}: {error!s}", flush=True)
            self.trouble = "hung" if isinstance(error, TimeoutError) else "failed"
            self.company.trouble = f"stopped, {self.name} {self.trouble}"
            self._signal(signal.SIGKILL)
            self.company.kill()
            return None

    def open(self, size: str, workers: int) -> None:
        self._workers = self.ask("open", size, workers) or []
        self._signal(signal.SIGSTOP)

    def turn(self, seconds: float) -> list[float]:
        self._signal(signal.SIGCONT)
        samples = self.ask("turn", seconds) or []
        self._signal(signal.SIGSTOP)
        return samples

    def check(self) -> str:
        self._signal(signal.SIGCONT)
        return self.ask("check") or "not made"

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self.ask("close")
        self._workers = []

    def _signal(self, number: int) -> None:
        for pid in self._workers:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
