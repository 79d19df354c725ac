"""Where a worker's policy may change: between two forwards, and never while one runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .... import _native
from ....engine.bind.binding import Binding
from ....engine.bind.guard import CALL, Cover, Guard, Proxy
from ....engine.bind.guarded_methods import GuardedCall, calls_of
from ....engine.read.reading import ReadPath
from ....errors import ProtocolError, ShmSyncError
from .clock import VersionClock


class ModelLock(_native.ModelLock):
    """A re-entrant lock for one model: calls of it in a worker and moves of its weights exclude each other.

    The listening thread does not wait for the lock: it defers its work.
    """

    _deferred: Callable[[], Any] | None = None

    def defer(self, work: Callable[[], Any] | None) -> None:
        """Let the thread that holds the lock do this when it releases it, in place of what was left before."""
        self._deferred = work
        self.has_work = work is not None  # last: then there is something to do

    def _ring(self) -> None:
        """Called by the native half when the lock is released and work is left to do."""
        work = self._deferred
        if work is not None:
            work()


class SafePoint(Cover):
    """Covers a policy's calls: each is one read section of the arena that the policy is bound to now.

    It also takes the lock, which keeps out the thread that moves an idle policy. When the policy is bound to another
    arena it stays, so that a call that is just entering finds the new one. All of that is native, like other covers.
    """

    def __init__(self, module: nn.Module, model_lock: ModelLock, clock: VersionClock) -> None:
        super().__init__(module)
        self.gradients_checked = True  # gradients are the collector's choice, and no reason for a warning
        self.model_lock = model_lock
        self.clock = clock
        try:
            calls = calls_of(module, True)
        except ProtocolError:  # a method that cannot be guarded; collectors call the policy itself
            calls = [GuardedCall(module, CALL), GuardedCall(module, "forward")]
        self._installed = [Guard(each.module, each.method, self) for each in calls]
        own = [guard for guard in self._installed if guard.module is module]
        forwards = [id(guard.entered) for guard in own if guard.method in ("forward", CALL)]
        self.set_model_lock(model_lock, clock.flight, forwards)

    def use(self, subscriber: ReadPath) -> None:
        """Make sections of this subscriber's arena from now on. Call it under the lock."""
        self.enter(subscriber, clones=True)

    def remove(self) -> None:
        """Give the module its own methods back. Call it under the lock."""
        self.enter(None, clones=False)
        for guard in self._installed:
            guard.remove()

    def _begin(self, args: tuple[Any, ...]) -> None:
        """Called by the native half before a forward, in its section, when the clock is due."""
        self.clock.forward_begins(args)


class StatePoint(Proxy):
    """Replaces a policy's `state_dict()`: a private copy of one version."""

    def __init__(self, module: nn.Module, policy: SafePoint) -> None:
        self._policy = policy
        super().__init__(module, "state_dict")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state_dict(), taken in a section."""
        with self._policy.model_lock:
            if self._policy.path is None:
                return self.inner(*args, **kwargs)
            with self._policy.path.read():
                state = self.inner(*args, **kwargs)
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):  # else keep_vars=True
                        state[key] = value.clone()
                return state


class LoadPoint(Proxy):
    """Replaces the part of `load_state_dict()` that writes a module's own parameters.

    Bound parameters are shared and read-only, so they become private before they are written.
    """

    def __init__(self, module: nn.Module, policy: SafePoint) -> None:
        self._policy = policy
        super().__init__(module, "_load_from_state_dict")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the parameters private, and load them, under the lock."""
        with self._policy.model_lock:
            self._policy.clock.flight.due = True  # a collector's state has a version too
            if self._policy.path is not None:
                release_bound(self._policy.path, {self.module})
            return self.inner(*args, **kwargs)


def release_bound(subscriber: ReadPath, owners: set[nn.Module] | None = None) -> None:
    """Let bound parameters (of these modules only) be private, until the next version."""
    bindings = [each for each in subscriber.followers if isinstance(each, Binding)]
    if not bindings:
        return  # a section would apply a version that no module shows
    with subscriber.hold_lock():
        try:
            with subscriber.read():
                for binding in bindings:
                    binding.release(owners)
        except ShmSyncError:  # the trainer died while it wrote, so these bytes do not change any more
            for binding in bindings:
                binding.release(owners)
