"""Publishing by a device: the copies are done later, and the device itself commits behind them.

So it is for an arena on a device, and for one in the host's memory once a GPU that has a source can pin the slab.

The trainer's thread asks its own current stream for the copies, and goes on. So they come after the work that makes the
weights, and before what changes them next; what lies in the host's memory is copied, or copied aside, at once. Only the
commit waits on a stream of the arena's: the trainer's stream need not wait for it.

INV: one version is under way at a time. Until it is committed, or known never to be, no other call touches the writer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from ... import _native
from ...errors import DeviceBusy, DeviceFailed, ProtocolError, ShmSyncError
from ...memory.devices import Device, DeviceSlab, Piece, Stream
from ...memory.manifest import Manifest
from ...memory.process import stay_if_exiting
from ..deadlines import SLICE, slice_until
from .copy_plan import CopyPlan


def wait_for_stream(device: Device, stream: Stream, deadline: float, late: str) -> None:
    """Wait for what a stream has now. Raises DeviceBusy, which says `late`, at the deadline; DeviceFailed."""
    while not device.wait(stream, slice_until(deadline) / 1e9):
        stay_if_exiting()
        device.check()
        if time.monotonic() >= deadline:
            raise DeviceBusy(late)
    device.check()


def wait_for_sources(devices: list[Device], after: object, deadline: float, name: str) -> None:
    """Before the host copies from these devices: wait until its sources are made, and for `after`.

    Raises ValueError for `after` without devices, TypeError where it is none of theirs; DeviceBusy, DeviceFailed.
    """
    if after is not None:
        if not devices:
            raise ValueError(
                f"after= orders copies on a device, but arena {name!r} lies in the host's memory, and so do the "
                "weights; leave it out"
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
            f"the weights for arena {name!r} are still being made on {device.name}, and nothing was published; give it "
            "more time with timeout="
        )
        wait_for_stream(device, device.current(), deadline, late)


class DeviceWrites:
    """The copies of one publisher that a device makes, and the commit behind them.

    Args:
        place: the slab, as the device has it.
        manifest: its leaves.
        name: the arena's, for errors.
        writer: the native writer, which commits.
    """

    def __init__(self, place: DeviceSlab, manifest: Manifest, name: str, writer: _native.Writer) -> None:
        self._name, self._writer = name, writer
        self._device, self._stream, self._in_host_memory = place.device, place.stream, place.pinned
        self._bytes = manifest.slot_bytes
        self._staging: torch.Tensor | None = None
        self._commit: _native.HostCall | None = None
        self._asked = False  # for copies since the last version that was published; before a write: by one given up
        self._number = 0  # the version that is under way
        # Kept until wait_until_published() or take_back(), where after= is an event.
        self._sources: Sequence[torch.UntypedStorage] = ()

    def wait(self, deadline: float) -> bool:
        """Wait until the version that is under way is published; any thread may. False: there is none.

        Raises DeviceFailed when it never will be; then it is taken back. DeviceBusy at the deadline.
        """
        commit = self._commit
        if commit is None:
            return False
        while not commit.wait(slice_until(deadline)):
            stay_if_exiting()
            try:
                self._device.check()
            except DeviceFailed as error:
                if not commit.cancel():
                    continue  # it is just being made
                self._commit = None
                raise DeviceFailed(
                    f"version {self._number} of arena {self._name!r} was not published: {error}", version=self._number
                ) from error
            if time.monotonic() >= deadline:
                raise DeviceBusy(
                    f"version {self._number} of arena {self._name!r} is still being copied on {self._device.name}, and "
                    "nothing newer was published; give it more time with timeout=",
                    version=self._number,
                )
        return True

    def wait_until_published(self, deadline: float) -> bool:
        """As wait(), for the thread that writes next."""
        if not self.wait(deadline):
            return False
        self._commit = None
        self._sources = ()
        self._asked = False
        return True

    def order(self, sources: list[Device], after: object) -> None:
        """Let the current streams, of these devices too, wait for `after`, as in publish().

        Raises TypeError for what is no stream or event.
        """
        if after is not None:
            self._refuse_capture(self._device.current())
            made_by = self._device.as_stream(after)
            self._refuse_capture(made_by)
            for device in dict.fromkeys((self._device, *sources)):
                device.follow(device.current(), made_by)

    def ready(self, deadline: float) -> None:
        """See, before anything is written, that copies can be asked for now.

        Raises ProtocolError in a capture. Raises DeviceBusy while copies of a write that was given up are under way,
        for they may read the staging memory. DeviceFailed.
        """
        self._refuse_capture(self._device.current())
        if self._asked:
            late = (
                f"copies of an earlier write to arena {self._name!r}, which was given up, are still under way on "
                f"{self._device.name}, and nothing was published; give it more time with timeout="
            )
            wait_for_stream(self._device, self._stream, deadline, late)
            self._asked = False

    def _refuse_capture(self, stream: Stream) -> None:
        if self._device.capturing(stream):
            raise ProtocolError(
                f"a graph is being captured on this stream of {self._device.name}: what it records is done at each "
                f"replay, and arena {self._name!r} would be published then; publish before or after the capture"
            )

    def carry(self, pieces: list[Piece]) -> None:
        """Copy within the slab."""
        self._asked = True
        self._device.copy(self._device.current(), pieces)

    def write(self, plan: CopyPlan, address: int, slot: int, after: object = None) -> None:
        """Copy what the plan has into the slot, which begins at `address`. `after`: what order() was given."""
        self._asked = True
        mine = self._device.current()
        if self._in_host_memory:
            plan.copy_to(address, slot, later=True)
            staged = []
        else:
            plan.conversions.write(slot)
            staged = plan.staged()
        if staged:
            if self._staging is None:
                self._staging = self._device.staging(self._bytes)
            aside = self._staging.data_ptr()
            plan.aside(self._staging)
            self._device.copy(mine, [(address + at, aside + at, size) for at, size in staged])
        # The stream that made the weights may change them, or use their memory again, once they are copied.
        if after is not None and not self._device.follow(self._device.as_stream(after), mine):
            self._sources = [source.untyped_storage() for source in plan.conversions.sources]

    def open_to(self) -> None:
        """An update() is open: its body writes into the slot, by the current stream.

        Should another stream be the current one at the end, the commit waits for this one too.
        """
        self._asked = True
        self._device.follow(self._stream, self._device.current())

    def commit(self) -> int:
        """Let the device publish what was written, when it is written; its version."""
        self._device.follow(self._stream, self._device.current())
        self._number = int(self._writer.next_version)
        self._commit = self._writer.commit_later()
        self._device.call(self._stream, self._commit)
        return self._number

    def take_back(self) -> None:
        """The write that was begun ends here: from now on the device commits nothing, unless it has done so already."""
        commit, self._commit = self._commit, None
        self._sources = ()
        if commit is None and self._asked:
            with suppress(ShmSyncError):  # it has failed; or what the stream has is only recorded, in a capture
                self._device.follow(self._stream, self._device.current())
        if commit is not None and not commit.cancel():
            while not commit.wait(int(SLICE * 1e9)):
                stay_if_exiting()
