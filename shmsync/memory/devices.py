"""Devices whose memory an arena can lie in, and what it asks of them. The memory of the host needs none of this.

What a device is asked for is done later: each stream does what it was given, in that order, and streams do not wait for
each other unless follow() says so. So an arena on a device never takes a call for its result. A version is committed
by the device itself, in a call that stands behind the copies; a slot is let go by the device, in a call that stands
behind the reads of a section.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from .. import _native
from ..errors import ArenaNotFound, DeviceFailed

Piece = tuple[int, int, int]  # to, from: addresses; bytes
Stream = Hashable


class Device(Protocol):
    """One device, as one process uses it. Its errors are DeviceFailed; they may come with a later call.

    Attributes:
        kind: the number that the header of a segment has for such a device.
        name: as in an error: "cuda:0".
    """

    kind: int
    name: str

    def allocate(self, size: int) -> torch.UntypedStorage:
        """Memory of the device that other processes can open. Raises NoSpace."""

    def export(self, storage: torch.UntypedStorage) -> bytes:
        """By what another process of this machine opens it; at most HANDLE_BYTES."""

    def open(self, handle: bytes, size: int) -> torch.UntypedStorage:
        """The memory that another process, which lives, has exported. Raises ArenaNotFound, ArenaCorrupt, NoSpace."""

    def free(self, storage: torch.UntypedStorage) -> None:
        """Give allocated or opened memory back; its tensors may still live, and then it goes with the last of them."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Is this plain tensor in memory of this device, so that the device itself can copy it?"""

    def staging(self, size: int) -> torch.Tensor:
        """Memory of the host that the device copies from without stopping the calling thread; bytes."""

    def stream(self) -> Stream:
        """A new stream."""

    def current(self) -> Stream:
        """The stream that the calling thread's own work goes to."""

    def as_stream(self, given: object) -> Stream:
        """A stream, or what one has done when it was recorded (an event), as the users of this device have them.

        Raises TypeError for anything else.
        """

    def follow(self, later: Stream, first: Stream) -> None:
        """What `later` gets from now on is done when all that `first` has now is done."""

    def copy(self, stream: Stream, pieces: Sequence[Piece]) -> None:
        """Copy between memory of this device, or from staging memory to it. The sources stay as they are until then."""

    def capturing(self, stream: Stream) -> bool:
        """Is what this stream is given now only recorded, to be done later, perhaps more than once (a CUDA graph)?"""

    def call(self, stream: Stream, call: _native.HostCall) -> None:
        """Make this call when all that the stream has now is done. It is not made if the device fails before."""

    def wait(self, stream: Stream, seconds: float) -> bool:
        """Wait until all that the stream has now is done; False: it is not, after so many seconds."""

    def check(self) -> None:
        """Raise DeviceFailed if the device has failed, so that what it was asked for may never be done."""


_LAST_COPIES = 1.0  # seconds; those of a version that was given up
_unfinished: list[torch.UntypedStorage] = []  # what a device may still write or read
_of_kind: dict[int, Device] = {}
_default: list[Device] = []


def register(device: Device, *, default: bool = False) -> None:
    """Let arenas lie on this device. `default`: also those for which none was asked."""
    _of_kind[device.kind] = device
    if default:
        _default[:] = [device]


def default() -> Device | None:
    """Where arenas lie for which no device was asked; None: in the host's memory."""
    return _default[0] if _default else None


def of_kind(kind: int, name: str, handle: bytes) -> Device | None:
    """The device on which a slab lies; None: in the host's memory. `name`: the arena's; `handle`: the slab's.

    Raises ArenaNotFound, and for a GPU what shmsync.memory.cuda.holder() raises.
    """
    if kind == _native.SLAB_MEMFD:
        return None
    device = _of_kind.get(kind)
    if device is None and kind == _native.SLAB_CUDA:
        from . import cuda  # nothing of it is needed for other devices

        return cuda.holder(handle, name)
    if device is None:
        raise ArenaNotFound(
            f"arena {name!r} lies on a device of kind {kind} but this process knows the kinds {sorted(_of_kind)}; "
            "import what brings the device, or publish with device='cpu'"
        )
    return device


class OnDevice:
    """The part of an arena that lies on a device, in one process.

    Args:
        device: the device.
        storage: the slab.
        reads: what this process has still to read, in a subscriber.
    """

    def __init__(self, device: Device, storage: torch.UntypedStorage, reads: _native.DeviceReads | None = None) -> None:
        self.device = device
        self.storage = storage
        self.reads = reads
        self.stream = device.stream()  # copies of a publisher; what ends a subscriber's reads

    def free(self) -> None:
        """Give the memory back, when nothing is under way in it any more."""
        try:
            done = self.device.wait(self.stream, _LAST_COPIES)
        except DeviceFailed:
            done = False
        if done:
            self.device.free(self.storage)
        else:  # the device has failed, or its thread has ended with the interpreter
            _unfinished.append(self.storage)
        self.storage = torch.UntypedStorage(0)  # the memory goes with the last tensor over it


def checked_slots(slots: int, device: Device) -> None:
    """Raise ValueError for more slots than readers on a device can hold."""
    if slots > _native.MAX_DEVICE_SLOTS:
        raise ValueError(
            f"an arena on {device.name} has at most {_native.MAX_DEVICE_SLOTS} slots, not {slots}; use fewer"
        )
