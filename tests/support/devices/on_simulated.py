"""What tests, and their workers, do with an arena on the simulated device."""

from __future__ import annotations

import shmsync


def stream_of(handle):
    """The arena's stream: a publisher commits there, and a subscriber's reads end there."""
    return (handle._writer.arena if isinstance(handle, shmsync.Publisher) else handle.arena).on_device.stream


def value(sub, **kwargs):
    """What a section sees; all elements are one value."""
    with sub.read(**kwargs) as section:
        (found,) = set(section.weights["t"].tolist())
        return section.version, found
