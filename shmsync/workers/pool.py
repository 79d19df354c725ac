"""Workers: the processes that use one publisher's weights, as the trainer sees them; and their queues."""

from __future__ import annotations

import logging
import math
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from multiprocessing import queues, util
from typing import Any, Literal

import torch

from ..engine.deadlines import SLICE, names_nearest, timeout_or_default, timeout_or_none, whole
from ..engine.outcome import RemoteTraceback, listed
from ..engine.publisher import Publisher, writer_of
from ..engine.write.acks import WorkerWatch
from ..errors import AckTimeout, ProtocolError, WorkerDied, WorkerFailed
from ..memory.process import Peer
from .process import EXIT_CODE, Process, context_of, end, wait_for_any, watched
from .worker_process import attach_and_work

_START = 300.0  # seconds to attach: importing torch takes long on a busy machine, and a death ends the wait
_BETWEEN_LOOKS = 0.01  # seconds: a poll costs as much as a small publish
_LAST = 0.2  # seconds: what a worker put before it returned is in the pipe, and the queue's lock may be taken

_log = logging.getLogger("shmsync")


class Workers:
    """n processes that each run `work(sub, *args)`; `sub` is a Subscriber of the publisher, attached as worker `rank`.

    ```python
    with shmsync.Publisher(policy) as pub, shmsync.Workers(pub, work, 4) as workers:
        for _ in range(100):
            train_step()
            pub.publish(wait=True)
    ```

    When the `with` is entered all workers are attached. Leaving it ends `sub.versions()` and every wait in the workers,
    makes `sub.publisher_alive` False, and waits until their functions have returned; what is late is killed. What a
    worker raises is WorkerFailed in the trainer, from the next publish() or update(), before it writes anything, or on
    leaving. A death is WorkerDied there. The worker's traceback is on stderr at once.

    Args:
        pub: the publisher.
        work: a function that the workers can import, or any function with start_method="fork".
        n: how many.
        args: more arguments of `work`. Queues, locks and events among them come from
            `multiprocessing.get_context(start_method)`; see also queue().
        start_method: "forkserver" forks them from a server that has imported torch once; "spawn" starts each from
            nothing; "fork" copies the trainer, and with it locks that its other threads hold.
        threads: for torch.set_num_threads() in each worker.
        restart: how often each worker is started again after a death, by the call that would raise WorkerDied. An
            exception of `work` is raised all the same.
        timeout: seconds to start, and to end, all workers. None: 300 to start, and the publisher's default to end.

    Without a `with`, as in a notebook, call `start()` and `close()`. Before that `wait=True` waits for none of them.

    Waits of the workers' Subscribers have no timeout: they end when the trainer dies or leaves the `with`.
    Worker `rank` draws other random numbers than the others: torch, random and numpy are seeded with
    `torch.initial_seed() + rank`.

    Raises:
        ProtocolError: the workers cannot import `work`, or use a queue in `args`; or the publisher has other Workers.
        WorkerFailed, WorkerDied, AckTimeout: on entry, when they are not all attached.
    """

    @names_nearest
    def __init__(
        self,
        pub: Publisher,
        work: Callable[..., object],
        n: int,
        *,
        args: Iterable[Any] = (),
        start_method: Literal["forkserver", "spawn", "fork"] = "forkserver",
        threads: int = 1,
        restart: int = 0,
        timeout: float | None = None,
    ) -> None:
        self._timeout = timeout_or_none(timeout)
        if not isinstance(pub, Publisher):
            raise TypeError(f"pub is a Publisher, not a {type(pub).__name__}; write Workers(pub, work, n)")
        if not callable(work):
            raise TypeError(f"work is a function that gets a Subscriber, not {work!r}; write Workers(pub, work, n)")
        if not isinstance(args, Iterable):
            raise TypeError(f"args is a tuple, not a {type(args).__name__}; write args=(it,) for one argument")
        self._count = whole("n", n, 1)
        self._threads = whole("threads", threads, 1, 1 << 16)
        self._restarts = dict.fromkeys(range(self._count), whole("restart", restart, 0, sys.maxsize, ValueError))
        self._pub = pub
        self._writer = writer_of(pub)
        self._work = work
        self._args = tuple(args)
        self._context = context_of(start_method)
        self._queues: tuple[WorkerQueue, ...] = ()
        self._members: dict[int, Process] = {}
        self._looking = threading.RLock()  # one thread at a time learns of ends, and starts others
        self._poll = select.poll()  # for what the members do next
        self._next_look = 0.0  # monotonic time
        self._started = 0  # processes so far, so that a restarted worker draws new random numbers
        # At the exit of the trainer, before the publisher's end. A stopped worker would keep it in multiprocessing's.
        util.Finalize(self, end, (self._members,), exitpriority=30)

    @property
    def procs(self) -> list[Any]:
        """The processes, by rank: a multiprocessing.Process each. Empty before the `with`."""
        return [member.process for member in self._members.values()]

    @property
    def alive(self) -> list[int]:
        """The ranks of the workers that run, as wait= takes them."""
        return [rank for rank, member in self._members.items() if not member.dead]

    def queue(self, maxsize: int = 0) -> WorkerQueue:
        """A queue of the workers' start method, which each worker gets as one more argument: `work(sub, *args, queue)`.

        Call it before the start. `maxsize`: items after which a worker's put() waits; 0 for any number. In the trainer
        its get() raises a worker's failure or death. Raises ProtocolError after the start.
        """
        if self._members:
            raise ProtocolError("workers.queue() gives the workers an argument; call it before they are started")
        made = WorkerQueue(whole("maxsize", maxsize, 0), self._context, self)
        self._queues += (made,)
        return made

    def get(self, timeout: float | None = None) -> Any:
        """The next item of the first queue() that was made.

        Args:
            timeout: seconds; None is the publisher's default, math.inf waits without limit.

        Raises:
            WorkerFailed, WorkerDied: a worker raised or died; once each, before what is in the queue.
            AckTimeout: no worker has put anything in time.
            ProtocolError: the queue is empty and no worker runs; or no queue() was made.
        """
        if not self._queues:
            raise ProtocolError("these Workers have no queue; call workers.queue() before they are started")
        seconds = timeout_or_default(timeout, self._writer.timeout)
        try:
            return self._queues[0].get(timeout=seconds)
        except queue.Empty:
            raise AckTimeout(
                f"no worker has put anything into the queue within {seconds:g} s; give more time with timeout=",
                missing=self.alive,
            ) from None

    def restart(self, rank: int) -> None:
        """End this worker if it runs, start another one in its place, and wait until that is attached.

        It begins `work` from its start. No later call raises how the old one was lost. Raises ValueError for a `rank`
        that there is not, else as entering does.
        """
        self._writer.check()
        member = self._members.get(rank)
        if member is None:
            known = f"the workers are {list(self._members)}" if self._members else "none was started"
            raise ValueError(f"there is no worker {rank!r}, {known}")
        with self._looking:
            member.reported = True  # before it is ended here: a wait of another thread would take that for a death
            end({rank: member})
            self._free_rows(member)
            self._start([rank])

    def start(self) -> Workers:
        """Start the workers and return when all are attached, as entering the `with` does. Returns these Workers.

        Raises:
            ProtocolError: the publisher has Workers that run; or the workers could not import `work`.
            WorkerFailed, WorkerDied, AckTimeout: not all workers are attached; none runs.
        """
        self._writer.check()
        if self._writer.workers.watch is not None:
            raise ProtocolError(
                f"the publisher of arena {self._pub.name!r} has Workers already; leave those first, or "
                "give them a larger n"
            )
        try:
            self._writer.workers.watch = WorkerWatch(self._look, self._before_write, self._peer_of)
            self._start(range(self._count))
        except BaseException:
            self._end_all()
            raise
        return self

    def close(self) -> None:
        """End the workers, as leaving the `with` does. Does nothing if none was started.

        Raises as leaving does, unless another exception is on its way, as in a `finally`.
        """
        self.__exit__(*sys.exc_info())

    __enter__ = start

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._writer.in_parent or not self._members:  # a fork's workers are the trainer's; or none was started
            return
        members = dict(self._members)
        patience = self._writer.timeout if self._timeout is None else self._timeout
        late = self._end_all("leave", time.monotonic() + patience)
        if late:
            _log.warning(
                "%s had not returned in time after the trainer left, and was killed. A custom loop must end when "
                "sub.publisher_alive is False, and must not wait for a queue that is no longer read",
                listed(late),
            )
        for rank, member in members.items():
            if error is None and member.lost and not member.reported:
                raise self._loss(rank, member)

    def _look(self, ended: Collection[int | str] = ()) -> None:
        """Restart the dead as often as that is allowed; raise what a worker failed with, or how it died.

        `ended`: those whose end the reader table shows, a moment before their exit codes are known.
        """
        for member in [member for rank, member in self._members.items() if rank in ended]:
            member.process.join(EXIT_CODE)
        # Another thread that looks raises what there is. A wait for acks has to know who runs again.
        if not self._looking.acquire(blocking=bool(ended)):
            return
        try:
            if self._writer.workers.watch is None or not self._poll.poll(0):  # they end on purpose; or nothing happened
                return
            self._next_look = 0.0  # there may be more to raise
            for rank, member in list(self._members.items()):
                member.read()
                if not member.lost or member.reported:
                    continue
                if member.failure is None and self._restarts[rank] > 0:
                    self._restarts[rank] -= 1
                    self.restart(rank)
                else:
                    raise self._loss(rank, member)
            self._poll = watched(self._members)
        finally:
            self._looking.release()

    def _before_write(self) -> None:
        """As _look(), for each publish() and update(); at most once in some milliseconds."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _BETWEEN_LOOKS
            self._look()

    def _peer_of(self, worker: int | str) -> Peer | None:
        return self._members[worker].peer if worker in self._members else None

    def _start(self, ranks: Iterable[int]) -> None:
        """Start these workers and wait until they are attached."""
        ranks = list(ranks)
        for rank in ranks:
            self._writer.workers.forget(rank)
            seed = (torch.initial_seed() + rank + self._count * (self._started // self._count)) % 2**63
            args = (self._pub.handle, rank, self._work, *self._args, *self._queues)
            self._members[rank] = Process(
                self._context, f"worker {rank}", attach_and_work, args, seed=seed, threads=self._threads
            )
            self._started += 1
        deadline = time.monotonic() + (_START if self._timeout is None else self._timeout)
        while late := {rank: self._members[rank] for rank in ranks if not self._members[rank].attached}:
            if time.monotonic() >= deadline:
                procs = {rank: member.process for rank, member in late.items()}
                self._pub.wait_readers(late, timeout=0.0, procs=procs)  # raises, unless they are attached now
            wait_for_any(late, deadline)
            for rank, member in late.items():
                member.read()
                if member.lost:
                    raise self._loss(rank, member)
        self._poll = watched(self._members)

    def _end_all(self, word: str = "", deadline: float = 0.0) -> list[int]:
        """End the workers, as end() does. Their ends are no deaths to later waits."""
        self._writer.workers.watch = None  # first: from now on their ends are on purpose
        try:
            return end(self._members, word, deadline)
        finally:
            for member in self._members.values():
                self._free_rows(member)
            self._members.clear()

    def _free_rows(self, member: Process) -> None:
        if not self._writer.closed:
            self._writer.workers.free_rows_of(member.peer.pid)

    def _loss(self, rank: int, member: Process) -> WorkerFailed | WorkerDied:
        """The error that says how this worker was lost, to be raised once, by its `reported`."""
        member.reported = True
        how, version = member.how, self._writer.current[0]
        if member.failure is not None:
            failed = WorkerFailed(
                f"worker {rank} ({how}) raised {member.failure.summary.rstrip('.')}. Its traceback is above. "
                f"Inside the `with` the others go on, and workers.restart({rank}) starts another one",
                version=version,
                missing=[rank],
            )
            failed.__cause__ = member.failure.exception()
            failed.__cause__.__cause__ = RemoteTraceback(member.failure.trace)
            return failed
        self._free_rows(member)  # or the next wait would find them, and raise its death again
        words = f"worker {rank} died ({how})"
        if not member.attached:
            words += " before it was attached; its own output may have the reason"
            if member.process.exitcode == 1:  # it could not import the main file
                words += '. A script needs `if __name__ == "__main__":` around its start'
        return WorkerDied(
            f"{words}. workers.restart({rank}) starts another one; Workers(restart=) does so by itself",
            version=version,
            missing=[rank],
        )


class WorkerQueue(queues.Queue):
    """A multiprocessing.Queue; made by Workers.queue().

    In the trainer get() raises WorkerFailed or WorkerDied, once each, and ProtocolError when the queue is empty and no
    worker runs. Else it is as in the standard library: without a `timeout` it waits without limit, and raises
    queue.Empty at the end of one.
    """

    def __init__(self, maxsize: int, context: Any, workers: Workers) -> None:
        super().__init__(maxsize, ctx=context)
        self._workers = workers

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next item. Raises queue.Empty, WorkerFailed, ProtocolError; WorkerDied also for an item that is lost."""
        workers: Workers | None = getattr(self, "_workers", None)  # it is not pickled with the queue
        if workers is None or workers._writer.in_parent:  # in a worker
            return super().get(block, timeout)
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while True:
            workers._look()
            running = workers.alive or not workers._started  # else no worker could fill the queue
            left = deadline - time.monotonic()
            try:
                return super().get(block and left > 0, min(left, SLICE if running else _LAST))
            except queue.Empty:
                if not block or left <= 0:
                    raise
            except (ConnectionError, FileNotFoundError, EOFError) as error:  # torch asks the process that has put it
                raise WorkerDied(
                    "an item of the queue is lost: its tensors went with the worker that had put it, which has ended. "
                    "Let a worker that returns, or may die, put arrays: tensor.numpy()"
                ) from error
            if not running:
                raise ProtocolError(
                    "the queue is empty, and no worker runs that could fill it; workers.restart(rank) starts one"
                )
