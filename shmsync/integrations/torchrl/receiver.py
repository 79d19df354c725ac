"""The worker's side of one model: a module bound to an arena, which moves to new versions between two forwards.

A forward applies the newest version itself, at its entry. A thread waits on the arena, and applies what comes while no
forward begins, so that the trainer gets its ack.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from torch import nn
from torchrl._utils import WEIGHT_SYNC_TIMEOUT
from torchrl.collectors import BaseCollector

from ... import _native
from ...engine.by_value import copy_by_value
from ...engine.deadlines import SLICE
from ...engine.read.reading import ReadPath, open_reader
from ...errors import ArenaNotFound, ShmSyncError
from ...memory.segment import Handle
from ...schemes.strategy import WeightStrategy
from . import extra_state
from .connection import Mailbox
from .safe_point import SafePoint, VersionClock


class Receiver:
    """Receives the weights of one model in a worker.

    Args:
        address: of the trainer's mailbox.
        name: of the arena to start with, which may not be made yet.
        worker: this worker's index.
        model: bound to the arena; None: nothing is.
        timeout: for each wait on the trainer, in seconds.
    """

    def __init__(self, address: str, name: str, worker: int, model: nn.Module | None, timeout: float) -> None:
        self._worker, self._timeout = worker, timeout
        self._lock, self._clock = _native.ModelLock(), VersionClock()
        self._point: SafePoint | None = None
        self._server_lock: AbstractContextManager[Any] = nullcontext()
        self._hears: Callable[[Any], object] | None = None  # is told of new weights: a cascade, or a server
        self._hears_each = False  # a server: once for each version, those included that this worker never used
        self._counted = 1  # the version that arenas start with; each later one is an update
        self._stop = threading.Event()
        self._mailbox = Mailbox(f"{address}.{worker}", peer=address)
        try:
            self._reader = self._attached(name, WEIGHT_SYNC_TIMEOUT)
            try:
                if model is not None:
                    self.bind(model)
                self._reader.refresh()
            except BaseException:
                self._reader.close()
                raise
        except BaseException:
            self._mailbox.close()
            raise
        self._seen = self._at  # the arena and the version at the last refresh()
        thread = threading.Thread(target=_run, args=(weakref.ref(self), self._stop), daemon=True, name="shmsync")
        thread.start()
        self._finalizer = weakref.finalize(self, _end, self._stop, thread, self._mailbox)

    def _attached(self, arena: str | Handle, patience: float) -> ReadPath:
        """A reader that applies nothing before it is told to: its first ack is to mean that the module shows it."""
        copy_by_value()
        reader = open_reader(arena, "pinned", self._worker, patience, False)
        # Sections wait for a trainer that waits, perhaps for another worker's forward. Its death ends the wait.
        reader.timeout = math.inf
        reference = weakref.ref(self)

        def applied(version: int) -> None:
            receiver = reference()
            if receiver is not None:
                receiver._applied(version)

        reader.on_version(applied)  # in the first section of each version, whichever thread enters it, before the ack
        return reader

    @property
    def weights(self) -> Any:
        """The newest weights as a TensorDict, zero-copy; they change with the next version."""
        weights = self._reader.weights
        return weights.exclude(extra_state.LEAF) if extra_state.LEAF in weights.keys() else weights  # noqa: SIM118

    @property
    def _at(self) -> tuple[str, int]:
        return self._reader.name, self._reader.applied_version

    def bind(self, module: nn.Module) -> None:
        """Bind this module, in place of the one bound before, which keeps what it has.

        Raises ManifestMismatch and ProtocolError as Subscriber.bind() does.
        """
        before = self._point
        if before is not None and before.module is module:
            return
        with self._lock:
            point = SafePoint(module, self._lock, self._clock)
            point.bind(self._reader)
            if before is not None:
                before.remove()
            self._point = point
            self._reader.refresh()
            self._set_states()

    def follow(self, context: Any, model_id: str) -> None:
        """Let the context know of new weights; None: nothing is to know of them.

        A leaf collector has its policy_version kept right, a collector of collectors passes the weights on, and any
        other, such as an InferenceServer, has its update_policy_weights_() called once for each version.
        """
        if context is None:
            return
        reference = weakref.ref(context)

        def update(weights: Any) -> None:
            there = reference()
            if there is not None:
                there.update_policy_weights_(model_id=model_id, policy_or_weights=extra_state.unpacked(weights))

        if getattr(context, "_weight_sync_schemes", None):
            self._hears = update
        elif not isinstance(context, BaseCollector) and hasattr(context, "update_policy_weights_"):
            # It has this lock from a forward until it has stamped the output.
            self._server_lock = getattr(context, "_model_lock", nullcontext())
            self._hears, self._hears_each = update, True
        elif model_id == "policy":
            self._clock.follow(context)

    def refresh(self, timeout: float | None = 0.0) -> bool:
        """Move to a newer version. Waits `timeout` seconds for one; None: without limit.

        Is the version another one than at the last call, whichever thread has applied it?
        """
        if timeout != 0.0 and self._at == self._seen:
            self._reader.wait_version(self._at[1] + 1, math.inf if timeout is None else timeout)
        self.catch_up()
        seen, self._seen = self._seen, self._at
        return seen != self._seen

    def catch_up(self) -> None:
        """Move to the trainer's arena and version."""
        with self._lock:
            for message in self._mailbox.receive():
                self._move_to(Handle(*message))
            self._reader.refresh()

    def wait(self) -> None:
        """One slice of the thread's work: wait for a version or another arena, and move there. Errors are reported."""
        try:
            if (
                self._reader.wait_version_slice(self._reader.applied_version + 1, int(SLICE * 1e9))
                or self._mailbox.waiting
            ):
                with self._server_lock:  # before the model's, as the server takes them; it calls receive() with it held
                    self.catch_up()
        except Exception as error:
            if not self._stop.is_set():
                self._mailbox.report(self._worker, error)
                self._stop.wait(SLICE)

    def apply(self, weights: Any) -> None:
        """Give the module private weights, until the next version. Raises as WeightStrategy.apply_weights()."""
        module = None if self._point is None else self._point.module
        if self._point is not None and module is not None:
            strategy = WeightStrategy()
            strategy.check_weights(module, weights)
            with self._lock:
                self._point.release()
                strategy.apply_weights(module, weights)

    def close(self) -> None:
        """Leave: the module keeps the weights that it has, as its own. Idempotent."""
        self._finalizer()
        with self._lock:
            if self._point is not None:
                self._point.remove()
                self._point = None
            self._reader.close()

    def _applied(self, version: int) -> None:
        updates, self._counted = version - self._counted, version
        if not updates:
            return  # the one that it began with
        try:
            try:
                self._set_states()
                if self._hears is not None:
                    for _ in range(updates if self._hears_each else 1):
                        self._hears(self._reader.weights)
            finally:
                self._clock.moved(updates)
        except Exception as error:  # for the trainer, which gets it before the ack, not for the caller of the policy
            self._mailbox.report(self._worker, error)

    def _set_states(self) -> None:
        """Give the module, and the modules in it, their extra state of the version that is shown."""
        module = None if self._point is None else self._point.module
        weights = self._reader.weights
        if module is not None and extra_state.LEAF in weights.keys():  # noqa: SIM118  # it iterates over its batch
            extra_state.set_states(module, weights.get(extra_state.LEAF))

    def _move_to(self, handle: Handle) -> None:
        """Move to another arena, which started as a copy of this one; under the lock."""
        if handle.name == self._reader.name:
            return  # the trainer repeats itself until it sees us there
        with suppress(ShmSyncError):
            self._reader.refresh()  # count what came before
        try:
            fresh = self._attached(handle, self._timeout)
        except ArenaNotFound:
            return  # the trainer has given that one up
        before, self._reader, self._counted = (self._reader, self._counted), fresh, 1
        try:
            if self._point is not None:
                self._point.bind(fresh)
        except BaseException:
            self._reader, self._counted = before
            fresh.close()
            raise
        before[0].close()


def _run(reference: weakref.ref[Receiver], stop: threading.Event) -> None:
    """The thread of a receiver, which it does not keep alive; a wait lasts a slice."""
    while not stop.is_set():
        receiver = reference()
        if receiver is None or receiver._reader.gone:
            return  # the trainer has ended, and the module goes on with what it has
        receiver.wait()
        del receiver


def _end(stop: threading.Event, thread: threading.Thread, mailbox: Mailbox) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(1.0)
    mailbox.close()
