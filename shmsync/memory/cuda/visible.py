"""The GPUs that this process sees, and whether it can use them at all."""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from uuid import UUID

import torch

from ... import _native
from ...errors import ArenaNotFound, DeviceFailed, ForkedHandle
from .calls import UUID_SIZE, CudaCalls, TorchSide
from .gpu import Gpu

_DRIVER = "libcuda.so.1"

_lock = threading.RLock()


def device(index: int) -> Gpu:
    """The GPU of this number, as torch counts them in this process.

    Raises DeviceFailed, which says what is missing, where CUDA cannot be used; ForkedHandle in a child of a process
    that uses CUDA.
    """
    with _lock:
        calls, side, gpus = _used(_native.fork_generation())
        if index not in gpus:
            count = side.count()
            if not 0 <= index < count:
                raise DeviceFailed(
                    f"cuda:{index} is not there: this process sees {count} GPUs; look at CUDA_VISIBLE_DEVICES, and in "
                    "a container at --gpus"
                )
            gpus[index] = Gpu(index, calls, side)
        return gpus[index]


def holder(handle: bytes, arena: str) -> Gpu:
    """The GPU whose memory a slab's handle is about; `arena` is its name.

    It may have another number here than in the process of the publisher.

    Raises ArenaNotFound if this process does not see it, and what device() raises.
    """
    uuid = handle[:UUID_SIZE]
    with _lock:
        _, side, _ = _used(_native.fork_generation())
        seen = {gpu.uuid: gpu for gpu in map(device, range(side.count()))}  # which makes no context on them
    if uuid not in seen:
        raise ArenaNotFound(
            f"arena {arena!r} lies on {named(uuid)}, but this process sees {', '.join(map(named, seen)) or 'no GPU'}; "
            "let CUDA_VISIBLE_DEVICES contain that GPU (in any place of the list), in a container --gpus; or publish "
            "with device='cpu'"
        )
    return seen[uuid]


def named(uuid: bytes) -> str:
    """A UUID as nvidia-smi writes it."""
    return f"GPU-{UUID(bytes=uuid)}"


def reason() -> str | None:
    """Why CUDA cannot be used in this process; None: it can. Makes no context on a GPU, but initialises CUDA."""
    try:
        with _lock:
            _used(_native.fork_generation())
    except (DeviceFailed, ForkedHandle) as error:
        return str(error)
    return None


@lru_cache(maxsize=1)
def _used(generation: int) -> tuple[CudaCalls, TorchSide, dict[int, Gpu]]:
    """What this process uses CUDA with, and its GPUs so far; a forked child, of another generation, has its own."""
    return *system(), {}


def system() -> tuple[CudaCalls, TorchSide]:
    """What this machine has. Raises DeviceFailed, ForkedHandle."""
    if torch.version.cuda is None:
        raise DeviceFailed(
            f"torch {torch.__version__} was built without CUDA; install a build with it, or publish with device='cpu'"
        )
    if torch.cuda._is_in_bad_fork():
        raise ForkedHandle(
            "the parent of this process used CUDA before it forked, and CUDA cannot be used in the child; start "
            "workers with the method 'spawn' or 'forkserver'"
        )
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        version = (torch.version.cuda or "").partition(".")[0]
        raise DeviceFailed(
            f"weights on a GPU need cuda-bindings, which is not there ({error}); install it for the CUDA of this "
            f"torch: pip install 'cuda-bindings=={version}.*'"
        ) from error
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise DeviceFailed(
            f"the NVIDIA driver is not there ({error}); install it, in a container use --gpus"
        ) from error
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        raise DeviceFailed(f"torch could not initialise CUDA: {error}") from error
    return CudaCalls(runtime, driver), TorchSide()
