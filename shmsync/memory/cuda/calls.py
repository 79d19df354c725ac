"""What is asked of CUDA, and of torch about GPUs, and what CUDA's error codes mean for who uses shmsync.

Tests put others in the place of CUDA and torch, which need no GPU.

The functions of CUDA come from cuda-bindings, and one of them from the driver. The names and the form of the answers
are those of cuda.bindings.runtime: (code, value, ...). Host functions are launched through the driver itself, since the
bindings put their own function in front, which takes the GIL: a thread that holds the GIL and waits for the device
would then deadlock.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any
from uuid import UUID

import torch

from ...errors import ArenaNotFound, DeviceFailed, NoSpace, ProtocolError, ShmSyncError
from ..torch_modes import plainly

UUID_SIZE = 16  # bytes
HANDLE_SIZE = 64  # bytes of CUDA's own handles

STREAM_NON_BLOCKING = 1  # such a stream does not wait for the default stream, nor that one for it
HOST_PORTABLE = 1
HOST_READ_ONLY = 8  # only for cudaHostRegister
IPC_LAZY_PEER_ACCESS = 1

Answer = tuple[Any, ...]

# Called as the bindings have them. Codes and modes convert to int.
RUNTIME = (
    "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaHostRegister", "cudaHostUnregister",
    "cudaStreamDestroy", "cudaStreamIsCapturing", "cudaIpcCloseMemHandle", "cudaGetLastError", "cudaGetErrorString",
)  # fmt: skip


class CudaCalls:
    """What is called of CUDA: the functions of RUNTIME, and those below, whose arguments are simpler than CUDA's.

    Args:
        runtime: the module cuda.bindings.runtime.
        driver: the library libcuda.so.1.
    """

    def __init__(self, runtime: ModuleType, driver: ctypes.CDLL) -> None:
        self._runtime = runtime
        self._launch = driver.cuLaunchHostFunc
        self._launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self._launch.restype = ctypes.c_int
        self._relaxed = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        try:
            from cuda.bindings.utils import get_cuda_native_handle as handle_of
        except ImportError:  # bindings before 12.9, where int() is not deprecated
            handle_of = int
        self._handle_of: Callable[[Any], int] = handle_of

    def __getattr__(self, name: str) -> Any:
        if name not in RUNTIME:
            raise AttributeError(name)
        found = getattr(self._runtime, name)
        setattr(self, name, found)
        return found

    def cudaStreamCreateWithFlags(self, flags: int) -> Answer:
        """A new stream: its handle."""
        code, stream = self._runtime.cudaStreamCreateWithFlags(flags)
        return (code, None if int(code) else self._handle_of(stream))

    def cudaIpcGetMemHandle(self, address: int) -> Answer:
        """The HANDLE_SIZE bytes by which a whole allocation can be opened."""
        code, handle = self._runtime.cudaIpcGetMemHandle(address)
        # Its bytes are an attribute in the bindings for CUDA 12, and nowhere in those for CUDA 13.
        return (code, b"" if handle is None else ctypes.string_at(int(handle.getPtr()), HANDLE_SIZE))

    def cudaIpcOpenMemHandle(self, handle: bytes) -> Answer:
        """The address at which these HANDLE_SIZE bytes are opened."""
        given = self._runtime.cudaIpcMemHandle_t()
        ctypes.memmove(int(given.getPtr()), handle, HANDLE_SIZE)
        code, address = self._runtime.cudaIpcOpenMemHandle(given, IPC_LAZY_PEER_ACCESS)
        return (code, 0 if address is None else int(address))

    def cudaMemcpyAsync(self, to: int, source: int, size: int, stream: int) -> Answer:
        """Ask a stream for a copy; where each address lies, CUDA finds out."""
        answer: Answer = self._runtime.cudaMemcpyAsync(
            to, source, size, self._runtime.cudaMemcpyKind.cudaMemcpyDefault, stream
        )
        return answer

    def relax(self) -> Answer:
        """From now on calls of this thread are no part of captures of other threads; the mode before."""
        return self.restore(self._relaxed)

    def restore(self, mode: Any) -> Answer:
        """Go back to that mode."""
        answer: Answer = self._runtime.cudaThreadExchangeStreamCaptureMode(mode)
        return answer

    def cuLaunchHostFunc(self, stream: int, function: int, ticket: int) -> Answer:
        """Let the driver call function(ticket) when the stream's present work is done.

        The numbers of the driver's errors are those of the runtime's.
        """
        code = self._launch(stream, function, ticket)
        try:
            return (self._runtime.cudaError_t(code),)
        except ValueError:  # a code that the bindings are too old for
            return (code,)


class Block:
    """Memory of a GPU that goes with the last tensor over it, perhaps in the middle of a garbage collection.

    Args:
        address: where it begins in this process.
        size: bytes that can be used.
        gone: called with no argument when the last reference is gone. Not at the end of the process, whose memory goes
            with it.
    """

    def __init__(self, address: int, size: int, gone: Callable[[], None]) -> None:
        self.address = address
        self.size = size
        weakref.finalize(self, gone).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory as bytes, for torch."""
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}


