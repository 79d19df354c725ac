"""A device that has no hardware: memory in pages of the host, streams that do later what they were asked for.

Each stream is a thread. It does one thing after the other, each after a delay that a seed decides; streams wait for
each other only by follow(). A failure comes late: what was asked for before it may be done or not.

For torch its tensors lie on "simulated:0" or "simulated:1", by its index (backend.py). A copy to or from such a one is
work of the calling thread's current stream; one into the host's memory is done when the call returns. Every other
operator is carried out at once: the stream is waited for, the CPU computes, and the results are copied back. The stream
HOST, which is the current one unless on() says otherwise, has always done all its work. kernel() gives other work
to a stream.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import random
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from . import backend
from .streams import HOST, Event, Stream, on_a_drivers_thread

KIND = 0x10001
_HANDLE = struct.Struct("<iiQ")  # pid, descriptor, inode


class Simulated:
    """The device.

    Args:
        seed: decides all delays.
        longest: of a delay, in seconds. Most are none at all, some are as long.
        index: of several devices of one process.
        prompt: a call is made before the thread that asked for it goes on, as tests of the host's memory expect of a
            publish. Delays, threads and order stay.
    """

    def __init__(self, seed: int = 0, longest: float = 0.002, *, prompt: bool = False, index: int = 0) -> None:
        copies_are_done_by(self, index)
        self.kind = KIND + index
        self.name = f"simulated:{index}"
        self.torch_device = torch.device("simulated", index)
        self.failed: BaseException | None = None
        self.longest = longest
        self.prompt = prompt
        self.copies = 0
        self.casts = 0  # tensors that changed their dtype on their way
        self.pins = True  # memory of the host; or does it refuse that?
        self.pinned: dict[int, tuple[int, bool]] = {}
        self.recorded = 0  # how often
        self.captured: list[Any] = []  # streams whose work is recorded, not done
        self.allocated = 0  # how often: tests find publishers by it
        self._seeds = random.Random(seed)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._descriptors: dict[int, int] = {}  # of the memory of arenas, by storage
        self._here = threading.local()

    # What an arena asks for; see shmsync/memory/devices.py.

    def allocate(self, size: int) -> torch.UntypedStorage:
        fd = os.memfd_create("simulated device", os.MFD_CLOEXEC)
        with _closed_if_it_fails(fd):
            os.posix_fallocate(fd, 0, size)
            self.allocated += 1
            return self._mapped(fd, size)

    def export(self, storage: torch.UntypedStorage) -> bytes:
        fd = self._descriptors[storage._cdata]
        return _HANDLE.pack(os.getpid(), fd, os.fstat(fd).st_ino)

    def open(self, handle: bytes, size: int) -> torch.UntypedStorage:
        from shmsync.errors import ArenaCorrupt, ArenaNotFound

        pid, fd, inode = _HANDLE.unpack_from(handle)
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaNotFound(f"the memory that pid {pid} has exported is gone") from error
        with _closed_if_it_fails(opened):
            status = os.fstat(opened)
            if status.st_ino != inode:
                raise ArenaNotFound(f"the memory that pid {pid} has exported is gone")
            if status.st_size != size:
                raise ArenaCorrupt(f"the memory of pid {pid} has {status.st_size:,} bytes, not {size:,}")
            return self._mapped(opened, size)

    def staging(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def pin(self, storage: torch.UntypedStorage, *, readonly: bool) -> None:
        if not self.pins:
            from shmsync.errors import DeviceFailed

            raise DeviceFailed(f"{self.name} pins no memory")
        self.pinned[storage.data_ptr()] = storage.nbytes(), readonly

    def unpin(self, storage: torch.UntypedStorage) -> None:
        del self.pinned[storage.data_ptr()]

    def stream(self) -> Stream:
        stream = Stream(self, self._seeds.getrandbits(32))
        self._streams.add(stream)
        return stream

    def current(self) -> Any:
        return getattr(self._here, "stream", HOST)

    def as_stream(self, given: object) -> Any:
        if isinstance(given, (Stream, Event)):
            return given
        raise TypeError(f"a stream or an event of {self.name}, not {given!r}")

    def follow(self, later: Any, first: Any) -> bool:
        if isinstance(later, Event):
            return False
        if first is HOST or later is first:
            return True
        event = first if isinstance(first, Event) else first.record()
        if later is HOST:
            event.done.wait()
        else:
            later.give(lambda: _wait(event))
        return True

    def copy(self, stream: Any, pieces: list[tuple[int, int, int]]) -> None:
        self.copies += len(pieces)
        for to, source, size in pieces:
            half = size // 2  # in two steps, so that a half is seen where no wait is for the whole
            for at, many in ((0, half), (half, size - half)):
                self.kernel(partial(ctypes.memmove, to + at, source + at, many), stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        steps: list[Callable[[], None]] = []
        self.recorded += 1
        self._here.steps = steps
        try:
            work()
        finally:
            self._here.steps = None
        return lambda: [self.kernel(step) for step in steps] and None

    def capturing(self, stream: Any) -> bool:
        return stream in self.captured

    def call(self, stream: Any, call: Any) -> None:
        run = partial(on_a_drivers_thread, type(call).function, call.ticket())
        self.kernel(run, stream)
        if stream is not HOST and self.prompt and (self.allocated or self.pinned):
            stream.record().done.wait()

    def wait(self, stream: Any, seconds: float) -> bool:
        if stream is HOST or seconds <= 0:
            return stream is HOST or stream.idle
        return stream.record().done.wait(seconds)

    def check(self) -> None:
        if self.failed is not None:
            from shmsync.errors import DeviceFailed

            raise DeviceFailed(f"{self.name} failed: {self.failed}")

    # For tests.

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of this tensor in memory of the device, dense and laid out as the values are."""
        with self.on(HOST):
            return values.to(self.torch_device, copy=True)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """The current stream of this thread."""
        before = self.current()
        self._use(stream)
        try:
            yield
        finally:
            self._use(before)

    def _use(self, stream: Any) -> None:
        self._here.stream = stream
        torch.ops.simulated.set_stream(
            self.torch_device.index, 0 if stream is HOST else id(stream)
        )  # whose memory is used again by whom

    def kernel(self, work: Callable[[], None], stream: Any = None) -> None:
        """Work for a stream, by default the current one."""
        stream = self.current() if stream is None else stream
        if getattr(self._here, "steps", None) is not None:
            self._here.steps.append(work)
        else:
            work() if stream is HOST else stream.give(work)

    def gate(self, stream: Any) -> threading.Event:
        """What the stream is given from now on is done after this is set."""
        event = Event()
        stream.give(lambda: _wait(event))
        return event.done

    def settle(self) -> None:
        """Wait until all work is done, so that a section that was left holds nothing."""
        for stream in list(self._streams):
            stream.record().done.wait()

    def fail(self, error: str = "an illegal memory access was encountered") -> None:
        """From now on nothing is done any more."""
        self.failed = RuntimeError(error)

    def delay(self, chance: random.Random) -> None:
        """Before each piece of work of a stream."""
        if chance.random() < 0.2:
            time.sleep(chance.random() * self.longest)

    def _mapped(self, fd: int, size: int) -> torch.UntypedStorage:
        fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        pages = (ctypes.c_ubyte * size).from_buffer(mmap.mmap(fd, size))
        address = ctypes.addressof(pages)
        storage = torch.ops.simulated.wrap(address, size, self.torch_device.index).untyped_storage()
        self._descriptors[storage._cdata] = fd
        # Mapped, and open to others, as long as tensors over it live.
        weakref.finalize(storage, _gone, self._descriptors, storage._cdata, pages).atexit = False
        return storage


