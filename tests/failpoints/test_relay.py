"""A relay that is killed or stands still while it publishes for its node, and the one that takes its place."""

from __future__ import annotations

from math import inf as for_ever

import pytest

import shmsync
from support.faults.failpoints import end_relay, relay
from support.jobs.engine import attach, look
from support.processes import segments

RELAYING = ["relay.planned", "relay.written", "relay.answers"]
STEPS = ["begin.marked", "commit.start", "commit.numbered", "commit.current", "commit.announced"]


@pytest.mark.parametrize("point", RELAYING + STEPS)
def test_a_hand_over(start, hold, point, slots, consistency):
    """Its workers keep what is whole, and the next relay publishes the same version for them."""
    first, second, worker = start(3)
    handle = first.call(relay, slots, 1).handle
    worker.call(attach, handle, consistency=consistency)
    held = hold(first, point).run(relay, slots, 2)
    if not held.killed:
        assert held.result().stamp.version == 2
        assert worker.call(look) == (2, 2, 2)
        first.call(end_relay)
        return
    half = slots == 1 and consistency != "live" and point in ("begin.marked", "commit.start")
    if half:
        with pytest.raises(shmsync.Poisoned):
            worker.call(look, timeout=for_ever)
    elif consistency != "live":
        version, low, high = worker.call(look, timeout=for_ever)
        assert version == low == high <= 2
    announced = second.call(relay, slots, 2)
    assert announced.stamp.version == 2
    worker.call(attach, announced.handle, consistency=consistency)
    assert worker.call(look) == (2, 2, 2)
    assert segments(first.pid) == []  # the new relay has removed what the dead one left
    second.call(end_relay)
    assert segments(second.pid) == []