class TorchSide:
    """What torch knows of GPUs: which there are, their streams, and storages over memory that is not its own."""

    def count(self) -> int:
        """How many GPUs this process sees."""
        return torch.cuda.device_count()

    def uuid(self, index: int) -> bytes:
        """Of this GPU, in UUID_SIZE bytes. No context is made on it."""
        return UUID(str(torch.cuda.get_device_properties(index).uuid)).bytes

    def memory(self, index: int) -> tuple[int, int, int]:
        """Bytes of this GPU: free, in all, and those that torch's allocator keeps and no tensor uses."""
        kept = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
        return *torch.cuda.mem_get_info(index), kept

    def on(self, index: int) -> AbstractContextManager[object]:
        """This GPU is the calling thread's current one. No context is made on another."""
        return torch.cuda.device(index)

    def current(self, index: int) -> torch.cuda.Stream:
        """The calling thread's current stream on this GPU."""
        return torch.cuda.current_stream(index)

    def external(self, handle: int, index: int) -> torch.cuda.Stream:
        """A stream of this GPU that torch has not made."""
        return torch.cuda.ExternalStream(handle, torch.device("cuda", index))

    def wrap(self, memory: object, index: int) -> torch.UntypedStorage:
        """A storage over a __cuda_array_interface__, which torch keeps until the last tensor over it is gone."""
        with plainly():
            return torch.as_tensor(memory, device=torch.device("cuda", index)).untyped_storage()

    def captured(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> Callable[[], None]:
        """What `work` asks this stream for, as a CUDA graph: the call that launches it on the then current stream."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay


# Errors.

OUT_OF_MEMORY = 2
CAPTURES = range(900, 909)  # what a stream that is being captured, or one beside it, refuses
CAPTURE_ELSEWHERE = 906  # asked of the default stream while a stream that blocks it is being captured

_RESTART = "CUDA cannot be used in this process any more; end it, and look for the kernel that failed before this call"
_SHARING = (
    "trainer and workers must see the same GPU, and in containers share ipc and pid namespaces (--ipc, --pid); "
    "`shmsync doctor` and docs/gpu.md have the systems where sharing does not work"
)

# What to do about the common codes.
_CURES = {
    35: "the driver is older than cuda-bindings; install those of the driver's version: pip install 'cuda-bindings<13'",
    46: "another process uses the GPU alone (nvidia-smi -c DEFAULT lets several use it)",
    205: _SHARING,
    217: "the two GPUs cannot reach each other's memory; let trainer and worker use the same GPU",
    304: _SHARING,
    709: "the CUDA context of this process is gone; was cudaDeviceReset() called?",
    801: _SHARING,
    805: "the MPS server cannot be reached; is nvidia-cuda-mps-control running, with this CUDA_MPS_PIPE_DIRECTORY?",
}
_OTHERS = "see whether `nvidia-smi` shows the driver running; docs/gpu.md lists what shmsync needs of it"
_LOST = (226, 700, 702, 710, *range(714, 720), 721)  # the context has failed for good


class CudaError(RuntimeError):
    """A call to CUDA that was refused.

    Args:
        call: its name.
        code: its number, the attribute error_code as in torch.AcceleratorError (2.8).
        name: of the code.
        text: CUDA's own words.
    """

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{call} failed with {name} ({code}): {text}")
        self.error_code = code


def refused(doing: str, error: RuntimeError, device: str, needed: int | None = None) -> ShmSyncError:
    """The error to raise for one of CUDA or torch. `doing`: what was tried; `needed`: bytes that were asked for."""
    code: int = getattr(error, "error_code", 0)  # torch before 2.8 tells none
    text = f"{doing} on {device} failed: {str(error).partition(chr(10))[0]}"
    if code in CAPTURES:
        return ProtocolError(
            f"{text}; a CUDA graph is being captured. Nothing was changed: call it before or after the capture"
        )
    if code == OUT_OF_MEMORY:
        amount = "" if needed is None else f", {needed:,} bytes were asked for"
        return NoSpace(f"{text}{amount}; use fewer slots, a smaller dtype=, or free memory of the GPU")
    if code in _LOST:
        return DeviceFailed(f"{text}; {_RESTART}")
    return DeviceFailed(f"{text}; {_CURES.get(code, _OTHERS)}")


def not_opened(error: CudaError, device: str) -> ShmSyncError:
    """The error for memory of another process that could not be opened."""
    code = error.error_code
    if code in _LOST or code in CAPTURES or code == OUT_OF_MEMORY:
        return refused("opening the memory of another process", error, device)
    return ArenaNotFound(
        f"the memory that the publisher has on {device} could not be opened: {error}. Either the publisher has just "
        f"ended, then attach to its new arena; or it cannot be shared: {_CURES.get(code, _SHARING)}"
    )
