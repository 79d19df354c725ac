"""Where a worker's policy may change: between two forwards, and never while one runs.

A forward, and each public method of a policy, is one read section (engine/bind/guard.py). Here is what TorchRL needs
besides: a lock around forwards, a version number in each frame that is that of its weights, and load_state_dict().
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from ... import _native
from ...engine.bind.binding import Binding, ModuleCheck, bindable
from ...engine.bind.guard import CALL, Proxy, bind
from ...engine.bind.guarded_methods import can_be_called
from ...engine.read.reading import ReadPath
from ...errors import ProtocolError, ShmSyncError
from ...schemes.devices import lies_elsewhere
from . import extra_state

_VERSION = "policy_version"


class VersionClock:
    """Keeps the policy_version of one leaf collector true. Does nothing without a tracker (TorchRL's PolicyVersion).

    The tracker stamps a frame after the environment's step with the version that is current then. Weights may be newer
    by that time, when they moved between the forward and the stamp. So the tracker's number moves on only when no frame
    is between the two. A frame's root entry is carried over from the step before, so it is corrected before a forward
    that uses a newer version: in the policy's input, and in the collector's own TensorDict, which is another one when
    devices are given.

    `flight` is set by the native half of the policy's cover: `under_way` when a forward begins. A frame without an
    update before it costs no more than to set that back.
    """

    def __init__(self) -> None:
        self.flight = _native.Flight()  # under_way: a forward has begun whose frame is not stamped; due: see moved()
        self._tracker: Any = None
        self._lock = threading.Lock()
        self._uncounted = 0  # updates that the tracker does not show yet

    def follow(self, collector: Any) -> None:
        """Drive the tracker of this leaf collector, if it has one."""
        tracker: Any = getattr(collector, "policy_version_tracker", None)
        self._collector = weakref.ref(collector)
        if tracker is self._tracker or not hasattr(tracker, "increment_version"):
            return
        self._tracker, self._step = tracker, tracker._step
        self.flight.under_way = False
        tracker._step = self._stamp  # in this worker's own transform
        self.moved(0)

    def moved(self, updates: int) -> None:
        """The weights are that many updates newer. Any thread may call it that has the model's lock, or a section."""
        with self._lock:
            self._uncounted += updates
            if self._tracker is not None:
                self.flight.due = True  # roots that were stamped before are old now
                if not self.flight.under_way:
                    self._settle()

    @torch._dynamo.disable
    def forward_begins(self, inputs: tuple[Any, ...]) -> None:
        """Called by the collecting thread before the policy's forward on these inputs, if it is due."""
        self.flight.due = False
        if self._tracker is not None:
            with self._lock:
                self._settle()
            stamp_roots(self._step, inputs[:1], self._collector())

    def _stamp(self, tensordict: Any, next_tensordict: Any) -> Any:
        result = self._step(tensordict, next_tensordict)
        if tensordict is not None:  # None: a reset, perhaps of some environments, which ends no frame
            self.flight.under_way = False
            if self._uncounted:  # after the flag: moved() looks at it after it has added to this
                with self._lock:
                    self._settle()
        return result

    def _settle(self) -> None:
        for _ in range(self._uncounted):
            self._tracker.increment_version()
        self._uncounted = 0


def stamp_roots(step: Callable[[Any, Any], Any], inputs: tuple[Any, ...], collector: Any) -> None:
    """Let a tracker's step() write its version into the root of a frame: the policy's input and the collector's own."""
    for td in (*inputs, getattr(collector, "_carrier", None)):
        if isinstance(td, TensorDictBase) and _VERSION in td.keys():  # noqa: SIM118  # it iterates over its batch
            step(None, td)


class SafePoint:
    """A module of a worker, bound to an arena. Its calls and its moves exclude each other by the re-entrant `lock`."""

    def __init__(self, module: nn.Module, lock: _native.ModelLock, clock: VersionClock) -> None:
        self._module = weakref.ref(module)
        self.lock, self.clock = lock, clock
        self.reader: ReadPath | None = None
        self._loads: list[LoadPoint] = []

    @property
    def module(self) -> nn.Module | None:
        """The module, while it lives."""
        return self._module()

    def bind(self, reader: ReadPath) -> None:
        """Show the weights of this reader, in place of those shown now. Call it under the lock.

        Raises ManifestMismatch and ProtocolError as Subscriber.bind() does, with nothing changed.
        """
        module = self.module
        if module is None:
            return
        arena, before = reader.arena, self.reader
        beside = [extra_state.KEY] if extra_state.KEY in arena.manifest.by_key else []

        def check() -> ModuleCheck:
            return ModuleCheck(arena, reader.name, copies=lies_elsewhere(module, arena.device), absent=beside)

        try:
            bind(reader, module, can_be_called(module), check(), clones=True, instead_of=before)
        except ProtocolError:  # perhaps a method that cannot be guarded; collectors call the policy itself
            if type(module).forward is nn.Module.forward:
                raise
            bind(reader, module, ["forward"], check(), clones=True, instead_of=before)
        self.reader = reader
        for cover in reader.covers:
            if cover.is_of(module):
                cover.gradients_checked = True  # gradients are the collector's choice, and no reason for a warning
                cover._begin = self.clock.forward_begins  # the native half calls it when the clock is due
                own = [each for each in cover.guards if each.module is module and each.method in ("forward", CALL)]
                cover.set_model_lock(self.lock, self.clock.flight, [id(each.entered) for each in own])
        if not self._loads:
            self._loads = [LoadPoint(owner, self) for each in self.bindings() for owner in each.owners()]

    def bindings(self) -> list[Binding]:
        """What moves the tensors of the module."""
        module = self.module
        if module is None or self.reader is None:
            return []
        bound = bindable(module)
        return [each for each in self.reader.followers if each.is_of(bound)]

    def release(self, owners: set[nn.Module] | None = None) -> None:
        """Let bound parameters (of these submodules only) be private until the next version. Hold the lock."""
        if self.reader is None or self.reader.closed or not self.bindings():
            return
        with self.reader.hold_lock():
            try:
                with self.reader.read():
                    for binding in self.bindings():
                        binding.release(owners)
            except ShmSyncError:  # the trainer died while it wrote, so these bytes do not change any more
                for binding in self.bindings():
                    binding.release(owners)

    def remove(self) -> None:
        """Give the module its own weights and methods back. Hold the lock."""
        self.release()
        for load in self._loads:
            load.remove()
        module = self.module
        for cover in list(self.reader.covers) if self.reader is not None and module is not None else ():
            if cover.is_of(module):
                cover.enter(None, clones=False)  # its guards call what they replace
        for binding in self.bindings():
            binding.follow(False)
        self.reader = None


class LoadPoint(Proxy):
    """Replaces the part of `load_state_dict()` that writes a module's own parameters.

    Bound parameters are shared and read-only, so they become private before they are written.
    """

    def __init__(self, module: nn.Module, point: SafePoint) -> None:
        self._point = point
        super().__init__(module, "_load_from_state_dict")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the parameters private, and load them, under the lock."""
        with self._point.lock:
            self._point.clock.flight.due = True  # a collector's state has a version too
            self._point.release({self.module})
            bindings = self._point.bindings()
            for binding in bindings:
                binding.follow(False)  # for the moment: the engine refuses to load into what is bound
            try:
                return self.inner(*args, **kwargs)
            finally:
                for binding in bindings:
                    binding.follow(True)
