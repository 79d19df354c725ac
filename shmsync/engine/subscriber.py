"""The subscriber: one of many readers of an arena."""

from __future__ import annotations

import warnings
import weakref
from multiprocessing import util
from types import TracebackType
from typing import Any, Literal

from tensordict import TensorDictBase
from torch import nn

from .. import _native
from ..errors import ClosedError, Poisoned, ProtocolError
from ..memory import attaching
from ..memory.process import Peers
from ..memory.segment import Handle
from .binding import bind_module
from .reading import ReadPath
from .snapshot import Snapshot, Targets
from .timing import check_timeout, check_worker

Consistency = Literal["pinned", "optimistic", "live"]

_CONSISTENCIES = {each.name.lower(): each for each in _native.Consistency}


class Subscriber(ReadPath):
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
        if worker is not None:
            worker = check_worker(worker)
        timeout = check_timeout(timeout)
        if not isinstance(handle_or_name, (str, tuple)):
            raise TypeError(f"pass pub.handle or the arena's name, not a {type(handle_or_name).__name__}")
        name, session = (handle_or_name, None) if isinstance(handle_or_name, str) else handle_or_name
        peers = Peers()
        try:
            attached = attaching.attach(name, session, worker, timeout, peers)
        except BaseException:
            peers.close()
            raise
        release = attaching.Release(attached, peers)
        try:
            super().__init__(attached, peers, _CONSISTENCIES[consistency], name, timeout)
            self._consistency = consistency
            self._finalizer = util.Finalize(self, release, exitpriority=30)
            self.arena.reader = weakref.ref(self)
            self.attached()
        except BaseException:
            release()
            raise

    def attached(self) -> None:
        """Apply the published version, at the end of the constructor."""
        try:
            self.refresh()
        except Poisoned:  # attaching works; the next section raises
            pass

    def bind(
        self,
        module: nn.Module,
        *,
        guard: bool = True,
        buffers: Literal["copy", "view"] = "copy",
        clone_outputs: bool = True,
    ) -> nn.Module:
        """Make the module's parameters views of the arena, which move with the version, and return the module.

        Its Parameter objects keep their identity.

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
            self.show(bind_module(self, module, guard=guard, buffers=buffers, clone_outputs=clone_outputs))
        return module

    def snapshot(self, out: TensorDictBase | None = None) -> Snapshot:
        """A private copy of one version, by default into new memory, else into `out` (same keys, shapes, dtypes).

        With "live" it is whatever was there, perhaps of two versions. Raises ValueError for an `out` that does not fit
        (one with expanded, overlapping or lazily conjugated tensors, or in an arena), before anything is written;
        otherwise as read(). Parameters may be in `out`; no gradient is recorded.
        """
        targets = Targets(out, self.arena)
        version = 0

        def copy() -> None:
            nonlocal version
            version = self._held_version
            targets.copy(self._held_slot)

        self.run(copy)
        return Snapshot(targets.out, version)

    def close(self) -> None:
        """Give the row back. Tensors of the arena stay readable, but unprotected. Idempotent.

        A module that was bound with a guard raises ClosedError when called: bind it elsewhere, or deepcopy() it.
        """
        if self._closed:
            return
        if self._in_parent:  # forked: the row is the parent's
            return
        if self._mine:
            raise ProtocolError("close() inside a read section of this Subscriber; leave the section first")
        try:
            with self._exclusive():
                self._retire()
                try:
                    self.followers.clear()
                finally:
                    self._finalizer()
        except ClosedError:
            pass  # another thread was quicker

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"version {self.version} of {self.latest}"
        return f"<shmsync.Subscriber of {self.name!r}, {state}, {self._consistency}>"

    def __del__(self) -> None:
        if getattr(self, "_finalizer", None) is not None and not self._closed and not self._in_parent:
            warnings.warn(f"Subscriber of {self.name!r} was not closed", ResourceWarning, stacklevel=2)

    def __reduce__(self) -> Any:
        raise TypeError("a Subscriber cannot be pickled; pass the Publisher's handle and attach in the other process")


attach = Subscriber  # a verb, for those who prefer one
