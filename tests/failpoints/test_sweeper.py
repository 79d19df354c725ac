"""A process that removes what a killed publisher has left, and is killed or stands still at it."""

from __future__ import annotations

import contextlib

import pytest

import shmsync
from support.faults.failpoints import NotPassed, sweep
from support.jobs.engine import open_arena, read
from support.processes import segment_path
from support.weights import stamped


@pytest.mark.parametrize("point", ["sweep.locked", "sweep.unlinked"])
def test_a_sweeping(start, name, hold, point, slots, consistency):
    """The name is free for the next publisher, or the error names the process that it waits for; nothing stays."""
    sweeper = start()
    held = hold(sweeper, point)
    while not held.held:
        writer = start()
        writer.call(open_arena, name=name, slots=slots)
        writer.kill()
        with contextlib.suppress(NotPassed):  # the publisher of another test has removed it
            held.run(sweep, name)
    # The publisher of another test may have removed it after the sweeper opened it; then the name is free at once.
    if point == "sweep.locked" and not held.killed and segment_path(name).exists():
        with pytest.raises(shmsync.ArenaExists, match="removing"):
            shmsync.Publisher(stamped(2), name=name)
        held.result()
    with shmsync.Publisher(stamped(2), name=name) as pub:
        if held.held and not held.killed:
            held.result()
        assert segment_path(name).exists()  # the new one, which the sweeper leaves alone
        with shmsync.Subscriber(pub.handle, consistency=consistency) as sub:
            assert read(sub)[1:] == (2, 2)
    assert not segment_path(name).exists()
