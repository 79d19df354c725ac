"""The trainer's side of one model: publish in the arenas of the workers, and wait until they have applied it.

Workers with the same weights, on one device, share an arena. A send to some of them gives these an arena of their own
first: it starts as a copy, they are told of it, and move there; then the new weights are published in it.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import util
from typing import Any, NamedTuple

from torch import nn

from ...engine.deadlines import check_worker, deadline_after, slice_until
from ...engine.outcome import Failure, Outcome, Wording, listed
from ...engine.publisher import Publisher, writer_of
from ...engine.source.dtypes import Dtypes, dtypes_of
from ...engine.source.sources import EVERYTHING, collect
from ...engine.write.acks import RowWait
from ...errors import AckTimeout, ManifestMismatch, WorkerDied
from ...memory.leftovers import new_name
from ...memory.process import Peer
from ...schemes.devices import WorkerDevices
from ...schemes.sender import SendLock
from . import extra_state
from .connection import Mailbox
from .weights import First, OtherWeights

_RESEND = 0.1  # seconds until a worker that has not moved is told again
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

    def source(self, tensors: Any, states: extra_state.States | None) -> Any:
        """What to publish here of these weights."""
        if states is None and self.room and isinstance(tensors, nn.Module):
            return extra_state.flat(tensors)  # a module must have every leaf; the state that lies here stays
        return extra_state.together(tensors, states, self.room)

    def known(self, tensors: Any, states: extra_state.States | None) -> tuple[Any, extra_state.States | None]:
        """What of these weights has a place here. All of them if none has, so that publishing them is refused."""
        manifest = self.writer.arena.manifest
        found = collect(tensors, EVERYTHING, manifest)
        fitting = {".".join(key): tensor for key, tensor in found.items() if key in manifest.by_key}
        if states is not None:
            here = extra_state.states_in(self.publisher.weights.get(extra_state.LEAF)) if self.room else {}
            states = {path: state for path, state in states.items() if path in here} or None
        return fitting or tensors, states

    def unchanged(self) -> Any:
        """Weights that change nothing: the smallest leaf as it is, since the others stay."""
        name = min((leaf for leaf in self.by_key.values() if leaf.nbytes), key=lambda leaf: leaf.nbytes).key
        leaf = self.publisher.weights.get(name).clone()
        return {".".join(name): leaf}


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
        for worker, source in first.sources.items():
            place = first.place(worker) if devices.unset else str(devices.of(worker))
            key = worker if apart or first.apart else (id(source), place)
            self._planned.setdefault(key, (new_name(), set(), place))[1].add(worker)
        self._others: dict[int, OtherWeights] = {}  # by the id of a model of the trainer's
        self._processes: dict[int, Peer] = {}
        self._lost: set[int] = set()  # dead workers that a WorkerDied has named
        self._version = 1  # of the first weights; arenas that some workers have for themselves count their own
        self._lock = SendLock()
        self.mailbox = Mailbox()
        self.arenas: list[Arena] = []
        self._closing = util.Finalize(self, _close, (self.arenas, self.mailbox), exitpriority=25)

    @property
    def names(self) -> dict[int, str]:
        """The name of the arena that each worker starts with."""
        return {worker: name for name, workers, _ in self._planned.values() for worker in workers}

    @property
    def weights(self) -> Any:
        """The newest weights as a TensorDict; of several arenas, those of the first."""
        weights = self.arenas[0].publisher.weights
        return weights.exclude(extra_state.LEAF) if self.arenas[0].room else weights

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
            self._read_failures(outcome)
            outcome.check(f"an earlier version of {self._model_id!r}; nothing was published now", None)
            living = self._living(chosen)
            own = self.first.again() if model is None else dict.fromkeys(self.first.sources, model)
            # Workers that get the same weights, and whose own model is the same.
            wanted: dict[tuple[int, int], tuple[Any, Any, set[int]]] = {}
            for worker in living & own.keys():
                given = weights[worker] if by_worker else weights
                whose = id(self.first.sources[worker] if model is None else model)
                wanted.setdefault((id(given), whose), (given, own[worker], set()))[2].add(worker)
            posted: list[Post] = []
            try:
                for arena, source, workers in self._planned_for(wanted, prepare, deadline):
                    posted.append(Post(arena, self._publish(arena, source, deadline), workers))
                self._version += 1
                for (_, key), (given, model, workers) in wanted.items():
                    if given is not None or key in self._others:
                        kept = self._kept(key, workers, model) if given is None else set()
                        others = self._others.setdefault(key, OtherWeights())
                        others.sent(workers - kept, model if given is None else given, model)
                if wait:
                    self._wait(posted, outcome, deadline)
            finally:
                for arena in [arena for arena in self.arenas if not arena.members]:
                    self.arenas.remove(arena)
                    arena.publisher.close()
            outcome.check(f"version {self._version} of {self._model_id!r}", self._version)
            return self._version

    def _kept(self, key: int, workers: set[int], own: Any) -> set[int]:
        return self._others[key].kept_by(workers, own) if key in self._others else set()

    def _planned_for(
        self, wanted: dict[tuple[int, int], tuple[Any, Any, set[int]]], prepare: Callable[[Any], Any], deadline: float
    ) -> list[tuple[Arena, Any, set[int]]]:
        """What to publish in which arena, for whom. All of it is checked before any worker moves to another arena.

        Raises ManifestMismatch; AckTimeout and WorkerDied of workers that should move, and did not.
        """
        plan = []
        for (_, key), (given, own, workers) in wanted.items():
            kept = self._kept(key, workers, own) if given is None else set()
            parts: Any = None, None
            if workers - kept:
                parts = extra_state.separate(prepare(own if given is None else given))
            for arena in self.arenas:
                for chosen, these in ((arena.members & (workers - kept), parts), (arena.members & kept, None)):
                    if chosen:
                        fitting = these if these is None or self._strict else arena.known(*these)
                        plan.append((arena, fitting, chosen))
        made = []
        for arena, parts, chosen in plan:
            room = 0 if parts is None else extra_state.needed(parts[1])
            split = room > arena.room or bool(arena.members.difference(chosen, self._lost))
            if split or len(plan) > 1:
                self._check(arena, arena.unchanged() if parts is None else parts[0])
            made.append((arena, parts, chosen, room, split))
        found = []
        for arena, parts, chosen, room, split in made:
            arena = self._split(arena, chosen, room, deadline) if split else arena
            source = arena.unchanged() if parts is None else arena.source(*parts)
            found.append((arena, source, chosen))
        return found

    def _publish(self, arena: Arena, source: Any, deadline: float) -> int:
        try:
            version = arena.writer.publish(source, deadline)
        except ManifestMismatch as error:
            raise self._explained(error) from error
        if arena.writer.device is not None:  # the workers are told of this version
            with arena.writer.lock:
                arena.writer.ready(deadline)
        return version

    def _check(self, arena: Arena, tensors: Any) -> None:
        try:
            arena.writer.check_weights(extra_state.flat(tensors) if arena.room else tensors)
        except ManifestMismatch as error:
            raise self._explained(error) from error

    def _explained(self, error: ManifestMismatch) -> ManifestMismatch:
        if "is not in the arena" not in str(error):
            return error
        return ManifestMismatch(
            f"{error}\nTo leave out what the workers' model does not have, make the scheme with strict=False"
        )

    def _split(self, arena: Arena, workers: set[int], room: int, deadline: float) -> Arena:
        """A new arena for these workers, with room for so much extra state; returns when they are attached to it."""
        weights = arena.publisher.weights
        if arena.room:
            states = extra_state.states_in(weights.get(extra_state.LEAF))
            room = max(arena.room, 2 * room)
            weights = extra_state.together(weights.exclude(extra_state.LEAF), states, room)
        elif room:
            weights = extra_state.together(weights, {}, 2 * room)
        manifest = arena.writer.arena.manifest
        fresh = self._make(weights, new_name(), arena.writer.arena.place, dtypes_of(manifest), set())
        fresh.writer.forget_source()  # it would keep the arena that it was copied from; each send passes weights
        moving, procs = sorted(workers), self._context_processes()
        try:
            while True:
                for worker in moving:
                    self.mailbox.send_to(f"{self.mailbox.address}.{worker}", tuple(fresh.publisher.handle))
                left = max(0.0, deadline - time.monotonic())
                known = {worker: procs[worker] for worker in moving if worker in procs}
                try:
                    fresh.publisher.wait_readers(moving, timeout=min(_RESEND, left), procs=known)
                    break
                except AckTimeout:
                    if left <= _RESEND:
                        raise
        except BaseException as error:
            fresh.members.clear()
            if isinstance(error, WorkerDied):
                self._lost |= {worker for worker in error.missing if isinstance(worker, int)}
            raise
        arena.members -= workers
        fresh.members |= workers
        return fresh

    def _wait(self, posted: list[Post], outcome: Outcome, deadline: float) -> None:
        """Wait until each worker has applied its version, is dead, or the deadline; outcome has what went wrong."""
        for arena, version, workers in posted:
            writer, asked = arena.writer, sorted(workers)
            rows = RowWait(writer.arena.control, writer.peers, (), asked, functools.partial(_has_acked, version))

            def nap(writer: Any = writer, rows: RowWait = rows, version: int = version) -> None:
                if rows.late:
                    writer.native.wait_acks(version, rows.late, slice_until(deadline, 0.005))
                else:
                    time.sleep(0.0005)  # a worker is not attached yet

            def look(rows: RowWait = rows) -> None:
                self._read_failures(outcome)
                absent = [worker for worker in rows.absent if not self._ended(worker)]
                late = {rows._control.name_of(row) for row in rows.late} | set(absent)
                if late <= outcome.failed.keys():
                    raise _NobodyLeft

            try:
                rows.until(deadline, look, nap)
            except _NobodyLeft:
                pass
            found = rows.outcome(WORDING)
            for worker in [*found.dead, *(worker for worker in found.absent if self._ended(worker))]:
                outcome.dead[worker] = self._how(worker)
            outcome.late += [each for each in found.late if each not in outcome.dead and each not in outcome.failed]
            outcome.pids |= found.pids
            outcome.stopped += found.stopped
        self._read_failures(outcome)
        self._lost |= outcome.dead.keys()

    def _read_failures(self, outcome: Outcome) -> None:
        for worker, failure in self.mailbox.receive():
            outcome.failed[worker] = Failure(*failure)

    def _context_processes(self) -> dict[int, Any]:
        collector = None if self._context is None else self._context()
        return dict(enumerate(getattr(collector, "procs", None) or ()))

    def _ended(self, worker: int) -> bool:
        process = self._context_processes().get(worker)
        return process is not None and process.exitcode is not None

    def _how(self, worker: int) -> str:
        process = self._context_processes().get(worker)
        return "" if process is None else str(Peer(process=process))

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

    def _make(self, weights: Any, name: str, device: str, dtype: Dtypes, members: set[int]) -> Arena:
        made = Arena(Publisher(weights, name=name, device=device, dtype=dtype, **self._options), members)
        self.arenas.append(made)
        return made

    def close(self) -> None:
        """End the arenas. Idempotent. Raises WriterBusy for one that another thread writes; call it again then."""
        self.mailbox.close()
        _close(self.arenas, self.mailbox)


def _has_acked(version: int, row: Any) -> bool:
    return bool(row.acked == version)


class _NobodyLeft(Exception):
    """Each worker that is still waited for has failed or ended."""


def _close(arenas: list[Arena], mailbox: Mailbox) -> None:
    with ExitStack() as stack:  # one that is busy keeps none of the others open, and is closed by the next call
        stack.callback(mailbox.close)
        for arena in arenas:
            stack.callback(arena.publisher.close)
    arenas.clear()
