"""A contestant: a trainer and its workers, which time their own sends on request.

Every library has its own trainer process, so that none pays for another's threads and memory. Workers are stopped while
others have their turn. A contestant that hangs is killed with the others of its library, and they are started again for
the next row.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from common import models
from common.measure import timed
from common.trainer import Trainer, serve, turn, why
from torch import nn

CONTEXT = multiprocessing.get_context("forkserver")


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
    gc.freeze()  # later collections skip the objects of the imports
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

    def answer(command: str, name: str, *arguments: Any) -> Any:
        if command == "open":
            session = sessions[name] = getattr(kinds, name)(*arguments)
            session.send()
            session.slowest = 0.0
            return [process.pid for process in session.workers.processes]
        if command == "turn":
            session = sessions[name]
            return turn(session, session.send, lambda: _sample(session), *arguments)
        if command == "check":
            return _check(sessions[name])
        return sessions.pop(name).close() if name in sessions else None

    serve(conn, answer)


def _sample(session: Session) -> float:
    models.step(session.module)
    return timed(session.send)


def _check(session: Session) -> str:
    """Has every worker exactly the weights of the last send, and has the trainer still its own?"""
    models.randomize(session.module)
    expected = models.digest(models.tensors(session.module))
    session.send()
    wrong = [index for index, found in enumerate(session.workers.digests()) if found != expected]
    if models.digest(models.tensors(session.module)) != expected:
        return "the trainer's own weights changed"
    return f"workers {wrong} have other weights" if wrong else "ok"


class Contestant:
    """One session after the other, seen from the benchmark. The contestants of a library share a trainer process."""

    def __init__(self, name: str, kind: str, company: Trainer, patience: float) -> None:
        self.name = name
        self._kind = kind
        self.company = company
        self._patience = patience
        self._workers: list[int] = []
        self.trouble: str | None = None  # why it takes no part in the rest of a row

    def ask(self, command: str, *arguments: Any) -> Any:
        """The answer; None when the contestant is in trouble, perhaps since this command."""
        self.trouble = self.trouble or self.company.trouble
        if self.trouble is not None:
            return None
        try:
            self.company.send((command, self._kind, *arguments))
            return self.company.answer(self._patience)
        except (EOFError, OSError, RuntimeError) as error:  # TimeoutError is an OSError
            print(f"{self.name}: {error!s}", flush=True)
            self.trouble = why(error)
            self.company.trouble = f"stopped, {self.name} {self.trouble}"
            self._signal(signal.SIGKILL)
            self.company.stop(0.0)
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
