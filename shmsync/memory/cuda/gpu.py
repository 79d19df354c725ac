"""One GPU as arenas use it: its memory, and streams that do later what they are asked for.

INV: whatever is called here is called with this GPU as the thread's current one, and so that no capture of a CUDA graph
     by another thread is spoilt.
"""

from __future__ import annotations

import ctypes
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ... import _native
from ...errors import DeviceFailed, ForkedHandle, NoSpace, ProtocolError
from ..slab import refuse_too_large
from ..torch_modes import plainly
from .calls import (
    CAPTURE_ELSEWHERE,
    EVENT_NO_TIMING,
    HANDLE_SIZE,
    HOST_PORTABLE,
    HOST_READ_ONLY,
    NOT_READY,
    STREAM_NON_BLOCKING,
    UUID_SIZE,
    Answer,
    Block,
    CudaCalls,
    CudaError,
    TorchSide,
    not_opened,
    refused,
)

_log = logging.getLogger("shmsync")

# CUDA cuts smaller allocations out of a block of this size, and a handle shares the whole block.
WHOLE_BLOCKS = 2 << 20
_LOOK = 0.00002, 0.001  # seconds between two looks at an event: at first, and at most
_KEPT_EVENTS = 8


@dataclass(unsafe_hash=True)
class GpuStream:
    """A stream of a GPU; two of the same handle are one. Nothing in it changes.

    Args:
        handle: CUDA's.
        index: of its GPU in this process. The default stream has the same handle on each.
        keep: what owns the handle.
    """

    handle: int
    index: int
    keep: object = field(default=None, compare=False)


@dataclass(eq=False)
class GpuEvent:
    """What a stream had when the user recorded this event.

    Args:
        handle: CUDA's.
        keep: the user's event.
    """

    handle: int
    keep: object