def _gone(descriptors: dict[int, int], storage: int, pages: object) -> None:
    os.close(descriptors.pop(storage))


_of_index: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # the newest of each


def copies_are_done_by(device: Any, index: int) -> None:
    """torch's copies to and from the memory of this index are work of this device's streams, while the device lives."""
    backend.load(_copied, _synchronize, _sleep)
    _of_index[index] = device


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, which may lie on a device, as a tensor of the host."""
    if tensor.device.type == "cpu":
        return tensor
    there = torch.ops.simulated.on_host(tensor)
    there = there.conj() if tensor.is_conj() else there
    return torch._neg_view(there) if tensor.is_neg() else there


def _copied(source: torch.Tensor, to: torch.Tensor) -> None:
    """What `to.copy_(source)` does where one of them, or both, are on devices: the work of the target's, if it can."""
    places = (each.device.index if each.device.type == "simulated" else None for each in (to, source))
    owner, giver = (_of_index.get(place) for place in places)
    device = owner or giver
    if device is None:  # it is gone; or a test looks at calls only
        _copy(on_host(to), on_host(source))
        return
    mine = device.current()
    if giver not in (None, device):  # what is to be copied there is made first
        device.follow(mine, giver.current())
    if to.dtype != source.dtype:
        device.casts += 1
    if giver is None and mine is not HOST:  # the caller may change it at once
        source = source.clone()
    there, here = on_host(to), on_host(source)
    device.kernel(lambda: _copy(there, here), mine)
    if giver not in (None, device):
        giver.follow(giver.current(), mine)
    if owner is None:
        device.follow(HOST, mine)


