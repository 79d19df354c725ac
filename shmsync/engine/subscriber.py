"""The subscriber: one of many readers of an arena."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from multiprocessing import util
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from .. import _native
from ..errors import ClosedError, Poisoned, ProtocolError
from ..memory import attaching
from ..memory.process import Peers
from ..memory.segment import Handle
from .binding import bind_module
from .reading import Pinned, ReadPath
from .stats import SubscriberStats
from .timing import check_timeout, check_version, check_worker, deadline_after

Consistency = Literal["pinned", "optimistic", "live"]
T = TypeVar("T")

_CONSISTENCIES: dict[str, int] = {"pinned": 0, "optimistic": 1, "live": 2}
_TEARS_BEFORE_PIN = 3


class Snapshot(NamedTuple):
    """A private, consistent copy."""

    weights: TensorDictBase
    version: int


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
            self._arena.reader = weakref.ref(self)
            self._first_version()
        except BaseException:
            release()
            raise

    def _first_version(self) -> None:
        """Apply what is there. A poisoned or closed gate is no reason not to attach: the next section will tell."""
        try:
            self.refresh()
        except Poisoned:
            pass

    @property
    def name(self) -> str:
        """The arena's name."""
        return self._name

    @property
    def weights(self) -> TensorDictBase:
        """The weights of the applied version, zero-copy, read-only; protected only inside a section."""
        self._check()
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
        with self._exclusive():
            self._forget()  # so that entering takes the slow path, which knows about Pinned
            with self.read(timeout=Pinned(self._timeout)):
                return fn(*args, **kwargs)

    def snapshot(self, out: TensorDictBase | None = None) -> Snapshot:
        """A private copy of one version, by default into new memory, else into `out` (same keys, shapes, dtypes).

        With "live" it is whatever was there, perhaps of two versions. Raises ValueError for an `out` that does not fit,
        before anything is written; otherwise as read().
        """
        if out is None:
            tensors = {leaf.name: torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in self._arena.manifest.leaves}
            targets = {leaf.key: tensors[leaf.name] for leaf in self._arena.manifest.leaves}
            out = _nested(targets)
        for leaf in self._arena.manifest.leaves:
            target = out.get(leaf.key)
            if target is not None and self._arena.overlaps(target):
                raise ValueError(
                    f"{leaf.name} of out lies in the arena itself; nothing was written, pass memory of yours"
                )
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
        if self._arena.slots == 1 and self._mine_and_pinned and self._latest < version:
            raise ProtocolError(
                "wait_version() inside a read section with slots=1 would wait for a publisher that waits for it; "
                "leave the section first, or use more slots",
                version=version,
            )
        return self._wait_for(check_version(version), deadline_after(timeout, self._timeout))

    def stats(self) -> SubscriberStats:
        """Counts since this subscriber was attached."""
        reads, torn, retries = self._counts
        return SubscriberStats(
            self._version, self._latest, self.lag, reads, torn, retries, self._moves, self._waits.latency()
        )

    def close(self) -> None:
        """Give the row back. Tensors of the arena stay readable, but nothing protects them any more; a module that was
        bound with a guard raises ClosedError when it is called. Bind it to another arena, or deepcopy() it."""
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
                    self._bindings.clear()
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
        state = "closed" if self._closed else f"version {self._version} of {self._latest}"
        return f"<shmsync.Subscriber of {self._name!r}, {state}, {self._consistency}>"

    def __del__(self) -> None:
        if getattr(self, "_finalizer", None) is not None and not self._closed and not self._in_parent:
            warnings.warn(f"Subscriber of {self._name!r} was not closed", ResourceWarning, stacklevel=2)

    def __reduce__(self) -> Any:
        raise TypeError("a Subscriber cannot be pickled; pass the Publisher's handle and attach in the other process")


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
