"""The publisher: the one writer of an arena."""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from multiprocessing import util
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import nn

from . import _adopt, _native, _segment, _slab
from ._acks import wait_for_acks
from ._process import Peers, me, pid_of
from ._transfer import Transfer
from ._weights import Filter, Patterns, Weights, check_keys, collect, problem_with
from .arena import Arena
from .errors import (
    ClosedError,
    ForkedHandle,
    ManifestMismatch,
    Poisoned,
    ProtocolError,
    ReaderStalled,
    WriterBusy,
)
from .manifest import Manifest, fingerprint
from .stats import PublisherStats, ReaderInfo, Samples

Wait = Literal["all"] | Sequence[int] | None
_SLICE_NS = 50_000_000


class Handle(NamedTuple):
    """What a worker needs to attach; pickles, so it goes into Process(args=...)."""

    name: str
    session: bytes


class Publisher:
    """Publishes the weights of one model to any number of subscribers on this machine.

    Args:
        weights: an nn.Module (parameters and buffers), a TensorDict, or a mapping of dotted key to tensor. Published
            as version 1. Kept, so that publish() can read it again; never changed.
        name: under which other processes find the arena; None makes one up.
        slots: copies of the weights. 1: publisher and readers take turns, least memory, fixed addresses. 2 or more:
            readers never wait, and the publisher does not as long as slots ≥ 2 + old versions held at once.
        max_readers: rows in the reader table (1 to 4,096).
        device: None (every tensor must be on the CPU) or "cpu" (tensors are fetched from where they are).
        dtype: floating leaves are cast to it on publish.
        include, exclude: glob patterns on dotted keys; which leaves the arena has.
        timeout: the arena's default, in seconds; math.inf waits for ever.

    Raises:
        ArenaExists, NoSpace, ManifestMismatch; ValueError and TypeError for arguments out of range.

    Thread-safe in that a second writer call at the same time raises WriterBusy; a context manager.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        name: str | None = None,
        slots: int = 1,
        max_readers: int = 64,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        include: Patterns = None,
        exclude: Patterns = None,
        timeout: float = 10.0,
    ) -> None:
        self._closed = True  # until all of it is there; __del__ may run before
        _check_arguments(slots, max_readers, device, dtype, timeout)
        self._name = _segment.new_name() if name is None else _segment.check_name(name)
        self._timeout = timeout
        self._any_device = device is not None
        self._source = weights
        self._filter = Filter.of(include, exclude)
        self._lock = threading.Lock()
        self._peers = Peers()
        self._me = me().owner
        self._generation = _native.fork_generation()
        self._publishes = self._updates = self._bytes = self._aborted = self._reaped = 0
        self._publish_time, self._pin_wait, self._ack_wait = Samples(), Samples(), Samples()
        self._adopted: _adopt.Adoption | None = None
        self._updating_thread: int | None = None
        self._transfers: weakref.WeakKeyDictionary[nn.Module, Transfer] = weakref.WeakKeyDictionary()
        self._source_transfer: Transfer | None = None

        collected = collect(weights, self._filter)
        check_keys(collected.tensors)
        problems = [
            f"{'.'.join(key)} {reason}" for key, value in collected.tensors.items() if (reason := problem_with(value))
        ]
        if not collected.tensors:
            problems = ["there is no tensor to publish (after include= and exclude=)"]
        if problems:
            raise ManifestMismatch("these weights cannot be published: " + "; ".join(problems))
        manifest = Manifest.of(collected.tensors, dtype=dtype, filtered=self._filter.filters)
        self._arena, self._segment_fd, created = self._create(manifest, slots, max_readers)
        self._writer = _native.Writer(self._arena.control, self._me)
        self._closed = False
        self._finalizer = util.Finalize(
            self,
            _clean_up,
            (self._name, self._segment_fd, self._writer, self._peers, self._arena),
            exitpriority=20,
        )
        try:
            self.publish()
            _segment.make_ready(created)
        except BaseException:
            self.close()
            raise

    def _create(self, manifest: Manifest, slots: int, max_readers: int) -> tuple[Arena, int, _segment.Created]:
        session = secrets.token_bytes(16)
        text = manifest.to_json()
        slab = _slab.create(slots, manifest.slot_bytes, session)
        here = me()
        created = _segment.create(
            self._name,
            _native.segment_bytes(slots, max_readers, len(text)),
            session=session,
            owner=here.owner,
            boot_id=here.boot_id,
            pid_namespace=here.pid_namespace,
            slots=slots,
            readers=max_readers,
            slot_bytes=manifest.slot_bytes,
            slab_fd=slab.fd,
            slab_inode=slab.inode,
            fingerprint=fingerprint(text),
            manifest=text,
        )
        arena = Arena(created.control, slab, manifest, slots=slots, session=session)
        return arena, created.fd, created

    @property
    def name(self) -> str:
        """The arena's name."""
        return self._name

    @property
    def version(self) -> int:
        """The published version; the first is 1."""
        return self._writer.version

    @property
    def weights(self) -> TensorDictBase:
        """The published weights, zero-copy and read-only: writing into them is a SIGSEGV. Use update() to write."""
        self._check()
        return self._arena.weights(self._writer.current_slot)

    @property
    def handle(self) -> Handle:
        """What a worker needs to attach; picklable."""
        return Handle(self._name, self._arena.session)

    def publish(self, weights: Weights | None = None, *, wait: Wait = None, timeout: float | None = None) -> int:
        """Copy weights into the arena and make them the new version.

        Everything is checked before the first byte moves. A mapping may be partial: the other leaves keep their
        value. Each byte is copied once (cast and gathered ones twice), whatever the number of readers.

        Args:
            weights: as in the constructor; None reads the constructor's source again.
            wait: None returns at once; "all" waits until every subscriber alive at the commit has applied the
                version; a list of worker indices waits for those, attached or not.
            timeout: seconds for the whole call; None is the arena's default.

        Returns:
            The new version.

        Raises:
            ManifestMismatch, ReaderStalled, WriterBusy, Poisoned (partial after a failed update), ProtocolError
            (this thread is inside a read section that is in the way): nothing was published.
            WorkerDied, AckTimeout: published, but not applied by all.
        """
        deadline = self._deadline(timeout)
        workers = _check_wait(wait)
        with self._writing():
            transfer = self._transfer(weights)
            if self._writer.poisoned and not transfer.whole:
                raise Poisoned(
                    "the last update() failed half way, so a partial publish would leave torn weights; publish all",
                    version=self.version + 1,
                )
            transfer.stage()
            started = time.perf_counter()
            try:
                self._begin(deadline)
                if self._arena.slots > 1:
                    self._carry(transfer.carried + transfer.in_place)
                transfer.copy_to(self._arena.slot_address(self._writer.slot))
                version = self._writer.commit()
            except BaseException:  # an interrupt may land anywhere
                self._undo()
                raise
            self._publish_time.add(time.perf_counter() - started)
            self._publishes += 1
            self._bytes += transfer.nbytes
            if workers is not None:
                self._wait_acks(version, workers, deadline)
        return version

    def update(self, *, wait: Wait = None, timeout: float | None = None) -> _Update:
        """`with pub.update() as weights:` — write the new version in place; leaving publishes it.

        With slots = 1 nothing is copied, and readers wait at the door meanwhile; an exception inside leaves the
        weights half written, so the arena is poisoned until a full publish(). With more slots the current version is
        copied to a free slot on entry, and an exception just abandons it.

        Raises as publish() does: on entry before anything is written, WorkerDied and AckTimeout on leaving.
        """
        return _Update(self, _check_wait(wait), self._deadline(timeout))

    def adopt(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Make the module's parameters the slab itself (slots = 1), so that updates copy nothing.

        From then on write parameters only inside update(); with an optimizer, its step() runs inside update() by
        itself. Buffers stay private to the module, since forward passes write them, and are copied at each update().
        The Parameter objects, and so the optimizer's state, keep their identity. close() makes them private again.

        Raises ValueError (slots > 1: use publish()), ManifestMismatch.
        """
        if self._arena.slots != 1:
            raise ValueError(
                f"adopt() needs slots=1 but this arena has slots={self._arena.slots}; use publish() instead"
            )
        with self._writing():
            if self._adopted is not None:
                raise ProtocolError("this arena has adopted a module already; make another Publisher for this one")
            transfer = self._plan(module)
            if not transfer.whole:
                raise ManifestMismatch("the module to adopt lacks " + ", ".join(leaf.name for leaf in transfer.carried))
        self._publish_if_different(module)
        with self._writing():
            self._adopted = _adopt.Adoption(module, self._arena, self._filter)
            self._source, self._source_transfer = module, None
        if optimizer is not None:
            _adopt.step_inside_update(optimizer, self)

    def _publish_if_different(self, module: nn.Module) -> None:
        tensors = collect(module, self._filter).tensors
        views = self._arena.views(0)
        if self._writer.poisoned or any(
            tensor.dtype != views[key].dtype or not _adopt.same_bytes(tensor.detach(), views[key])
            for key, tensor in tensors.items()
        ):
            self.publish(module)

    def readers(self) -> list[ReaderInfo]:
        """Every subscriber, the dead ones not yet swept included."""
        self._check()
        rows = self._arena.control.owners()
        self._peers.keep_only({owner for _, owner in rows})
        found = []
        for row, owner in rows:
            same, pin, acked, worker, pinned_at, reads, torn, retries = self._arena.control.row(row)
            if same != owner:
                continue
            age = max(0.0, (time.clock_gettime_ns(time.CLOCK_MONOTONIC) - pinned_at) / 1e9) if pin else 0.0
            found.append(
                ReaderInfo(
                    worker=None if worker < 0 else worker,
                    pid=pid_of(owner),
                    state=self._peers.state(owner),
                    acked=acked,
                    lag=max(0, self.version - acked),
                    pinned=(pin - 1) >> 8 if pin else None,
                    pin_age=age,
                    reads=reads,
                    torn=torn,
                    retries=retries,
                )
            )
        return found

    def stats(self) -> PublisherStats:
        """Counts and latencies since the arena was made."""
        return PublisherStats(
            version=self._writer.version,
            publishes=self._publishes,
            updates=self._updates,
            bytes_copied=self._bytes,
            aborted=self._aborted,
            reaped=self._reaped,
            publish=self._publish_time.latency(),
            pin_wait=self._pin_wait.latency(),
            ack_wait=self._ack_wait.latency(),
        )

    def close(self) -> None:
        """End the arena. Subscribers keep the last version, but nobody can attach any more. Idempotent."""
        if self._closed or self._generation != _native.fork_generation():
            return
        if not self._lock.acquire(blocking=False):
            raise WriterBusy("a publish() or update() is under way; close the arena after it")
        self._closed = True
        try:
            if self._adopted is not None:
                self._adopted.give_back()
            self._source_transfer = None
            self._finalizer()
        finally:
            self._lock.release()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed and self._generation == _native.fork_generation():
            warnings.warn(f"Publisher {self._name!r} was not closed", ResourceWarning, stacklevel=2)

    def __reduce__(self) -> Any:
        raise TypeError("a Publisher cannot be pickled; pass pub.handle to the worker and make a Subscriber there")

    # What publish() and update() share.

    def _check(self) -> None:
        if self._generation != _native.fork_generation():
            raise ForkedHandle("this Publisher belongs to the parent process; a forked child may only subscribe")
        if self._closed:
            raise ClosedError(f"arena {self._name!r} is closed; make a new Publisher")

    def _writing(self) -> _Writing:
        self._check()
        return _Writing(self)

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self._timeout if timeout is None else timeout)

    def _transfer(self, weights: Weights | None) -> Transfer:
        """The plan for this source: the one made before if nothing about it changed."""
        source = self._source if weights is None else weights
        cached = None
        if source is self._source:
            cached = self._source_transfer
        elif isinstance(source, nn.Module):
            cached = self._transfers.get(source)
        if cached is not None and cached.still_valid() and not cached.overlaps(self._arena):
            return cached
        plan = self._plan(source)
        if source is self._source:
            self._source_transfer = plan
        elif isinstance(source, nn.Module):
            # The plan holds the module's dicts and tensors, not the module: no cycle keeps the key alive.
            self._transfers[source] = plan
        return plan

    def _plan(self, source: Weights) -> Transfer:
        partial = not isinstance(source, nn.Module)
        collected = collect(source, self._filter, self._arena.manifest)
        return Transfer(collected, self._arena, self._name, partial=partial, any_device=self._any_device)

    def _begin(self, deadline: float) -> None:
        """Get a slot to write, or raise with nothing written; the caller undoes."""
        writer = self._writer
        if writer.begin():
            return
        started = time.perf_counter()
        while True:
            self._refuse_own_pins()
            remaining = int(max(0.0, min(deadline - time.monotonic(), 1.0)) * 1e9)
            if writer.wait_begin(min(remaining, _SLICE_NS)):
                break
            if self._reap(writer.blockers()) == 0 and time.monotonic() >= deadline:
                self._stalled()
        self._pin_wait.add(time.perf_counter() - started)

    def _undo(self) -> None:
        """After a failure: as before, or poisoned if the only slot may be half written."""
        self._aborted += 1
        if self._arena.slots == 1 and self._writer.writing:
            self._writer.poison()
        else:
            self._writer.abort()

    def _reap(self, blockers: list[tuple[int, int, int]]) -> int:
        dead = [(row, owner) for row, owner, _ in blockers if not self._peers.alive(owner)]
        reaped = sum(self._arena.control.reap(row, owner, self._me) for row, owner in dead)
        self._reaped += reaped
        return len(dead)

    def _refuse_own_pins(self) -> None:
        held = self._arena.rows_held_by_this_thread()
        if held and any(row in held for row, _, _ in self._writer.blockers()):
            raise ProtocolError(
                "this thread is inside a read section of the slot that the publish needs; leave the section first",
                version=self.version,
            )

    def _stalled(self) -> None:
        missing: list[int | str] = []
        for row, owner, _ in self._writer.blockers():
            worker = self._arena.control.row(row)[3]
            missing.append(worker if worker >= 0 else f"pid {pid_of(owner)}")
        names = ", ".join(f"worker {m}" if isinstance(m, int) else m for m in missing)
        raise ReaderStalled(
            f"version {self.version + 1} was not written: {names or 'a reader'} still hold(s) the slot it needs; "
            "shorten their read sections, use more slots, or give more time with timeout=",
            version=self.version + 1,
            missing=missing,
        )

    def _carry(self, leaves: list[Any]) -> None:
        """Copy the current values of these leaves into the slot being written."""
        to = self._arena.slot_address(self._writer.slot)
        source = self._arena.slot_address(self._writer.current_slot)
        table = [(to + leaf.offset, source + leaf.offset, leaf.nbytes) for leaf in leaves]
        if table:
            _native.copy(table)
            self._bytes += sum(leaf.nbytes for leaf in leaves)

    def _wait_acks(self, version: int, workers: list[int] | None, deadline: float) -> None:
        started = time.perf_counter()
        try:
            wait_for_acks(self._writer, self._arena.control, self._peers, version, workers, deadline, self._me)
        finally:
            self._ack_wait.add(time.perf_counter() - started)


class _Writing:
    """The writer's lock; refuses instead of waiting."""

    def __init__(self, publisher: Publisher) -> None:
        self._lock = publisher._lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise WriterBusy("another publish() or update() of this Publisher is under way; let it finish first")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _Update:
    """One update() section. A class, not a generator: entry and exit cost a microsecond less."""

    def __init__(self, publisher: Publisher, workers: Any, deadline: float) -> None:
        self._publisher = publisher
        self._workers = workers
        self._deadline = deadline
        self._seconds = 0.0

    def __enter__(self) -> TensorDictBase:
        pub = self._publisher
        started = time.perf_counter()
        pub._check()
        if not pub._lock.acquire(blocking=False):
            raise WriterBusy("another publish() or update() of this Publisher is under way; let it finish first")
        try:
            if pub._writer.poisoned:
                raise Poisoned(
                    "the last update() failed half way; publish() all weights before the next update()",
                    version=pub.version + 1,
                )
            try:
                pub._begin(self._deadline)
                if pub._arena.slots > 1:
                    to, source = (pub._arena.slot_address(s) for s in (pub._writer.slot, pub._writer.current_slot))
                    _native.copy([(to, source, pub._arena.manifest.used_bytes)])
                    pub._bytes += pub._arena.manifest.used_bytes
                elif pub._adopted is not None:
                    pub._bytes += pub._adopted.copy_buffers()
                weights = pub._arena.weights(pub._writer.slot, writable=True)
            except BaseException:
                pub._undo()
                raise
        except BaseException:
            pub._lock.release()
            raise
        pub._updating_thread = threading.get_ident()
        self._seconds = time.perf_counter() - started
        return weights

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pub = self._publisher
        if pub._generation != _native.fork_generation():
            raise ForkedHandle("this update() was begun in the parent process; only the parent can finish it")
        started = time.perf_counter()
        pub._updating_thread = None
        try:
            if kind is not None:
                pub._undo()
                return
            version = pub._writer.commit()
            pub._updates += 1
            pub._publish_time.add(self._seconds + time.perf_counter() - started)
            if self._workers is not None:
                pub._wait_acks(version, self._workers, self._deadline)
        finally:
            pub._lock.release()


def _clean_up(name: str, fd: int, writer: _native.Writer, peers: Peers, arena: Arena) -> None:
    """Without the Publisher, so that it can run after it: at close(), at collection, at exit."""
    writer.close()
    _segment.unlink(name, fd)
    os.close(fd)
    peers.close()
    arena.release()


def _check_wait(wait: Wait) -> Any:
    """None: do not wait; () : everybody; a list: those workers."""
    if wait is None:
        return None
    if wait == "all":
        return ()
    if isinstance(wait, (str, bytes)) or not all(isinstance(worker, int) for worker in wait):
        raise ValueError(f'wait is None, "all" or a list of worker indices, not {wait!r}')
    return list(wait)


def _check_arguments(
    slots: int, max_readers: int, device: torch.device | str | None, dtype: torch.dtype | None, timeout: float
) -> None:
    if not 1 <= slots <= _native.MAX_SLOTS:
        raise ValueError(f"slots must be 1 to {_native.MAX_SLOTS}, not {slots}")
    if not 1 <= max_readers <= _native.MAX_READERS:
        raise ValueError(f"max_readers must be 1 to {_native.MAX_READERS}, not {max_readers}")
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"arenas hold their weights in CPU memory in this version, not on {device}; use device='cpu'")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype= casts floating leaves and must be floating itself, not {dtype}")
    if not timeout >= 0 or math.isnan(timeout):
        raise ValueError(f"timeout must be 0 or more seconds, not {timeout}")
