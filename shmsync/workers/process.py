"""One worker process as its trainer sees it: started, watched and ended. Workers and collectors use it alike.

What runs in the process itself is in worker_process.py.
"""

from __future__ import annotations

import multiprocessing
import select
import time
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from ..engine.outcome import Failure
from ..errors import ProtocolError
from ..memory.process import Peer, me, poll, stay_if_exiting
from .pipe import Pipe, milliseconds
from .worker_process import ATTACHED, BEGAN, FAILED, Start, run

EXIT_CODE = 1.0  # seconds; a fork server reports an exit code a moment after the death
_TERMINATED = 2.0  # seconds from SIGTERM to SIGKILL, at the exit of the trainer
_COUNTERS = Path("/proc/vmstat")  # of the machine; kills at the limit of a cgroup count there too


class Process:
    """One worker process and its pipe, over which messages (word, content) travel. Made started.

    Args:
        context: the multiprocessing context.
        who: its name in errors, as "worker 3".
        body: called in the process as `body(control, *args)`; `control` is the worker's end of the pipe.
        args: they may have queues, locks and connections of this context.
        seed, threads: for its random generators, and torch.set_num_threads().

    Attributes:
        failure: the exception that it has reported.
        received: its messages that are not about its own state, oldest first.
        over: it is dead, and its messages were all read.
        began, attached: it runs Python code of `body`; it has said that it is attached.
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
        self.failure: Failure | None = None
        self.received: list[tuple[str, Any]] = []
        self.over = self.began = self.attached = self.reported = False
        self._memory_kills = memory_kills()
        self.connection, theirs = context.Pipe()
        self.pipe = Pipe.of(self.connection)
        packed = args if context.get_start_method() == "fork" else Packed(args)
        start = Start(who, me().owner, threads, seed)
        name = f"shmsync-{who.replace(' ', '-')}"
        self.process = context.Process(target=run, args=(start, body, packed, theirs), name=name, daemon=True)
        try:
            self.process.start()
        except RuntimeError as error:
            if "SemLock" not in str(error):
                raise
            raise ProtocolError(
                "a queue or lock in args= was made by multiprocessing itself, so only forked processes can use it. "
                f"Make it with multiprocessing.get_context({context.get_start_method()!r}).Queue(), or pass "
                "start_method='fork'"
            ) from error
        finally:
            theirs.close()
        self.peer = Peer(process=self.process)

    @property
    def dead(self) -> bool:
        """Has the process ended? What it sent before can still be read."""
        return self.peer.dead or self.process.exitcode is not None  # the second also where there are no pidfds

    @property
    def died(self) -> bool:
        """Has it ended other than by returning, and without an exception that it reported? Call read() before."""
        if self.failure is not None or not self.dead:
            return False
        self.process.join(EXIT_CODE)
        return self.process.exitcode != 0 or not self.attached

    @property
    def how(self) -> str:
        """Its pid and how it ended, for an error."""
        words = str(self.peer)
        if self.process.exitcode == -9 and memory_kills() > self._memory_kills:
            words += ", possibly out of memory: the kernel has killed a process for that since this one was started"
        return words

    def send(self, message: bytes) -> None:
        """Send it a message, as far as the pipe takes it. Does nothing for a dead process."""
        if not self.pipe.closed:
            self.pipe.send(message)

    def read(self) -> None:
        """Take what it has sent, and write what its pipe takes now."""
        if self.over or self.pipe.closed:
            return
        gone = self.dead  # before the last look: what it sent, it sent before it died
        self.pipe.flush()
        try:
            while (found := self.pipe.receive()) is not None:
                word, content = found[0]
                if word == FAILED:
                    self.failure = content
                elif word == BEGAN:
                    self.began = True
                elif word == ATTACHED:
                    self.attached = True
                else:
                    self.received.append(found[0])
        except EOFError:
            gone = True
        self.over = gone

    def watch(self, poller: select.poll) -> None:
        """Let this poll find its messages and its end, unless they are known."""
        if not (self.over or self.pipe.closed or self.pipe.ended):
            poller.register(self.pipe.fd, select.POLLIN)
        if self.peer.fd is not None and not self.peer.dead:
            poller.register(self.peer.fd, select.POLLIN)

    def end(self, grace: float) -> None:
        """End it if it runs: SIGTERM, and SIGKILL after `grace` seconds. Idempotent."""
        if self.process.exitcode is None and not self.dead:
            self.process.terminate()
            self.process.join(grace)
        if self.process.exitcode is None:
            self.process.kill()
        self.process.join()  # of one that has ended too: else multiprocessing keeps its descriptor until the next start
        self.read()
        self.connection.close()
        if self.peer.dead:
            self.peer.close()


def wait_for_any(members: Mapping[int, Process], deadline: float) -> None:
    """Until one of these has sent something, or has ended; for 50 ms at most, and not beyond the deadline."""
    poller = select.poll()
    for member in members.values():
        member.watch(poller)
    poll(poller, milliseconds(deadline))
    stay_if_exiting()


def leave(members: Mapping[int, Process], order: bytes, deadline: float) -> list[int]:
    """Send each process its last order and wait for its end; those that are late. Their messages are read meanwhile."""
    for member in members.values():
        if not member.dead:
            member.send(order)
    while living := {index: member for index, member in members.items() if not member.dead}:
        if time.monotonic() >= deadline:
            break
        wait_for_any(living, deadline)
        for member in living.values():
            member.read()  # a long report would keep its worker in its send
    return sorted(living)


def end_at_exit(members: dict[int, Process]) -> None:
    """End processes that run when the trainer exits. A stopped one would keep it in multiprocessing's own join."""
    for member in members.values():
        if not member.dead:
            member.process.terminate()
    deadline = time.monotonic() + _TERMINATED
    for member in members.values():
        member.end(max(0.0, deadline - time.monotonic()))


class Packed:
    """Arguments on their way into a process, unpickled there by load(), where an error can be reported."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self._args = args

    def __reduce__(self) -> Any:
        return _Arrived, (bytes(ForkingPickler.dumps(self._args)),)  # while the process is started, as queues need it


class _Arrived:
    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def load(self) -> tuple[Any, ...]:
        args: tuple[Any, ...] = ForkingPickler.loads(self._pickled)
        return args


def memory_kills(counters: Path = _COUNTERS) -> int:
    """How many processes the kernel has killed for lack of memory so far, as far as this process may know.

    It only grows, and says how often, not whom.
    """
    try:
        found = dict(line.split() for line in counters.read_text().splitlines())
        return int(found.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