class Gpu:
    """One GPU, as this process uses it. Its errors are DeviceFailed; they may come with a later call.

    Args:
        index: its number in this process, as torch counts.
        calls: CUDA.
        side: torch.

    Attributes:
        kind: the number that the header of a segment has for such a device.
        name: as users name it and as in an error: "cuda:0".
        torch_device: where torch says that the tensors over its memory are.
        uuid: the same in every process, whatever numbers the GPUs have there.
    """

    kind: int = _native.SLAB_CUDA

    def __init__(self, index: int, calls: CudaCalls, side: TorchSide) -> None:
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        self._index, self._calls, self._side = index, calls, side
        properties = self._call("looking at its properties", "cudaGetDeviceProperties", index)
        self.uuid = bytes(properties.uuid.bytes)
        self._exported: weakref.WeakValueDictionary[bytes, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._events: dict[int, list[int]] = {}  # by GPU: those that may be used again
        self._probe: GpuStream | None = None
        self._recording: GpuStream | None = None
        self._generation = _native.fork_generation()

    # Memory.

    def allocate(self, size: int) -> torch.UntypedStorage:
        """Memory of the GPU that other processes can open. Raises NoSpace.

        It is CUDA's, and never of torch's allocator: a handle shares a whole allocation.
        """
        whole = -(-size // WHOLE_BLOCKS) * WHOLE_BLOCKS
        doing = f"allocating {whole:,} bytes"
        with self._here():
            free, total = self._call(doing, "cudaMemGetInfo")
            if whole > free:
                kept = self._side.cached(self._index)
                more = f"; torch's allocator keeps {kept:,} bytes unused, which torch.cuda.empty_cache() gives back"
                raise NoSpace(
                    f"{whole:,} bytes are needed on {self.name}, of whose {total:,} bytes {free:,} are free; use fewer "
                    f"slots, a smaller dtype=, exclude= what workers do not need{more if kept else ''}"
                )
            address = int(self._call(doing, "cudaMalloc", whole, needed=whole))
            return self._storage(Block(address, size, lambda: self._give_back(lambda: self._calls.cudaFree(address))))

    def export(self, storage: torch.UntypedStorage) -> bytes:
        """By what another process of this machine opens it, HANDLE_BYTES: the GPU's UUID, and CUDA's own handle."""
        with self._here():
            memory: bytes = self._call("sharing memory", "cudaIpcGetMemHandle", storage.data_ptr())
        self._exported[memory] = storage
        return self.uuid + memory

    def open(self, handle: bytes, size: int) -> torch.UntypedStorage:
        """The memory that a process, which lives, has exported. Raises ArenaNotFound, NoSpace.

        CUDA maps the same memory once in a process, and counts how often it is opened and closed. It opens no handle
        in the process that made it.
        """
        memory = handle[UUID_SIZE : UUID_SIZE + HANDLE_SIZE]
        own = self._exported.get(memory)
        if own is not None:
            return own
        with self._here():
            answer = self._calls.cudaIpcOpenMemHandle(memory)
            if int(answer[0]):
                error = self._error("cudaIpcOpenMemHandle", answer)
                raise not_opened(error, self.name) from error
            address = int(answer[1])
            close = partial(self._calls.cudaIpcCloseMemHandle, address)
            return self._storage(Block(address, size, lambda: self._give_back(close)))

    def free(self, storage: torch.UntypedStorage) -> None:
        """Give allocated or opened memory back: nothing to do, for a block goes with the last tensor over it."""

    def staging(self, size: int) -> torch.Tensor:
        """Bytes of the host's memory whose pages stay where they are: copies from there do not stop the thread."""
        cure = "publish weights that are on the GPU, or use a smaller dtype="
        refuse_too_large(size, f"copies from the host to {self.name}", cure)
        if size == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        doing = f"getting {size:,} bytes of the host's memory for copies"
        with self._here():
            address = int(self._call(doing, "cudaHostAlloc", size, HOST_PORTABLE, needed=size))
        memory = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(memory, self._give_back, lambda: self._calls.cudaFreeHost(address)).atexit = False
        with plainly():
            return torch.frombuffer(memory, dtype=torch.uint8)

    def pin(self, storage: torch.UntypedStorage, *, readonly: bool) -> None:
        """From now on copy() takes this memory of the host too. `readonly`: the process may only read it."""
        size, flags = storage.nbytes(), HOST_PORTABLE | (HOST_READ_ONLY if readonly else 0)
        with self._here():
            self._call(f"registering {size:,} bytes of the host's memory", "cudaHostRegister", storage.data_ptr(), size,
                       flags, needed=size)  # fmt: skip

    def unpin(self, storage: torch.UntypedStorage) -> None:
        """Take that back, when nothing is under way there. Raises nothing."""
        self._give_back(lambda: self._calls.cudaHostUnregister(storage.data_ptr()))

    # Streams.

    def stream(self) -> GpuStream:
        """A new stream."""
        with self._here():
            handle: int = self._call("making a stream", "cudaStreamCreateWithFlags", STREAM_NON_BLOCKING)
        stream = GpuStream(handle, self._index)
        weakref.finalize(stream, self._give_back, lambda: self._calls.cudaStreamDestroy(handle)).atexit = False
        return stream

    def current(self) -> GpuStream:
        """The stream that the calling thread's own work goes to."""
        self._check_process()
        return GpuStream(self._side.current(self._index), self._index)

    def as_stream(self, given: object) -> GpuStream | GpuEvent:
        """A user's stream, of this GPU or another one, or what one has done when it was recorded (an event).

        `given`: torch's, or an object with __cuda_stream__(). Raises TypeError for anything else, and for an event that
        was never recorded.
        """
        if isinstance(given, (GpuStream, GpuEvent)):
            return given
        device: Any = getattr(given, "device", None)
        place = getattr(device, "index", None)
        place = self._index if place is None else int(place)
        stream, event = getattr(given, "cuda_stream", None), getattr(given, "cuda_event", None)
        if isinstance(stream, int):
            return GpuStream(stream, place, given)
        if isinstance(event, int):
            if event == 0:
                raise TypeError(
                    f"{given!r} has never been recorded, so it orders nothing; record() it on a stream first"
                )
            return GpuEvent(event, given)
        protocol = getattr(type(given), "__cuda_stream__", None)
        if protocol is not None:
            _, handle = protocol(given)
            return GpuStream(int(handle), place, given)
        raise TypeError(
            f"a stream or an event of {self.name} is needed, for example torch.cuda.Stream(), not {given!r}"
        )

    def capturing(self, stream: GpuStream | GpuEvent) -> bool:
        """Is what this stream is given now only recorded, to be done later, perhaps more than once (a CUDA graph)?"""
        if isinstance(stream, GpuEvent):
            return False
        with self._here(stream.index):
            return self._captured(stream)

    def follow(self, later: GpuStream | GpuEvent, first: GpuStream | GpuEvent) -> bool:
        """Work that `later` gets from now on waits for the work that `first` has now.

        False: `later` is an event, which gets no work.
        """
        if isinstance(later, GpuEvent):
            return False
        if later == first:
            return True
        doing = "ordering two streams"
        if isinstance(first, GpuEvent):
            with self._here():
                self._call(doing, "cudaStreamWaitEvent", later.handle, first.handle, 0)
            return True
        with self._here(first.index):
            event = self._recorded(first)
            try:
                with nullcontext() if later.index == first.index else self._here(later.index):
                    self._call(doing, "cudaStreamWaitEvent", later.handle, event, 0)
            finally:
                self._keep(event, first.index)  # it may be recorded again: the wait is for what the stream had
        return True

    def copy(self, stream: GpuStream, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Copy between memory of this GPU, staging and pinned memory. The sources stay as they are until then."""
        with self._here():
            for to, source, size in pieces:
                self._call(f"copying {size:,} bytes", "cudaMemcpyAsync", to, source, size, stream.handle)

    def record(self, work: Callable[[], None]) -> Callable[[], None] | None:
        """The copies that `work` asks the current stream for, as one call for later, done in the same order.

        Nothing is copied now. None: CUDA refuses. It is a CUDA graph, captured on a stream of its own; torch launches
        it.
        """
        if self._recording is None:
            self._recording = self.stream()
        try:
            with self._here():
                return self._side.captured(self._index, self._recording.handle, work)
        except (DeviceFailed, ProtocolError, RuntimeError) as error:
            _log.info("copies on %s are asked for one by one, since they cannot be captured: %s", self.name, error)
            self._calls.cudaGetLastError()
            self._recording = None  # it may still be captured
            return None

    def call(self, stream: GpuStream, call: _native.HostCall) -> None:
        """Make this call when the stream's present work is done. It is not made if the GPU fails before.

        When CUDA refuses, the call may or may not be made: its ticket is left to it.
        """
        with self._here():
            self._call("asking for a call", "cuLaunchHostFunc", stream.handle, type(call).function, call.ticket())

    def wait(self, stream: GpuStream, seconds: float) -> bool:
        """Wait until the stream's present work is done; False: it is not, after so many seconds. 0: do not wait.

        CUDA's own waits know no deadline, so this looks at an event again and again.
        """
        if seconds <= 0:  # a newly recorded event would rarely be done yet
            with self._here(stream.index):
                answer = self._calls.cudaStreamQuery(stream.handle)
                if int(answer[0]) == NOT_READY:
                    return False
                self._take("looking at a stream", "cudaStreamQuery", answer)
                return True
        deadline = time.monotonic() + seconds
        pause, longest = _LOOK
        with self._here(stream.index):
            event = self._recorded(stream)
        try:
            while True:
                with self._here(stream.index):
                    answer = self._calls.cudaEventQuery(event)
                    if int(answer[0]) != NOT_READY:
                        self._take("waiting for a stream", "cudaEventQuery", answer)
                        return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                time.sleep(min(pause, left))
                pause = min(2 * pause, longest)
        finally:
            self._keep(event, stream.index)

    def check(self) -> None:
        """Raise DeviceFailed if the GPU has failed, so that what it was asked for may never be done.

        An error that came late is what every later call to CUDA answers.
        """
        if self._probe is None:
            self._probe = self.stream()
        with self._here():
            answer = self._calls.cudaStreamQuery(self._probe.handle)
            if int(answer[0]) != NOT_READY:
                self._take("looking at the device", "cudaStreamQuery", answer)

    # How CUDA is called.

    def _check_process(self) -> None:
        if self._generation != _native.fork_generation():
            raise ForkedHandle(
                f"{self.name} was first used in the parent of this process, and CUDA cannot be used in a forked child; "
                "start workers with the method 'spawn' or 'forkserver'"
            )

    @contextmanager
    def _here(self, index: int | None = None) -> Iterator[None]:
        """The GPU is the current one, and calls of this thread are no part of a capture in another."""
        self._check_process()
        try:
            guard = self._side.on(self._index if index is None else index)
            guard.__enter__()
        except RuntimeError as error:  # torch looks at its own errors first
            raise DeviceFailed(f"{self.name} cannot be used: {error}") from error
        try:
            answer = self._calls.relax()
            before = self._take("leaving captures alone", "cudaThreadExchangeStreamCaptureMode", answer)
            try:
                yield
            finally:
                self._calls.restore(before)
        finally:
            guard.__exit__(None, None, None)

    def _captured(self, stream: GpuStream) -> bool:
        answer = self._calls.cudaStreamIsCapturing(stream.handle)
        if int(answer[0]) == CAPTURE_ELSEWHERE:
            self._calls.cudaGetLastError()
            return True
        return int(self._take("looking at a stream", "cudaStreamIsCapturing", answer)) != 0

    def _recorded(self, stream: GpuStream) -> int:
        """An event behind what the stream has now, to be given to _keep(). Call it inside _here() of that GPU."""
        if self._captured(stream):
            raise ProtocolError(
                f"a CUDA graph is being captured on a stream of cuda:{stream.index}, so what it has now is never done; "
                "nothing was changed, call it before or after the capture"
            )
        kept = self._events.setdefault(stream.index, [])
        event: int
        try:
            event = kept.pop()
        except IndexError:
            event = self._call("making an event", "cudaEventCreateWithFlags", EVENT_NO_TIMING)
        try:
            self._call("recording an event", "cudaEventRecord", event, stream.handle)
        except BaseException:
            self._calls.cudaEventDestroy(event)
            raise
        return event

    def _keep(self, event: int, index: int) -> None:
        kept = self._events[index]
        if len(kept) < _KEPT_EVENTS:
            kept.append(event)
        else:
            self._give_back(lambda: self._calls.cudaEventDestroy(event), index)

    def _call(self, doing: str, name: str, *arguments: Any, needed: int | None = None) -> Any:
        """What this function of CUDA gives."""
        return self._take(doing, name, getattr(self._calls, name)(*arguments), needed)

    def _take(self, doing: str, call: str, answer: Answer, needed: int | None = None) -> Any:
        """What a call gave: its one value, or all of several. Raises the error for a code."""
        if int(answer[0]):
            error = self._error(call, answer)
            raise refused(doing, error, self.name, needed) from error
        return answer[1] if len(answer) == 2 else answer[1:]

    def _error(self, call: str, answer: Answer) -> CudaError:
        code = answer[0]
        self._calls.cudaGetLastError()  # it stays this thread's last error else, and torch's next call is blamed for it
        name = getattr(code, "name", None)
        if name is None:  # a code that the bindings do not know
            return CudaError(call, int(code), "an unknown code", "see the documentation of the driver")
        return CudaError(call, int(code), name, self._calls.cudaGetErrorString(code)[1].decode())

    def _give_back(self, call: Callable[[], Answer], index: int | None = None) -> None:
        """Free something, perhaps in a garbage collection: no call can raise an error."""
        if self._generation != _native.fork_generation():
            return  # it is the parent's
        with suppress(RuntimeError), self._side.on(self._index if index is None else index):
            code, before = self._calls.relax()
            if int(call()[0]) or int(code):
                self._calls.cudaGetLastError()  # else torch's next call would be blamed for it
            if not int(code):
                self._calls.restore(before)

    def _storage(self, block: Block) -> torch.UntypedStorage:
        try:
            storage = self._side.wrap(block, self._index)
        except (RuntimeError, TypeError) as error:
            raise DeviceFailed(f"torch cannot use memory of {self.name} that is not its own: {error}") from error
        if storage.data_ptr() != block.address:
            raise DeviceFailed(
                f"torch has copied memory of {self.name} at {block.address:#x} to {storage.data_ptr():#x} instead of "
                f"using it; this is a fault of torch {torch.__version__} or of shmsync, please report it"
            )
        return storage
