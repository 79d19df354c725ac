"""Workers: the processes that use one publisher's weights, as the trainer sees them."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Literal

import torch

from ..engine.deadlines import timeout_or_none, whole
from ..engine.outcome import Failure, RemoteTraceback, listed
from ..engine.publisher import Publisher, writer_of
from ..errors import ProtocolError, WorkerDied, WorkerFailed
from ..memory.system.exiting import stay_if_exiting
from ..memory.system.process import Peer, start_process
from ..schemes.link.connection import Channel
from .importable import check_importable
from .memory_kills import memory_kills
from .rank_process import FAILED, LEAVE, WorkerStart, run

StartMethod = Literal["forkserver", "spawn", "fork"]

# Not tensordict, which takes as long to import as torch: a worker that only calls its module uses none. Where the
# trainer has it, workers may need it too, and it is imported once for all.
_PRELOADED = ["torch", "shmsync", "shmsync.workers.rank_process"]
_START = 300.0  # seconds to attach: importing torch takes long on a busy machine, and a death ends the wait
_EXIT_CODE = 1.0  # seconds; a fork server reports an exit code a moment after the death
_TERMINATED = 2.0  # seconds from SIGTERM to SIGKILL
_MOST = 4096

_log = logging.getLogger("shmsync")


class _RankProcess:
    """One worker process and its pipe."""

    def __init__(self, context: Any, spec: WorkerStart, work: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.rank = spec.rank
        self.failure: Failure | None = None
        self.reported = False  # its failure or death was raised, or it was ended on purpose
        ours, self._theirs = context.Pipe()
        self.connection, self.channel = ours, Channel.of(ours)
        self._method = context.get_start_method()
        name = f"shmsync-worker-{spec.rank}"
        self.process = context.Process(target=run, args=(spec, work, args, self._theirs), name=name, daemon=True)

    def start(self) -> None:
        try:
            start_process(self.process)
        except RuntimeError as error:
            if "SemLock" not in str(error):
                raise
            raise ProtocolError(
                "a queue or lock in args= was made by multiprocessing itself, so only forked processes can use it. "
                f"Make it with multiprocessing.get_context({self._method!r}).Queue(), or pass start_method='fork'"
            ) from error
        finally:
            self._theirs.close()

    @property
    def running(self) -> bool:
        return self.process.pid is not None and self.process.exitcode is None

    def listen(self) -> None:
        """Read what it has reported."""
        with suppress(EOFError):  # it has sent everything
            while not self.channel.closed and (message := self.channel.peek()) is not None:
                word, content = message[0]
                if word == FAILED:
                    self.failure = content
                del self.channel.arrived[0]  # last: an interrupted listen() handles the message again

    @property
    def died(self) -> bool:
        """Has it ended other than by returning, and without an exception that it reported?"""
        return self.failure is None and self.process.exitcode not in (None, 0)

    def end(self, grace: float) -> None:
        """End it if it runs: SIGTERM, and SIGKILL after `grace` seconds. Idempotent."""
        if self.running:
            self.process.terminate()
            self.process.join(grace)
        if self.running:
            self.process.kill()
            self.process.join()
        self.listen()
        self.connection.close()


class Workers:
    """n processes that each run `work(sub, *args)`; `sub` is a Subscriber of the publisher, attached as worker `rank`.

    ```python
    with shmsync.Publisher(policy) as pub, shmsync.Workers(pub, work, 4) as workers:
        for _ in range(100):
            train_step()
            pub.publish(wait=True)
    ```

    When the `with` is entered all workers are attached. Leaving it ends `sub.versions()` and every wait in the workers,
    makes `sub.publisher_alive` False, and waits until their functions have returned; what is late is terminated. What a
    worker raises is WorkerFailed in the trainer, from the next publish() or update() that waits for acks, or on
    leaving. A death is WorkerDied there.

    Args:
        pub: the publisher.
        work: a function that the workers can import, or any function with start_method="fork".
        n: how many.
        args: more arguments of `work`. Queues, locks and events among them come from
            `multiprocessing.get_context(start_method)`.
        start_method: "forkserver" forks them from a server that has imported torch once; "spawn" starts each from
            nothing; "fork" copies the trainer, and with it locks that its other threads hold.
        threads: for torch.set_num_threads() in each worker.
        restart: how often each worker is started again after a death, by the call that would raise WorkerDied. An
            exception of `work` is raised all the same.
        timeout: seconds to start, and to end, all workers. None: 300 to start, and the publisher's default to end.

    Without a `with`, as in a notebook, call `start()` and `close()`. Before that, calls of `pub` that would wait for
    these workers raise ProtocolError.

    Waits of the workers' Subscribers have no timeout: they end when the trainer dies or leaves the `with`.
    Worker `rank` draws other random numbers than the others: torch, random and numpy are seeded with
    `torch.initial_seed() + rank`.

    Raises:
        ProtocolError: the workers cannot import `work`, or use a queue in `args`; or the publisher has other Workers.
        WorkerFailed, WorkerDied, AckTimeout: on entry, when they are not all attached.
    """

    def __init__(
        self,
        pub: Publisher,
        work: Callable[..., object],
        n: int,
        *,
        args: Iterable[Any] = (),
        start_method: StartMethod = "forkserver",
        threads: int = 1,
        restart: int = 0,
        timeout: float | None = None,
    ) -> None:
        self._timeout = timeout_or_none(timeout)
        if not isinstance(pub, Publisher):
            raise TypeError(f"pub is a Publisher, not a {type(pub).__name__}")
        if not callable(work):
            raise TypeError(f"work is a function that gets a Subscriber, not {work!r}")
        methods = multiprocessing.get_all_start_methods()
        if start_method not in methods:
            raise ValueError(f"start_method is one of {', '.join(methods)}, not {start_method!r}")
        self._count = whole("n", n, 1, _MOST)
        self._threads = whole("threads", threads, 1, 1 << 16)
        self._restarts = whole("restart", restart, 0, sys.maxsize, ValueError)
        check_importable(work, start_method)
        self._pub = pub
        self._writer = writer_of(pub)
        self._work = work
        self._args = tuple(args)
        self._context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            needed = ["tensordict"] if "tensordict" in sys.modules else []
            self._context.set_forkserver_preload(_PRELOADED + needed)
        self._pid = os.getpid()
        self._members: dict[int, _RankProcess] = {}
        self._started = 0  # processes so far, so that a restarted worker draws new random numbers
        self._memory_kills = 0
        self._ending = False
        self._writer.not_started[self] = self._count
        self._used = False  # neither started nor closed

    @property
    def procs(self) -> list[Any]:
        """The processes, by rank: a multiprocessing.Process each. Empty before the `with`."""
        return [member.process for _, member in sorted(self._members.items())]

    @property
    def alive(self) -> list[int]:
        """The ranks of the workers that run, as wait= takes them."""
        return [rank for rank, member in sorted(self._members.items()) if member.running]

    def restart(self, rank: int) -> None:
        """End this worker if it runs, start another one in its place, and wait until that is attached.

        It begins `work` from its start. A failure of the old one that no call has raised is logged. Raises ValueError
        for a `rank` that there is not, else as entering does.
        """
        self._writer.check()
        member = self._members.get(rank)
        if member is None:
            known = f"the workers are {sorted(self._members)}" if self._members else "none was started"
            raise ValueError(f"there is no worker {rank!r}, {known}")
        unsaid, died = not member.reported, member.died
        member.reported = True  # before it is ended here: a wait of another thread would take that for a death
        self._end_member(member, _TERMINATED)
        if unsaid and (member.failure or died):
            self._log_failure(member, ", and is started again")
        self._start([rank])

    def start(self) -> Workers:
        """Start the workers and return when all are attached, as entering the `with` does. Returns these Workers.

        Raises:
            ProtocolError: the publisher has Workers that run.
            WorkerFailed, WorkerDied, AckTimeout: not all workers are attached; none runs.
        """
        self._used = True
        self._writer.check()
        if self._writer.worker_watch is not None:
            raise ProtocolError(
                f"the publisher of arena {self._pub.name!r} has Workers already; leave those first, or "
                "give them a larger n"
            )
        self._restarts_left = dict.fromkeys(range(self._count), self._restarts)
        self._started, self._ending = 0, False
        try:
            self._writer.not_started.pop(self, None)
            self._writer.watch_workers(self._look, self._explains)
            self._start(range(self._count))
        except BaseException:
            self._end(0.0)
            self._writer.not_started[self] = self._count
            raise
        return self

    def close(self) -> None:
        """End the workers, as leaving the `with` does. Does nothing if none was started.

        Raises as leaving does; where another exception is on its way, as in a `finally`, it logs that instead.
        """
        self._used = True
        self._writer.not_started.pop(self, None)
        self.__exit__(*sys.exc_info())

    def __enter__(self) -> Workers:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pid != os.getpid() or not self._members:  # a fork's workers are the trainer's; or none was started
            return
        try:
            members = list(self._members.values())
            late = self._leave(members)
        except BaseException:  # Ctrl-C while it waits
            self._end(0.0)
            raise
        self._end(_TERMINATED)
        if late:
            _log.warning(
                "%s had not returned in time after the trainer left: terminated. A custom loop must end when "
                "sub.publisher_alive is False, and must not wait for a queue that is no longer read",
                listed(late),
            )
        lost = [m for m in members if not m.reported and (m.failure or m.died) and m.rank not in late]
        for member in lost if error is not None else lost[1:]:
            self._log_failure(member)
        if error is None and lost:
            self._raise(lost[0], self._writer.current[0])

    def __del__(self) -> None:
        if not getattr(self, "_used", True):
            warnings.warn(
                f"Workers of arena {self._pub.name!r} were made and never started; write `with shmsync.Workers(...):`",
                RuntimeWarning,
                stacklevel=2,
            )

    def _look(self, version: int) -> None:
        """Restart the dead as often as that is allowed; raise what a worker failed with, or how it died."""
        if self._ending:  # in another thread: their deaths are on purpose
            return
        for member in list(self._members.values()):
            member.listen()
            if member.reported:
                continue
            if member.died and self._restarts_left[member.rank] > 0:
                self._restarts_left[member.rank] -= 1
                self.restart(member.rank)
            elif member.failure is not None or member.died:
                self._raise(member, version)

    def _explains(self, error: WorkerDied) -> bool:
        """As _look(), when the reader table shows deaths. Do all of these workers run again?"""
        for rank, member in list(self._members.items()):
            if rank in error.missing:
                member.process.join(_EXIT_CODE)
        self._look(error.version or 0)
        return self._ending or set(error.missing) <= set(self.alive)

    def _start(self, ranks: Iterable[int]) -> None:
        """Start these workers and wait until they are attached."""
        ranks = list(ranks)
        writer = writer_of(self._pub)
        self._memory_kills = memory_kills()
        for rank in ranks:
            writer.forget_acks(rank)
            seed = (torch.initial_seed() + rank + self._count * (self._started // self._count)) % 2**63
            spec = WorkerStart(self._pub.handle, rank, self._threads, seed)
            self._members[rank] = _RankProcess(self._context, spec, self._work, self._args)
            self._members[rank].start()
            self._started += 1
        deadline = time.monotonic() + (_START if self._timeout is None else self._timeout)
        while ranks:
            procs = {rank: self._members[rank].process for rank in ranks}
            try:
                self._pub.wait_readers(ranks, timeout=max(0.0, deadline - time.monotonic()), procs=procs)
                return
            except WorkerDied as error:
                ended = [self._members[rank] for rank in ranks if rank in error.missing]
                for member in ended:
                    member.process.join(_EXIT_CODE)
                    member.listen()
                    if member.failure is not None or member.died:
                        self._raise(member, error.version)
                ranks = [rank for rank in ranks if rank not in error.missing]  # their function has returned already

    def _leave(self, members: list[_RankProcess]) -> list[int]:
        """Tell the workers that the trainer leaves, and wait for their end; the ranks of those that are late."""
        for member in members:
            if member.running:
                member.channel.send(pickle.dumps(LEAVE))
        deadline = time.monotonic() + (self._writer.timeout if self._timeout is None else self._timeout)
        while (living := [member for member in members if member.running]) and time.monotonic() < deadline:
            left = deadline - time.monotonic()
            sources: list[Any] = [member.process.sentinel for member in living]
            sources += [member.connection for member in living if not member.channel.ended]
            wait(sources, None if math.isinf(left) else max(0.0, left))
            stay_if_exiting()
            for member in members:  # a long report would keep its worker in its send
                member.listen()
        return [member.rank for member in living]

    def _end(self, grace: float) -> None:
        """End every worker, also if it is interrupted meanwhile."""
        self._ending = True
        interrupted: BaseException | None = None
        while self._members:
            try:
                for member in self._members.values():  # all at once, so that they have the same time
                    if member.running:
                        member.process.terminate()
                rank, member = next(iter(self._members.items()))
                self._end_member(member, grace)
                del self._members[rank]
            except KeyboardInterrupt as error:
                interrupted, grace = error, 0.0
        self._writer.worker_watch = None
        if interrupted is not None:
            raise interrupted

    def _end_member(self, member: _RankProcess, grace: float) -> None:
        pid = member.process.pid
        member.end(grace)
        if pid is not None and not self._writer.closed:
            writer_of(self._pub).free_rows_of(pid)

    def _log_failure(self, member: _RankProcess, then: str = "") -> None:
        trace = "" if member.failure is None else f":\n{member.failure.trace}"
        verb = "died" if member.failure is None else "failed"
        _log.warning("worker %d %s (%s)%s%s", member.rank, verb, Peer(process=member.process), then, trace)

    def _raise(self, member: _RankProcess, version: int | None = None) -> None:
        member.reported = True
        peer = Peer(process=member.process)
        if member.failure is not None:
            cause = member.failure.exception()
            cause.__cause__ = RemoteTraceback(member.failure.trace)
            raise WorkerFailed(
                f"worker {member.rank} ({peer}) raised {member.failure.summary.rstrip('.')}. Its traceback is above. "
                f"Inside the `with` the others go on, and workers.restart({member.rank}) starts another one",
                version=version,
                missing=[member.rank],
            ) from cause
        hint = ""
        if member.process.exitcode == -9 and memory_kills() > self._memory_kills:
            hint = ", possibly out of memory: the kernel has killed a process for that since the workers were started"
        elif (member.process.exitcode or 0) > 0:
            hint = '; its own output has the reason. A script needs `if __name__ == "__main__":` around its start'
        raise WorkerDied(
            f"worker {member.rank} died ({peer}){hint}. Start another one with workers.restart({member.rank}), or pass "
            "restart= for that",
            version=version,
            missing=[member.rank],
        )
