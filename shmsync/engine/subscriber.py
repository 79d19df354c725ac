"""The subscriber: one of many readers of an arena."""

from __future__ import annotations

import warnings
import weakref
from contextlib import ExitStack, nullcontext
from multiprocessing import util
from types import TracebackType
from typing import Any, Literal, TypeVar

from tensordict import TensorDictBase
from torch import nn

from .. import _native
from .._native import Enter
from ..errors import ClosedError, Poisoned, ProtocolError, WriterBusy
from ..memory import attaching
from ..memory.control.segment import Handle
from ..memory.system.process import Peers
from .bind.binding import Binding, bind_module, bound_elsewhere, taken_over
from .bind.guarded_methods import GuardNames, calls_of
from .bind.install import guard_calls, withdraw_guards
from .bind.module_check import ModuleCheck, bindable
from .by_value import copy_by_value
from .deadlines import DEFAULT_TIMEOUT, check_worker, deadline_after, timeout_or_default
from .read.device_sections import wait_for_reads
from .read.failover import Successor
from .read.reading import Pinned, ReadPath
from .read.snapshot import Snapshot
from .read.snapshot_cache import SnapshotCache
from .verify.checksums import refuse_without_checksums
from .verify.local import Proof, refuse_succeeded, verify_held

Consistency = Literal["pinned", "optimistic", "live"]

M = TypeVar("M", bound=nn.Module)

_CONSISTENCIES = {each.name.lower(): each for each in _native.Consistency}


def _name_and_session(handle: Handle | str) -> tuple[str, bytes | None]:
    if isinstance(handle, str):
        return handle, None
    if isinstance(handle, tuple) and [type(part) for part in handle] == [str, bytes]:
        return handle[0], handle[1]
    raise TypeError(f"pass pub.handle or the arena's name, not the {type(handle).__name__} {handle!r}")


