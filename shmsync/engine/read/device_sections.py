"""Read sections of arenas on devices: such a section ends for the publisher when the device has done its work.

A section may end before the kernels that it has asked for are done. So a stream of the arena's waits for what the
section's streams have then, and releases the slot behind that.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..._native import HostCall
from ...errors import DeviceBusy, DeviceFailed, ProtocolError
from ...memory.arena import Arena
from ...memory.devices import Stream
from ..deadlines import SLICE, slice_until


def end_reads(arena: Arena, name: str, others: list[Stream], call: HostCall | None, look: Callable[[], None]) -> None:
    """A section on a device is over: its reads come to an end when its streams have done what they have now.

    These are the current one and `others`, which is empty afterwards. `call` releases the slot then. None: they end
    before this returns, and `look` may raise in each slice.
    """
    place = arena.device_slab
    assert place is not None
    device, ending = place.device, place.stream
    captured = False
    for stream in (device.current(), *others):
        if device.capturing(stream):  # it is only recorded now; a replay needs a separate section
            captured = True
        else:
            device.follow(ending, stream)
    others.clear()
    if call is not None:
        device.call(ending, call)
        if captured and arena.slots > 1:
            raise ProtocolError(
                f"a graph was captured in a read section of arena {name!r}, which has {arena.slots} slots: its "
                "replays would read one of them, whatever version lies there; publish with slots=1, whose "
                "addresses stay, and replay inside a section"
            )
        return
    while not device.wait(ending, SLICE):
        look()
        device.check()


def wait_for_reads(arena: Arena, name: str, deadline: float) -> None:
    """For close(): wait until the device has done what sections have asked for. Raises DeviceBusy at the deadline."""
    place = arena.device_slab
    while place is not None and place.reads is not None and not place.reads.wait(slice_until(deadline)):
        try:
            place.device.check()
        except DeviceFailed:
            return  # it does nothing any more
        if time.monotonic() >= deadline:
            raise DeviceBusy(
                f"{place.device.name} still does what was asked for in read sections of arena {name!r}; nothing was "
                "closed, call close() again when it has done so"
            )
