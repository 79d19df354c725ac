"""The worker's side of one model: a policy bound to an arena, which moves to new versions between two forwards."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torchrl.collectors import BaseCollector

from ....engine.bind.binding import Binding, ModuleCheck, bindable, taken_over
from ....engine.by_value import copy_by_value
from ....engine.read.reading import Follower, ReadPath, open_reader
from ....errors import ArenaNotFound, WriterDied
from ....memory.segment import Handle
from ....memory.torch_modes import run_plainly
from ....schemes.devices import lies_elsewhere
from ....schemes.strategy import WeightStrategy
from .. import extra_state
from .clock import VersionClock
from .listener import ConnectionListener
from .safe_point import LoadPoint, ModelLock, SafePoint, StatePoint, release_bound
from .worker_connection import WorkerConnection


class Receiver:
    """Receives the weights of one model in a worker.

    Args:
        address: of the trainer's WorkerConnections.
        name: of the arena to start with.
        worker: this worker's index.
        timeout: for each wait on the trainer, in seconds.
        patience: seconds to wait for the arena, which is made after all workers were started.
    """

    def __init__(self, address: str, name: str, worker: int, *, timeout: float, patience: float) -> None:
        self._worker = worker
        self._timeout = timeout
        self._model_lock = ModelLock()
        self.clock = VersionClock()
        self.cascade: Callable[[Any], None] | None = None
        self._server_lock: Any = None  # a server has it from a forward until its output is stamped
        self._module: weakref.ref[nn.Module] | None = None
        self._safe_point: SafePoint | None = None
        self._proxies: list[LoadPoint | StatePoint] = []
        self._next_arena: Handle | None = None
        self._connection = WorkerConnection(address, worker)
        try:
            self._subscriber = self._attach(name, patience)
        except BaseException:
            self._connection.close()
            raise
        self._counted = 1  # the version that arenas start with; each later one is an update
        self._seen = self._at  # the arena and the version at the last refresh()
        self._finalizer = weakref.finalize(self, _leave, self._connection)
        ConnectionListener.here().add(self._connection.fd, self._on_message)

    @property
    def weights(self) -> Any:
        """The newest weights as a TensorDict, zero-copy; they change with the next version."""
        with self._model_lock:
            weights = self._subscriber.weights
            return weights.exclude(extra_state.LEAF) if self._has_extra else weights

    def bind(self, module: nn.Module) -> None:
        """Bind this module, in place of the one bound before.

        Raises ManifestMismatch and ProtocolError as Subscriber.bind() does.
        """
        with self._model_lock:
            if self._module is not None and self._module() is module:
                return
            binding = self._bound(self._subscriber, module)
            self._forget_module()
            self._module = weakref.ref(module)
            self._safe_point = SafePoint(module, self._model_lock, self.clock)
            self._safe_point.use(self._subscriber)
            self._show(self._subscriber, binding)
            self._seen = self._at
            self._proxies = [LoadPoint(owner, self._safe_point) for owner in binding.owners()]
            self._proxies.append(StatePoint(module, self._safe_point))

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
                there.update_policy_weights_(model_id=model_id, policy_or_weights=weights)

        if getattr(context, "_weight_sync_schemes", None):
            self.cascade = lambda weights: update(extra_state.unpacked(weights))
        elif not isinstance(context, BaseCollector) and hasattr(context, "update_policy_weights_"):
            with self._model_lock:
                # It stamps what a forward returns after the forward, under its model lock.
                self._server_lock = getattr(context, "_model_lock", None)
                self.clock.on_update(lambda: update(self.weights))
        elif model_id == "policy":
            self.clock.follow(context)

    def refresh(self, timeout: float | None = 0.0) -> bool:
        """Move to a newer version. Waits `timeout` seconds for one; None: without limit.

        Is the version another one than at the last call, whichever thread has applied it?
        """
        if timeout != 0.0 and self._at == self._seen and self._subscriber.lag == 0:
            newer = self._subscriber.applied_version + 1  # than the policy's, whichever thread has moved it
            self._subscriber.wait_version(newer, float("inf") if timeout is None else timeout)
        with self._model_lock:
            self._advance()
            seen, self._seen = self._seen, self._at
            return seen != self._seen

    @property
    def _at(self) -> tuple[str, int]:
        return self._subscriber.name, self._subscriber.applied_version

    def apply(self, weights: Any) -> None:
        """Give the module private weights, until the next version. Raises as WeightStrategy.apply_weights()."""
        module = None if self._module is None else self._module()
        if module is not None:
            strategy = WeightStrategy()
            strategy.check_weights(module, weights)
            with self._model_lock:
                release_bound(self._subscriber)
                strategy.apply_weights(module, weights)

    def _on_message(self) -> bool:
        """Called by the listener's thread: new weights, or another arena. False when the trainer is gone.

        It does not wait for a forward that is running, since the thread serves other models too.
        """
        message = self._connection.take()
        if message == b"":
            return self._connection.reconnect()
        if isinstance(message, Handle):
            self._next_arena = message
        if not self._catch_up():
            self._model_lock.defer(self._catch_up)
            self._catch_up()  # the lock may have been released just before that
        return True

    def _catch_up(self) -> bool:
        """Move to the trainer's arena and version; False when another thread holds the lock."""
        if not self._model_lock.try_enter():
            return False
        lock = self._server_lock
        try:
            if lock is not None and not lock.acquire(blocking=False):
                self._model_lock.defer(None)  # the server is serving, and calls refresh() when it has done so
                return True
            try:
                self._advance()
            except Exception as error:  # the trainer gets it
                self._connection.report(error)
            finally:
                if lock is not None:
                    lock.release()
        finally:
            self._model_lock.__exit__()
        return True

    def _advance(self) -> None:
        """Move to the trainer's arena and version, under the lock."""
        self._model_lock.defer(None)
        handle, self._next_arena = self._next_arena, None
        if handle is not None:
            self._move_to(handle)
        self._subscriber.refresh()

    def close(self) -> None:
        """Leave: the module keeps the weights that it has, as its own. Idempotent."""
        self._finalizer()
        with self._model_lock:
            if not self._subscriber.closed:
                self._forget_module()
                self._subscriber.close()

    @property
    def _has_extra(self) -> bool:
        return extra_state.KEY in self._subscriber.arena.manifest.by_key

    def _attach(self, name_or_handle: str | Handle, patience: float) -> ReadPath:
        copy_by_value()
        until = time.monotonic() + patience
        while True:
            try:
                subscriber = open_reader(name_or_handle, "pinned", self._worker, self._timeout, False)
                # Sections wait for a trainer that waits, perhaps for another worker's forward. Its death ends the wait.
                subscriber.timeout = math.inf
                return subscriber
            except ArenaNotFound:
                message = self._connection.take()
                if message == b"":
                    raise WriterDied(
                        f"the trainer of worker {self._worker} hung up before it had made arena {name_or_handle!r}; "
                        "look at the trainer's own error"
                    ) from None
                if isinstance(message, Handle):
                    name_or_handle = message
                elif time.monotonic() >= until:
                    raise
                else:
                    time.sleep(0.002)

    @run_plainly
    def _bound(self, subscriber: ReadPath, module: nn.Module) -> Binding:
        beside = [extra_state.KEY] if extra_state.KEY in subscriber.arena.manifest.by_key else []
        copies = lies_elsewhere(module, subscriber.arena.device)
        check = ModuleCheck(subscriber.arena, subscriber.name, copies=copies, absent=beside)
        bound = bindable(module)
        tensors = check.tensors(bound)
        return Binding(subscriber, bound, check, tensors, taken_over(bound, tensors, subscriber, self._subscriber))

    def _show(self, subscriber: ReadPath, binding: Binding, *, quiet: bool = False) -> None:
        """Let the module show this subscriber's weights, now and in later versions."""
        after = _After(self, quiet)
        with subscriber.hold_lock():
            subscriber.followers += [binding, after]
            if subscriber.applied_version == 0:
                subscriber.refresh()  # the first version: it is acked when the module shows it
            else:
                with subscriber.read():
                    binding.move(subscriber.held_slot)
                    after.set_extra_state(subscriber.held_slot)
        after.quiet = True

    def _move_to(self, handle: Handle) -> None:
        """Move, under the lock, to another arena, which started as a copy and has had at least one update since."""
        if handle.name == self._subscriber.name:
            return
        fresh = self._attach(handle, 0.0)
        earlier, module = self._subscriber, None if self._module is None else self._module()
        try:
            if module is not None:
                binding = self._bound(fresh, module)
        except BaseException:
            fresh.close()
            raise
        self._subscriber, self._counted = fresh, 1
        if self._safe_point is not None and module is not None:
            self._safe_point.use(fresh)
            self._show(fresh, binding, quiet=True)
        else:
            fresh.refresh()
        earlier.followers.clear()
        earlier.close()

    def _forget_module(self) -> None:
        for proxy in self._proxies:
            proxy.remove()
        self._proxies = []
        if self._safe_point is not None:
            self._safe_point.remove()
            self._safe_point = None
        release_bound(self._subscriber)
        self._subscriber.followers.clear()
        self._module = None


