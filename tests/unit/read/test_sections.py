"""Read sections and the publisher: who waits for whom, and for how long."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

import shmsync
from support.weights import put


@pytest.mark.parametrize("slots", [2, 3])
def test_a_pinned_section_keeps_its_version_while_the_publisher_goes_on(pair, slots):
    pub, sub = pair(slots)
    with sub.read() as section:
        if slots == 2:
            put(pub, 1)
        else:
            for value in range(1, 6):
                put(pub, value)
        assert section.version == 1
        assert section.weights["t"].tolist() == [0] * 4
        with sub.read() as inner:  # nested: the outermost decides
            assert inner.version == 1
        assert not sub.refresh()
    assert sub.refresh()
    assert sub.version == pub.version


@contextmanager
def held_in_another_thread(sub):
    """A read section of `sub`, open meanwhile in a thread of its own."""
    held, done = threading.Event(), threading.Event()

    def hold():
        with sub.read():
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_no_free_slot_raises_and_writes_nothing(publisher, subscriber):
    pub = publisher({"t": torch.zeros(4)}, slots=2)
    sub = subscriber(pub, worker=4)
    with held_in_another_thread(sub):
        put(pub, 1)
        with pytest.raises(shmsync.ReaderStalled) as error:
            pub.publish({"t": torch.ones(4)}, timeout=0.05)
        assert error.value.missing == [4]
        assert pub.version == 2
        assert pub.weights["t"].tolist() == [1] * 4
    assert put(pub, 2) == 3


def test_one_slot_publish_times_out_with_the_gate_open_again(publisher, subscriber):
    pub = publisher({"t": torch.zeros(4)})
    sub = subscriber(pub)
    other = subscriber(pub)
    with held_in_another_thread(sub):
        with pytest.raises(shmsync.ReaderStalled):
            pub.publish(timeout=0.05)
        with other.read() as section:
            assert section.version == 1


def test_a_reader_waits_at_the_gate_and_gives_up_at_its_deadline(pair):
    pub, sub = pair()
    with pub.update() as weights:
        weights["t"].fill_(1)
        with pytest.raises(shmsync.WriterBusy), sub.read(timeout=0.05):
            pass
        assert not sub.refresh()
    with sub.read() as section:
        assert section.version == 2


def test_a_waiting_reader_enters_when_the_gate_opens(pair):
    pub, sub = pair()
    seen = []

    def read():
        with sub.read() as section:
            seen.append((section.version, section.weights["t"].tolist()))

    with pub.update() as weights:
        thread = threading.Thread(target=read)
        thread.start()
        weights["t"].fill_(5)
    thread.join()
    assert seen in ([(2, [5.0] * 4)], [(1, [0.0] * 4)])


def test_close_inside_a_section_is_refused(pair):
    _, sub = pair()
    with sub.read(), pytest.raises(shmsync.ProtocolError):
        sub.close()


def test_a_section_is_left_where_it_was_entered(pair):
    _, sub = pair()
    section = sub.read()
    section.__enter__()
    errors = []

    def leave():
        try:
            section.__exit__(None, None, None)
        except shmsync.ProtocolError as error:
            errors.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    section.__exit__(None, None, None)
    assert len(errors) == 1


def test_another_thread_waits_for_the_section(pair):
    _, sub = pair(timeout=5.0)
    errors = []

    def read():
        try:
            with sub.read(timeout=0.05):
                pass
        except shmsync.WriterBusy as error:
            errors.append(error)

    with sub.read():
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert "one Subscriber per thread" in str(errors[0])
