"""The trainer's side of one model: publish in the arenas of the workers, and wait until they have applied it.

Workers with the same weights, on one device, share an arena. A send to some of them gives each of these an arena of its
own first: it starts as a copy, and they move there; then the new weights are published in it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing import util
from typing import Any, NamedTuple

from torch import nn

from ...engine.deadlines import check_worker, deadline_after, slice_until
from ...engine.outcome import Outcome, Wording, listed
from ...engine.publisher import Publisher, writer_of
from ...engine.source.dtypes import Dtypes, dtypes_of
from ...engine.source.sources import EVERYTHING, collect
from ...engine.write.acks import RowWait
from ...errors import ManifestMismatch, WorkerDied
from ...memory.leftovers import new_name
from ...memory.process import Peer
from ...schemes.devices import WorkerDevices
from ...schemes.sender import SendLock
from . import extra_state
from .failures import Failures
from .frames import FIRST
from .receiver import Names
from .weights import First, OtherWeights

WORDING = Wording(
    "a worker applies between two forwards of its policy",
    sent="is published",
    died="ended",
    after_death="The others have it, and later updates leave these out. To replace them, make a new collector",
    after_lateness="A late worker uses it as soon as it can; give more time with timeout=",
)


class Arena:
    """One arena, and the workers that have its weights."""

    def __init__(self, publisher: Publisher, members: set[int]) -> None:
        self.publisher, self.writer, self.members = publisher, writer_of(publisher), members
        self.by_key = self.writer.arena.manifest.by_key
        self.room = self.by_key[extra_state.KEY].nbytes if extra_state.KEY in self.by_key else 0  # for extra state

    def source(self, weights: Any, *, strict: bool) -> Any:
        """What to publish here of these weights. Raises ManifestMismatch for extra state without room."""
        tensors, states = extra_state.separate(weights)
        if not strict:
            found = collect(tensors, EVERYTHING, self.writer.arena.manifest)
            # All of them if none has a place here, so that publishing them is refused.
            tensors = {".".join(key): tensor for key, tensor in found.items() if key in self.by_key} or tensors
            here = extra_state.states_in(self.publisher.weights.get(extra_state.LEAF)) if self.room else {}
            states = {path: state for path, state in (states or {}).items() if path in here} or None
        if states is None and self.room and isinstance(tensors, nn.Module):
            return extra_state.flat(tensors)  # a module must have every leaf; the state that lies here stays
        return extra_state.together(tensors, states, self.room)


class Post(NamedTuple):
    """A version that these workers have to apply."""

    arena: Arena
    version: int
    workers: set[int]


class Sender:
    """Sends the weights of one model to its workers.

    Args:
        model_id: for messages.
        first: what the workers start with.
        devices: where the arenas lie; where it says nothing, where the policies are.
        apart: give each worker an arena of its own.
        options: of each Publisher: slots, timeout.
        dtype: floating weights are cast to it.
        strict: refuse weights that workers have no place for; else leave them out.
        context: the collector, whose processes are known later; or None.

    Thread-safe: one send at a time. Nothing is made before open(), but the arenas' names are known.
    """

    def __init__(
        self, model_id: str, first: First, devices: WorkerDevices, *, apart: bool, options: dict[str, Any],
        dtype: Dtypes, strict: bool, context: weakref.ReferenceType[Any] | None,
    ) -> None:  # fmt: skip
        self._model_id, self.first, self._dtype, self._strict, self._context = model_id, first, dtype, strict, context
        self._options = {**options, "max_readers": max(64, 2 * len(first.sources))}
        self._planned: dict[Any, tuple[str, set[int], str]] = {}  # name, workers, device
        self.names: dict[int, Names] = {}  # by worker
        for worker, source in first.sources.items():
            place = first.place(worker) if devices.unset else str(devices.of(worker))
            key = worker if apart or first.apart else (id(source), place)
            name, workers, _ = self._planned.setdefault(key, (new_name(), set(), place))
            workers.add(worker)
            self.names[worker] = Names(name, name if key == worker else new_name())
        self._others: dict[int, OtherWeights] = {}  # by the id of a model of the trainer's
        self._lost: set[int] = set()  # dead workers that a WorkerDied has named
        self._version = 1  # of the first weights; arenas that some workers have for themselves count their own
        self._lock = SendLock()
        self.failures = Failures()
        self.arenas: list[Arena] = []
        self._closing = util.Finalize(self, _close, (self.arenas, self.failures), exitpriority=25)

    @property
    def weights(self) -> Any:
        """The newest weights as a TensorDict; of several arenas, those of the first."""
        return extra_state.without(self.arenas[0].publisher.weights)

    def open(self, prepare: Callable[[Any], Any]) -> None:
        """Make the arenas, with the weights of now; wait for no worker. Idempotent. Raises what Publisher() raises."""
        sources = self.first.again()
        for name, workers, place in self._planned.values() if not self.arenas else ():
            weights = extra_state.together(*extra_state.separate(prepare(sources[min(workers)])))
            self._make(weights, name, place, self._dtype, workers)

    def send(
        self, weights: Any, worker_ids: Any, model: Any, prepare: Callable[[Any], Any], *, wait: bool,
        timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Publish weights for these workers; `wait` until they have applied it. Returns the version.

        `weights`: for all of them, by worker, or None. `model`: the trainer's own; None: what the workers started with.
        `prepare` makes what is published of weights. The version grows by one with each send, to whichever workers.

        Raises:
            As Publisher.publish(): nothing was published. A worker's own exception, WorkerDied, AckTimeout: published,
            but not applied by these workers; the others have it.
        """
        chosen = self._chosen(worker_ids)
        by_worker = isinstance(weights, dict) and weights and all(isinstance(key, int) for key in weights)
        if by_worker:
            chosen = chosen & self._chosen(list(weights))
        if not chosen:
            return self._version
        deadline = deadline_after(timeout, self._options["timeout"])
        with self._lock.hold("send", deadline):
            outcome = Outcome(WORDING)
            outcome.failed.update(self.failures.received())
            outcome.check(f"an earlier version of {self._model_id!r}; nothing was published now", None)
            own = self.first.again() if model is None else dict.fromkeys(self.first.sources, model)
            # Workers that get the same weights, and whose own model is the same.
            wanted: dict[tuple[int, int], tuple[Any, Any, set[int]]] = {}
            for worker in self._living(chosen) & own.keys():
                given = weights[worker] if by_worker else weights
                whose = id(self.first.sources[worker] if model is None else model)
                wanted.setdefault((id(given), whose), (given, own[worker], set()))[2].add(worker)
            posted = self._publish(wanted, prepare, deadline)
            self._version += 1
            for post in posted if wait else ():
                self._wait(post, outcome, deadline)
            outcome.check(f"version {self._version} of {self._model_id!r}", self._version)
            return self._version

    def _publish(
        self, wanted: dict[tuple[int, int], tuple[Any, Any, set[int]]], prepare: Callable[[Any], Any], deadline: float
    ) -> list[Post]:
        """Publish what these workers want. All of it is checked before any of it is written."""
        plan: list[tuple[Arena, Any, set[int]]] = []
        posted, sent = [], []
        for (_, whose), (given, own, workers) in wanted.items():
            others = self._others.get(whose)
            kept = others.kept_by(workers, own) if given is None and others is not None else set()
            weights = own if given is None else given
            if given is not None or others is not None:
                others = self._others.setdefault(whose, OtherWeights())
                sent.append((others, workers - kept, weights, own))
            prepared = prepare(weights) if workers - kept else None
            for arena in self.arenas:
                if here := arena.members & kept:
                    posted.append(Post(arena, arena.publisher.version, here))  # perhaps not applied yet
                if here := arena.members & (workers - kept):
                    plan.append((arena, arena.source(prepared, strict=self._strict), here))
        for arena, source, here in plan:
            if len(plan) > 1 or arena.members - here - self._lost:
                self._explained(arena.writer.check_weights, source, deadline)
        targets: list[tuple[Arena, Any, set[int]]] = []
        for arena, source, here in plan:
            if arena.members - here - self._lost:
                targets += [(self._moved_to_own(worker, arena, deadline), source, {worker}) for worker in sorted(here)]
            else:
                targets.append((arena, source, here))
        for arena, source, workers in targets:
            posted.append(Post(arena, self._explained(arena.writer.publish, source, deadline), workers))
        for arena in [arena for arena in self.arenas if not arena.members]:
            self.arenas.remove(arena)
            arena.publisher.close()
        for others, *what in sent:
            others.sent(*what)
        return posted

    def _explained(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except ManifestMismatch as error:
            if "is not in the arena" not in str(error):
                raise
            raise ManifestMismatch(
                f"{error}\nTo leave out what the workers' model does not have, make the scheme with strict=False"
            ) from error

    def _moved_to_own(self, worker: int, arena: Arena, deadline: float) -> Arena:
        """A new arena for this worker alone, a copy of the one that it leaves; returns when it is attached to it."""
        arena.members.discard(worker)  # it moves, now or when it can
        fresh = self._make(
            arena.publisher.weights, self.names[worker].own, arena.writer.arena.place,
            dtypes_of(arena.writer.arena.manifest), {worker}, arena.publisher.version,
        )  # fmt: skip
        fresh.writer.forget_source()  # it would keep the arena that it was copied from; each send passes weights
        process = self._processes().get(worker)
        try:
            left = max(0.0, deadline - time.monotonic())
            fresh.publisher.wait_readers([worker], timeout=left, procs=None if process is None else [process])
        except WorkerDied:
            self._lost.add(worker)
            raise
        return fresh

    def _wait(self, post: Post, outcome: Outcome, deadline: float) -> None:
        """Wait until each worker has applied its version, is dead, or the deadline; outcome has what went wrong."""
        writer, control = post.arena.writer, post.arena.writer.arena.control
        rows = RowWait(control, writer.peers, (), sorted(post.workers), lambda row: row.acked == post.version)

        def nap() -> None:
            if rows.late:
                writer.native.wait_acks(post.version, rows.late, slice_until(deadline, 0.005))
            else:
                time.sleep(0.0005)  # a worker is not attached yet

        def look() -> None:
            outcome.failed.update(self.failures.received())
            waiting = {worker for worker in rows.absent if not self._ended(worker)}
            if waiting | {control.name_of(row) for row in rows.late} <= outcome.failed.keys():
                raise _NobodyLeft

        with suppress(_NobodyLeft):
            rows.until(deadline, look, nap)
        outcome.failed.update(self.failures.received())
        found = rows.outcome(WORDING)
        for worker in [*found.dead, *(worker for worker in found.absent if self._ended(worker))]:
            process = self._processes().get(worker)
            outcome.dead[worker] = "" if process is None else str(Peer(process=process))
        self._lost |= outcome.dead.keys()
        outcome.late += [each for each in found.late if each not in outcome.dead and each not in outcome.failed]
        outcome.pids |= found.pids
        outcome.stopped += found.stopped

    def _processes(self) -> dict[int, Any]:
        collector = None if self._context is None else self._context()
        return dict(enumerate(getattr(collector, "procs", None) or ()))

    def _ended(self, worker: int) -> bool:
        process = self._processes().get(worker)
        return process is not None and process.exitcode is not None

    def _living(self, chosen: set[int]) -> set[int]:
        """These workers without the lost. One that is attached again is not lost."""
        if self._lost:
            attached = {
                row.worker
                for arena in self.arenas
                for row in arena.writer.arena.control.rows()
                if row.worker in arena.members and arena.writer.peers.alive(row.owner)
            }
            self._lost -= attached
        living = chosen - self._lost
        if not living:
            raise WorkerDied(
                f"no worker is left to send {self._model_id!r} to; make a new collector", missing=sorted(self._lost)
            )
        return living

    def _chosen(self, worker_ids: Any) -> set[int]:
        """Worker indices from what users pass: None (all), an index, a device, or a list of these.

        Raises ValueError for an unknown one.
        """
        everybody = set(self.first.sources)
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

    def _make(
        self, weights: Any, name: str, device: str, dtype: Dtypes, members: set[int], version: int = FIRST
    ) -> Arena:
        publisher = Publisher(weights, name=name, device=device, dtype=dtype, first_version=version, **self._options)
        made = Arena(publisher, members)
        self.arenas.append(made)
        return made

    def close(self) -> None:
        """End the arenas. Idempotent. Raises WriterBusy for one that another thread writes; call it again then."""
        _close(self.arenas, self.failures)


class _NobodyLeft(Exception):
    """Each worker that is still waited for has failed or ended."""


def _close(arenas: list[Arena], failures: Failures) -> None:
    with ExitStack() as stack:  # one that is busy keeps none of the others open, and is closed by the next call
        stack.callback(failures.close)
        for arena in arenas:
            stack.callback(arena.publisher.close)
    arenas.clear()
