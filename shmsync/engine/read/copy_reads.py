"""Private copies on a device: what sections have asked it for is done before a new version overwrites them.

A section may end before the kernels that it has asked for are done. So what its streams have then is noted, on a stream
that does nothing else; who renews the copies waits for that stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...memory.devices import Stream, Streams, holding

SLICE = 0.05  # seconds between two looks at what else ends a wait


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
        return self._torch.Stream(device=self._device)

    def current(self) -> torch.Stream:
        """As in Streams."""
        return self._torch.current_stream(self._device)

    def as_stream(self, given: object) -> Stream:
        """As in Streams. Raises TypeError for what is neither a stream nor an event of torch's."""
        if not isinstance(given, (torch.Stream, torch.Event, self._torch.Stream, self._torch.Event)):
            raise TypeError(f"a stream or an event of {self._device} is needed, not {given!r}")
        return given

    def follow(self, later: Stream, first: Stream) -> None:
        """As in Streams."""
        if hasattr(first, "wait_event"):
            later.wait_stream(first)  # type: ignore[attr-defined]
        else:
            later.wait_event(first)  # type: ignore[attr-defined]

    def capturing(self, stream: Stream) -> bool:
        """As in Streams."""
        return bool(getattr(self._torch, "is_current_stream_capturing", bool)())

    def wait(self, stream: Stream, seconds: float) -> bool:
        """As in Streams; it waits until it is done, for torch knows no limit."""
        stream.synchronize()  # type: ignore[attr-defined]
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
        self.streams = streams
        self._noted = streams.stream() if noted is None else noted

    def end(self, others: Iterable[Stream]) -> None:
        """A section is over: note what the current stream has, and these."""
        for stream in (self.streams.current(), *others):
            if not self.streams.capturing(stream):  # a replay needs a section of its own
                self.streams.follow(self._noted, stream)

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """The copies are renewed by the current stream, after all that was noted; they are new at the end.

        The next section may use another stream, which would not wait for this one.
        """
        mine = self.streams.current()
        self.streams.follow(mine, self._noted)
        yield
        while not self.streams.wait(mine, SLICE):
            self.streams.check()


def streams_of(tensor: torch.Tensor) -> Streams | None:
    """Of the device that the tensor lies on; None: it does one thing after the other."""
    device = holding(tensor)
    if device is not None:
        return device
    module = torch.get_device_module(tensor.device)
    return TorchStreams(tensor.device, module) if hasattr(module, "current_stream") else None
