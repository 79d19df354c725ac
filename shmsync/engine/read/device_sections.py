"""Read sections that ask devices for work: such a section ends for the publisher when the device has done that work.

So it is with private copies on a device: what sections have asked it for is done before a new version overwrites them.
A section may end before the kernels that it has asked for are done. So what its streams have then is noted on another
stream, on the arena's device the arena's; the stream that renews the copies waits for that one. A third stream notes
the renewal, and the streams of later sections wait for it. The host waits in a capture only, and for a copy from its
own memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from ..._native import HostCall
from ...errors import DeviceBusy, DeviceFailed, ProtocolError
from ...memory.arena import Arena
from ...memory.devices import Stream, Streams, holding
from ..deadlines import slice_until

_SLICE = 0.05  # seconds between two looks at what else ends a wait


class PrivateCopies:
    """The order of private copies on one device: what sections still read of them, and what renews them.

    Args:
        streams: of the device.
        noted: the stream on which it is noted what sections read; by default a new one.
        before: what ordered the same copies until now, by another `noted`.

    Attributes:
        pending: are they perhaps still being renewed? Then a section orders its stream behind that.
    """

    def __init__(self, streams: Streams, noted: Stream | None = None, before: PrivateCopies | None = None) -> None:
        self.streams = streams
        self.noted = streams.stream() if noted is None else noted
        self.pending: bool = before is not None and before.pending
        self._renewed: Stream = streams.stream() if before is None else before._renewed
        # The stream that renews the copies just now, or was interrupted in a renewal.
        self._renewing: Stream | None = None if before is None else before._renewing
        if before is not None:
            streams.follow(self.noted, before.noted)

    def note(self, others: Iterable[Stream]) -> None:
        """A section is over: note what the current stream has, and these."""
        for stream in (self.streams.current(), *others):
            if not self.streams.capturing(stream):  # a replay needs a separate section
                self.streams.follow(self.noted, stream)

    def refuse_capture(self) -> None:
        """Raise ProtocolError if the current stream is captured: a replay would copy from a slot with other weights."""
        if self.streams.capturing(self.streams.current()):
            raise ProtocolError(
                "a graph is being captured, and the module has buffers or other private copies that a newer version "
                "has to be copied into; nothing was changed, begin the capture inside a read section"
            )

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """The current stream renews the copies inside, after all work that was noted."""
        mine = self.streams.current()
        for first in (self.noted, self._renewed if self.pending else None, self._renewing):
            if first is not None:
                self.streams.follow(mine, first)
        self._renewing = mine
        yield
        self.streams.follow(self._renewed, mine)
        self.streams.follow(self.noted, mine)  # it reads a slot, and the section may end on another stream
        self.pending, self._renewing = True, None

    def use(self) -> None:
        """A section begins: what its stream is given from now on comes after the renewal."""
        if not self.pending:
            return
        mine = self.streams.current()
        if self.streams.capturing(mine):  # what is captured cannot wait for what is not
            while not self.streams.wait(self._renewed, _SLICE):
                self.streams.check()
        elif not self.streams.wait(self._renewed, 0):
            self.streams.follow(mine, self._renewed)
            return
        self.pending = False


class SectionStreams:
    """The streams that sections of one Subscriber use, and their order with what writes the memory that they read.

    Attributes:
        apart: the private copies of bound modules on other devices than the arena's, whose reads a section has to end.
    """

    def __init__(self) -> None:
        self._others: list[Stream] = []  # that the open section has used besides the current one
        self._known: dict[str, PrivateCopies] = {}
        self._copies: list[PrivateCopies] = []
        self.apart: list[PrivateCopies] = []

    def order_copies(self, copies: Iterable[torch.Tensor], arena: Arena) -> None:
        """From now on order these private copies with the kernels that read them.

        The sections on the arena's own device are noted on its stream already.
        """
        place = arena.on_device
        own = None if place is None else place.device.name
        names = set()
        for tensor in copies:
            name = str(tensor.device)
            if name not in ("cpu", "meta", own):
                streams = holding(tensor) if name not in self._known else None
                if streams is not None:  # else it is no device of ours, and does one thing after the other
                    self._known[name] = PrivateCopies(streams)
                names.add(name)
        self.apart = [self._known[name] for name in sorted(names & self._known.keys())]
        self._copies = list(self.apart)
        if place is not None:
            before = self._known.get(place.device.name)
            if before is None or before.noted is not place.stream:
                self._known[place.device.name] = PrivateCopies(place.device, place.stream, before)
            self._copies.append(self._known[place.device.name])

    def refuse_capture(self) -> None:
        """Before private copies are renewed. Raises ProtocolError while the current stream is captured."""
        for copies in self._copies:
            copies.refuse_capture()

    @contextmanager
    def renewing_copies(self) -> Iterator[None]:
        """The private copies are renewed inside; a later use calls use_copies() first."""
        with ExitStack() as stack:
            for copies in self._copies:
                stack.enter_context(copies.renewing())
            yield

    def use_copies(self) -> None:
        """Order the current stream behind the renewal of the copies."""
        for copies in self._copies:
            copies.use()

    @property
    def pending(self) -> bool:
        """May a device still renew private copies?"""
        return any(copies.pending for copies in self._copies)

    def add(self, stream: object, arena: Arena) -> None:
        """The open section uses this stream too. Raises TypeError for what is no stream or event of the device."""
        place = arena.on_device
        if place is not None:
            self._others.append(place.device.as_stream(stream))
        elif self.apart:
            self._others.append(self.apart[0].streams.as_stream(stream))

    def end_copies(self, arena: Arena) -> None:
        """A section is over that may have asked devices for something with private copies."""
        for copies in self.apart:
            copies.note(self._others)
        if arena.on_device is None:
            self._others.clear()

    def end(self, arena: Arena, name: str, call: HostCall | None, look: Callable[[], None]) -> None:
        """A section on a device is over: its reads come to an end when its streams have done what they have now.

        `call` releases the slot then. None: they end before this returns, and `look` may raise in each slice.
        """
        place = arena.on_device
        assert place is not None
        device, ending = place.device, place.stream
        captured = False
        for stream in (device.current(), *self._others):
            if device.capturing(stream):  # it is only recorded now; a replay needs a separate section
                captured = True
            else:
                device.follow(ending, stream)
        self._others.clear()
        if call is not None:
            device.call(ending, call)
            if captured and arena.slots > 1:
                raise ProtocolError(
                    f"a graph was captured in a read section of arena {name!r}, which has {arena.slots} slots: its "
                    "replays would read one of them, whatever version lies there; publish with slots=1, whose "
                    "addresses stay, and replay inside a section"
                )
            return
        while not device.wait(ending, _SLICE):
            look()
            device.check()


def wait_for_reads(arena: Arena, name: str, deadline: float) -> None:
    """For close(): wait until the device has done what sections have asked for. Raises DeviceBusy at the deadline."""
    place = arena.on_device
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
