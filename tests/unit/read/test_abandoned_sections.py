"""Sections that no thread can leave any more: their thread ended, or their object is gone. close() gives them up."""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager

import pytest
import torch

import shmsync
from support.calls import Call
from support.processes import PATIENCE


def ended_inside(sub):
    """A thread entered a section and ended in it. The section's object lives."""

    def enter():
        section = sub.read()
        section.__enter__()
        return section

    return [Call(enter).result()]


def dropped(sub):
    """A section was entered, and its object dropped."""
    sub.read().__enter__()
    gc.collect()


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


WAYS = [ended_inside, dropped]


@contextmanager
def pinned(sub, pub):
    """The publisher cannot publish before, and can after."""
    with pytest.raises(shmsync.ReaderStalled):
        pub_elsewhere(pub)
    yield
    assert pub.publish(timeout=1.0)
    assert pub.readers() == []


@pytest.mark.parametrize("another", [False, True], ids=["this thread", "another thread"])
@pytest.mark.parametrize("abandon", WAYS, ids=lambda way: way.__name__)
def test_close_gives_an_abandoned_section_up(pair, abandon, another):
    pub, sub = pair(timeout=5.0)
    kept = abandon(sub)
    with pinned(sub, pub):
        Call(sub.close).result() if another else sub.close()
    with pytest.raises(shmsync.ClosedError):
        sub.read().__enter__()
    fresh = shmsync.Subscriber(pub.handle)
    with fresh.read(), pytest.raises(shmsync.ReaderStalled):
        for section in kept or []:
            section.__exit__(None, None, None)  # late, and harmless: the row is another subscriber's now
        pub_elsewhere(pub)
    fresh.close()


def pub_elsewhere(pub):
    """publish() in a thread that is in no section; its error is raised here."""
    Call(pub.publish, timeout=0.05).result()


def test_a_section_of_a_thread_that_ended_keeps_nobody_waiting(pair):
    _, sub = pair(timeout=60.0)
    kept = ended_inside(sub)
    with pytest.raises(shmsync.WriterBusy, match="a thread that has ended") as error, sub.read():
        pass
    assert "close()" in str(error.value)
    assert kept
    sub.close()


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
