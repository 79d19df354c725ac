"""One worker process as its trainer sees it: started, watched and ended. Workers and collectors use it alike.

What runs in the process itself is in worker_process.py.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import select
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ..engine.deadlines import SLICE
from ..engine.outcome import Failure
from ..errors import ProtocolError
from ..memory.arena import show_failure
from ..memory.process import Peer, me, poll, stay_if_exiting
from ..memory.slab import memory_kills
from .worker_process import ATTACHED, FAILED, RETURNED, run

EXIT_CODE = 1.0  # seconds; a fork server reports an exit code a moment after the death
# What workers need where the trainer has it. It is as slow to import as torch, and other workers use none of it.
_PRELOADED_IF_USED = ("tensordict", "shmsync.collectors")

_log = logging.getLogger("shmsync")


def context_of(start_method: str) -> Any:
    """The multiprocessing context of this start method.

    A program has one fork server, which imports once what all Workers and collectors use: that of the first of them
    also has what the others are about to use.
    """
    context: Any = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        used = [name for name in _PRELOADED_IF_USED if name in sys.modules]
        context.set_forkserver_preload([run.__module__, *used])
    return context


class Process:
    """One worker process and its pipe, over which messages (word, content) travel. Made started.

    Both sides read and write the pipe with blocking calls: the trainer's messages always fit into it, and a worker that
    does not read them is no reason for the trainer to wait.

    Args:
        context: the multiprocessing context.
        who: its name, as "worker 3".
        body: called in the process as `body(closing, control, *args)`: an ExitStack, and the worker's end of the pipe.
        args: they may have queues, locks and connections of this context.
        seed, threads: for its random generators, and torch.set_num_threads().

    Attributes:
        attached: it has its weights.
        failure: the first exception that it has reported.
        over: it is dead, and its messages were all read.
        returned: its function has returned.
        reported: its failure or death was raised, or it was ended on purpose.

    Raises ProtocolError in a daemon process, and for arguments that only forked processes can use.
    """

    def __init__(
        self, context: Any, who: str, body: Callable[..., object], args: tuple[Any, ...], *, seed: int, threads: int = 1
    ) -> None:
        if multiprocessing.current_process().daemon:
            raise ProtocolError(
                "this process is a daemon (of a multiprocessing.Pool or a DataLoader), which may not start processes; "
                "start the workers in the main process, or pass pub.handle to processes that you start yourself"
            )
        self._who = who
        self._sessions: Collection[bytes] = ()  # of the arenas that it has said it uses
        self._memory_kills = memory_kills()
        self.failure: Failure | None = None
        self.attached = self.over = self.reported = self.returned = False
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=run,
            args=(me().owner, threads, seed, body, _Packed(args, context.get_start_method()), theirs),
            name=f"shmsync-{who.replace(' ', '-')}",
            daemon=True,
        )
        try:
            self.process.start()
        finally:
            theirs.close()
        self.peer = Peer(process=self.process)

    @property
    def dead(self) -> bool:
        """Has the process ended? What it sent before can still be read."""
        return self.peer.dead or self.process.exitcode is not None  # the second also where there are no pidfds

    @property
    def lost(self) -> bool:
        """Has it failed, or ended without having returned? Call read() before."""
        return self.failure is not None or (self.over and not self.returned)

    @property
    def how(self) -> str:
        """Its pid and how it ended, for an error."""
        if self.over:
            self.process.join(EXIT_CODE)
        words = str(self.peer)
        kills = memory_kills() - self._memory_kills
        if self.process.exitcode == -9 and kills > 0:
            words += f"; processes of its cgroup killed for lack of memory since its start: {kills}"
        return words

    def send(self, word: str, content: Any = None) -> None:
        """Send it a message. Does nothing for a dead process."""
        with suppress(OSError):  # it is gone, which read() finds; or its pipe is closed here
            self.connection.send((word, content))

    def take(self, word: str, content: Any) -> None:
        """Called for each message of another kind."""

    def read(self) -> None:
        """Take what it has sent. A death is logged, and `shmsync list` shows it; a worker says its exception itself."""
        if self.over:
            return
        gone = self.dead  # before the last look: what it sent, it sent before it died
        try:
            while self.connection.poll():
                word, content = self.connection.recv()
                if word == ATTACHED:
                    self.attached, self._sessions = True, content
                elif word == FAILED:
                    self.failure = self.failure or content
                elif word == RETURNED:
                    self.returned = True
                else:
                    self.take(word, content)
        except (EOFError, OSError):
            gone = True
        self.over = gone
        if self.lost and self.failure is None and not self.reported:
            _log.warning("%s died (%s)", self._who, self.how)
            show_failure(self._who, f"died: {self.how}", self._sessions)

    def close(self) -> None:
        """Kill it if it runs, which is no loss, and close its pipe. Idempotent."""
        self.read()
        self.kill()
        self.process.join()  # of one that has ended too: else multiprocessing keeps its descriptor until the next start
        self.read()
        self.over = True
        self.connection.close()
        self.peer.close()

    def kill(self) -> None:
        """Let it end on purpose, if it runs."""
        if not self.dead:
            self.reported |= self.failure is None
            self.process.kill()


def watched(members: Mapping[int, Process]) -> select.poll:
    """What finds messages of these processes, and their ends, unless they are known."""
    poller = select.poll()
    for member in members.values():
        if not member.over:
            poller.register(member.connection, select.POLLIN)
            if member.peer.fd is not None:
                poller.register(member.peer.fd, select.POLLIN)
    return poller


def wait_for_any(members: Mapping[int, Process], deadline: float) -> None:
    """Until one of these has sent something, or has ended; for 25 ms at most, and not beyond the deadline."""
    poll(watched(members), max(0.0, min(deadline - time.monotonic(), SLICE)) * 1e3)
    stay_if_exiting()


def end(members: Mapping[int, Process], word: str = "", deadline: float = 0.0) -> list[int]:
    """Send each process its last message, wait for its end, and kill those that are late; at once on Ctrl-C.

    Returns the late. `word`: "" for no message. `deadline`: in monotonic time.
    """
    living: dict[int, Process] = {}
    try:
        for member in members.values() if word else ():
            member.send(word)
        while living := {index: member for index, member in members.items() if not member.dead}:
            if time.monotonic() >= deadline:
                break
            wait_for_any(living, deadline)
            for member in living.values():
                member.read()  # a long report would keep its worker in its send
    finally:
        for member in members.values():
            member.kill()
        for member in members.values():
            member.close()
    return sorted(living)


class _Packed:
    """Arguments that are unpickled by load(), in the process, where an error can be reported."""

    def __init__(self, args: tuple[Any, ...], start_method: str) -> None:
        self._args, self._start_method = args, start_method

    def __getstate__(self) -> bytes:
        try:
            with _named():
                return bytes(ForkingPickler.dumps(self._args))  # while the process is started, as queues need it
        except RuntimeError as error:  # a lock's
            raise ProtocolError(
                f"the workers cannot get an argument: {error}. If it has a queue or a lock, make that with "
                f"multiprocessing.get_context({self._start_method!r}).Queue(), or pass start_method='fork'"
            ) from error

    def __setstate__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def load(self) -> tuple[Any, ...]:
        with _named():
            return pickle.loads(self._pickled) if hasattr(self, "_pickled") else self._args


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except (AttributeError, pickle.PicklingError) as error:
        raise ProtocolError(
            f"the workers cannot import what they are given: {error}; put it into a file, as a function or class at "
            "the top level of a module, and import it from there (in a notebook a cell with %%writefile makes one), or "
            "use start_method='fork'"
        ) from error
