"""Where a worker's policy may change: between two forwards, and never while one runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._dynamo.decorators import skip

from ....engine.binding import Binding
from ....engine.guard import StandIn, call
from ....engine.outputs import unalias
from ....engine.subscriber import Subscriber
from ....errors import ShmSyncError
from .clock import VersionClock


class Turn:
    """A re-entrant lock for one model in a worker: those who call the model and those who move its weights take turns.

    The listening thread does not wait for its turn. It leaves its work in `rang`, and the thread that has the turn does
    that work when its turn ends.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self.rang: Callable[[], Any] | None = None

    @skip
    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def try_enter(self) -> bool:
        """Enter if nobody else has the turn."""
        if not self._lock.acquire(blocking=False):
            return False
        self._depth += 1
        return True

    @skip
    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        outermost = self._depth == 0
        self._lock.release()
        if outermost and self.rang is not None:
            self.rang()


class SafePoint(StandIn):
    """Stands in for a policy's `forward`: each call is one read section of the arena that the policy is bound to now.

    It also takes the turn, which keeps out the thread that moves an idle policy. Unlike the Guard of Subscriber.bind()
    it stays when the policy is bound to another arena, so that a forward that is just entering finds the new one.
    """

    def __init__(self, module: nn.Module, turn: Turn, clock: VersionClock) -> None:
        self.turn = turn
        self._clock = clock
        self._subscriber: Subscriber | None = None
        super().__init__(module, "forward")

    def use(self, subscriber: Subscriber, binding: Binding) -> None:
        """Make sections of this subscriber's arena from now on. Call it in a turn."""
        self._section = subscriber.read()
        # Private copies (buffers, and all that is not in CPU memory) change in place, as the slab does.
        copies = {tensor.untyped_storage().data_ptr() for _, tensor in binding.copied}
        in_slab = subscriber._aliases
        self._aliases: Callable[[Any], bool] = in_slab
        if copies:
            self._aliases = lambda tensor: in_slab(tensor) or tensor.untyped_storage().data_ptr() in copies
        self._subscriber = subscriber

    def remove(self) -> None:
        """Give the module its own forward back. Call it in a turn."""
        self._subscriber = None
        super().remove()

    @skip  # as Guard's: Dynamo compiles the module's own forward below, not this frame
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, inside a section."""
        if self._subscriber is None:
            return self.inner(*args, **kwargs)
        with self.turn:
            if self._subscriber is None:  # removed meanwhile
                return self.inner(*args, **kwargs)
            with self._section:
                self._clock.forward_begins(args)
                return unalias(call(self.inner, *args, **kwargs), self._aliases)


class StatePoint(StandIn):
    """Stands in for a policy's `state_dict()`: a private copy of one version."""

    def __init__(self, module: nn.Module, policy: SafePoint) -> None:
        self._policy = policy
        super().__init__(module, "state_dict")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state_dict(), taken in a section."""
        with self._policy.turn:
            if self._policy._subscriber is None:
                return self.inner(*args, **kwargs)
            with self._policy._section:
                state = self.inner(*args, **kwargs)
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):  # else keep_vars=True
                        state[key] = value.clone()
                return state


class LoadPoint(StandIn):
    """Stands in for the part of `load_state_dict()` that writes a module's own parameters.

    Bound parameters are shared and read-only, so they become private before they are written.
    """

    def __init__(self, module: nn.Module, policy: SafePoint) -> None:
        self._policy = policy
        super().__init__(module, "_load_from_state_dict")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the parameters private, and load them, in a turn."""
        with self._policy.turn:
            if self._policy._subscriber is not None:
                make_private(self._policy._subscriber, {self.module})
            return self.inner(*args, **kwargs)


def make_private(subscriber: Subscriber, owners: set[nn.Module] | None = None) -> None:
    """Let bound parameters (of these modules only) be private, until the next version."""
    bindings = [each for each in subscriber.followers if isinstance(each, Binding)]
    with subscriber._exclusive():
        try:
            section: AbstractContextManager[Any] = subscriber.read()
            with section:
                for binding in bindings:
                    binding.give_back(owners)
        except ShmSyncError:  # the trainer died while it wrote, so these bytes do not change any more
            for binding in bindings:
                binding.give_back(owners)
