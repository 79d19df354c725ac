"""The trainer's side of one model: publish in the arenas of the workers, and wait until they have applied it.

Workers with the same weights, on one device, share an arena, and get the same updates.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.weight_update.utils import _resolve_model

from ...engine.deadlines import check_worker, deadline_after, slice_until
from ...engine.outcome import Outcome, Wording, listed
from ...engine.publisher import Publisher, writer_of
from ...engine.source.manifest_check import same_bytes
from ...engine.source.sources import collect
from ...engine.write.acks import RowWait
from ...errors import ManifestMismatch, WorkerDied
from ...memory.leftovers import new_name
from ...memory.process import Peer
from ...memory.torch_modes import run_plainly
from ...schemes.devices import DeviceChoice, device_names
from ...schemes.sender import SendLock
from ...schemes.strategy import has_dotted_keys
from . import extra_state
from .failures import Failures
from .frames import FIRST
from .weights import First, place_of, resolve, same_memory

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
            found = collect(tensors, self.writer.arena.manifest)
            # All of them if none has a place here, so that publishing them is refused.
            tensors = {".".join(key): tensor for key, tensor in found.items() if key in self.by_key} or tensors
            here = extra_state.states_in(self.publisher.weights.get(extra_state.LEAF)) if self.room else {}
            fitting = {path: state for path, state in (states or {}).items() if path in here}
            states = fitting or (None if tensors else {})
        if states is None and self.room and isinstance(tensors, nn.Module):
            return extra_state.flat(tensors)  # a module must have every leaf; the state that lies here stays
        return extra_state.together(tensors, states, self.room)

    @run_plainly
    def sent(self, weights: Any, own: Any) -> None:
        """Note that these weights lie here now: the trainer's own model, or others."""
        others = {} if same_memory(weights, own) else _values(own)
        self._own = {key: tensor.detach().clone() for key, tensor in others.items()} or None

    @run_plainly
    def keeps(self, own: Any) -> bool:
        """Does an update without weights leave here what it finds?

        TorchRL's schemes make the trainer's policy and the workers' one memory, so there the last write counts: an
        update with weights, or one to the policy. Here they are apart. After other weights, the policy is sent only if
        it has changed since, by its bytes: the counters of tensors miss writes through .data and through NumPy.
        """
        if self._own is None:
            return False
        now = _values(own)
        return self._own.keys() == now.keys() and all(
            then.dtype == now[key].dtype and same_bytes(then, now[key]) for key, then in self._own.items()
        )


def _values(weights: Any) -> dict[str, torch.Tensor]:
    """The tensors by dotted key; extra state is one of them."""
    return extra_state.flat(extra_state.together(*extra_state.separate(weights)))


