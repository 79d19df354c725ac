"""The worker's side of one model: a module bound to an arena, which moves to new versions between two forwards.

A forward, and each public method of a policy, is one read section (engine/bind/guard.py), and applies the newest
version itself, at its entry. A thread waits on the arena, and applies what comes while no forward begins, so that the
trainer gets its ack.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

from torch import nn
from torchrl._utils import WEIGHT_SYNC_TIMEOUT
from torchrl.collectors import BaseCollector

from ...engine.bind.binding import Binding, bindable
from ...engine.bind.guard import Proxy, bind
from ...engine.bind.guarded_methods import CALL, GuardedCall, calls_of
from ...engine.deadlines import SLICE
from ...engine.pickling import copy_by_value
from ...engine.read.reading import ReadPath
from ...engine.subscriber import open_reader
from ...errors import ProtocolError, ShmSyncError
from ...schemes.devices import lies_elsewhere
from ...schemes.strategy import WeightStrategy
from . import extra_state
from .failures import reach, report
from .frames import FIRST, FrameStamp


class Receiver:
    """Receives the weights of one model in a worker.

    Args:
        address: of the trainer's socket for failures.
        name: of the arena, which may not be made yet.
        worker: this worker's index.
        model: bound to the arena; None: nothing is.

    Locks are taken in this order: an inference server's, and the reader's, which a forward holds, and which is held
    around moves to another module.
    """

    def __init__(self, address: str, name: str, worker: int, model: nn.Module | None) -> None:
        self._module: weakref.ref[nn.Module] | None = None
        self._loads: list[_Load] = []
        self._server_lock: AbstractContextManager[Any] = nullcontext()
        self._hears: Callable[[], Any] = lambda: None  # the method that is told of new weights
        self._hears_each = False  # a server's: once for each version, those included that this worker never used
        self._counted = FIRST
        self._report = functools.partial(report, address, worker)
        reach(address, worker).close()  # or raise: the arena of a trainer that is gone would be waited for
        copy_by_value()
        # It applies nothing before it is told to: its first ack is to mean that the module shows it.
        self._reader = open_reader(name, "pinned", worker, WEIGHT_SYNC_TIMEOUT, False)
        # Sections wait for a trainer that waits, perhaps for another worker's forward. Its death ends the wait.
        self._reader.timeout = math.inf
        reference = weakref.ref(self)

        def applied(version: int) -> None:
            if (receiver := reference()) is not None:
                receiver._applied(version)

        self._reader.on_version(applied)  # in the first section of each version, in any thread, before the ack
        try:
            if model is not None:
                self.bind(model)
            self._reader.refresh()
        except BaseException:
            self._reader.close()
            raise
        self._seen = self._reader.applied_version  # at the last receive()

    @property
    def weights(self) -> Any:
        """The newest weights as a TensorDict, zero-copy; they change with the next version."""
        return extra_state.without(self._reader.weights)

    @property
    def module(self) -> nn.Module | None:
        """The bound module, while it lives."""
        return None if self._module is None else self._module()

    def bind(self, module: nn.Module) -> None:
        """Bind this module in place of the one before, which keeps what it has. A wrapper of that one changes nothing.

        Raises ManifestMismatch and ProtocolError as Subscriber.bind() does, with nothing changed.
        """
        if self.module is not None and bindable(self.module) is bindable(module):
            return
        with self._reader.hold_lock():
            _bind(self._reader, module)
            self._unbind()
            self._module = weakref.ref(module)
            self._loads = [_Load(owner, self) for each in self.bindings() for owner in each.owners()]
            with self._reader.read() as section:  # the state is that of one version too
                extra_state.set_states(module, section.weights)
            self._reader.forget_used_version()  # which is that of a forward

    def tell(self, context: Any, model_id: str) -> None:
        """Let the context know of new weights; None: nothing is to know of them.

        A leaf collector has its policy_version kept right, a collector of collectors passes the weights on, and any
        other, such as an InferenceServer, has its update_policy_weights_() called once for each version.
        """
        server = not isinstance(context, BaseCollector) and hasattr(context, "update_policy_weights_")
        if server or getattr(context, "_weight_sync_schemes", None):
            self._hears, self._model_id = weakref.WeakMethod(context.update_policy_weights_), model_id
            self._hears_each = server
            # A server has this lock from a forward until it has stamped the output.
            self._server_lock = getattr(context, "_model_lock", nullcontext())
        elif model_id == "policy" and getattr(context, "policy_version_tracker", None) is not None:
            FrameStamp(context, self._reader)

    def receive(self, timeout: float | None) -> Any:
        """Move to a newer version. Waits `timeout` seconds for one; None: without limit.

        Returns the weights, if their version is another one than at the last call, whichever thread has applied it.
        """
        if timeout != 0.0 and self._reader.applied_version == self._seen:
            with suppress(TimeoutError):
                self._reader.wait_version(self._seen + 1, math.inf if timeout is None else timeout)
        self._reader.refresh()
        seen, self._seen = self._seen, self._reader.applied_version
        return None if seen == self._seen else self.weights

    def apply_each_until(self, stop: threading.Event) -> None:
        """Move to each version, until `stop` or the trainer's end; then the module goes on with what it has."""
        reader = self._reader
        while not stop.is_set():
            try:
                if reader.wait_version_slice(reader.applied_version + 1, int(SLICE * 1e9)):
                    with self._server_lock:
                        reader.refresh()
            except Exception as error:
                if not stop.is_set():
                    self._report(error)
                    stop.wait(SLICE)
            if reader.gone:
                return

    def load_private(self, weights: Any) -> None:
        """Give the module private weights, until the next version. Raises as WeightStrategy.apply_weights()."""
        if (module := self.module) is not None:
            with self._reader.hold_lock():
                self.release()
                WeightStrategy().apply_weights(module, weights)

    def close(self) -> None:
        """Leave: the module keeps the weights that it has, as its own. Idempotent."""
        self._unbind()
        self._reader.close()

    def _applied(self, version: int) -> None:
        updates, self._counted = version - self._counted, version
        try:
            if (module := self.module) is not None:
                extra_state.set_states(module, self._reader.weights)
            for _ in range(updates if self._hears_each else 1):
                if (update := self._hears()) is not None:
                    update(model_id=self._model_id, policy_or_weights=self.weights if module is None else module)
        except Exception as error:  # for the trainer, which gets it before the ack, not for the caller of the policy
            self._report(error)

    # ---- the bound module

    def bindings(self) -> list[Binding]:
        """What moves the tensors of the module."""
        module = self.module
        if module is None:
            return []
        bound = bindable(module)
        return [each for each in self._reader.followers if isinstance(each, Binding) and each.is_of(bound)]

    def release(self, owners: set[nn.Module] | None = None) -> None:
        """Let bound parameters (of these submodules only) be private until the next version."""
        with suppress(ShmSyncError), self._reader.hold_lock(), ExitStack() as section:
            with suppress(ShmSyncError):  # the trainer died while it wrote, so these bytes do not change any more
                section.enter_context(self._reader.read())
            for binding in self.bindings():
                binding.release(owners)

    def _unbind(self) -> None:
        """Give the module its own weights and methods back."""
        self.release()
        for load in self._loads:
            load.remove()
        if (module := self.module) is not None:
            for cover in [cover for cover in self._reader.covers if cover.is_of(module)]:
                cover.enter(None, clones=False)  # its guards call what they replace
        for binding in self.bindings():
            binding.follow(False)
        self._module, self._loads = None, []


