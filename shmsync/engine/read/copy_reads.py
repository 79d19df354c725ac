"""Private copies on a device: what sections have asked it for is done before a new version overwrites them.

A section may end before the kernels that it has asked for are done. So what its streams have then is noted, on a stream
that does nothing else; who renews the copies waits for that stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ...memory.devices import OnDevice, Stream, Streams, holding, place_of

_SLICE = 0.05  # seconds


class TorchStreams:
    """The streams of a device on which no arena can lie, as torch has them: an XPU, or a GPU without cuda-bindings.

    Args:
        device: where the copies are.
        module: torch's module for its type.
    """

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device = device
        self._torch = module

    def stream(self) -> torch.Stream:
        """As in Streams."""
        made: torch.Stream = self._torch.Stream(device=self._device)
        return made

    def current(self) -> torch.Stream:
        """As in Streams."""
        found: torch.Stream = self._torch.current_stream(self._device)
        return found

    def as_stream(self, given: object) -> Stream:
        """As in Streams. Raises TypeError for what is neither a stream nor an event of torch's."""
        if not isinstance(given, (torch.Stream, torch.Event, self._torch.Stream, self._torch.Event)):
            raise TypeError(f"a stream or an event of {self._device} is needed, not {given!r}")
        return given

    def follow(self, later: Stream, first: Stream) -> None:
        """As in Streams."""
        if hasattr(first, "wait_event"):
            later.wait_stream(first)
        else:
            later.wait_event(first)

    def capturing(self, stream: Stream) -> bool:
        """As in Streams."""
        return bool(getattr(self._torch, "is_current_stream_capturing", bool)())

    def wait(self, stream: Stream, seconds: float) -> bool:
        """As in Streams; it waits until it is done, for torch knows no limit."""
        stream.synchronize()
        return True

    def check(self) -> None:
        """As in Streams: torch raises what has failed by itself."""


class CopyReads:
    """What the sections that are over still read of private copies on one device.

    Args:
        streams: of the device.
        noted: the stream on which it is noted; by default a new one.
    """

    def __init__(self, streams: Streams, noted: Stream | None = None) -> None:
        self._streams = streams
        self._noted = streams.stream() if noted is None else noted

    def as_stream(self, given: object) -> Stream:
        """As in Streams."""
        return self._streams.as_stream(given)

    def end(self, others: Iterable[Stream]) -> None:
        """A section is over: note what the current stream has, and these."""
        for stream in (self._streams.current(), *others):
            if not self._streams.capturing(stream):  # a replay needs a section of its own
                self._streams.follow(self._noted, stream)

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """The copies are renewed by the current stream, after all that was noted; they are new at the end.

        The next section may use another stream, which would not wait for this one.
        """
        mine = self._streams.current()
        self._streams.follow(mine, self._noted)
        yield
        while not self._streams.wait(mine, _SLICE):
            self._streams.check()


class CopyOrder:
    """What orders the private copies of one Subscriber with the kernels that read them."""

    def __init__(self) -> None:
        self._known: dict[str, CopyReads] = {}
        self._all: list[CopyReads] = []
        self.apart: list[CopyReads] = []  # of these, those that a section has to end by itself

    def order(self, copies: Iterable[torch.Tensor], place: OnDevice | None) -> None:
        """From now on order these. `place`: of the arena; the sections there are noted on its stream already."""
        names = set()
        for tensor in copies:
            name = place_of(tensor)
            if name not in ("cpu", "meta") and (place is None or name != place.device.name):
                streams = None if name in self._known else _streams_of(tensor)
                if streams is not None:
                    self._known[name] = CopyReads(streams)
                names.add(name)
        self.apart = [self._known[name] for name in sorted(names & self._known.keys())]
        self._all = [*self.apart, *([] if place is None else [CopyReads(place.device, place.stream)])]

    def end(self, others: Iterable[Stream]) -> None:
        """A section is over."""
        for reads in self.apart:
            reads.end(others)

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """The copies are renewed inside, and are new at the end."""
        with ExitStack() as stack:
            for reads in self._all:
                stack.enter_context(reads.renewing())
            yield


def _streams_of(tensor: torch.Tensor) -> Streams | None:
    """Of the device that the tensor lies on; None: it does one thing after the other."""
    device = holding(tensor)
    if device is not None:
        return device
    module = torch.get_device_module(tensor.device)
    return TorchStreams(tensor.device, module) if hasattr(module, "current_stream") else None
