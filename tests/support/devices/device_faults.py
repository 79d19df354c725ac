"""Orders of an arena on a device, each taken away: a storm over the simulated device must see that each is gone.

Each takes a monkeypatch, or what has its setattr(), and the simulated device of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmsync.engine.copy.copy_plan import CopyPlan
from shmsync.engine.read.reading import ReadPath
from shmsync.engine.write.device_writes import DeviceWrites
from support.devices.streams import HOST


def commits_at_once(patch, device):
    patch.setattr(DeviceWrites, "commit", lambda writes: int(writes._writer.commit()))


def sections_let_go_at_once(patch, device):
    patch.setattr(ReadPath, "_reads_end", lambda path, call: call is None or device.call(HOST, call))


def commits_do_not_follow_the_copies(patch, device):
    _some_follow_nobody(patch, device, lambda later, first, own: later is own and first is not HOST)


def weights_of_the_host_are_read_later(patch, device):
    aside = CopyPlan.aside
    _tell_own_stream(patch, device)
    patch.setattr(CopyPlan, "aside", lambda plan, staging: device.own.give(lambda: aside(plan, staging)))


def _some_follow_nobody(patch, device, forgotten):
    """`forgotten(later, first, own)`: is this order taken away? `own`: the arena's stream, which commits."""
    follow = device.follow

    def follow_or_not(later, first):
        return forgotten(later, first, getattr(device, "own", None)) or follow(later, first)

    _tell_own_stream(patch, device)
    patch.setattr(device, "follow", follow_or_not)


def _tell_own_stream(patch, device):
    """device.own becomes the stream on which the publisher commits."""
    begin = DeviceWrites.__init__

    def begin_and_tell(writes, place, *rest):
        begin(writes, place, *rest)
        device.own = place.stream

    patch.setattr(DeviceWrites, "__init__", begin_and_tell)


FAULTS: dict[str, Callable[[Any, Any], None]] = {
    each.__name__: each
    for each in (
        commits_at_once,
        sections_let_go_at_once,
        commits_do_not_follow_the_copies,
        weights_of_the_host_are_read_later,
    )
}