class _After(Follower):
    """What happens after the tensors have moved, before the ack: extra state, the version, sub-collectors."""

    def __init__(self, receiver: Receiver, quiet: bool) -> None:
        self._receiver = weakref.ref(receiver)
        self.quiet = quiet  # errors go to the trainer, not to the caller of the policy

    def move(self, slot: int) -> bool:
        """Do what goes with the tensors of this slot, which have moved already."""
        receiver = self._receiver()
        if receiver is None:
            return False
        try:
            try:
                self.set_extra_state(slot)
                if receiver.cascade is not None:
                    receiver.cascade(receiver._subscriber.arena.weights(slot))
            finally:
                version = receiver._subscriber.held_version
                receiver.clock.moved(version - receiver._counted)
                receiver._counted = version
        except Exception as error:
            if not self.quiet:
                raise
            receiver._connection.report(error)  # before the trainer sees the ack
        return True

    def set_extra_state(self, slot: int) -> None:
        """Give the module, and the modules in it, their extra state of this slot."""
        receiver = self._receiver()
        module = None if receiver is None or receiver._module is None else receiver._module()
        if receiver is not None and module is not None and receiver._has_extra:
            extra_state.set_states(module, receiver._subscriber.arena.views(slot)[extra_state.KEY])


def _leave(connection: WorkerConnection) -> None:
    ConnectionListener.here().remove(connection.fd)
    connection.close()
