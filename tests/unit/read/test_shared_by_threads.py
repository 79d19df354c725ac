"""One subscriber in several threads: each is alone in its section, and close() waits for the others."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

import shmsync
from support.calls import Call
from support.processes import PATIENCE, until


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


def test_many_threads_share_one_subscriber(pair):
    """Each is alone in its section."""
    pub, sub = pair(timeout=60.0)
    inside, most = 0, 0

    def work():
        nonlocal inside, most
        for _ in range(200):
            with sub.read(), sub.read():
                inside += 1
                most = max(most, inside)
                inside -= 1
            sub.refresh()

    calls = [Call(work) for _ in range(8)]
    while any(call.is_alive() for call in calls):
        pub.publish()
    for call in calls:
        call.result()
    assert most == 1
    until(lambda: pub.readers()[0].pinned is None)
