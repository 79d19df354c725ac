"""How a publisher writes slots that lie in the host's memory: each copy is done when its call returns.

DeviceWrites (device_writes.py) has the same methods for slots on a device, where what is asked for is done later.
"""

from __future__ import annotations

import time

from ... import _native
from ...errors import DeviceBusy
from ...memory.devices import Device, Piece, Stream
from ...memory.system.exiting import stay_if_exiting
from ..copy.copy_plan import CopyPlan
from ..deadlines import slice_until


def wait_for_stream(device: Device, stream: Stream, deadline: float, late: str) -> None:
    """Wait for what a stream has now. Raises DeviceBusy, which says `late`, at the deadline; DeviceFailed."""
    while not device.wait(stream, slice_until(deadline) / 1e9):
        stay_if_exiting()
        device.check()
        if time.monotonic() >= deadline:
            raise DeviceBusy(late)
    device.check()


class HostWrites:
    """The copies of one publisher, and the commit behind them.

    Attributes:
        at_once: is a copy done when its call returns, and a version published when commit() returns?

    Args:
        name: the arena's, for errors.
        writer: the native writer, which commits.
    """

    at_once = True

    def __init__(self, name: str, writer: _native.Writer) -> None:
        self._name = name
        self._writer = writer

    @property
    def under_way(self) -> bool:
        """May a version still be committed, so that no other call may use the writer?"""
        return False

    @property
    def published(self) -> tuple[int, int]:
        """The published version, and its slot; while a version is under way, the one before."""
        return self._writer.published

    def wait_until_published(self, deadline: float) -> bool:
        """Wait until the version that is under way is published. False: there is none.

        Raises DeviceFailed when it never will be; then it is taken back. DeviceBusy at the deadline.
        """
        return False

    def order(self, plan: CopyPlan, after: object, deadline: float) -> None:
        """See that what the plan copies from devices is made before it is copied. `after`: as in publish().

        The calling thread copies, so it waits for its own streams, and for `after`. Raises ValueError for `after`
        without devices, TypeError where it is none of theirs; DeviceBusy, DeviceFailed.
        """
        devices = plan.conversions.devices
        if after is not None:
            if not devices:
                raise ValueError(
                    f"after= orders copies on a device, but arena {self._name!r} lies in the host's memory, and so do "
                    "the weights; leave it out"
                )
            if len(devices) > 1:
                raise ValueError(
                    "after= orders the copies of one device, but the weights lie on "
                    + " and ".join(device.name for device in devices)
                    + "; let their current streams wait for it instead"
                )
            devices[0].follow(devices[0].current(), devices[0].as_stream(after))
        for device in devices:
            late = (
                f"the weights for arena {self._name!r} are still being made on {device.name}, and nothing was "
                "published; give it more time with timeout="
            )
            wait_for_stream(device, device.current(), deadline, late)

    def ready(self, deadline: float) -> None:
        """See, before anything is written, that copies can be asked for now.

        On a device: raises ProtocolError in a capture. Raises DeviceBusy while copies of a write that was given up are
        under way, for they may read the staging memory. DeviceFailed.
        """

    def carry(self, pieces: list[Piece]) -> None:
        """Copy within the slab."""
        _native.copy(pieces)

    def write(self, plan: CopyPlan, address: int, slot: int, after: object = None) -> None:
        """Copy what the plan has into the slot, which begins at `address`. `after`: what order() was given."""
        plan.copy_to(address, slot)

    def open_to(self) -> None:
        """An update() is open: its body writes into the slot, by the calling thread's current stream."""

    def commit(self) -> int:
        """Publish what was written, when it is written; its version."""
        return int(self._writer.commit())

    def take_back(self) -> None:
        """The write that was begun ends here: from now on the device commits nothing, unless it has done so already."""
