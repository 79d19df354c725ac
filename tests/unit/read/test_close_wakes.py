"""close() ends every wait that another thread is in, with ClosedError, and waits for its section."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from math import inf as for_ever

import pytest
import torch

import shmsync
from support.calls import Call
from support.processes import PATIENCE, until_waits


def ends_closed(call):
    """Check that it raises ClosedError, which is returned."""
    with pytest.raises(shmsync.ClosedError) as caught:
        call.result()
    return caught.value


def reads(sub):
    with sub.read(timeout=for_ever):
        pass


def waits_inside(sub):
    with sub.read():
        sub.wait_version(9, timeout=for_ever)


@contextmanager
def elsewhere(context):
    """Another thread, which is given, is inside this context meanwhile."""
    inside, over = threading.Event(), threading.Event()

    def stay():
        with context:
            inside.set()
            over.wait(PATIENCE)

    call = Call(stay)
    try:
        assert inside.wait(PATIENCE)
        yield call
    finally:
        over.set()
        call.join(PATIENCE)
    call.result()


@pytest.mark.parametrize(
    ("slots", "wait"),
    [
        (1, lambda sub: sub.wait_version(9, timeout=for_ever)),
        (2, lambda sub: sub.wait_version(9, timeout=for_ever)),
        (2, waits_inside),
        (2, lambda sub: sub.read(version=9, timeout=for_ever).__enter__()),
        (2, lambda sub: list(sub.versions(timeout=for_ever))),  # no end of the weights
    ],
    ids=["one slot", "two slots", "inside a section", "for a section", "in a loop"],
)
def test_close_wakes_a_wait_for_a_version(pair, slots, wait):
    _, sub = pair(slots)
    call = Call(wait, sub)
    until_waits(call, "_wait_for")
    sub.close()
    ends_closed(call)


@pytest.mark.parametrize("consistency", ["pinned", "optimistic"])
def test_close_wakes_a_reader_at_a_closed_gate(publisher, subscriber, consistency):
    pub = publisher({"t": torch.zeros(4)}, timeout=60.0)
    sub = subscriber(pub, consistency=consistency, timeout=for_ever)
    with pub.update():
        call = Call(reads, sub)
        until_waits(call, "_try_again")
        waits_for_the_lock = Call(reads, sub)
        sub.close()
        ends_closed(call)
        ends_closed(waits_for_the_lock)
        assert pub.readers() == []


def test_close_of_the_publisher_wakes_a_publish_that_waits_for_a_reader(both):
    pub, sub = both({"t": torch.zeros(4)}, timeout=for_ever)
    with sub.read() as section:
        call = Call(pub.publish)
        until_waits(call, "begin")
        pub.close()
        assert "nothing" in str(ends_closed(call))
        assert section.weights["t"].tolist() == [0] * 4
        assert sub.latest == 1


def publish(pub):
    pub.publish(wait="all")


def update(pub):
    with pub.update(wait=[3]):
        pass


@pytest.mark.parametrize("write", [publish, update])
def test_close_of_the_publisher_wakes_a_wait_for_acks(publisher, subscriber, write):
    pub = publisher({"t": torch.zeros(4)}, timeout=for_ever, slots=2)
    sub = subscriber(pub, worker=3)
    call = Call(write, pub)
    until_waits(call, "_wait_for_acks")
    pub.close()
    error = ends_closed(call)
    assert (error.version, error.missing) == (2, [3])
    assert sub.refresh()
    assert sub.version == 2


def test_close_waits_for_a_live_thread_and_names_it(publisher, subscriber):
    pub = publisher({"t": torch.zeros(4)})
    sub = subscriber(pub, timeout=0.2)
    with elsewhere(sub.read()) as slow:
        with pytest.raises(shmsync.WriterBusy, match=slow.name):
            sub.close()
        with pytest.raises(shmsync.WriterBusy, match=f"{slow.name}.*one Subscriber per thread"), sub.read():
            pass
        assert pub.readers()[0].pinned == 1  # nothing was changed
    with sub.read() as section:  # it goes on
        assert section.version == 1
    sub.close()
    assert pub.readers() == []
