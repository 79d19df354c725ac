"""Memory of a device that a closed publisher keeps, because subscribers of other processes still have it open.

Memory of the host is counted by the system. That of a device may go with its owner, and CUDA leaves open what readers
find there then. So it is kept until the last row of a living process is gone; each arena that this process closes on
a device looks again, and one for which there is no room. It ends with the process in any case.
"""

from __future__ import annotations

import threading

from .. import _native
from .devices import OnDevice
from .system.process import Peer, me

_lent: list[tuple[OnDevice, _native.Control, int]] = []  # the last one: of which process, see fork_generation()
_lock = threading.RLock()


def free(place: OnDevice, control: _native.Control) -> None:
    """Give an arena's memory on a device back: now, or once no other process maps it. `control`: its segment's."""
    sweep()
    if place.reads is None and _open_elsewhere(control):
        with _lock:
            _lent.append((place, control, _native.fork_generation()))
    else:
        place.free()


def sweep() -> int:
    """Free what no process has open any more; how much is still lent."""
    with _lock:
        _lent[:] = [each for each in _lent if each[2] == _native.fork_generation()]  # the rest is the parent's
        for each in list(_lent):
            if not _open_elsewhere(each[1]):
                _lent.remove(each)
                each[0].free()
        return len(_lent)


def _open_elsewhere(control: _native.Control) -> bool:
    mine = me().owner
    return any(owner != mine and not Peer(owner=owner).dead for _, owner in control.owners())
