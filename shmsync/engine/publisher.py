"""The publisher: the one writer of an arena."""

from __future__ import annotations

import functools
import os
import time
import warnings
import weakref
from collections.abc import Container, Iterable, Sequence
from multiprocessing import util
from types import TracebackType
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import nn

from .. import _native
from ..errors import ClosedError, ForkedHandle, ManifestMismatch, ProtocolError, WriterBusy
from ..memory import reader_table, segment
from ..memory.arena import create
from ..memory.manifest import Key, Manifest
from ..memory.process import me
from ..memory.segment import Handle
from . import adopting
from .copying import Recent, Transfer, same_bytes
from .sources import Collected, Filter, Patterns, Weights, check_keys, collect, problem_with
from .stats import PublisherStats, ReaderInfo
from .timing import check_timeout, check_worker, deadline_after
from .update import Update
from .writing import Wanted, WriteSide

Wait = Literal["all"] | Sequence[int] | None


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
        _check_arguments(slots, max_readers, device, dtype)
        self._name = segment.new_name() if name is None else segment.check_name(name)
        self._timeout = check_timeout(timeout)
        self._any_device = device is not None
        self._source = weights
        self._filter = Filter.of(include, exclude)
        self._generation = _native.fork_generation()
        self._closing: list[bool] = []  # filled by close(), which holds the writer's lock itself
        self._adopted: adopting.Adoption | None = None
        self._transfers: weakref.WeakKeyDictionary[nn.Module, Transfer] = weakref.WeakKeyDictionary()
        self._source_transfer: Transfer | None = None
        self._recent = Recent()

        manifest = _manifest_of(weights, self._filter, dtype)
        self._arena, created = create(self._name, manifest, slots=slots, max_readers=max_readers)
        self._side = WriteSide(self._arena, me().owner)
        self._closed = False
        self._finalizer = util.Finalize(
            self, _clean_up, (self._name, created.fd, self._side, self._closing), exitpriority=20
        )
        try:
            self.publish()
            segment.make_ready(created)
        except BaseException:
            self.close()
            raise

    def _forget_source(self) -> None:
        """Keep the first weights no longer: every publish() will be given others."""
        self._source = self._source_transfer = None

    @property
    def name(self) -> str:
        """The arena's name."""
        return self._name

    @property
    def version(self) -> int:
        """The published version; the first is 1."""
        return int(self._side.writer.version)

    @property
    def weights(self) -> TensorDictBase:
        """The published weights, zero-copy and read-only: writing into them is a SIGSEGV. Use update() to write."""
        self._check()
        return self._arena.weights(self._side.writer.current_slot)

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
        deadline = deadline_after(timeout, self._timeout)
        waits, wanted = _wanted(wait)
        self._check()
        with self._side.lock:
            return self._publish(weights, deadline, waits, wanted)

    def _publish(
        self,
        weights: Weights | None,
        deadline: float,
        waits: bool = False,
        wanted: Wanted = None,
        *,
        version: int | None = None,
        optional: Container[Key] | None = None,
    ) -> int:
        """`version`: publish this one instead of the next; `optional`: as in _checked(). The caller holds the lock."""
        side = self._side
        transfer = self._checked(weights, optional)
        if waits:
            side.refuse_own_section(wanted)
        transfer.stage()
        started = time.perf_counter()
        try:
            if version is not None:
                side.skip_to(version)
            side.begin(deadline)
            self._write(transfer)
            version = int(side.writer.commit())
        except BaseException:  # an interrupt may land anywhere
            side.undo()
            raise
        side.counts.publish.add(time.perf_counter() - started)
        if waits:
            side.wait_acks(version, wanted, deadline)
        return version

    def _checked(self, weights: Weights | None, optional: Container[Key] | None = None) -> Transfer:
        """The plan for a publish that nothing speaks against. `optional`: the leaves that may be missing; None: all."""
        self._check()  # close() may have come between
        transfer = self._transfer(weights)
        if optional is not None and not transfer.whole:
            missing = [leaf.name for leaf in transfer.carried if leaf.key not in optional]
            if missing:
                raise ManifestMismatch(
                    f"the weights lack {', '.join(missing)}; nothing was published, send all of them"
                )
        # An adopted module is the slab: publishing it as it is after a failure is its owner's decision.
        if not transfer.whole or (transfer.in_place and self._adopted is None):
            self._side.refuse_poisoned()
        return transfer

    def _write(self, transfer: Transfer) -> None:
        """Into the slot that begin() chose; it remains to commit."""
        side = self._side
        if self._arena.slots > 1:
            side.carry(transfer.carried + transfer.in_place)
        transfer.copy_to(side.address())
        side.counts.publishes += 1
        side.counts.bytes_copied += transfer.nbytes

    def update(self, *, wait: Wait = None, timeout: float | None = None) -> Update:
        """`with pub.update() as weights:` — write the new version in place; leaving publishes it.

        With slots = 1 nothing is copied, and readers wait at the door meanwhile; an exception inside leaves the
        weights half written, so the arena is poisoned until a full publish(). With more slots the current version is
        copied to a free slot on entry, and an exception just abandons it.

        Raises as publish() does: on entry before anything is written, WorkerDied and AckTimeout on leaving.
        """
        return Update(self, *_wanted(wait), None if timeout is None else check_timeout(timeout))

    def adopt(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Make the module's parameters the slab itself (slots = 1), so that updates copy nothing.

        From then on write parameters only inside update(); with an optimizer, its step() runs inside update() by
        itself; a step inside your own `with pub.update(wait=...)` joins that one. Buffers stay private to the module,
        since forward passes write them, and are copied when update() is left. The Parameter objects, and so the
        optimizer's state, keep their identity. close() makes them private again.

        If the module's values differ from what is published they become a new version first.

        Raises ValueError (slots > 1: use publish(); the optimizer steps nothing of the module), ManifestMismatch,
        ProtocolError (a module is adopted already), and for the new version what publish() raises.
        """
        if self._arena.slots != 1:
            raise ValueError(
                f"adopt() needs slots=1 but this arena has slots={self._arena.slots}; use publish() instead"
            )
        with self._side.lock:
            self._check()
            if self._adopted is not None:
                raise ProtocolError("this arena has adopted a module already; make another Publisher for this one")
            transfer = self._plan(module)
            if not transfer.whole:
                raise ManifestMismatch("the module to adopt lacks " + ", ".join(leaf.name for leaf in transfer.carried))
            adopting.check(module, self._arena, self._filter, optimizer)
            if self._differs(module):
                self._publish(module, deadline_after(None, self._timeout))
            self._adopted = adopting.Adoption(module, self._arena, self._filter)
            self._source, self._source_transfer = module, None
        if optimizer is not None:
            adopting.step_inside_update(optimizer, self)

    def _differs(self, module: nn.Module) -> bool:
        tensors = collect(module, self._filter).tensors
        views = self._arena.views(0)
        return self._side.writer.poisoned or any(
            tensor.dtype != views[key].dtype or not same_bytes(tensor, views[key]) for key, tensor in tensors.items()
        )

    def readers(self) -> list[ReaderInfo]:
        """Every subscriber, the dead ones not yet swept included."""
        self._check()
        return reader_table.infos(self._arena.control, self._side.peers, self.version)

    def stats(self) -> PublisherStats:
        """Counts and latencies since the arena was made."""
        return self._side.stats()

    def close(self) -> None:
        """End the arena. Subscribers keep the last version, but nobody can attach any more. Idempotent.

        Raises WriterBusy when another thread is publishing, or from inside update().
        """
        if self._closed or self._generation != _native.fork_generation():
            return
        with self._side.lock:
            try:
                if self._adopted is not None:
                    self._adopted.give_back()
            finally:
                self._closed = True
                self._adopted = self._source_transfer = None
                self._transfers.clear()
                self._recent.clear()
                self._closing.append(True)
                self._finalizer()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except WriterBusy:
            if error is None:
                raise
            # The caller's own error tells more; the arena ends with the process.

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"version {self.version}"
        return f"<shmsync.Publisher {self._name!r}, {state}, slots={self._arena.slots}>"

    def __del__(self) -> None:
        if not self._closed and self._generation == _native.fork_generation():
            warnings.warn(f"Publisher {self._name!r} was not closed", ResourceWarning, stacklevel=2)

    def __reduce__(self) -> Any:
        raise TypeError("a Publisher cannot be pickled; pass pub.handle to the worker and make a Subscriber there")

    def _check(self) -> None:
        if self._generation != _native.fork_generation():
            raise ForkedHandle("this Publisher belongs to the parent process; a forked child may only subscribe")
        if self._closed:
            raise ClosedError(f"arena {self._name!r} is closed; make a new Publisher")

    def _transfer(self, weights: Weights | None) -> Transfer:
        """The plan for this source: the one made before if nothing about it changed."""
        source = self._source if weights is None else weights
        if isinstance(source, TensorDictBase):
            return self._transfer_of(source)
        cached = None
        if source is self._source:
            cached = self._source_transfer
        elif isinstance(source, nn.Module):
            cached = self._transfers.get(source)
        if cached is not None and cached.still_valid(self._arena):
            return cached
        plan = self._plan(source)
        if source is self._source:
            self._source_transfer = plan
        elif isinstance(source, nn.Module):
            # The plan holds the module's dicts and tensors, not the module: no cycle keeps the key alive.
            self._transfers[source] = plan
        return plan

    def _transfer_of(self, source: TensorDictBase) -> Transfer:
        collected = functools.cache(lambda: collect(source, self._filter, self._arena.manifest))
        plan = self._recent.find(source, self._arena, collected)
        if plan is None:
            plan = self._plan(source, collected())
            self._recent.keep(source, plan)
        return plan

    def _plan(self, source: Weights, collected: Collected | None = None) -> Transfer:
        partial = not isinstance(source, nn.Module)
        collected = collected or collect(source, self._filter, self._arena.manifest)
        return Transfer(collected, self._arena, self._name, partial=partial, any_device=self._any_device)


def _manifest_of(weights: Weights, filter: Filter, dtype: torch.dtype | None) -> Manifest:
    tensors = collect(weights, filter).tensors
    check_keys(tensors)
    problems = [f"{'.'.join(key)} {reason}" for key, value in tensors.items() if (reason := problem_with(value))]
    if not tensors:
        problems = ["there is no tensor to publish (after include= and exclude=)"]
    if problems:
        raise ManifestMismatch("these weights cannot be published: " + "; ".join(problems))
    return Manifest.of(tensors, dtype=dtype, filtered=filter.filters)


def _clean_up(name: str, fd: int, side: WriteSide, closing: list[bool]) -> None:
    """Without the Publisher, so that it can run after it: at close(), at collection, at exit."""
    side.writer.close()
    segment.unlink(name, fd)
    os.close(fd)
    side.peers.close()
    if closing or not side.lock.locked():  # else a daemon thread still copies while the process exits
        side.arena.release()


def _wanted(wait: Wait) -> tuple[bool, Wanted]:
    """Does it wait at all, and for whom: None is everybody."""
    if wait is None:
        return False, None
    if isinstance(wait, str) and wait == "all":
        return True, None
    if isinstance(wait, (str, bytes)) or not isinstance(wait, Iterable):
        raise ValueError(f'wait is None, "all" or a list of worker indices, not {wait!r}')
    return True, [check_worker(worker) for worker in wait]


def _check_arguments(
    slots: int, max_readers: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> None:
    if not 1 <= slots <= _native.MAX_SLOTS:
        raise ValueError(f"slots must be 1 to {_native.MAX_SLOTS}, not {slots}")
    if not 1 <= max_readers <= _native.MAX_READERS:
        raise ValueError(f"max_readers must be 1 to {_native.MAX_READERS}, not {max_readers}")
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"arenas hold their weights in CPU memory in this version, not on {device}; use device='cpu'")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype= casts floating leaves and must be floating itself, not {dtype}")
