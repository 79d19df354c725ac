"""A worker that is killed or stands still between two steps of a section, an ack or its leaving."""

from __future__ import annotations

from itertools import product
from math import inf as for_ever

import pytest

import shmsync
from support.calls import Call, naming
from support.faults.failpoints import CONSISTENCIES, SLOTS
from support.jobs.engine import attach, detach, look, read, refresh, wait_version
from support.processes import until
from support.weights import stamped

SHORT = 0.2  # seconds
WORKER = 7
# Of a section at a new version. Only a pinned one pins.
PINNED = ["pin.stored", "unpin.stored"]
SECTION = ["section.entered", "ack.before", "ack.stored", "section.leaves"]


def pins(point, consistency):
    return consistency == "pinned" and point != "unpin.stored"


def goes_on(pub, sub, slots):
    """Without a row in the way each published version is applied, as often as there are slots and once more."""
    for _ in range(slots + 1):
        version = pub.version + 1
        call = Call(pub.publish, stamped(version), timeout=for_ever)
        assert call.result() == version
        assert read(sub) == (version,) * 3


@pytest.mark.parametrize(("point", "consistency"), [*product(PINNED, ["pinned"]), *product(SECTION, CONSISTENCIES)])
def test_a_section(start, hold, point, slots, consistency):
    worker, heir = start(2)
    with shmsync.Publisher(stamped(1), slots=slots, max_readers=2) as pub, shmsync.Subscriber(pub.handle) as other:
        worker.call(attach, pub.handle, worker=WORKER, consistency=consistency)
        pub.publish(stamped(2))
        held = hold(worker, point).run(look)
        pinned = pins(point, consistency)
        (row,) = [row for row in pub.readers() if row.worker == WORKER]
        assert row.state == {"kill": "dead", "stop": "stopped", "pause": "live"}[held.action]
        assert row.pinned == (2 if pinned else None)
        if not held.killed:
            for version in range(3, slots + 2):  # in the other slots
                pub.publish(stamped(version), timeout=SHORT)
            version = pub.version + 1
            if pinned and slots < 3:  # else there is another slot
                with pytest.raises(shmsync.ReaderStalled) as caught:
                    pub.publish(stamped(version), timeout=SHORT)
            else:
                with pytest.raises(shmsync.AckTimeout) as caught:
                    pub.publish(stamped(version), wait=[WORKER], timeout=SHORT)
            assert caught.value.missing == [WORKER]
            found = held.result()
            if consistency == "pinned":
                assert found[0] == found[1] == found[2] <= pub.version
            goes_on(pub, other, slots)
            assert worker.call(look) == (pub.version,) * 3
            return
        version = pub.version + 1
        with pytest.raises(shmsync.WorkerDied) as caught:
            pub.publish(stamped(version), wait=[WORKER], timeout=for_ever)
        assert caught.value.missing == [WORKER] and caught.value.version == pub.version == version
        goes_on(pub, other, slots)
        heir.call(attach, pub.handle, worker=WORKER)  # the row of the dead is there for the next
        assert heir.call(look) == (pub.version,) * 3
        assert [row.state for row in pub.readers()] == ["live"] * 2


@pytest.mark.parametrize("point", ["ack.before", "ack.stored", "section.entered"])
def test_an_ack_that_is_waited_for(start, hold, point, slots, consistency):
    """The death is noticed while the publish waits; one that had acked before is served."""
    worker = start()
    with shmsync.Publisher(stamped(1), slots=slots) as pub, shmsync.Subscriber(pub.handle) as other:
        worker.call(attach, pub.handle, worker=WORKER, consistency=consistency)
        call = Call(pub.publish, stamped(2), wait=[WORKER], timeout=for_ever)
        until(lambda: pub.version == 2)
        held = hold(worker, point).run(refresh)
        if point == "ack.stored":
            assert call.result() == 2
        elif held.killed:
            with naming(shmsync.WorkerDied, [WORKER]):
                call.result()
        else:
            assert call.is_alive()
            held.result()
            assert call.result() == 2
        if held.held and not held.killed:
            held.result()
        goes_on(pub, other, slots)


# Only with one slot is there a gate, and a live section does not ask for it.
WAITS = [*product(["gate.refused"], [1], ["pinned", "optimistic"]), *product(["version.waits"], SLOTS, CONSISTENCIES)]


@pytest.mark.parametrize(("point", "slots", "consistency"), WAITS)
def test_a_wait(start, hold, point, slots, consistency):
    """A reader that waits, for the gate or for a version, blocks no process."""
    gate = point == "gate.refused"
    worker = start()
    with shmsync.Publisher(stamped(1), slots=slots) as pub, shmsync.Subscriber(pub.handle) as other:
        worker.call(attach, pub.handle, worker=WORKER, consistency=consistency)
        if gate:
            with pub.update() as weights:
                weights["large"].fill_(2)
                held = hold(worker, point).run(look)
                for key in ("layer.weight", "layer.bias", "scalar"):
                    weights[tuple(key.split("."))].fill_(2)
        else:
            held = hold(worker, point).run(wait_version, 2)
        goes_on(pub, other, slots)
        if not held.killed:
            found = held.result()
            if consistency == "pinned" and gate:
                assert found == (pub.version,) * 3


@pytest.mark.parametrize("point", ["release.pin"])
def test_a_leaving(start, hold, point, slots, consistency):
    worker, heir = start(2)
    with shmsync.Publisher(stamped(1), slots=slots, max_readers=2) as pub, shmsync.Subscriber(pub.handle) as other:
        worker.call(attach, pub.handle, worker=WORKER, consistency=consistency)
        held = hold(worker, point).run(detach)
        goes_on(pub, other, slots)
        if not held.killed:
            with pytest.raises(shmsync.ReaderTableFull):
                heir.call(attach, pub.handle, worker=8)
            held.result()
        heir.call(attach, pub.handle, worker=8)
        assert heir.call(look) == (pub.version,) * 3
        goes_on(pub, other, slots)
