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
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import torch

from ... import _native
from ...errors import DeviceFailed, ForkedHandle, NoSpace, ProtocolError, ShmSyncError
from ..slab import refuse_too_large
from ..torch_modes import plainly
from .calls import (
    CAPTURE_ELSEWHERE,
    HANDLE_SIZE,
    HOST_PORTABLE,
    HOST_READ_ONLY,
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

Stream: TypeAlias = torch.cuda.Stream

_log = logging.getLogger("shmsync")

# CUDA cuts smaller allocations out of a block of this size, and a handle shares the whole block.
WHOLE_BLOCKS = 2 << 20
_LOOK = 0.00002, 0.001  # seconds between two looks at an event: at first, and at most


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
        self.uuid = side.uuid(index)
        self._exported: weakref.WeakValueDictionary[bytes, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._probe: Stream | None = None
        self._recording: Stream | None = None
        self._generation = _native.fork_generation()

    # Memory.

    def allocate(self, size: int) -> torch.UntypedStorage:
        """Memory of the GPU that other processes can open. Raises NoSpace.

        It is CUDA's, and never of torch's allocator: a handle shares a whole allocation.
        """
        whole = -(-size // WHOLE_BLOCKS) * WHOLE_BLOCKS
        with self._here(f"allocating {whole:,} bytes", needed=whole):
            free, total, kept = self._side.memory(self._index)
            if whole > free:
                more = f"; torch's allocator keeps {kept:,} bytes unused, which torch.cuda.empty_cache() gives back"
                raise NoSpace(
                    f"{whole:,} bytes are needed on {self.name}, of whose {total:,} bytes {free:,} are free; use fewer "
                    f"slots, a smaller dtype=, exclude= what workers do not need{more if kept else ''}"
                )
            address = int(self._call("cudaMalloc", whole))
            return self._storage(Block(address, size, lambda: self._give_back(lambda: self._calls.cudaFree(address))))

    def export(self, storage: torch.UntypedStorage) -> bytes:
        """By what another process of this machine opens it, HANDLE_BYTES: the GPU's UUID, and CUDA's own handle."""
        with self._here("sharing memory"):
            memory: bytes = self._call("cudaIpcGetMemHandle", storage.data_ptr())
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
        with self._here("opening the memory of another process"):
            try:
                address = int(self._call("cudaIpcOpenMemHandle", memory))
            except CudaError as error:
                raise not_opened(error, self.name) from error
            close = partial(self._calls.cudaIpcCloseMemHandle, address)
            return self._storage(Block(address, size, lambda: self._give_back(close)))

    def staging(self, size: int) -> torch.Tensor:
        """Bytes of the host's memory whose pages stay where they are: copies from there do not stop the thread."""
        cure = "publish weights that are on the GPU, or use a smaller dtype="
        refuse_too_large(size, f"copies from the host to {self.name}", cure)
        if size == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        with self._here(f"getting {size:,} bytes of the host's memory for copies", needed=size):
            address = int(self._call("cudaHostAlloc", size, HOST_PORTABLE))
        memory = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(memory, self._give_back, lambda: self._calls.cudaFreeHost(address)).atexit = False
        with plainly():
            return torch.frombuffer(memory, dtype=torch.uint8)

    def pin(self, storage: torch.UntypedStorage, *, readonly: bool) -> None:
        """From now on copy() takes this memory of the host too. `readonly`: the process may only read it."""
        size, flags = storage.nbytes(), HOST_PORTABLE | (HOST_READ_ONLY if readonly else 0)
        with self._here(f"registering {size:,} bytes of the host's memory", needed=size):
            self._call("cudaHostRegister", storage.data_ptr(), size, flags)

    def unpin(self, storage: torch.UntypedStorage) -> None:
        """Take that back, when nothing is under way there. Raises nothing."""
        self._give_back(lambda: self._calls.cudaHostUnregister(storage.data_ptr()))

    # Streams, which are torch's, and so are events.

    def stream(self) -> Stream:
        """A new stream. None of torch's own: those are given out more than once, and captured by others."""
        with self._here("making a stream"):
            handle: int = self._call("cudaStreamCreateWithFlags", STREAM_NON_BLOCKING)
        stream = self._side.external(handle, self._index)
        weakref.finalize(stream, self._give_back, lambda: self._calls.cudaStreamDestroy(handle)).atexit = False
        return stream

    def current(self) -> Stream:
        """The stream that the calling thread's own work goes to."""
        self._check_process()
        return self._side.current(self._index)

    def as_stream(self, given: Any) -> Any:
        """A user's stream, of this GPU or another one, or what one has done when it was recorded (an event); torch's.

        Raises TypeError for anything else, and for an event that was never recorded.
        """
        if _is_event(given):
            if given.cuda_event == 0:
                raise TypeError(
                    f"{given!r} has never been recorded, so it orders nothing; record() it on a stream first"
                )
            return given
        if hasattr(given, "cuda_stream"):
            return given
        raise TypeError(
            f"a stream or an event of {self.name} is needed, for example torch.cuda.Stream(), not {given!r}; "
            "torch.cuda.ExternalStream() makes one of another library's"
        )

    def capturing(self, stream: Any) -> bool:
        """Is what this stream is given now only recorded, to be done later, perhaps more than once (a CUDA graph)?"""
        if _is_event(stream):
            return False
        with self._here("looking at a stream", stream.device.index):
            return self._captured(stream)

    def follow(self, later: Any, first: Any) -> bool:
        """Work that `later` gets from now on waits for the work that `first` has now.

        False: `later` is an event, which gets no work.
        """
        if _is_event(later):
            return False
        if later == first:
            return True
        with self._here("ordering two streams", first.device.index):
            later.wait_event(first if _is_event(first) else self._recorded(first))
        return True

    def copy(self, stream: Stream, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Copy between memory of this GPU, staging and pinned memory. The sources stay as they are until then."""
        with self._here("copying"):
            for to, source, size in pieces:
                self._call("cudaMemcpyAsync", to, source, size, stream.cuda_stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None] | None:
        """The copies that `work` asks the current stream for, as one call for later, done in the same order.

        Nothing is copied now. None: CUDA refuses. It is a CUDA graph, captured on a stream of its own; torch launches
        it.
        """
        if self._recording is None:
            self._recording = self.stream()
        try:
            with self._here("capturing copies"):
                return self._side.captured(self._recording, work)
        except ShmSyncError as error:
            _log.info("copies on %s are asked for one by one, since they cannot be captured: %s", self.name, error)
            self._calls.cudaGetLastError()
            self._recording = None  # it may still be captured
            return None

    def call(self, stream: Stream, call: _native.HostCall) -> None:
        """Make this call when the stream's present work is done. It is not made if the GPU fails before.

        When CUDA refuses, the call may or may not be made: its ticket is left to it.
        """
        with self._here("asking for a call"):
            self._call("cuLaunchHostFunc", stream.cuda_stream, type(call).function, call.ticket())

    def wait(self, stream: Stream, seconds: float) -> bool:
        """Wait until the stream's present work is done; False: it is not, after so many seconds. 0: do not wait.

        CUDA's own waits know no deadline, so this looks at an event again and again.
        """
        doing, index = "waiting for a stream", stream.device.index
        with self._here(doing, index):
            if seconds <= 0:  # a newly recorded event would rarely be done yet
                return stream.query()
            event = self._recorded(stream)
        deadline = time.monotonic() + seconds
        pause, longest = _LOOK
        while True:
            with self._here(doing, index):
                if event.query():
                    return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, longest)

    def check(self) -> None:
        """Raise DeviceFailed if the GPU has failed, so that what it was asked for may never be done.

        An error that came late is what every later call to CUDA answers.
        """
        if self._probe is None:
            self._probe = self.stream()
        with self._here("looking at the device"):
            self._probe.query()

    # How CUDA is called.

    def _check_process(self) -> None:
        if self._generation != _native.fork_generation():
            raise ForkedHandle(
                f"{self.name} was first used in the parent of this process, and CUDA cannot be used in a forked child; "
                "start workers with the method 'spawn' or 'forkserver'"
            )

    @contextmanager
    def _here(self, doing: str, index: int | None = None, needed: int | None = None) -> Iterator[None]:
        """The GPU is the current one, and calls of this thread are no part of a capture in another.

        What CUDA or torch raises inside becomes an error of ours: `doing` failed; `needed`: bytes that it asked for.
        """
        self._check_process()
        try:
            with self._side.on(self._index if index is None else index):
                before = self._call("relax")
                try:
                    yield
                finally:
                    self._calls.restore(before)
        except RuntimeError as error:
            raise refused(doing, error, self.name, needed) from error

    def _call(self, name: str, *arguments: Any) -> Any:
        """What this function of CUDA gives. Raises CudaError; call it inside _here()."""
        code, *given = getattr(self._calls, name)(*arguments)
        if int(code):
            self._calls.cudaGetLastError()  # else torch's next call would be blamed for it
            known = getattr(code, "name", None)
            if known is None:  # the bindings do not know it
                raise CudaError(name, int(code), "an unknown code", "see the documentation of the driver")
            raise CudaError(name, int(code), known, self._calls.cudaGetErrorString(code)[1].decode())
        return given[0] if given else None

    def _captured(self, stream: Stream) -> bool:
        try:
            return int(self._call("cudaStreamIsCapturing", stream.cuda_stream)) != 0
        except CudaError as error:
            if error.error_code == CAPTURE_ELSEWHERE:
                return True
            raise

    def _recorded(self, stream: Stream) -> torch.cuda.Event:
        """An event behind what the stream has now. Call it inside _here() of that GPU."""
        if self._captured(stream):
            raise ProtocolError(
                f"a CUDA graph is being captured on a stream of {stream.device}, so what it has now is never done; "
                "nothing was changed, call it before or after the capture"
            )
        return stream.record_event()

    def _give_back(self, call: Callable[[], Answer]) -> None:
        """Free something, perhaps in a garbage collection: no call can raise an error."""
        if self._generation != _native.fork_generation():
            return  # it is the parent's
        with suppress(RuntimeError), self._side.on(self._index):
            code, before = self._calls.relax()
            if int(call()[0]) or int(code):
                self._calls.cudaGetLastError()  # else torch's next call would be blamed for it
            if not int(code):
                self._calls.restore(before)

    def _storage(self, block: Block) -> torch.UntypedStorage:
        storage = self._side.wrap(block, self._index)
        if storage.data_ptr() != block.address:
            raise DeviceFailed(
                f"torch has copied memory of {self.name} at {block.address:#x} to {storage.data_ptr():#x} instead of "
                f"using it; this is a fault of torch {torch.__version__} or of shmsync, please report it"
            )
        return storage


def _is_event(given: object) -> bool:
    return hasattr(given, "cuda_event")
