"""What CUDA's error codes mean for who uses shmsync: the error that is raised, its cause, and the next step."""

from __future__ import annotations

from ...errors import ArenaNotFound, DeviceFailed, NoSpace, ProtocolError, ShmSyncError

OUT_OF_MEMORY = 2
NOT_READY = 600
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
    100: "no GPU is visible; look at CUDA_VISIBLE_DEVICES, and in a container at --gpus",
    101: "fewer GPUs are visible; look at CUDA_VISIBLE_DEVICES",
    205: _SHARING,
    206: _SHARING,
    217: "the two GPUs cannot reach each other's memory; let trainer and worker use the same GPU",
    304: _SHARING,
    709: "the CUDA context of this process is gone; was cudaDeviceReset() called?",
    801: _SHARING,
    803: "driver and libcuda are of different versions; in a container, mount the host's",
    805: "the MPS server cannot be reached; is nvidia-cuda-mps-control running, with this CUDA_MPS_PIPE_DIRECTORY?",
}
_OTHERS = "see whether `nvidia-smi` shows the driver running; docs/gpu.md lists what shmsync needs of it"
_LOST = (226, 700, 702, 710, *range(714, 720), 721)  # the context has failed for good


class CudaError(Exception):
    """A call to CUDA that was refused.

    Args:
        call: its name.
        code: its number.
        name: of the code.
        text: CUDA's own words.
    """

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{call} failed with {name} ({code}): {text}")
        self.code = code


def refused(doing: str, error: CudaError, device: str, needed: int | None = None) -> ShmSyncError:
    """The error to raise. `doing`: what was tried; `needed`: bytes, where memory was asked for."""
    text = f"{doing} on {device} failed: {error}"
    if error.code in CAPTURES:
        return ProtocolError(
            f"{text}; a CUDA graph is being captured. Nothing was changed: call it before or after the capture"
        )
    if error.code == OUT_OF_MEMORY:
        amount = "" if needed is None else f", {needed:,} bytes were asked for"
        return NoSpace(f"{text}{amount}; use fewer slots, a smaller dtype=, or free memory of the GPU")
    if error.code in _LOST:
        return DeviceFailed(f"{text}; {_RESTART}")
    return DeviceFailed(f"{text}; {_CURES.get(error.code, _OTHERS)}")


def not_opened(error: CudaError, device: str) -> ShmSyncError:
    """The error for memory of another process that could not be opened."""
    if error.code in _LOST or error.code in CAPTURES or error.code == OUT_OF_MEMORY:
        return refused("opening the memory of another process", error, device)
    return ArenaNotFound(
        f"the memory that the publisher has on {device} could not be opened: {error}. Either the publisher has just "
        f"ended, then attach to its new arena; or it cannot be shared: {_CURES.get(error.code, _SHARING)}"
    )
