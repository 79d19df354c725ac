"""The trainer's side of one model: publish in the arenas of the workers, and wait until they have applied it.

Workers with the same weights, on one device, share an arena, and get the same updates.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import util
from typing import Any

import torch
from torch import nn

from ...engine.deadlines import check_worker, deadline_after, slice_until
from ...engine.outcome import Outcome, Wording, listed
from ...engine.publisher import Publisher, writer_of
from ...engine.source.manifest_check import same_bytes
from ...engine.source.sources import EVERYTHING, collect
from ...engine.write.acks import RowWait
from ...errors import ManifestMismatch, WorkerDied
from ...memory.leftovers import new_name
from ...memory.process import Peer
from ...memory.torch_modes import run_plainly
from ...schemes.sender import SendLock
from . import extra_state
from .failures import Failures
from .frames import FIRST
from .weights import First, same_memory, values_of

WORDING = Wording(
    "a worker applies between two forwards of its policy",
    sent="is published",
    died="ended",
    after_death="The others have it, and later updates leave these out. To replace them, make a new collector",
    after_lateness="A late worker uses it as soon as it can; give more time with timeout=",
)


class Arena:
    """One arena, and the workers that have its weights. Made by open()."""

    def __init__(self, members: set[int], place: str) -> None:
        self.name, self.members, self.place = new_name(), members, place
        self.version = FIRST  # the newest; the publisher shows it once its device has written it
        self._own: dict[str, torch.Tensor] | None = None  # see keeps()

    def open(self, weights: Any, **options: Any) -> None:
        """Make it, with its first weights. Raises as Publisher()."""
        self.publisher = Publisher(weights, name=self.name, device=self.place, first_version=FIRST, **options)
        self.writer = writer_of(self.publisher)
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

    @run_plainly
    def sent(self, weights: Any, own: Any) -> None:
        """Note that these weights lie here now: the trainer's own model, or others."""
        itself = weights is own or same_memory(weights, own)
        self._own = None if itself else {key: tensor.detach().clone() for key, tensor in values_of(own).items()}

    @run_plainly
    def keeps(self, own: Any) -> bool:
        """Does an update without weights leave here what it finds?

        TorchRL's schemes make the trainer's policy and the workers' one memory, so there the last write counts: an
        update with weights, or one to the policy. Here they are apart. After other weights, the policy is sent only if
        it has changed since, by its bytes: the counters of tensors miss writes through .data and through NumPy.
        """
        now = {} if self._own is None else values_of(own)
        return (
            self._own is not None
            and self._own.keys() == now.keys()
            and all(then.dtype == now[key].dtype and same_bytes(then, now[key]) for key, then in self._own.items())
        )


class Sender:
    """Sends the weights of one model to its workers.

    Args:
        model_id: for messages.
        first: what the workers start with.
        devices: where the arena of each worker lies; None: where its policy is.
        apart: give each worker an arena of its own.
        options: of each Publisher: slots, timeout, dtype.
        strict: refuse weights that workers have no place for; else leave them out.
        context: the collector, whose processes are known later; or None.

    Thread-safe: one send at a time. Nothing is made before open(), but the arenas' names are known.
    """

    def __init__(
        self, model_id: str, first: First, devices: Sequence[str | None], *, apart: bool, options: dict[str, Any],
        strict: bool, context: weakref.ReferenceType[Any] | None,
    ) -> None:  # fmt: skip
        self._model_id, self.first, self._strict, self._context = model_id, first, strict, context
        self._options = {**options, "max_readers": max(64, 2 * len(first.sources))}
        planned: dict[Any, Arena] = {}
        self.names: dict[int, str] = {}  # of the arena of each worker
        for worker, device in zip(sorted(first.sources), devices, strict=True):
            source, place = first.sources[worker], device or first.place(worker)
            arena = planned.setdefault(worker if apart else (id(source), place), Arena(set(), place))
            arena.members.add(worker)
            self.names[worker] = arena.name
        self._planned = list(planned.values())
        self._lost: set[int] = set()  # dead workers that a WorkerDied has named
        self._version = FIRST  # of the first weights; arenas whose workers got fewer updates count their own
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
        for arena in self._planned[len(self.arenas) :]:
            weights = prepare(sources[min(arena.members)])
            arena.open(extra_state.together(*extra_state.separate(weights)), **self._options)
            self.arenas.append(arena)

    def send(
        self, weights: Any, worker_ids: Any, model: Any, prepare: Callable[[Any], Any], *, wait: bool,
        timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Publish weights for these workers; `wait` until they have applied it. Returns the version.

        `weights`: for all of them, by worker, or None. `model`: the trainer's own; None: what the workers started with.
        `prepare` makes what is published of weights. The version grows by one with each send, to whichever workers.

        Raises:
            ValueError: workers that share an arena would get different weights, or some of them none.
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
            plan = self._plan(weights if by_worker else dict.fromkeys(chosen, weights), chosen, model, prepare)
            for arena, source, _, _ in plan if len(plan) > 1 else ():  # all is checked before any of it is written
                if source is not None:
                    self._explained(arena.writer.check_weights, source, deadline)
            for arena, source, given, own in plan:
                if source is not None:
                    arena.version = self._explained(arena.writer.publish, source, deadline)
                    arena.sent(given, own)
            self._version += 1
            for arena, *_ in plan if wait else ():
                self._wait(arena, outcome, deadline)
            outcome.check(f"version {self._version} of {self._model_id!r}", self._version)
            return self._version

    def _plan(
        self, given: Mapping[int, Any], chosen: set[int], model: Any, prepare: Callable[[Any], Any]
    ) -> list[tuple[Arena, Any, Any, Any]]:
        """For each arena: what to publish, or None; of which weights; the trainer's model. Raises as send()."""
        living = chosen - self._lost
        if not living:
            raise WorkerDied(
                f"no worker is left to send {self._model_id!r} to; make a new collector", missing=sorted(self._lost)
            )
        models = self.first.again() if model is None else dict.fromkeys(self.first.sources, model)
        plan: list[tuple[Arena, Any, Any, Any]] = []
        prepared: dict[int, Any] = {}  # by the id of the weights
        for arena in self.arenas:
            members = arena.members - self._lost
            if not members & living:
                continue
            weights = given[min(members & living)]
            if not members <= living or any(given[worker] is not weights for worker in members):
                raise ValueError(
                    f"workers {sorted(members)} share their weights, and this update is not the same for all of them; "
                    "make the scheme with per_worker_weights=True"
                )
            own, source = models[min(members)], None
            if weights is not None or not arena.keeps(own):
                weights = own if weights is None else weights
                if id(weights) not in prepared:
                    prepared[id(weights)] = prepare(weights)
                source = arena.source(prepared[id(weights)], strict=self._strict)
            plan.append((arena, source, weights, own))
        return plan

    def _explained(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except ManifestMismatch as error:
            if "is not in the arena" not in str(error):
                raise
            raise ManifestMismatch(
                f"{error}\nTo leave out what the workers' model does not have, make the scheme with strict=False"
            ) from error

    def _wait(self, arena: Arena, outcome: Outcome, deadline: float) -> None:
        """Wait until each worker has applied what was published, or is dead; `outcome` has those that did not."""
        writer, control, version = arena.writer, arena.writer.arena.control, arena.version
        members = sorted(arena.members - self._lost)
        rows = RowWait(control, writer.peers, (), members, lambda row: row.acked == version)

        def nap() -> None:
            if rows.late:
                writer.native.wait_acks(version, rows.late, slice_until(deadline, 0.005))
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
