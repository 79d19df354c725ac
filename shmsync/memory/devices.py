"""Devices whose memory an arena can lie in, or that copy from and to one in the host's memory; what they are asked for.

What a device is asked for is done later: each stream does what it was given, in that order, and streams do not wait for
each other unless follow() orders them. So an arena on a device never takes a call for its result. A version is
committed by the device itself, in a call that stands behind the copies; a slot is let go by the device, in a call that
stands behind the reads of a section. Tensors that lie on a device are copied by torch, on the current stream; copy() is
for bytes within the slab and from staging memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .. import _native
from ..errors import ArenaNotFound, ForkedHandle, ShmSyncError
from .manifest import same_order
from .torch_modes import copy_into

if TYPE_CHECKING:
    from .cuda.gpu import Gpu

Device: TypeAlias = "Gpu"  # or what a test has registered in its place
Piece = tuple[int, int, int]  # to, from: addresses; bytes
Stream = Any  # hashable; of a class of the device's own

_LAST_COPIES = 1.0  # seconds; those of a version that was given up
_unfinished: list[torch.UntypedStorage] = []  # what a device may still write or read
_of_kind: dict[int, Device] = {}
_of_name: dict[str, Device] = {}
_of_torch: dict[torch.device, Device | None] = {}  # as holding() found them
_default: list[Device] = []
_addressed = {"cpu", "cuda"}  # types of devices on which every plain tensor's storage tells its address


def register(device: Device, *, default: bool = False) -> None:
    """Let arenas lie on this device. `default`: also those for which none was asked."""
    _of_kind[device.kind] = device
    _of_name[device.name] = device
    _addressed.add(device.torch_device.type)
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
        from . import cuda  # other devices need no CUDA

        return cuda.holder(handle, name)
    if device is None:
        raise ArenaNotFound(
            f"arena {name!r} lies on a device of kind {kind} but this process knows the kinds {sorted(_of_kind)}; "
            "import what brings the device, or publish with device='cpu'"
        )
    return device


def named(device: torch.device | str) -> Device | None:
    """The device of this name, None for the host's memory.

    Raises TypeError and ValueError for what is no device that an arena can lie on, and what CUDA's own part raises.
    """
    wanted = "device is None or 'cpu' (the host's memory), or a GPU such as 'cuda:0'"
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"{wanted}, not {device!r}")
    known = _of_name.get(str(device))
    if known is not None:
        return known
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{wanted}, not {device!r}, which is no device") from error
    if found.type == "cuda":
        index = found.index
        if index is None:
            index = torch.cuda.current_device() if torch.cuda.is_available() else 0
        from . import cuda  # other devices need no CUDA

        return cuda.device(index)
    if found.type != "cpu":
        raise ValueError(
            f"{wanted}; an arena cannot lie on {str(found)!r}. With device='cpu' its weights are fetched from there to "
            "the host's memory"
        )
    return None


def has_address(tensor: torch.Tensor) -> bool:
    """Is its data_ptr() an address of this process? No device's memory has an address in common with the host's."""
    return tensor.device.type in _addressed


def holding(tensor: torch.Tensor) -> Device | None:
    """The device whose memory this plain tensor lies in. None: the host's, or one of which only torch knows.

    Raises ForkedHandle in a forked child, for a tensor on its parent's GPU.
    """
    if tensor.device.type == "cpu":
        return None
    if tensor.device not in _of_torch:
        try:
            _of_torch[tensor.device] = named(tensor.device)
        except ForkedHandle:
            raise
        except (ShmSyncError, ValueError, ImportError):
            _of_torch[tensor.device] = None  # no arena can lie there, but torch copies from there
    return _of_torch[tensor.device]


def assign(to: torch.Tensor, source: torch.Tensor) -> None:
    """`to.copy_(source)`, wherever they lie, as work of the calling thread's current stream. Call it inside plainly().

    What changes its dtype on the way to the host is cast on its device.
    """
    if to.dtype != source.dtype and to.device.type == "cpu" != source.device.type:
        source = source.to(to.dtype)
    copy_into(to, source)


def laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor with its values in the order of these strides, where it lies: itself, or a copy by the current stream.

    Call it inside plainly().
    """
    if same_order(tensor.shape, tensor.stride(), strides):
        return tensor
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    assign(made, tensor)
    return made


class DeviceSlab:
    """The slab of an arena as a device has it, in one process: its own memory, or memory of the host.

    Args:
        device: the device.
        storage: the slab.
        reads: what this process has still to read, in a subscriber of an arena on the device.
        pinned: the slab is memory of the host, and pinned.
    """

    def __init__(
        self,
        device: Device,
        storage: torch.UntypedStorage,
        reads: _native.DeviceReads | None = None,
        *,
        pinned: bool = False,
    ) -> None:
        self.device = device
        self.storage = storage
        self.reads = reads
        self.pinned = pinned
        self.stream = device.stream()  # a publisher's commits; what ends a subscriber's reads

    def free(self) -> None:
        """Give the memory back, with the last tensor over it, when nothing is under way in it any more."""
        try:
            done = self.device.wait(self.stream, _LAST_COPIES)
        except ShmSyncError:
            done = False
        if not done:  # the device has failed, or its thread has ended with the interpreter
            _unfinished.append(self.storage)
        elif self.pinned:
            self.device.unpin(self.storage)
        self.storage = torch.UntypedStorage(0)
