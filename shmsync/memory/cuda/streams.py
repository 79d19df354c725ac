"""Streams and events, as shmsync passes them on: their handles, and what keeps them alive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(unsafe_hash=True)
class GpuStream:
    """A stream of a GPU; two of the same handle are one. Nothing in it changes.

    Args:
        handle: CUDA's.
        index: of its GPU in this process. The default stream has the same handle on each.
        keep: what owns the handle.
    """

    handle: int
    index: int
    keep: object = field(default=None, compare=False)


@dataclass(eq=False)
class GpuEvent:
    """What a stream had when the user recorded this event.

    Args:
        handle: CUDA's.
        keep: the user's event.
    """

    handle: int
    keep: object


def stream_or_event(given: object, index: int) -> GpuStream | GpuEvent:
    """A stream or an event of torch's, or an object with __cuda_stream__(). `index`: the GPU if it does not say.

    Raises TypeError for anything else, and for an event that was never recorded.
    """
    if isinstance(given, (GpuStream, GpuEvent)):
        return given
    device: Any = getattr(given, "device", None)
    place = getattr(device, "index", None)
    place = index if place is None else int(place)
    stream, event = getattr(given, "cuda_stream", None), getattr(given, "cuda_event", None)
    if isinstance(stream, int):
        return GpuStream(stream, place, given)
    if isinstance(event, int):
        if event == 0:
            raise TypeError(f"{given!r} has never been recorded, so it orders nothing; record() it on a stream first")
        return GpuEvent(event, given)
    protocol = getattr(type(given), "__cuda_stream__", None)
    if protocol is not None:
        _, handle = protocol(given)
        return GpuStream(int(handle), place, given)
    raise TypeError(f"a stream or an event of cuda:{index} is needed, for example torch.cuda.Stream(), not {given!r}")
