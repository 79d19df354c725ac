"""The publisher: the one writer of an arena."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from multiprocessing import util
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import nn

from .. import _native
from ..errors import ManifestMismatch, ProtocolError, WriterBusy
from ..memory import reader_table, segment
from ..memory.arena import create
from ..memory.devices import named
from ..memory.exiting import exiting, watch_exit
from ..memory.manifest import Key, Manifest
from ..memory.plainly import plainly, run_plainly
from ..memory.process import me
from ..memory.reader_table import RowId
from ..memory.segment import Handle
from .adopting import Adoption
from .by_value import copy_by_value
from .checksums import check_checksum, refuse_without_checksums
from .copy_plan import CopyPlan
from .dtypes import Dtypes, cast_leaves, check_dtypes, kept_leaves
from .inquiry import Inquiry
from .joining import Procs, check_workers, processes_of, wait_for_readers
from .matching import same_bytes
from .places import place_for
from .plans import Plans
from .sources import EVERYTHING, Filter, Patterns, Weights, check_keys, collect, problem_with
from .stats import PublisherStats, ReaderInfo, reader_infos
from .stepping import as_list
from .timing import (
    DEFAULT_TIMEOUT,
    check_count,
    check_worker,
    deadline_after,
    timeout_or_default,
    timeout_or_none,
)  # fmt: skip
from .tracing import Tracing, trace_as_told
from .update import Update, load_inside_update, step_inside_update
from .verifying import Proof
from .writing import NO_ACKS, Acks, WriteSide, begin_all

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
        device: where the arena lies. None: where the weights are; everything published later must be there
            too. "cpu": in the host's memory. "cuda", "cuda:1": in that GPU's memory. With a name, tensors are brought
            there from wherever they are.
        dtype: floating parameters are cast to it on publish; buffers keep theirs. Where no leaf is an nn.Parameter or
            nn.Buffer, as in a state_dict(), all floating leaves are cast. A mapping of glob patterns on dotted keys to
            dtypes casts the leaves that match, buffers too, to the dtype of the first pattern that does.
        include: glob patterns on dotted keys: which leaves the arena has. A pattern that matches nothing, here, in
            exclude= or in dtype=, is a ManifestMismatch.
        exclude: glob patterns on dotted keys: which leaves of those it has not.
        timeout: the arena's default, in seconds; math.inf waits without limit, None is 10.
        checksum: write a checksum of each leaf with each version, so that verify() can prove what workers hold. Each
            publish() then reads what it has written once more, each update() everything. Needs shmsync[verify].

    Raises:
        ArenaExists: the name belongs to a publisher that lives.
        NoSpace: shared memory, or the device's, has not enough room.
        ManifestMismatch: these weights cannot be published.
        ValueError: an argument is out of range.
        TypeError: an argument is of another type.
        OSError: the file that the environment's SHMSYNC_TRACE names cannot be a trace.

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
        dtype: Dtypes = None,
        include: Patterns = None,
        exclude: Patterns = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        checksum: bool = False,
    ) -> None:
        slots = check_count("slots", slots, _native.MAX_SLOTS)
        max_readers = check_count("max_readers", max_readers, _native.MAX_READERS)
        check_dtypes(dtype)
        if device is not None:
            named(device)
        name = segment.new_name() if name is None else segment.check_name(name)
        timeout = timeout_or_default(timeout)
        self._source: Weights | None = weights
        self._filter = Filter.of(include, exclude)
        with plainly():
            tensors, manifest = _manifest_of(weights, self._filter, dtype, checksum)
            place = place_for(tensors, device)
            check_checksum(checksum)
        del tensors
        self._arena, created = create(name, manifest, slots=slots, max_readers=max_readers, device=place.device)
        self._side = WriteSide(self._arena, name, me().owner, timeout)
        self._inquiry = Inquiry(self._arena)
        self._plans = Plans(self._arena, name, self._filter, any_device=place.any_device)
        watch_exit()
        copy_by_value()
        self._closing: list[bool] = []  # filled by close(), which holds the writer's lock itself
        self._finalizer = util.Finalize(self, _clean_up, (created.fd, self._side, self._closing), exitpriority=20)
        try:
            trace_as_told(self._side)
            self.publish()
            self._side.settle(deadline_after(None, timeout))
            segment.make_ready(created)
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """The arena's name."""
        return self._side.name

    @property
    def version(self) -> int:
        """The published version; the first is 1."""
        return self._side.current[0]

    @property
    def weights(self) -> TensorDictBase:
        """The published weights, zero-copy and read-only: writing into them is a SIGSEGV. Use update() to write."""
        self._side.check()
        return self._arena.weights(self._side.current[1])

    @property
    def handle(self) -> Handle:
        """What a worker needs to attach; picklable."""
        return Handle(self.name, self._arena.session)

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
        value. Each byte is copied once, whatever the number of readers; cast, gathered and fetched ones too, but for
        small sets of them with slots = 1.

        Args:
            weights: as in the constructor; None reads the constructor's source again.
            wait: None returns at once; "all" waits until every subscriber alive at the commit has applied the
                version; a list of worker indices waits for those, attached or not.
            timeout: seconds for the whole call; None is the arena's default.
            after: for weights on a device that were made on another stream than the current one: that stream, or an
                event. The copies wait for what it has to do now.

        Returns:
            The new version. On a device it is visible when it is copied there; `wait=[]` waits for that.

        Raises:
            ManifestMismatch: the weights do not fit. By this and the next four nothing was published.
            ReaderStalled: readers held every slot that it could write until the deadline.
            WriterBusy: another thread is writing.
            Poisoned: only a part of the weights was given, after an update() that failed.
            ProtocolError: this thread is inside a read section that is in the way.
            WorkerDied: published, but these workers died before they had applied it.
            AckTimeout: published, but these workers have not applied it in time.
        """
        deadline = deadline_after(timeout, self._side.timeout)
        acks = _acks(wait)
        self._side.check()
        with self._side.lock:
            self._side.ready(deadline)
            try:
                plan = self._checked(weights)
                if after is not None:
                    self._side.await_sources(plan, deadline, after)
                return self._side.publish(plan, deadline, acks)
            finally:
                self._plans.let_go()

    def _checked(self, weights: Weights | None, optional: Container[Key] | None = None) -> CopyPlan:
        """The plan to publish these weights, all checked. `optional`: the leaves that may be missing; None: all."""
        source = self._source if weights is None else weights
        if self._side.adopted is not None:
            self._side.adopted.look()
        return self._side.checked(self._plans.find(source, default=source is self._source), optional)

    def update(self, *, wait: Wait = None, timeout: float | None = None) -> Update:
        """`with pub.update() as weights:` — write the new version in place; leaving publishes it.

        With slots = 1 nothing is copied, and readers wait meanwhile; an exception inside leaves the weights half
        written, so the arena is poisoned until a full publish(). With more slots the current version is copied to a
        free slot on entry, and an exception abandons that slot.

        Raises as publish() does: on entry before anything is written, WorkerDied and AckTimeout on leaving.
        """
        return Update(self, self._side, _acks(wait), timeout_or_none(timeout))

    @run_plainly
    def adopt(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        """Make the module's parameters the slab itself (slots = 1), so that updates copy nothing.

        From then on write parameters only inside update(); with an optimizer (or several), its step() runs inside
        update() by itself; a step inside your own `with pub.update(wait=...)` joins that one. The Parameter objects,
        and so the optimizer's state, keep their identity, and lie as the arena's leaves do. Buffers stay private to
        the module, since forward passes write them, and are copied when update() is left. Tensors are followed by
        name: one that the module has replaced goes into the arena with the next update() or publish(). close() makes
        the parameters private again.

        If the module's values differ from what is published they become a new version first. Call it again with the
        same module to add an optimizer, for example a new one after parameters were replaced.

        Raises ValueError (slots > 1: use publish(); the optimizer steps no parameter of the module), ManifestMismatch,
        ProtocolError (this arena, or another, has adopted already; the module is bound to a Subscriber), and for the
        new version what publish() raises.
        """
        if self._arena.slots != 1:
            raise ValueError(
                f"adopt() needs slots=1 but this arena has slots={self._arena.slots}; use publish() instead"
            )
        side = self._side
        optimizers = as_list(optimizer)
        with side.lock:
            side.ready(deadline_after(None, side.timeout))
            if side.adopted is None:
                self._adopt(module, optimizers)
            elif side.adopted.module is not module or not optimizers:
                raise ProtocolError("this arena has adopted a module already; make another Publisher for this one")
            else:
                side.adopted.check_optimizers(optimizers)
            step_inside_update(optimizers, self, side)
            load_inside_update(self, side)

    def _adopt(self, module: nn.Module, optimizers: list[torch.optim.Optimizer], protected: bool = True) -> None:
        side = self._side
        plan = self._plans.make(module)
        if not plan.whole:
            raise ManifestMismatch("the module to adopt lacks " + ", ".join(leaf.name for leaf in plan.lacking))
        adoption = Adoption(module, plan.tensors, self._arena, self.name, self._filter, optimizers, protected)
        adoption.check_optimizers(optimizers)
        deadline = deadline_after(None, side.timeout)
        if self._differs(plan.tensors):
            side.publish(side.checked(plan), deadline)
            side.settle(deadline)
        if protected:
            side.protect()
        side.adopted = adoption
        adoption.move_in()
        self._source = module
        self._plans.forget()

    @run_plainly
    def _differs(self, tensors: Mapping[Key, torch.Tensor]) -> bool:
        views = self._arena.views(0)
        return self._side.writer.poisoned or any(
            tensor.dtype != views[key].dtype or not same_bytes(tensor, views[key]) for key, tensor in tensors.items()
        )

    def readers(self) -> list[ReaderInfo]:
        """Every subscriber, the dead ones not yet swept included."""
        self._side.check()
        return reader_infos(self._arena.control, self._side.peers, self.version)

    def wait_readers(self, workers: Iterable[int], *, timeout: float | None = None, procs: Procs = None) -> None:
        """Wait until subscribers with these worker indices are attached. Publishes nothing, and blocks no publish.

        A worker is attached once its Subscriber is made; what it does then, such as bind(), may fail later.

        Args:
            workers: the indices, as in Subscriber(worker=).
            timeout: seconds; None is the arena's default, math.inf waits without limit.
            procs: the workers' processes, in the order of `workers` or as a mapping by index; each a
                multiprocessing.Process, a subprocess.Popen or a pid. With them a death ends the wait at once.

        Raises:
            WorkerDied: one of them ended, and is not attached. AckTimeout: these are not attached in time. ClosedError:
            the arena was closed meanwhile. TypeError, ValueError: wrong arguments.
        """
        deadline = deadline_after(timeout, self._side.timeout)
        wanted = check_workers(workers)
        processes = processes_of(wanted, procs)
        side = self._side
        side.check()
        wait_for_readers(self._arena.control, wanted, processes, deadline, self.version, side.check)

    def verify(self, *, timeout: float | None = None, workers: Iterable[int] | None = None) -> Proof:
        """Let every worker prove what it holds: that its bound modules compute with the published weights.

        A worker answers at its next section, refresh() or slice of a wait_version(), where it reads all its weights
        once. Publish on meanwhile as you like; an answer is about the newest version that its worker finds.

        Args:
            timeout: seconds for the whole call; None is the arena's default, math.inf waits without limit.
            workers: None asks every subscriber that is attached now; indices ask these, attached or not.

        Returns:
            The version at the call, how many leaves each worker compared, and which workers did: who detaches before
            it has answered is not among them, and raises nothing unless `workers` names it.

        Raises:
            NotDelivered: these workers hold other weights; sub.verify() there names every leaf.
            WorkerDied: these died before they answered.
            AckTimeout: these have not answered in time, or are not attached.
            ProtocolError: the arena has no checksums, or this thread is in a read section.
            ClosedError: this publisher is closed.
            WriterBusy: another thread asks.
        """
        deadline = deadline_after(timeout, self._side.timeout)
        return self.ask(None if workers is None else check_workers(workers), deadline)

    def ask(self, workers: list[int] | None, deadline: float, meanwhile: Callable[[], object] = lambda: None) -> Proof:
        """As verify() of these workers (None: all), until the monotonic time `deadline`.

        `meanwhile` is called again and again until all have answered.
        """
        side = self._side
        side.check()
        refuse_without_checksums(self._arena.manifest, side.name)
        if self._arena.rows_held_by_this_thread():
            raise ProtocolError(
                "verify() inside a read section of this thread would wait for it to leave; leave the section first",
                version=self.version,
            )
        if self._arena.slots == 1 and side.updating_thread == threading.get_ident():
            raise ProtocolError(
                "verify() inside update() would wait for readers, and the gate keeps them out; leave update() first",
                version=self.version,
            )

        def look() -> None:
            side.check()
            meanwhile()

        return self._inquiry.ask(workers, self.version, deadline, look)

    def trace(self, file: str | os.PathLike[str] | None = None) -> Tracing:
        """Write what the processes of this arena do into a file, until stop() of what this returns, or its `with`.

        These are publishes, read sections, acks and waits, in the Trace Event Format of Chrome; Perfetto
        (https://ui.perfetto.dev) shows them. Subscribers of other processes join in at their next section. The
        environment's SHMSYNC_TRACE=FILE traces every Publisher from its first version on.

        Args:
            file: its path. None: shmsync-NAME.trace.json in the working directory. To a file that is such a trace
                already it is appended, so that one can have those of several arenas.

        Raises:
            FileExistsError: there is a file that is no trace. BlockingIOError: another process had locked it until the
            arena's timeout. OSError: it cannot be made. ProtocolError: this arena is being traced. ClosedError.
        """
        return self._side.trace(f"shmsync-{self.name}.trace.json" if file is None else file)

    def stats(self) -> PublisherStats:
        """Counts and latencies since the arena was made."""
        return self._side.stats()

    def close(self) -> None:
        """End the arena. Subscribers keep the last version; new ones cannot attach. Idempotent.

        A publish() or update() of another thread that waits, for readers or for acks, ends with ClosedError.

        Raises WriterBusy when another thread is writing, or from inside update().
        """
        side = self._side
        if side.closed or side.in_parent:
            return
        with side.closing():
            try:
                side.give_back()
            finally:
                side.closed = True
                self._plans.forget()
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
        state = "closed" if self._side.closed else f"version {self.version}"
        return f"<shmsync.Publisher {self.name!r}, {state}, slots={self._arena.slots}>"

    def __del__(self) -> None:
        side = getattr(self, "_side", None)  # absent when the constructor refused its arguments
        if side is not None and not side.closed and not side.in_parent:
            warnings.warn(f"Publisher {side.name!r} was not closed", ResourceWarning, stacklevel=2)

    def __reduce__(self) -> Any:
        raise TypeError("a Publisher cannot be pickled; pass pub.handle to the worker and make a Subscriber there")

    # For the layers above the engine.

    @property
    def place(self) -> str:
        """The name of where the arena lies: "cpu", "cuda:0"."""
        return self._arena.place

    @property
    def manifest(self) -> Manifest:
        """The leaves of the arena."""
        return self._arena.manifest

    def check(self, weights: Weights, optional: Container[Key] | None = None) -> None:
        """Raise what publishing these would raise before anything is written. `optional`: as in Publication."""
        with self._side.lock:
            self._side.ready(deadline_after(None, self._side.timeout))
            try:
                self._checked(weights, optional)
            finally:
                self._plans.let_go()

    @run_plainly
    def share(self, module: nn.Module) -> None:
        """As adopt(), but the module may be written at any time, and readers see it at once: alias=True of schemes."""
        side = self._side
        with side.lock:
            side.ready(deadline_after(None, side.timeout))
            self._adopt(module, [], protected=False)

    def forget_source(self) -> None:
        """Let go of the constructor's weights: from now on publish() must be given some."""
        self._source = None
        self._plans.forget()

    def applied_by(self, version: int) -> list[int]:
        """The workers whose last ack is for this version, including those that have left or died since."""
        return list(self._arena.control.workers_at(version))

    def forget_acks(self, worker: int) -> None:
        """Another process is `worker` from now on; what those before it applied, who are gone, is not its doing."""
        reader_table.forget(self._arena.control, worker, self._side.peers, me().owner)

    def attached_rows(self) -> dict[int, RowId]:
        """The row of each attached worker, by its index."""
        return {row.worker: row.id for row in reader_table.claimed(self._arena.control)}

    def wait_rows(self, version: int, rows: list[RowId], nanoseconds: int) -> list[RowId]:
        """Wait until these rows have acked, at most `nanoseconds`. Returns those that have not."""
        if not self._side.published(nanoseconds):
            return rows
        return list(self._side.writer.wait_acks(version, rows, nanoseconds))


class Publication(NamedTuple):
    """What to publish where."""

    publisher: Publisher
    weights: Weights | None
    optional: Container[Key] | None = None  # leaves that may be missing; None: all


def publish_all(publications: Sequence[Publication], version: int | None, deadline: float) -> list[int]:
    """Publish each of these in its arena, all as `version` (None: each as its next), by the monotonic `deadline`.

    Before the first byte moves, every source is checked and every arena has a slot to write. With slots = 1 no
    gate opens before all are closed, so a reader that enters the arenas in this order, one section inside the other,
    sees all of them before or all of them after.

    Returns the versions, which are visible then. Raises as Publisher.publish() does; then nothing was published, but by
    WriterBusy and DeviceFailed for a version whose copies on a device are not done.
    """
    if len(publications) > 1:
        versions = _publish_locked(publications, version, deadline, len(publications))
    else:
        versions = [_publish_one(publications[0], version, deadline)] if publications else []
    for each in publications:
        if each.publisher._side.later is not None:  # who calls tells others of the versions
            with each.publisher._side.lock:
                each.publisher._side.ready(deadline)
    return versions


def _publish_one(publication: Publication, version: int | None, deadline: float) -> int:
    publisher = publication.publisher
    side = publisher._side
    with side.lock:
        side.ready(deadline)
        try:
            plan = publisher._checked(publication.weights, publication.optional)
            return side.publish(plan, deadline, version=version)
        finally:
            publisher._plans.let_go()


def _publish_locked(publications: Sequence[Publication], version: int | None, deadline: float, left: int) -> list[int]:
    # One `with` inside the other: an interrupt may land anywhere, and would make a loop over the locks, or an
    # ExitStack, lose some.
    if left == 0:
        try:
            return _publish(publications, version, deadline)
        finally:
            for each in publications:
                each.publisher._plans.let_go()
    with publications[-left].publisher._side.lock:
        return _publish_locked(publications, version, deadline, left - 1)


def _publish(publications: Sequence[Publication], version: int | None, deadline: float) -> list[int]:
    for each in publications:
        each.publisher._side.ready(deadline)
    plans = [(each.publisher._side, each.publisher._checked(each.weights, each.optional)) for each in publications]
    for side, plan in plans:
        if plan.from_devices:
            side.await_sources(plan, deadline)
        plan.stage()
    try:
        begin_all([side for side, _ in plans], deadline, version)
    except BaseException:
        for side, _ in plans:
            side.writer.abort()  # nothing is written yet
        raise
    versions = []
    uncommitted = [side for side, _ in plans]
    try:
        for side, plan in plans:
            side.write(plan)
        for side, _ in plans:
            side.add_sums(deadline)
        while uncommitted:
            versions.append(uncommitted[0].commit())
            del uncommitted[0]
    except BaseException:
        for side in uncommitted:
            side.undo()
        raise
    return versions


def _manifest_of(weights: Weights, filter: Filter, dtype: Dtypes, checksum: bool) -> tuple[dict[Key, Any], Manifest]:
    everything = collect(weights, EVERYTHING, watch=False).tensors
    tensors = everything
    if filter.filters:
        tensors = {key: value for key, value in everything.items() if filter.admits(".".join(key))}
    check_keys(tensors)
    problems = filter.idle(".".join(key) for key in everything) if filter.filters else []
    problems += [f"{'.'.join(key)} {reason}" for key, value in tensors.items() if (reason := problem_with(value))]
    if not tensors and not problems:
        problems = ["there is no tensor to publish (after include= and exclude=)"]
    if problems:
        raise ManifestMismatch("these weights cannot be published: " + "; ".join(problems))
    dtypes = cast_leaves(tensors, dtype, kept_leaves(weights, everything) if isinstance(dtype, torch.dtype) else ())
    return tensors, Manifest.of(tensors, dtypes=dtypes, filtered=filter.filters, checksum=checksum)


def _clean_up(fd: int, side: WriteSide, closing: list[bool]) -> None:
    """End the arena. Holds no Publisher, so that it can run when that is collected, and at exit."""
    try:
        if not exiting():  # of a Publisher that was collected
            side.give_back()
    finally:
        side.end()
        segment.withdraw(side.name, fd)
        side.peers.close()
    if closing or not exiting():  # else a daemon thread may still copy, and the memory goes with the process anyway
        side.arena.release()


def _acks(wait: Wait) -> Acks:
    if wait is None:
        return NO_ACKS
    if isinstance(wait, str) and wait == "all":
        return Acks(True)
    if isinstance(wait, (str, bytes)) or not isinstance(wait, Iterable):
        raise ValueError(f'wait is None, "all" or a list of worker indices, not {wait!r}')
    return Acks(True, [check_worker(worker) for worker in wait])