def _sleep(cycles: int) -> None:
    _of_index[0].kernel(lambda: time.sleep(cycles / 2e9))


def _synchronize(device: object = None) -> None:
    for each in list(_of_index.values()):
        each.settle()


@torch.no_grad()  # each thread starts with gradients on
def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source)


@contextmanager
def _closed_if_it_fails(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            os.close(fd)
        raise


def _wait(event: Event) -> None:
    event.done.wait()


@contextmanager
def installed(*made: Simulated, default: bool = False) -> Iterator[None]:
    """Only these are known to this process, and afterwards what was before. `default`: all new arenas lie on one."""
    from shmsync.memory import attaching, devices

    known = devices._of_kind, devices._of_name, devices._default, devices._of_torch
    before = [each.copy() for each in known]
    for each in known:
        each.clear()
    for device in made:
        devices.register(device, default=default)
    yield
    for each, earlier in zip(known, before, strict=True):
        each.clear()
        each.update(earlier) if isinstance(each, dict) else each.extend(earlier)
    for kept in (attaching._unfinished, devices._unfinished):  # of a device that failed: nothing is done there any more
        kept.clear()


@contextmanager
def everywhere(seed: int, longest: float) -> Iterator[Simulated]:
    """All new arenas of this process lie on one, and afterwards where they did before."""
    device = Simulated(seed, longest)
    with installed(device, default=True):
        yield device


def value(sub: Any, **kwargs: Any) -> tuple[int, float]:
    """(version, value) of a section of an arena on a device; all elements are one value."""
    with sub.read(**kwargs) as section:
        (found,) = set(section.weights["t"].tolist())
        return section.version, found


def settle(_state: object) -> None:
    """For Worker.stop(): a process that is stopped in the middle of its device's work keeps what this work holds."""
    from shmsync.memory import devices

    for device in list(devices._of_kind.values()):
        device.settle()


def install(devices: Any) -> Simulated:
    """Let all arenas and new tensors of this process lie on one, and let it know another.

    SHMSYNC_TEST_TENSORS=host leaves new tensors in the host's memory. `devices`: shmsync.memory.devices.
    """
    seed = int(os.environ.get("SIMULATED_SEED", "0")) + os.getpid()
    device, other = (Simulated(seed + index, longest=0.0005, prompt=True, index=index) for index in range(2))
    devices.register(device, default=True)
    devices.register(other)
    if os.environ.get("SHMSYNC_TEST_TENSORS") != "host":
        torch.set_default_device(device.torch_device)
    return device
