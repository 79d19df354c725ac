"""The subscriber: one of many readers of an arena."""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Callable
from multiprocessing import util
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from . import _native, _segment, _slab
from ._process import Peers, me, pid_of
from .arena import Arena
from .binding import Binding, bind_module
from .errors import (
    ArenaCorrupt,
    ClosedError,
    Poisoned,
    ProtocolError,
    PublishTimeout,
    ReaderTableFull,
    WriterBusy,
    WriterDied,
)
from .manifest import Manifest, fingerprint
from .stats import Samples, SubscriberStats

if TYPE_CHECKING:
    from .publisher import Handle

Consistency = Literal["pinned", "optimistic", "live"]
T = TypeVar("T")

_CONSISTENCIES: dict[str, int] = {"pinned": 0, "optimistic": 1, "live": 2}
_SAME, _MOVED, _GATED, _POISONED, _EVICTED = range(5)  # Enter in native/include/shmsync/read_side.hpp
_CLOSED = 1  # State in layout.hpp
_SLICE_NS = 50_000_000
_TEARS_BEFORE_PIN = 3


class Snapshot(NamedTuple):
    """A private, consistent copy."""

    weights: TensorDictBase
    version: int


class Subscriber(_native.Reader):
    """Reads the weights of one arena, zero-copy.

    Args:
        handle_or_name: `pub.handle`, or the arena's name.
        consistency: "pinned": what a section sees does not change while it lasts. "optimistic": sections never hold
            the publisher up, and say afterwards if they were torn; run() repeats. "live": plain shared memory.
        worker: an index by which the publisher names this subscriber.
        timeout: default for this subscriber's waits, in seconds; math.inf waits for ever.

    Raises:
        ArenaNotFound, ArenaCorrupt, WriterDied, ReaderTableFull; WriterBusy when an in-place update takes too long.

    Sections nest. The outermost one of a thread keeps the other threads out, so use one Subscriber per thread that
    reads in parallel. A context manager.
    """

    def __init__(
        self,
        handle_or_name: Handle | str,
        *,
        consistency: Consistency = "pinned",
        worker: int | None = None,
        timeout: float = 10.0,
    ) -> None:
        if consistency not in _CONSISTENCIES:
            raise ValueError(f"consistency is one of {', '.join(_CONSISTENCIES)}, not {consistency!r}")
        if worker is not None and not 0 <= worker < 1 << 31:
            raise ValueError(f"worker is an index from 0 to 2**31 - 1, not {worker}")
        if not timeout >= 0 or math.isnan(timeout):
            raise ValueError(f"timeout must be 0 or more seconds, not {timeout}")
        name, session = (handle_or_name, None) if isinstance(handle_or_name, str) else handle_or_name
        control, identity = _segment.attach(name, session, time.monotonic() + timeout)
        text = control.manifest()
        if fingerprint(text) != identity["fingerprint"]:
            raise ArenaCorrupt(
                f"the manifest of arena {name!r} has fingerprint {fingerprint(text):#x} but its header says "
                f"{identity['fingerprint']:#x}; attach again"
            )
        manifest = Manifest.from_json(text, identity["slot_bytes"])
        if manifest.slot_bytes != identity["slot_bytes"]:
            raise ArenaCorrupt(f"slots of arena {name!r} are {identity['slot_bytes']} bytes, not {manifest.slot_bytes}")
        size = _slab.slab_bytes(identity["slots"], identity["slot_bytes"])
        slab = _slab.attach(identity["owner"], identity["slab_fd"], identity["slab_inode"], size, identity["session"])
        self._name = name
        self._session: bytes = identity["session"]
        self._writer_owner: int = identity["owner"]
        self._timeout = timeout
        self._arena = Arena(control, slab, manifest, slots=identity["slots"], session=identity["session"])
        self._peers = Peers()
        owner = me().owner
        row = _claim(control, self._peers, owner, -1 if worker is None else worker, name)
        super().__init__(control, row, owner, _CONSISTENCIES[consistency])
        begin = slab.readonly.data_ptr()
        self._set_slab(begin, begin + size)
        self._consistency = consistency
        self._bindings: list[Binding] = []
        self._version = 0
        self._slot = 0
        self._moves = 0
        self._waits = Samples()
        self._generation = _native.fork_generation()
        release = _Release(control, row, owner, self._peers)
        self._finalizer = util.Finalize(self, release, exitpriority=30)
        self._arena.reader = weakref.ref(self)
        try:
            self._first_version()
        except BaseException:
            self.close()
            raise

    def _first_version(self) -> None:
        """Apply what is there. A poisoned or closed gate is no reason not to attach: the next section will tell."""
        try:
            self._refresh_slow()
        except Poisoned:
            pass

    @property
    def name(self) -> str:
        """The arena's name."""
        return self._name

    @property
    def weights(self) -> TensorDictBase:
        """The weights of the applied version, zero-copy, read-only; protected only inside a section."""
        return self._arena.weights(self._slot)

    @property
    def version(self) -> int:
        """The applied version."""
        return self._version

    @property
    def latest(self) -> int:
        """The published version."""
        return self._latest

    @property
    def lag(self) -> int:
        """Published versions not applied yet."""
        return max(0, self._latest - self._version)

    def bind(
        self,
        module: nn.Module,
        *,
        guard: bool = True,
        buffers: Literal["copy", "view"] = "copy",
        clone_outputs: bool = True,
    ) -> nn.Module:
        """Let the module's parameters be the arena's, from now on, and return it.

        Its Parameter objects keep their identity; their data become views, which move with the version.

        Args:
            guard: wrap the module's forward in a read section, so that each call uses one version.
            buffers: "copy": private copies, refreshed with each version, so that forward passes may write them;
                "view": zero-copy and read-only.
            clone_outputs: outputs of a guarded forward that are views of the weights are cloned, so that they do not
                change with the next version.

        An optimistic subscriber repeats a torn forward, with all that it does besides (random numbers, buffers).

        Raises:
            ManifestMismatch: module and arena differ; nothing was changed. ProtocolError: it cannot be bound.
        """
        self._check()
        with self._exclusive():
            binding = bind_module(self, self._arena, module, guard=guard, buffers=buffers, clone_outputs=clone_outputs)
            if self._version:
                with self.read():
                    binding.move(self._held & 0x7F)
            self._bindings.append(binding)
        return module

    def run(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """fn(*args, **kwargs) computed on untorn weights, in one section.

        With consistency="optimistic" it is called again when its section was torn, and the fourth time under a pin;
        so it must not mind being repeated. An exception from a torn call is not the caller's: it is repeated too. With
        "live" nothing is promised.
        """
        if self._consistency != "optimistic" or self._mine:
            with self.read():
                return fn(*args, **kwargs)
        for _ in range(_TEARS_BEFORE_PIN):
            section = self.read()
            try:
                with section:
                    result = fn(*args, **kwargs)
            except Exception:
                if not section.torn:
                    raise
            else:
                if not section.torn:
                    return result
            self._count_retry()
        return self._pinned(fn, args, kwargs)

    def _pinned(self, fn: Callable[..., T], args: Any, kwargs: Any) -> T:
        with self._exclusive(), self.read(timeout=_Pinned(self._timeout)):
            return fn(*args, **kwargs)

    def snapshot(self, out: TensorDictBase | None = None) -> Snapshot:
        """A private copy of one version, by default into new memory, else into `out` (same keys, shapes, dtypes)."""
        if out is None:
            tensors = {leaf.name: torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in self._arena.manifest.leaves}
            targets = {leaf.key: tensors[leaf.name] for leaf in self._arena.manifest.leaves}
            out = _nested(targets)
        for leaf in self._arena.manifest.leaves:
            target = out.get(leaf.key)
            if target is None or target.shape != leaf.shape or target.dtype != leaf.dtype:
                raise ValueError(
                    f"{leaf.name} is {leaf.dtype} {leaf.shape} in the arena but "
                    f"{None if target is None else (target.dtype, tuple(target.shape))} in out; nothing was written"
                )
        pairs = [(out.get(leaf.key), leaf) for leaf in self._arena.manifest.leaves]
        plain = all(target.is_contiguous() and target.device.type == "cpu" for target, _ in pairs)
        version = 0

        def copy() -> None:
            nonlocal version
            slot = self._held & 0x7F
            version = self._held >> 8
            views = self._arena.views(slot)
            if plain:
                _native.copy([(t.data_ptr(), views[leaf.key].data_ptr(), leaf.nbytes) for t, leaf in pairs])
            else:
                for target, leaf in pairs:
                    target.copy_(views[leaf.key])

        self.run(copy)
        return Snapshot(out, version)

    def wait_version(self, version: int, timeout: float | None = None) -> int:
        """Wait until `version` or a later one is published; returns the published one. Applies nothing.

        Raises PublishTimeout, WriterDied, ClosedError; ProtocolError inside a section with slots = 1, where the
        publisher would wait for this process in turn.
        """
        self._check()
        if self._arena.slots == 1 and self._mine and self._consistency == "pinned" and self._latest < version:
            raise ProtocolError(
                "wait_version() inside a read section with slots=1 would wait for a publisher that waits for it; "
                "leave the section first, or use more slots",
                version=version,
            )
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        while True:
            remaining = int(max(0.0, min(deadline - time.monotonic(), 1.0)) * 1e9)
            if self._wait_version(version, min(remaining, _SLICE_NS)):
                return self._latest
            if self._state == _CLOSED:
                if self._latest >= version:
                    return self._latest
                raise ClosedError(
                    f"arena {self._name!r} was closed at version {self._latest}; version {version} will not come",
                    version=version,
                )
            if not self._peers.alive(self._writer_owner):
                last = max(self._latest, self._last_words if self._arena.slots == 1 else 0)
                if last >= version:
                    return last
                raise self._writer_died(version)
            if time.monotonic() >= deadline:
                raise PublishTimeout(
                    f"version {version} was not published in time, the newest is {self._latest}; is the trainer "
                    "slow or stuck?",
                    version=version,
                )

    def stats(self) -> SubscriberStats:
        """Counts since this subscriber was attached."""
        reads, torn, retries = self._counts
        return SubscriberStats(
            self._version, self._latest, self.lag, reads, torn, retries, self._moves, self._waits.latency()
        )

    def close(self) -> None:
        """Give the row back. Tensors and bound modules keep their mapping, but nothing protects them any more."""
        if self._closed:
            return
        if self._in_parent:  # forked: the row is the parent's
            self._closed = True
            return
        if self._mine:
            raise ProtocolError("close() inside a read section of this Subscriber; leave the section first")
        self._lock_slow(None)
        self._closed = True
        self._bindings.clear()
        self._finalizer()
        self._unlock()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_finalizer", None) is not None and not self._closed and not self._in_parent:
            warnings.warn(f"Subscriber of {self._name!r} was not closed", ResourceWarning, stacklevel=2)

    def __reduce__(self) -> Any:
        raise TypeError("a Subscriber cannot be pickled; pass the Publisher's handle and attach in the other process")

    # Hooks of the native Reader: everything that is not the common case.

    def _exclusive(self) -> _Exclusive:
        return _Exclusive(self)

    def _lock_slow(self, timeout: float | None) -> None:
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        while not self._lock_for(max(0.0, min(0.05, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise WriterBusy(
                    "another thread kept this Subscriber in a read section; make one Subscriber per thread that reads "
                    "in parallel"
                )

    def _enter_slow(self, outcome: int, version: int | None, timeout: float | None) -> None:
        """Enter, or raise with nothing entered. Called with the lock held."""
        started = time.perf_counter()
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        pinned = isinstance(timeout, _Pinned)
        if version is not None:
            self.wait_version(version, max(0.0, deadline - time.monotonic()))
        if version is not None or pinned:
            outcome = self._leave_if_entered(outcome, pinned)
        waited = False
        while outcome not in (_SAME, _MOVED):
            waited = True
            outcome = self._try_again(outcome, deadline, pinned)
        try:
            if version is not None and self._held >> 8 != version:
                raise ProtocolError(
                    f"version {version} is gone, the arena is at {self._held >> 8}; read without version=, or make the "
                    "publisher wait for acks",
                    version=version,
                )
            if outcome == _MOVED:
                self._move()
        except BaseException:
            self._abandon()
            raise
        if waited:
            self._waits.add(time.perf_counter() - started)

    def _leave_if_entered(self, outcome: int, pinned: bool) -> int:
        """Start over with a pin; the native side may have entered in its own mode already."""
        if outcome in (_SAME, _MOVED):
            self._abandon()
        return self._try_enter(pinned)

    def _try_again(self, outcome: int, deadline: float, pinned: bool) -> int:
        if outcome == _POISONED:
            raise Poisoned(
                f"the publisher of arena {self._name!r} failed in the middle of version {self._latest + 1}; it has to "
                "publish() all weights again",
                version=self._latest + 1,
            )
        if outcome == _EVICTED:
            raise ProtocolError(
                f"this subscriber's row in arena {self._name!r} was taken away because it held garbage; attach again, "
                "and look for what writes beyond its memory"
            )
        # Death first, then the state, which nobody changes any more.
        if not self._peers.alive(self._writer_owner):
            outcome = self._enter_final()
            if outcome == _POISONED:
                raise Poisoned(
                    f"the publisher of arena {self._name!r} (pid {pid_of(self._writer_owner)}) died in the middle of "
                    f"version {self._latest + 1}, so the weights are half written; restart it",
                    version=self._latest + 1,
                )
            return outcome
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise WriterBusy(
                f"the publisher of arena {self._name!r} kept readers out until the deadline; make its update() "
                "sections shorter, use slots=2, or give more time",
                version=self._latest,
            )
        self._wait(min(_SLICE_NS, int(min(remaining, 1.0) * 1e9)))
        return self._try_enter(pinned)

    def _move(self) -> None:
        """Make everything that shows the weights show the version that is held, then ack."""
        slot = self._held & 0x7F
        for binding in [b for b in self._bindings if not b.move(slot)]:
            self._bindings.remove(binding)  # its module is gone
        self._slot = slot
        self._version = self._held >> 8
        self._moves += 1
        self._applied()

    def _refresh_slow(self) -> bool:
        with self._exclusive():
            if self._depth > 0:
                return False
            before = self._version
            outcome = self._try_enter(False)
            if outcome != _SAME:
                self._enter_slow(outcome, None, None)
            while self._abandon() and self._consistency == "optimistic":  # torn while buffers were copied
                self._forget()
                self._enter_slow(_GATED, None, _Pinned(self._timeout))
            return self._version != before

    def _writer_died(self, version: int) -> WriterDied:
        return WriterDied(
            f"the publisher of arena {self._name!r} (pid {pid_of(self._writer_owner)}) died; the newest version is "
            f"{self._latest}. Restart it and attach to the new arena",
            version=version,
        )


class _Pinned(float):
    """A timeout that also asks for a pinned section, whatever the subscriber's consistency."""


class _Exclusive:
    """Holds the subscriber's re-entrant lock."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber

    def __enter__(self) -> None:
        self._subscriber._check()
        self._subscriber._lock_slow(None)

    def __exit__(self, *_: object) -> None:
        self._subscriber._unlock()


class _Release:
    """Gives a row back; holds what it needs, not the subscriber, so that it can run after it."""

    def __init__(self, control: _native.Control, row: int, owner: int, peers: Peers) -> None:
        self._control, self._row, self._owner, self._peers = control, row, owner, peers

    def __call__(self) -> None:
        self._control.reap(self._row, self._owner, self._owner)  # ours: CAS from us to us, clear, free
        self._peers.close()


def _claim(control: _native.Control, peers: Peers, owner: int, worker: int, name: str) -> int:
    row = control.claim(owner, worker)
    if row is not None:
        return row
    for candidate, holder in control.owners():
        if not peers.alive(holder) and control.take_over(candidate, holder, owner, worker):
            return candidate
    count = len(control.owners())
    raise ReaderTableFull(
        f"arena {name!r} has {count} live subscribers, as many as its max_readers; raise max_readers= in the Publisher"
    )


def _nested(tensors: dict[tuple[str, ...], torch.Tensor]) -> TensorDict:
    result = TensorDict({}, batch_size=[])
    for key, tensor in tensors.items():
        result[key] = tensor
    return result


def attach(
    handle_or_name: Handle | str,
    *,
    consistency: Consistency = "pinned",
    worker: int | None = None,
    timeout: float = 10.0,
) -> Subscriber:
    """The same as Subscriber(...)."""
    return Subscriber(handle_or_name, consistency=consistency, worker=worker, timeout=timeout)


__all__ = ["Consistency", "Snapshot", "Subscriber", "attach"]