def _bind(reader: ReadPath, module: nn.Module) -> None:
    try:
        calls = calls_of(module)
    except ProtocolError:  # a method cannot be guarded; collectors call the policy itself
        calls = [GuardedCall(module, CALL), GuardedCall(module, "forward")]
    bind(reader, module, calls, copies=lies_elsewhere(module, reader.arena.torch_device), absent=[extra_state.KEY])
    for cover in reader.covers:
        if cover.is_of(module):
            cover.gradients_checked = True  # gradients are the collector's choice, and no reason for a warning


class _Load(Proxy):
    """Replaces the part of `load_state_dict()` that writes a module's own parameters.

    Bound parameters are shared and read-only, so they become private before they are written.
    """

    def __init__(self, module: nn.Module, receiver: Receiver) -> None:
        self._receiver = weakref.ref(receiver)
        super().__init__(module, "_load_from_state_dict")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the parameters private, and load them."""
        receiver = self._receiver()
        if receiver is None:
            return self.inner(*args, **kwargs)
        with receiver._reader.hold_lock():
            receiver.release({self.module})
            bindings = receiver.bindings()
            for binding in bindings:
                binding.follow(False)  # for the moment: the engine refuses to load into what is bound
            try:
                return self.inner(*args, **kwargs)
            finally:
                for binding in bindings:
                    binding.follow(True)
