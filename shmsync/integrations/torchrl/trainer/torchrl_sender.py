"""The trainer's side of one model: publish, wake the workers, wait until they have applied it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ....engine.deadlines import check_worker, deadline_after
from ....engine.outcome import Outcome, Wording, listed
from ....errors import WorkerDied
from ....schemes.sender import SendLock
from .first_weights import First
from .groups import Assignment, Groups
from .own_weights import OwnWeights, Wanted
from .worker_connections import WorkerConnections

_SLICE = 5_000_000  # ns between two looks at deaths and failures
WORDING = Wording(
    "a worker applies between two forwards of its policy",
    sent="is published",
    died="ended",
    after_death="The others have it, and later updates leave these out. To replace them, make a new collector",
    after_lateness="A late worker uses it as soon as it can; give more time with timeout=",
)


class Sender:
    """Sends the weights of one model to its workers.

    Args:
        model_id: for messages.
        first: what the workers start with.
        groups: its arenas, not open yet.
        timeout: default of a send, in seconds.
        context: the collector, whose processes are known later; or None.

    Thread-safe: one send at a time.
    """

    def __init__(
        self, model_id: str, first: First, groups: Groups, timeout: float, context: weakref.ReferenceType[Any] | None
    ) -> None:
        self._model_id = model_id
        self.first = first
        self.groups = groups
        self._own = OwnWeights()
        self._timeout = timeout
        self.connections = WorkerConnections(groups.workers, context)
        self._version = 1  # of the first weights; arenas that some workers have for themselves count their own
        self._lost: set[int] = set()  # dead workers that a WorkerDied has named
        self._lock = SendLock()

    def wanted(self, weights: Any, worker_ids: Any, model: Any) -> list[Wanted]:
        """Each of the weights to send, with the workers that get it, and the trainer's own weights for those.

        `weights`: for all of `worker_ids`, or a dict by worker. `model`: the trainer's own; None: what the scheme was
        initialised with.
        """
        chosen, sources = self._checked(worker_ids), self.first.sources
        by_worker = isinstance(weights, dict) and weights and all(isinstance(key, int) for key in weights)
        if by_worker:
            chosen = chosen & self._checked(list(weights))
        own = self.first.again() if model is None else dict.fromkeys(sources, model)
        found: dict[Any, Wanted] = {}
        for worker in chosen & own.keys():
            given = weights[worker] if by_worker else weights
            wanted = Wanted(given, set(), own[worker], id(sources[worker]))
            found.setdefault((id(given), id(own[worker])), wanted).workers.add(worker)
        return list(found.values())

    def send(
        self, wanted: Sequence[Wanted], prepare: Callable[[Any], Any], *, wait: bool, timeout: float | None
    ) -> int:
        """Publish each of these weights for its workers; `wait` until they have applied it. Returns the version.

        `prepare` makes what is published of weights.
        The version grows by one with each send, to whichever workers.

        Raises:
            As Publisher.publish(): nothing was published. A worker's own exception, WorkerDied, AckTimeout: published,
            but not applied by these workers; the others have it.
        """
        if not any(each.workers for each in wanted):
            return self._version  # there is no worker to send to
        deadline = deadline_after(timeout, self._timeout)
        with self._lock.hold("send", deadline):
            earlier = dict(self.connections.look(deadline))  # also lets new workers in
            if earlier:
                outcome = Outcome(WORDING)
                outcome.failed.update(earlier)
                outcome.check(f"an earlier version of {self._model_id!r}; nothing was published now", None)
            self._lost &= self.connections.ended.keys()  # workers that connected again are not lost
            living = [each._replace(workers=each.workers - self._lost) for each in wanted]
            living = [each for each in living if each.workers]
            if not living:
                raise WorkerDied(
                    f"no worker is left to send {self._model_id!r} to; make a new collector", missing=sorted(self._lost)
                )
            chosen = list(self._own.chosen(living, prepare))
            posted = self.groups.publish(chosen, self._lost, deadline)
            self._version += 1
            for post in posted:
                for worker in post.workers - post.group.attached:  # these have not acked there, and have to move
                    self.connections.move(worker, post.group.publisher.handle)
                self.connections.wake(post.workers)
            try:
                self._own.sent(living, chosen)
                if wait:
                    self._wait(posted, deadline)
            finally:
                self.groups.sweep()
            return self._version

    def _wait(self, posted: Sequence[Assignment], deadline: float) -> None:
        """Wait until each worker has applied its assignment, has failed or is dead. Raises what went wrong."""
        outcome, connections = Outcome(WORDING), self.connections
        waiting = {worker: post for post in posted for worker in post.workers}

        def take_acks() -> None:
            for post in posted:
                for worker in post.group.applied(post.version):
                    if waiting.get(worker) is post:
                        del waiting[worker]

        while True:
            # Sleep in the kernel until the workers of one arena have acked, at most a slice.
            post = next(iter(waiting.values()))
            workers = [worker for worker, each in waiting.items() if each is post]
            slice_ns = int(min(_SLICE, max(0.0, deadline - time.monotonic()) * 1e9))
            if not post.group.wait(post.version, workers, slice_ns):
                time.sleep(0.0005)  # a worker has not attached to this arena yet
            take_acks()  # before the failures: a worker reports a failure before it acks
            for worker, failure in connections.look(deadline):
                waiting.pop(worker, None)
                outcome.failed[worker] = failure
            if waiting.keys() & connections.ended.keys():
                take_acks()  # a worker that acked before it ended is done
                for worker in waiting.keys() & connections.ended.keys():
                    del waiting[worker]
                    outcome.dead[worker] = connections.ended[worker]
                self._lost |= outcome.dead.keys()
            if not waiting or time.monotonic() >= deadline:
                break
            connections.wake_moving()
        outcome.add_late({worker: connections.peers.get(worker) for worker in waiting})
        outcome.check(f"version {self._version} of {self._model_id!r}", self._version)

    def _checked(self, worker_ids: Any) -> set[int]:
        """Worker indices from what users pass: None (all), an index, a device, or a list of these.

        Raises ValueError for an unknown one.
        """
        everybody = self.groups.workers
        if worker_ids is None:
            return everybody
        single = isinstance(worker_ids, (str, int)) or not hasattr(worker_ids, "__iter__")
        chosen: set[int] = set()
        for each in [worker_ids] if single else worker_ids:
            if isinstance(each, int):
                found = {check_worker(each)} & everybody
            else:
                found = {worker for worker, device in self.first.devices.items() if str(device) == str(each)}
            if not found:
                raise ValueError(f"Worker {each} not registered: the workers are {listed(sorted(everybody))}")
            chosen |= found
        return chosen

    def close(self) -> None:
        """End the arenas, and close the connections. Idempotent."""
        self.connections.close()
        self.groups.close()