class Sender:
    """Sends the weights of one model to its workers.

    Args:
        model_id: where the context has the model.
        first: what the workers start with.
        device: where the arenas lie; see ShmWeightSyncScheme.
        apart: give each worker an arena of its own.
        options: of each Publisher: slots, timeout, dtype.
        strict: refuse weights that workers have no place for; else leave them out.
        strategy: TorchRL's.
        context: the collector, whose processes are known later; or None.

    Thread-safe: one send at a time. Nothing is made before open(), but the arenas' names are known.
    """

    def __init__(
        self, model_id: str, first: First, device: DeviceChoice, *, apart: bool, options: dict[str, Any],
        strict: bool, strategy: Any, context: weakref.ReferenceType[Any] | None,
    ) -> None:  # fmt: skip
        self._model_id, self._first, self._strict, self._strategy = model_id, first, strict, strategy
        self._context = context
        sources = first.sources()
        self._options = {**options, "max_readers": max(64, 2 * len(sources))}
        planned: dict[Any, Arena] = {}
        self.names: dict[int, str] = {}  # of the arena of each worker
        for worker, name in zip(sorted(sources), device_names(device, len(sources)), strict=True):
            source = sources[worker]
            place = name or place_of(source, first.devices.get(worker))
            arena = planned.setdefault(worker if apart else (id(source), place), Arena(set(), place))
            arena.members.add(worker)
            self.names[worker] = arena.name
        self._planned = list(planned.values())
        self._lost: set[int] = set()  # dead workers that a WorkerDied has named
        self._version = FIRST  # of the first weights; arenas whose workers got fewer updates count their own
        self._lock = SendLock()
        self.failures = Failures()
        self.arenas: list[Arena] = []

    @property
    def _collector(self) -> Any:
        return None if self._context is None else self._context()

    @property
    def weights(self) -> Any:
        """The newest weights as a TensorDict; of several arenas, those of the first."""
        return extra_state.without(self.arenas[0].publisher.weights)

    def open(self) -> None:
        """Make the arenas, with the weights of now; wait for no worker. Idempotent. Raises what Publisher() raises."""
        sources = self._first.sources()
        for arena in self._planned[len(self.arenas) :]:
            weights = self._prepared(sources[min(arena.members)])
            arena.open(extra_state.together(*extra_state.separate(weights)), **self._options)
            self.arenas.append(arena)

    def _prepared(self, weights: Any) -> Any:
        """What is published of weights."""
        if self._strategy.extract_as == "state_dict" and hasattr(weights, "merge_and_unload"):
            return self._strategy.extract_weights(weights)
        return dict(weights.items()) if isinstance(weights, TensorDictBase) and has_dotted_keys(weights) else weights

    def send(self, weights: Any, worker_ids: Any, *, wait: bool, timeout: float | None = None) -> int:
        """Publish weights for these workers; `wait` until they have applied it. Returns the version.

        `weights`: for all of them, by worker, the id of a model, or None. The version grows by one with each send, to
        whichever workers.

        Raises:
            ValueError: workers that share an arena would get different weights, or some of them none.
            As Publisher.publish(): nothing was published. A worker's own exception, WorkerDied, AckTimeout: published,
            but not applied by these workers; the others have it.
        """
        if isinstance(weights, str):
            weights = _resolve_model(self._collector, weights)
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
            plan = self._plan(weights if by_worker else dict.fromkeys(chosen, weights), chosen)
            try:
                for arena, source, _, _ in plan if len(plan) > 1 else ():  # all is checked before any of it is written
                    if source is not None:
                        arena.writer.check_weights(source, deadline)
                for arena, source, given, own in plan:
                    if source is not None:
                        arena.version = arena.writer.publish(source, deadline)
                        arena.sent(given, own)
            except ManifestMismatch as error:
                if not self._strict:
                    raise
                raise ManifestMismatch(
                    f"{error}\nA scheme with strict=False leaves out what the workers' model does not have"
                ) from error
            self._version += 1
            for arena, *_ in plan if wait else ():
                self._wait(arena, outcome, deadline)
            outcome.check(f"version {self._version} of {self._model_id!r}", self._version)
            return self._version

    def _plan(self, given: Mapping[int, Any], chosen: set[int]) -> list[tuple[Arena, Any, Any, Any]]:
        """For each arena: what to publish, or None; of which weights; the trainer's model. Raises as send()."""
        living = chosen - self._lost
        if not living:
            raise WorkerDied(
                f"no worker is left to send {self._model_id!r} to; make a new collector", missing=sorted(self._lost)
            )
        model = None if self._first.apart else resolve(self._collector, self._model_id)
        models = self._first.sources() if model is None else dict.fromkeys(self.names, model)
        plan: list[tuple[Arena, Any, Any, Any]] = []
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
                source = arena.source(self._prepared(weights), strict=self._strict)
            plan.append((arena, source, weights, own))
        return plan

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
            waiting = {*rows.absent, *map(control.name_of, rows.late)}
            if waiting <= outcome.failed.keys() | self._ended().keys():
                raise _NobodyLeft

        with suppress(_NobodyLeft):
            rows.until(deadline, look, nap)
        outcome.failed.update(self.failures.received())
        found, ended = rows.outcome(WORDING), self._ended()
        outcome.dead |= found.dead | {each: how for each, how in ended.items() if each in {*found.dead, *found.late}}
        self._lost |= outcome.dead.keys()
        outcome.late += [each for each in found.late if each not in outcome.dead and each not in outcome.failed]
        outcome.pids |= found.pids
        outcome.stopped += found.stopped

    def _ended(self) -> dict[int, str]:
        """The workers whose process has ended, and how, where the collector tells."""
        processes = enumerate(getattr(self._collector, "procs", None) or ())
        return {worker: str(Peer(process=each)) for worker, each in processes if each.exitcode is not None}

    def _chosen(self, worker_ids: Any) -> set[int]:
        """Worker indices from what users pass: None (all), an index, a device, or a list of these.

        Raises ValueError for an unknown one.
        """
        everybody = set(self.names)
        if worker_ids is None:
            return everybody
        single = isinstance(worker_ids, (str, int)) or not hasattr(worker_ids, "__iter__")
        chosen: set[int] = set()
        for each in [worker_ids] if single else worker_ids:
            if isinstance(each, int):
                found = {check_worker(each)} & everybody
            else:
                found = {worker for worker, device in self._first.devices.items() if str(device) == str(each)}
            if not found:
                raise ValueError(f"Worker {each} not registered: the workers are {listed(sorted(everybody))}")
            chosen |= found
        return chosen

    def close(self) -> None:
        """End the arenas. Idempotent. Raises WriterBusy for one that another thread writes; call it again then."""
        with ExitStack() as stack:  # one that is busy keeps none of the others open
            stack.callback(self.failures.close)
            for arena in self.arenas:
                stack.callback(arena.publisher.close)


class _NobodyLeft(Exception):
    """Each worker that is still waited for has failed or ended."""