class Subscriber(ReadPath):
    """Reads the weights of one arena, zero-copy.

    Args:
        handle_or_name: `pub.handle`, or the arena's name.
        consistency: "pinned": what a section sees does not change while it lasts. "optimistic": sections never hold
            the publisher up, and say afterwards if they were torn; run() repeats. "live": plain shared memory.
        worker: an index by which the publisher names this subscriber.
        timeout: default for this subscriber's waits, in seconds; math.inf waits without limit, None is 10.
        follow: when the publisher was closed or died, and another one publishes the same leaves under the same name,
            move to its arena: at the next section (noticed within 50 ms), refresh() or wait_version(). Its versions
            begin again, `session` is another one. An arena with other leaves is ManifestMismatch in refresh() and
            wait_version(); sections warn, and read the old weights on.

    Raises:
        ArenaNotFound: there is none of this name.
        ArenaCorrupt: there is something else.
        WriterDied: its publisher is dead.
        ReaderTableFull: all rows are taken; see Publisher(max_readers=).
        NoSpace: there is no memory, or no descriptor, to map it.
        WriterBusy: an in-place update took too long.

    Sections nest. The outermost one of a thread keeps the other threads out, so use one Subscriber per thread that
    reads in parallel. A context manager.
    """

    def __init__(
        self,
        handle_or_name: Handle | str,
        *,
        consistency: Consistency = "pinned",
        worker: int | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        follow: bool = False,
    ) -> None:
        if not isinstance(consistency, str) or consistency not in _CONSISTENCIES:
            raise ValueError(f"consistency is one of {', '.join(_CONSISTENCIES)}, not {consistency!r}")
        if worker is not None:
            worker = check_worker(worker)
        timeout = timeout_or_default(timeout)
        if not isinstance(follow, bool):
            raise TypeError(f"follow is True or False, not {follow!r}")
        name, session = _name_and_session(handle_or_name)
        peers = Peers()
        try:
            attached = attaching.attach(name, session, worker, timeout, peers)
        except BaseException:
            peers.close()
            raise
        release = attaching.Release(attached, peers)
        try:
            successor = Successor(name, worker, peers) if follow else None
            super().__init__(attached, release, peers, _CONSISTENCIES[consistency], name, timeout, successor)
            self._consistency = consistency
            self._snapshot_cache = SnapshotCache()
            self._finalizer = util.Finalize(self, release, exitpriority=30)
            self.arena.reader = weakref.ref(self)
            copy_by_value()
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
        self._forget_use()  # this thread may leave the weights to others, and look on

    def bind(
        self,
        module: M,
        *,
        guard: GuardNames = True,
        buffers: Literal["copy", "view"] = "copy",
        clone_outputs: bool = True,
    ) -> M:
        """Make the module's parameters views of the arena, which move with the version, and return the module.

        Its Parameter objects keep their identity. With the next version a buffer that was replaced is put back, and a
        parameter that was replaced is ManifestMismatch. Bind one module to several arenas if each has other tensors of
        it; its calls are sections of all.

        Args:
            guard: which calls are read sections, so that each uses one version, the newest. True: each call of the
                module or of a submodule, hooks included, and each public method that its own classes define (not those
                of torch). A list names methods and submodules, as in ["act", "actor.net"]. False: none; put what uses
                the weights in `with sub.read():`.
            buffers: "copy": private copies, refreshed with each version, so that forward passes may write them;
                "view": zero-copy and read-only.
            clone_outputs: outputs of a guarded call that are views of the weights are cloned, so that they do not
                change with the next version.

        An optimistic subscriber repeats a torn call, with its side effects (random numbers, buffers). A
        generator holds its section until it ends, is closed or is collected.

        Raises:
            ManifestMismatch: module and arena differ. By this and the next two nothing was changed.
            ProtocolError: it cannot be bound, or not be guarded so (a coroutine, a class with its own __call__, nothing
                to guard).
            ValueError: a name in `guard` that the module lacks.
            ShmSyncError: as in read().
        """
        self._check()
        return self._bind(module, guard, ModuleCheck(self.arena, self.name, buffers=buffers), clones=clone_outputs)

    def bind_copies(self, module: M, *, guard: GuardNames = True) -> M:
        """As bind(), but all of the module's tensors are private copies, which are renewed with each version.

        They stay on the devices that they are on, so this is for a module that cannot show the arena's own memory.
        `guard` is that of bind().
        """
        self._check()
        return self._bind(module, guard, ModuleCheck(self.arena, self.name, copies=True), clones=True)

    def _bind(self, module: M, guard: GuardNames, fitting: ModuleCheck, *, clones: bool) -> M:
        bound = bindable(module)
        calls = calls_of(module, guard)
        with ExitStack() as stack:
            for path in (self, *bound_elsewhere(bound, self)):  # no call is under way while the tensors change hands
                stack.enter_context(path._exclusive())
            self.followers[:] = [each for each in self.followers if each.owners() or not isinstance(each, Binding)]
            tensors = fitting.tensors(bound)
            replaced = taken_over(bound, tensors)
            for old in replaced:
                old.drop()  # it may fit no more, which would be an error at the entry of the section
            try:
                with self.unused() if self._version else nullcontext():
                    binding = bind_module(self, bound, fitting, tensors)
                    if self._version:
                        binding.move(self._held_slot)
                    self.followers.append(binding)
            except BaseException:
                for old in replaced:
                    old.restore()
                raise
            try:
                guard_calls(self, module, bound, binding, calls, clones=clones)
            except BaseException:
                binding.drop()
                binding.release()
                withdraw_guards(module, bound)
                raise
        return module

    def snapshot(self, out: TensorDictBase | None = None) -> Snapshot:
        """A private copy of one version, by default into new memory, else into `out` (same keys, shapes, dtypes).

        With "live" it is whatever was there, perhaps of two versions. Raises ValueError for an `out` that does not fit
        (one with expanded, overlapping or lazily conjugated tensors, or in an arena), before anything is written;
        otherwise as read(). Parameters may be in `out`; no gradient is recorded.
        """
        targets = self._snapshot_cache.targets(out, self.arena)
        version = 0

        def copy() -> None:
            nonlocal version
            version = self._held_version
            targets.copy(self.arena, self._held_slot)

        self.run_as_is(copy)
        made = targets.made if out is None else out
        assert made is not None
        return Snapshot(made, version)

    def verify(self, *modules: nn.Module) -> Proof:
        """Compare what each bound module holds with the checksums of the newest version, which is applied first.

        Every tensor is read as the module has it now, under its name: private copies and buffers too, whatever has
        taken the place of what was bound. One of another dtype is compared with the published value cast to it.

        Args:
            *modules: what this process computes with, if that is not what was bound: a copy, a part of an agent.
                They must have every leaf of the arena.

        Returns:
            The version, the number of leaves that were compared, and the modules' leaves that no checksum is for.

        Raises:
            NotDelivered: names every leaf that differs, where it is and what is there instead; also when another
                publisher has this arena's name.
            ProtocolError: the arena has no checksums, or a section of this thread is open that is not pinned.
            ShmSyncError: as in read().
        """
        self._check()
        with self._exclusive():
            refuse_without_checksums(self.arena.manifest, self.name)
            if self._mine:
                if not self._mine_and_pinned:
                    raise ProtocolError(
                        "verify() inside a section that is not pinned could compare torn weights; leave it first",
                        version=self._version,
                    )
                return verify_held(self, modules)
            if self._gone and not self._follow():
                refuse_succeeded(self)
            try:
                self._enter_slowly(Enter.GATED, None, Pinned(self.timeout))
            except BaseException:
                self._give_up_entry()
                raise
            try:
                return verify_held(self, modules)
            finally:
                self._abandon()

    def close(self) -> None:
        """Give the row back. Tensors of the arena stay readable, but unprotected. Idempotent.

        A module that was bound with a guard raises ClosedError when called: bind it elsewhere, or deepcopy() it. What
        another thread waits for in this subscriber ends with ClosedError. A section that no thread can leave any more,
        because its thread has ended or its object is gone, is given up.

        Raises ProtocolError inside a section of this thread, WriterBusy when another thread does not leave its section
        in time; then nothing is closed.
        """
        if self._closed:
            return
        if self._in_parent:  # forked: the row is the parent's
            return
        try:
            with self._closing():
                wait_for_reads(self.arena, self.name, deadline_after(None, self.timeout))
                self._retire()
                try:
                    self.followers.clear()
                    self._snapshot_cache.clear()
                finally:
                    self._finalizer()
        except ClosedError:
            pass  # another thread was quicker

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except (ProtocolError, WriterBusy):
            if error is None:
                raise
            # The caller's own error tells more; the row goes back when this is collected.

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"version {self._version} of {self.latest}"
        return f"<shmsync.Subscriber of {self.name!r}, {state}, {self._consistency}>"

    def __del__(self) -> None:
        if getattr(self, "_finalizer", None) is not None and not self._closed and not self._in_parent:
            warnings.warn(f"Subscriber of {self.name!r} was not closed", ResourceWarning, stacklevel=2)

    def __reduce__(self) -> Any:
        raise TypeError("a Subscriber cannot be pickled; pass the Publisher's handle and attach in the other process")


attach = Subscriber  # a verb, for those who prefer one
