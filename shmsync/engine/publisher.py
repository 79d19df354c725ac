"""The publisher: the one writer of an arena."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from .. import _native
from ..errors import ForkedHandle, ProtocolError, WriterBusy
from ..memory import segment
from ..memory.devices import default, named
from ..memory.leftovers import new_name
from ..memory.segment import Handle, ReaderInfo
from .bind.compiled import disable
from .deadlines import (
    DEFAULT_TIMEOUT,
    deadline_after,
    names_nearest,
    timeout_or_default,
    timeout_or_none,
    whole,
)
from .digest import digests_of
from .read.section_values import copied_state
from .source.dtypes import Dtypes, check_dtypes
from .source.sources import Filter, Patterns, Weights
from .stats import PublisherStats
from .subscriber import live_weights
from .write.acks import Acks, Procs, check_workers, processes_of, wait_for_readers
from .write.adoption import adopt
from .write.optimizer_steps import as_list
from .write.writer import Writer

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Wait = Literal["all"] | bool | Sequence[int] | None


class Publisher:
    """Publishes the weights of one model to any number of subscribers on this machine.

    Args:
        weights: an nn.Module (parameters and buffers), a TensorDict, or a mapping of dotted keys to modules,
            TensorDicts, tensors, numpy arrays, numbers and further mappings. Published as the first version. The
            publisher keeps it for publish(), which reads it again, and never changes it.
        name: the name by which other processes find the arena; None makes a random one.
        slots: copies of the weights. 1: publisher and readers take turns, least memory, fixed addresses. 2 or more:
            readers never wait. The publisher does not wait either if slots ≥ 2 + old versions held at once.
        max_readers: rows in the reader table (1 to 4,096).
        device: where the arena lies. None, or "cpu": in the host's memory, so that workers need no GPU. "cuda",
            "cuda:1": in that GPU's memory. Weights are brought there from wherever they are.
        dtype: floating parameters are cast to it on publish; buffers keep theirs. Where no leaf is an nn.Parameter or
            nn.Buffer, as in a state_dict(), all floating leaves are cast. A mapping of glob patterns on dotted keys to
            dtypes casts the leaves that match, buffers too, to the dtype of the first pattern that does.
        include: glob patterns on dotted keys: the leaves that the arena has. A pattern that matches nothing, here, in
            exclude= or in dtype=, is a ManifestMismatch.
        exclude: glob patterns on dotted keys: the leaves that are left out.
        timeout: the arena's default, in seconds; math.inf waits without limit, None is 10.
        first_version: the number of the first version. None: 1; where the name's last publisher was killed, the number
            after its last version, so that numbers only grow.

    Raises:
        ArenaExists: the name belongs to a publisher that lives.
        NoSpace: the machine's or the device's memory does not suffice.
        ManifestMismatch: these weights cannot be published.
        ValueError: an argument is out of range.
        TypeError: an argument is of another type.

    A second writer call at the same time raises WriterBusy. A context manager.
    """

    @names_nearest
    def __init__(
        self,
        weights: Weights,
        *,
        name: str | None = None,
        slots: int = 1,
        max_readers: int = 64,
        device: torch.device | str | None = None,
        dtype: Dtypes = None,
        include: Patterns = None,
        exclude: Patterns = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        first_version: int | None = None,
    ) -> None:
        if first_version is not None:
            whole("first_version", first_version, 1, _native.MAX_VERSION)
        check_dtypes(dtype)
        self._writer = Writer(
            weights,
            new_name() if name is None else segment.check_name(name),
            slots=whole("slots", slots, 1, _native.MAX_SLOTS),
            max_readers=whole("max_readers", max_readers, 1, _native.MAX_READERS),
            device=default() if device is None else named(device),
            dtype=dtype,
            filter=Filter.of(include, exclude),
            timeout=timeout_or_default(timeout),
        )
        try:
            self._writer.arena.live = live_weights, (self.handle,)
            self._writer.open(first_version)
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """The arena's name."""
        return self._writer.name

    @property
    def version(self) -> int:
        """The published version."""
        return self._writer.current[0]

    @property
    def weights(self) -> TensorDictBase:
        """The published weights, zero-copy and read-only: writing into them is a SIGSEGV. Use update() to write."""
        writer = self._writer
        writer.check()
        by_device = writer.slots.device_writes
        if by_device is not None and writer.arena.device_slab is None:
            by_device.wait(deadline_after(None, writer.timeout))  # else the host may see them half copied
        return writer.arena.weights(writer.current[1])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A private copy of the published version by dotted key, for torch.save() and load_state_dict().

        It has the leaves that the module's own state_dict() has. Raises Poisoned after an update() that failed half
        way, and WriterBusy while another call writes.
        """
        with self._writer.at_rest() as (_, slot):
            return copied_state(self._writer.arena, slot)

    def digest(self) -> tuple[int, dict[str, str]]:
        """The published version, and a digest of each of its leaves by dotted key.

        A digest is 16 bytes of BLAKE2b, in hex, of the leaf's bytes as they lie in the arena. Compare it with that of
        Subscriber.digest(). Raises as state_dict() does.
        """
        with self._writer.at_rest() as (version, slot):
            return version, digests_of(self._writer.arena, slot)

    @property
    def handle(self) -> Handle:
        """What a worker needs to attach; picklable."""
        return Handle(self.name, self._writer.arena.session)

    def publish(
        self,
        weights: Weights | None = None,
        *,
        wait: Wait = None,
        timeout: float | None = None,
        after: object = None,
    ) -> int:
        """Copy weights into the arena and make them the new version.

        Everything is checked before the first byte moves. A mapping may be partial: the other leaves keep their
        value. Each byte is copied once, whatever the number of readers; cast, gathered and fetched ones too.

        Args:
            weights: as in the constructor; None reads the constructor's source again.
            wait: None or False returns at once; True, or "all", waits until every subscriber alive at the commit has
                applied the version; a list of worker indices waits for those, attached or not.
            timeout: seconds for the whole call; None is the arena's default.
            after: a stream or an event, for weights on a device that were made on another stream than the current one.
                The current stream waits for the work that it has at the call. A stream waits in turn for the copies;
                after an event, do not change these weights before the version is published.

        Returns:
            The new version. From or on a GPU it is visible when its copy has ended; `wait=[]` waits for that.

        Raises:
            ManifestMismatch: the weights do not fit. After this and the next four errors nothing was published.
            ReaderStalled: readers held every slot that it could write until the deadline.
            WriterBusy: another thread is writing.
            Poisoned: only a part of the weights was given, after an update() that failed.
            ProtocolError: another module is adopted; or a graph is being captured on a stream of the arena's device.
            WorkerDied: published, but these workers died, or returned from their function, before they had applied it.
            AckTimeout: published, but these workers have not applied it in time.
        """
        writer = self._writer
        acks = None if wait is None else _acks(wait)
        return writer.publish(weights, deadline_after(timeout, writer.timeout), acks, after)

    def update(self, *, wait: Wait = None, timeout: float | None = None) -> Update:
        """`with pub.update() as weights:` — write the new version in place; leaving publishes it.

        With slots = 1 nothing is copied, and readers wait meanwhile. An exception in the body leaves the weights half
        written, and poisons the arena until a full publish(). With more slots the current version is copied to a
        free slot on entry, and an exception abandons that slot.

        Raises as publish() does: on entry before anything is written, WorkerDied and AckTimeout on leaving.
        """
        return Update(self, None if wait is None else _acks(wait), timeout_or_none(timeout))

    def adopt(
        self,
        module: nn.Module | TensorDictBase,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        """Make the parameters of a module, or the tensors of a TensorDict, the slab itself (slots = 1).

        From then on write parameters only inside update(). The step() of each given optimizer opens an update(); a step
        inside your own `with pub.update(wait=...)` becomes part of that one. The Parameter objects and the optimizer's
        state keep their identity. Buffers stay private to the module, because forward
        passes write them, and are copied when update() is left. If the module replaces a tensor, the new one goes
        into the arena under its name with the next update() or publish(). close() makes the parameters private again.

        If the module's values differ from what is published they become a new version first. Call it again with the
        same module to add an optimizer, for example a new one after parameters were replaced.

        Raises ValueError (slots > 1: use publish(); the optimizer steps no parameter of the module), ManifestMismatch,
        ProtocolError (this arena, or another, has adopted already; the module is bound to a Subscriber), and for the
        new version what publish() raises.
        """
        slots = self._writer.arena.slots
        if slots != 1:
            raise ValueError(f"adopt() needs slots=1 but this arena has slots={slots}; use publish() instead")
        adopt(self._writer, self, module, as_list(optimizer))

    def readers(self) -> list[ReaderInfo]:
        """Every subscriber, including dead ones whose rows are not yet free."""
        writer = self._writer
        writer.check()
        version, rows = self.version, writer.arena.control.rows()
        writer.peers.keep_only({row.owner for row in rows})
        return [ReaderInfo.of(row, version, writer.peers.state(row.owner)) for row in rows]

    def wait_readers(self, workers: Iterable[int], *, timeout: float | None = None, procs: Procs = None) -> None:
        """Wait until subscribers with these worker indices are attached. Publishes nothing, and blocks no publish.

        A worker is attached once its Subscriber is made. A later call in it, such as bind(), may still fail.

        Args:
            workers: the indices, as in Subscriber(worker=).
            timeout: seconds; None is the arena's default, math.inf waits without limit.
            procs: the workers' processes, in the order of `workers` or as a mapping by index; each a
                multiprocessing.Process, a subprocess.Popen or a pid. With them a death ends the wait at once.

        Raises:
            WorkerDied: one of them ended, and is not attached. AckTimeout: these are not attached in time. ClosedError:
            the arena was closed meanwhile. TypeError, ValueError: wrong arguments.
        """
        writer = self._writer
        deadline = deadline_after(timeout, writer.timeout)
        wanted = check_workers(workers)
        processes = processes_of(wanted, procs)
        writer.check()
        wait_for_readers(writer.arena.control, writer.current[0], wanted, processes, deadline, writer.check)

    def stats(self) -> PublisherStats:
        """Counts and latencies since the arena was made."""
        return self._writer.stats()

    def close(self) -> None:
        """End the arena. Subscribers keep the last version; new ones cannot attach. Idempotent.

        A publish() or update() of another thread that waits, for readers or for acks, ends with ClosedError; one that
        writes is waited for, at most the arena's timeout, and at most 10 s.

        Raises WriterBusy when it still writes then, and inside update().
        """
        self._writer.close()

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
        writer = self._writer
        state = "closed" if writer.closed else f"version {self.version}"
        return f"<shmsync.Publisher {self.name!r}, {state}, slots={writer.arena.slots}>"

    def __del__(self) -> None:
        writer = getattr(self, "_writer", None)  # absent when the constructor refused its arguments
        if writer is not None and not writer.closed and not writer.in_parent:
            warnings.warn(f"Publisher {writer.name!r} was not closed", ResourceWarning, stacklevel=2)

    def __reduce__(self) -> Any:
        raise TypeError("a Publisher cannot be pickled; pass pub.handle to the worker and make a Subscriber there")


class Update:
    """What Publisher.update() returns.

    Not traced where an optimizer's step is compiled: only the step is.
    """

    def __init__(self, publisher: Publisher, acks: Acks | None, timeout: float | None) -> None:
        _native.tell_dynamo()  # the entry may be below compiled code
        self._publisher = publisher  # lives as long as its section
        self._writer = publisher._writer
        self._acks = acks
        self._timeout = timeout
        self._seconds = 0.0  # spent at the entry

    def __enter__(self) -> TensorDictBase:
        writer, started = self._writer, time.perf_counter()
        writer.check()
        if writer.lock.held_by(self):
            raise WriterBusy(
                "this update() section is entered already; leave it first, or make another one with update()"
            )
        try:
            writer.lock.acquire(self)
            deadline = deadline_after(self._timeout, writer.timeout)
            if writer.closed or writer.slots.device_writes is not None or writer.native.writing:
                writer.ready(deadline)
        except BaseException:  # nothing was begun: a version that is under way stays
            writer.lock.release(self)
            raise
        try:
            weights = writer.begin_update(deadline)
            self._seconds = time.perf_counter() - started
            return weights
        except BaseException:
            self._undo()
            raise

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        writer = self._writer
        if not writer.lock.held_by(self):
            raise ProtocolError("this update() section is not entered, or was left already; nothing to leave")
        if writer.in_parent:
            raise ForkedHandle("this update() was begun in the parent process; only the parent can finish it")
        started = time.perf_counter()
        try:
            if exc_type is None:
                version = writer.end_update()
                writer.counts.publish.add(self._seconds + time.perf_counter() - started)
                try:
                    if self._acks is not None:
                        # The timeout starts again: the time spent in the body does not count.
                        writer.wait_acks(version, self._acks, deadline_after(self._timeout, writer.timeout))
                finally:
                    writer.lock.release(self)  # published: there is nothing left to undo
        finally:
            self._undo()

    def _undo(self) -> None:
        """Publish nothing, and give the lock back. A no-op when the section has given it back."""
        writer = self._writer
        if writer.lock.held_by(self):
            writer.updating_thread = None
            writer.slots.undo()
            writer.lock.release(self)


disable(Publisher, "publish")
disable(Update, "__enter__", "__exit__")


def writer_of(publisher: Publisher) -> Writer:
    """The arena's writer, for the schemes: it does what users have no method for."""
    return publisher._writer


def _acks(wait: Wait) -> Acks | None:
    if wait is None or wait is False:
        return None
    if wait is True or (isinstance(wait, str) and wait == "all"):
        return "all"
    if isinstance(wait, (str, bytes)) or not isinstance(wait, Iterable):
        raise ValueError(f'wait is False (or None), True (or "all"), or a list of worker indices, not {wait!r}')
    return check_workers(wait)
