"""The subscriber: one of many readers of an arena."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch import nn

from .. import _native
from .._native import State
from ..errors import ClosedError, Poisoned, ProtocolError, WriterBusy
from ..memory import attaching
from ..memory.manifest import Key
from ..memory.process import Peers
from ..memory.segment import Handle
from .bind.binding import bindable
from .bind.compiled import skip
from .bind.guard import bind
from .bind.guarded_methods import calls_of
from .deadlines import DEFAULT_TIMEOUT, check_worker, names_nearest, timeout_or_default, timeout_or_none
from .digest import digests_held, digests_of
from .pickling import copy_by_value
from .read.reading import ReadPath
from .read.section_values import Snapshot, copied, state_of
from .read.successor import Successor
from .stats import SubscriberStats

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Consistency = Literal["pinned", "optimistic", "live"]
_CONSISTENCIES = {each.name.lower(): each for each in _native.Consistency}

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


class Subscriber(_native.ReadMethods):  # with read() and refresh(): native/bind/reader.cpp
    """Reads the weights of one arena, zero-copy.

    Args:
        handle_or_name: `pub.handle`, or the arena's name. A name is waited for, at most `timeout` seconds.
        consistency: "pinned": the weights do not change while a section lasts. "optimistic": sections never block the
            publisher, and `torn` tells afterwards; run() repeats a torn call. "live": plain shared memory.
        worker: an index by which the publisher names this subscriber.
        timeout: default for this subscriber's waits, in seconds; math.inf waits without limit, None is 10.
        follow: if the publisher was closed or died, and another one publishes the same leaves under the same name, move
            to its arena: at the next section (noticed within 50 ms), refresh() or wait_version(). Version numbers go on
            there if the other one died, and start from 1 again if it was closed; `session` is another one. An arena
            with other leaves is ManifestMismatch in refresh() and wait_version(); sections warn, and keep reading the
            old weights. By name, the arena of a publisher that has died or is just closing is passed over: the next one
            is waited for. Weights that a death has left half written are never shown: a section waits for the next
            publisher, until its deadline.

    Raises:
        ArenaNotFound: no arena of this name after `timeout` seconds, or the arena of the handle has ended.
        ArenaCorrupt: the segment of this name is not an arena that this version of shmsync can read.
        WriterDied: its publisher is dead; with follow=True and a name, still so after `timeout` seconds.
        ReaderTableFull: all rows are taken; see Publisher(max_readers=).
        NoSpace: no memory or no descriptor is free to map the arena.
        WriterBusy: an in-place update took too long.

    Sections nest. The outermost one of a thread keeps the other threads out, so use one Subscriber per thread that
    reads in parallel. A context manager.
    """

    @names_nearest
    def __init__(
        self,
        handle_or_name: Handle | str,
        *,
        consistency: Consistency = "pinned",
        worker: int | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        follow: bool = False,
    ) -> None:
        reader = open_reader(handle_or_name, consistency, worker, timeout, follow)
        super().__init__(reader)
        self._reader = reader
        reader.arena.live = live_weights, (Handle(reader.name, reader.arena.session),)
        self._consistency = consistency
        self._worker = worker
        try:
            copy_by_value()
            if reader.state != State.POISONED:  # else attaching works, and the next section waits for the repair
                with suppress(Poisoned):
                    reader.refresh()
        except BaseException:
            reader.close()
            raise
        reader.forget_used_version()  # this thread may leave the weights to others, and look on

    @property
    def name(self) -> str:
        """The arena's name."""
        return self._reader.name

    @property
    def worker(self) -> int | None:
        """The index that it was attached with; in Workers the worker's rank."""
        return self._worker

    @property
    def weights(self) -> TensorDictBase:
        """The weights of the applied version, zero-copy, read-only; protected only inside a section."""
        return self._reader.weights

    @property
    def version(self) -> int:
        """The version that the calling thread has used last: in a section, or moved to by refresh().

        That is the version of what this thread computed, whatever other threads have applied since. In a thread that
        has used none it is the applied version, as `lag` and stats() have it. Several tasks on one thread (asyncio)
        share it: take `section.version` or run(with_version=True) there. With follow=True, 0 until the first version of
        a new arena is applied; `session` tells of which arena it is.
        """
        return self._reader.used_version

    @property
    def session(self) -> bytes:
        """The session of the arena that `version` belongs to; it changes when follow= moves to a restarted one."""
        return self._reader.used_session

    @property
    def latest(self) -> int:
        """The published version."""
        return self._reader.latest

    @property
    def lag(self) -> int:
        """Published versions not applied yet, by any thread."""
        return max(0, self._reader.latest - self._reader.applied_version)

    @property
    def publisher_alive(self) -> bool:
        """Can new versions still come?

        False once the publisher's process is dead, or has closed the arena; then `lag` does not change any more. False
        too when the trainer has left `Workers`. A stopped process is alive, and so is one with an unknown state. With
        follow=True it is about the present arena.
        """
        self._reader.check_open()
        return not (self._reader.gone or self._reader.left())

    def wait_version(self, version: int, timeout: float | None = None) -> int:
        """Wait until `version` or a later one is published; returns the published one. Applies nothing.

        `version` is a number of `session`, as this thread has it. With follow=True it also waits for a restarted
        trainer and moves to its arena, whose versions begin again: each of them is newer than all of the session
        before, so the first one that is published there ends the wait, and is returned. So after
        `wait_version(sub.version + 1)` refresh() finds something new, whatever the trainer did meanwhile.

        Raises PublishTimeout, WriterDied, ClosedError; ProtocolError inside a section with slots = 1, where the
        publisher would wait for this process in turn; with follow=True ManifestMismatch.
        """
        return self._reader.wait_version(version, timeout)

    def stats(self) -> SubscriberStats:
        """Counts since this subscriber was attached."""
        return self._reader.stats()

    def versions(self, timeout: float | None = None) -> Iterator[int]:
        """`for version in sub.versions():` — apply each new version; versions that were missed are skipped.

        The first one is the version that is published when the loop begins. Calls and sections in the loop's body use
        the newest version, which may be newer than this one: label results with `sub.version` or `section.version`.
        The loop ends when the publisher closes its arena, or when the trainer leaves `Workers`. With follow=True it
        waits for a restarted trainer. It blocks its thread: under asyncio use `while sub.publisher_alive:` with an
        `await` in it, since each call of a bound module uses the newest version anyway.

        Args:
            timeout: seconds to wait for each next version; None is the subscriber's default.

        Raises:
            PublishTimeout: no new version came in time.
            WriterDied: the publisher died.
            ProtocolError: the loop runs inside a read section of this thread, which keeps its version.
            ShmSyncError: as in refresh() and wait_version().
        """
        return self._versions(timeout_or_none(timeout))

    def _versions(self, timeout: float | None) -> Iterator[int]:
        shown = None  # session and version: those of a followed publisher may begin again
        waited = False
        while True:
            self.refresh()  # once for each version that is given: it acks, and the publisher goes on at once
            now = self.session, self.version
            if now != shown:
                shown, waited = now, False
                last = self._reader.left()
                yield self.version  # the last one too: the trainer may have waited for its ack before it left
                if last:  # another thread of the trainer may go on publishing
                    return
                continue
            if waited:
                raise ProtocolError(
                    "versions() applies nothing inside a read section; leave the section first", version=self.version
                )
            try:
                self.wait_version(self.version + 1, timeout)
            except ClosedError:
                if not self._reader.follows and not self.publisher_alive:  # which raises if the subscriber is closed
                    return
                raise
            waited = True

    def bind(
        self,
        module: M,
        *,
        prefix: str | None = None,
        guard: bool = True,
        clone_outputs: bool = True,
    ) -> M:
        """Make the module's parameters views of the arena, which move with the version, and return the module.

        Its Parameter objects keep their identity. Its buffers are private copies, refreshed with each version, so that
        forward passes may write them. Buffers with persistent=False are its own: bind() fills those on the meta device,
        and no version writes them. With the next version a buffer that was replaced is put back, and a parameter that
        was replaced is ManifestMismatch.

        Args:
            prefix: the module's leaves are those below this dotted key, as in an arena of {"policy": module, ...}.
            guard: the calls that are read sections, each of the newest version. True: each call of the module or of a
                submodule, hooks included, and each public method that its own classes define (not those of torch).
                False: none; use the module inside `with sub.read():`.
            clone_outputs: outputs of a guarded call that are views of the weights are cloned, so that they do not
                change with the next version.

        An optimistic subscriber repeats a torn call, with its side effects (random numbers, buffers). A call that
        returns a generator or a coroutine raises ProtocolError.

        Raises:
            ManifestMismatch: module and arena differ. After this and the next two errors nothing was changed.
            ProtocolError: the module cannot be bound, or not with a guard (a coroutine, a class with its own __call__,
                nothing to guard); or it shares tensors with one that is bound to another arena.
            ShmSyncError: as in read().
        """
        reader = self._reader
        reader.check_open()
        if not isinstance(guard, bool):
            raise TypeError(f"guard is True or False, not {guard!r}")
        bindable(module)  # or raise
        calls = calls_of(module) if guard else []
        if guard and not calls:
            raise ProtocolError(
                f"no call of this {type(module).__name__} can be guarded: it has no forward(), no submodule and no "
                "method of its own. Use bind(module, guard=False), and put what uses it in `with sub.read():`"
            )
        below = tuple(prefix.split(".")) if prefix else ()
        return bind(reader, module, calls, clones=clone_outputs, prefix=below)

    def on_version(self, fn: Callable[[int], object]) -> None:
        """Call fn(version) once for each version that this process applies from now on.

        The version of the attach counts if this thread has not used it yet. The call is made in the first section of
        the version, before anything uses it, by whichever thread enters that section, or in refresh(). In it `weights`,
        bound modules, run(), snapshot(), state_dict() and digest() have that version; read() raises ProtocolError. The
        version is acked when all functions have returned. With "optimistic" this one section is pinned.

        What fn raises, the call that entered the section raises. The version counts as applied then.
        """
        self._reader.on_version(fn)

    @overload
    def run(self, fn: Callable[..., T], /, *args: Any, with_version: Literal[False] = ..., **kwargs: Any) -> T: ...
    @overload
    def run(self, fn: Callable[..., T], /, *args: Any, with_version: Literal[True], **kwargs: Any) -> tuple[T, int]: ...
    @overload
    def run(self, fn: Callable[..., Any], /, *args: Any, with_version: bool, **kwargs: Any) -> Any: ...
    def run(self, fn: Callable[..., Any], /, *args: Any, with_version: bool = False, **kwargs: Any) -> Any:
        """fn(*args, **kwargs) computed on untorn weights, in one section.

        With consistency="optimistic" a call whose section was torn is repeated, the fourth time under a pin, so fn must
        be safe to repeat. An exception from a torn call is dropped, and the call repeated. With "live" nothing is
        promised. Views of the weights in the result are cloned, as in what a guarded call returns.

        Args:
            with_version: return (result, version): the version that the result was computed with.

        Raises:
            ProtocolError: the result is a generator or a coroutine, or holds one.
            ShmSyncError: as in read().
        """
        _native.import_tensordict()  # as read()
        result, version = self._reader.run(self._reader.private, fn, args, kwargs)
        return (result, version) if with_version else result

    def snapshot(self) -> Snapshot:
        """A private copy of one version, in new memory.

        With "live" it may be a mix of two versions. Raises as read() does.
        """
        tensors, version = self._copied()
        return Snapshot.of(tensors, version, self._reader.arena.manifest)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A private copy of the newest version by dotted key, for torch.save() and load_state_dict().

        It has the leaves that the published module's own state_dict() has; leaves that are tied share their memory.
        Raises as read() does.
        """
        tensors, _ = self._copied()
        return state_of(tensors, self._reader.arena.manifest)

    def digest(self, *modules: nn.Module) -> tuple[int, dict[str, str]]:
        """The newest version, which is applied first, and a digest of each of its leaves by dotted key.

        Equal values of one dtype have equal digests, so a worker that computes with what was published has the digests
        of Publisher.digest(). With "live" they may be of two versions.

        Args:
            *modules: take the digests of what these modules hold now, whether they are bound or not, in the place of
                the leaves. Together they must hold every leaf.

        Raises:
            ManifestMismatch: names the leaves that no module holds, or holds in another shape.
            ValueError: two of the modules hold different values of one leaf.
            ShmSyncError: as in read().
        """
        reader = self._reader
        reader.check_open()

        def taken() -> dict[str, str]:
            if modules:
                return digests_held(reader.arena, reader.held_slot, modules)
            return digests_of(reader.arena, reader.held_slot)

        digests, version = reader.run(taken)
        return version, digests

    def _copied(self) -> tuple[dict[Key, torch.Tensor], int]:
        """The leaves of one version in new memory, and that version."""
        reader = self._reader
        return reader.run(lambda: copied(reader.arena, reader.held_slot))

    def close(self) -> None:
        """Give the row back. Tensors of the arena stay readable, but unprotected. Idempotent.

        The memory is unmapped with the last of these tensors. A bound module refers to itself: it goes when Python's
        garbage collector finds it, and leaves the arena at once when it is bound to another one.

        A module that was bound with a guard raises ClosedError when called: bind it elsewhere, or deepcopy() it. A wait
        of another thread in this subscriber ends with ClosedError.

        Raises ProtocolError inside a section of this thread, WriterBusy when another thread does not leave its section
        in time; then nothing is closed.
        """
        self._reader.close()

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
        reader = self._reader
        state = "closed" if reader.closed else f"version {reader.applied_version} of {self.latest}"
        return f"<shmsync.Subscriber of {self.name!r}, {state}, {self._consistency}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Subscriber cannot be pickled; pass the Publisher's handle and attach in the other process")


skip(Subscriber.run)  # Dynamo compiles what it calls, not this frame


def open_reader(
    handle_or_name: Handle | str, consistency: str, worker: int | None, timeout: float | None, follow: bool
) -> ReadPath:
    """Attach, for the arguments of Subscriber, all checked. Applies nothing yet."""
    if not isinstance(consistency, str) or consistency not in _CONSISTENCIES:
        raise ValueError(f"consistency is one of {', '.join(_CONSISTENCIES)}, not {consistency!r}")
    if worker is not None:
        worker = check_worker(worker)
    timeout = timeout_or_default(timeout)
    if not isinstance(follow, bool):
        raise TypeError(f"follow is True or False, not {follow!r}")
    name, session = _name_and_session(handle_or_name)
    with ExitStack() as undo:
        peers = Peers()
        undo.callback(peers.close)
        # A reader that follows restarts may itself start between the death and the restart.
        await_restart = follow and session is None
        attached = attaching.attach(name, session, worker, timeout, peers, pass_over_dead=await_restart)
        release = attaching.Release(attached, peers)
        undo.callback(release)
        successor = Successor(name, worker, peers) if follow else None
        reader = ReadPath(attached, release, peers, _CONSISTENCIES[consistency], name, timeout, successor)
        undo.pop_all()  # all of it is the reader's now
    return reader


def _name_and_session(handle: Handle | str) -> tuple[str, bytes | None]:
    if isinstance(handle, str):
        return handle, None
    if isinstance(handle, tuple) and [type(part) for part in handle] == [str, bytes]:
        return handle[0], handle[1]
    raise TypeError(f"pass pub.handle or the arena's name, not the {type(handle).__name__} {handle!r}")


def live_weights(handle: Handle) -> TensorDictBase:
    """What the TensorDict of an arena is in another process: attached for as long as it lives, read-only.

    With slots=1 the values change with each version; with more they are those of the slot that was current. Reads are
    protected only inside a read section of a Subscriber of your own. Raises what Subscriber() raises.
    """
    subscriber = Subscriber(handle)
    weights: Any = subscriber.weights
    weights.subscriber = subscriber  # lives as long
    return weights


def reader_of(subscriber: Subscriber) -> ReadPath:
    """What reads the arena, for the schemes: it does what users have no method for."""
    return subscriber._reader


attach = Subscriber  # a verb, for those who prefer one
