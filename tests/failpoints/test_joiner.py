"""A worker that is killed or stands still while it attaches, in a free row or in that of a dead one."""

from __future__ import annotations

from itertools import product
from math import inf as for_ever

import pytest

import shmsync
from support.jobs.engine import attach, detach, enter, leave, look, read
from support.weights import stamped

SHORT = 0.2  # seconds
DEAD, WORKER = 5, 7
MAPPING, CLAIMING = ["attach.mapped", "slab.attached"], ["claim.owner", "claim.cleared", "claim.worker"]
JOINING = [*product(MAPPING + CLAIMING, ["free", "dead"])]


@pytest.mark.parametrize(("point", "row"), JOINING)
def test_a_joining(start, hold, row, point, slots, consistency):
    """No process waits for it forever, it is named by its own index, and its row is free when it is dead."""
    earlier, joiner, heir = start(3)
    rows = 2 if row == "dead" else 3
    with (
        shmsync.Publisher(stamped(1), slots=slots, max_readers=rows) as pub,
        shmsync.Subscriber(pub.handle, worker=0) as other,
    ):
        earlier.call(attach, pub.handle, worker=DEAD)
        earlier.call(enter)
        if row == "dead":
            earlier.kill()  # with its pin
        else:
            earlier.call(leave)
            earlier.call(detach)  # its row keeps its index until the next one has it
        held = hold(joiner, point).run(attach, pub.handle, worker=WORKER, consistency=consistency)
        pinned = (point, row) == ("claim.owner", "dead")  # its pin is there until it is cleared
        if held.killed:
            for version in range(2, slots + 3):
                assert pub.publish(stamped(version), timeout=for_ever) == version
                assert read(other) == (version,) * 3
            heir.call(attach, pub.handle, worker=WORKER)
            assert heir.call(look) == (pub.version,) * 3
            assert sorted(each.worker for each in pub.readers() if each.state == "live") == [0, WORKER]
            return
        if point not in MAPPING:
            (mine,) = [each for each in pub.readers() if each.pid == joiner.pid]
            if not point.endswith(".owner"):  # there, for an instant, the row still names its owner before
                assert mine.worker == (WORKER if point.endswith(".worker") else None)
            assert mine.pinned is None or pinned
        for version in range(2, slots + 1):
            pub.publish(stamped(version), timeout=SHORT)
        version = pub.version + 1
        with pytest.raises((shmsync.AckTimeout, shmsync.ReaderStalled)) as caught:
            pub.publish(stamped(version), wait=[WORKER], timeout=SHORT)
        if isinstance(caught.value, shmsync.ReaderStalled):
            assert pinned and caught.value.missing == [DEAD]
        else:
            assert caught.value.missing == [WORKER]
        held.result()
        assert joiner.call(look) == (pub.version,) * 3
        version = pub.version + 1
        assert pub.publish(stamped(version), timeout=for_ever) == version
        assert joiner.call(look) == read(other) == (version,) * 3
