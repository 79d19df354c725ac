"""Sections, snapshots, waiting and the consistencies, in one process."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import shmsync


@pytest.fixture
def pair(publisher, subscriber):
    def make(slots=1, consistency="pinned", **options):
        pub = publisher({"t": torch.zeros(4)}, slots=slots, **options)
        return pub, subscriber(pub, consistency=consistency)

    return make


def put(pub, value):
    return pub.publish({"t": torch.full((4,), float(value))})


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


def test_optimistic_sections_never_hold_the_publisher_up_and_say_they_were_torn(pair):
    pub, sub = pair(consistency="optimistic")
    with sub.read() as section:
        put(pub, 1)
    assert section.torn
    with sub.read() as section:
        pass
    assert not section.torn
    assert sub.stats().torn == 1


def test_run_repeats_torn_calls_and_takes_a_pin_in_the_end(pair):
    pub, sub = pair(consistency="optimistic")
    calls = []

    def disturbed():
        calls.append(sub.version)
        if len(calls) <= 3:
            put(pub, len(calls))
        return sub.weights["t"].tolist()

    assert sub.run(disturbed) == [3.0] * 4
    assert len(calls) == 4


def test_run_repeats_an_exception_that_torn_weights_caused(pair):
    pub, sub = pair(consistency="optimistic")
    calls = []

    def fails_once():
        calls.append(1)
        if len(calls) == 1:
            put(pub, 1)
            raise FloatingPointError
        return "fine"

    assert sub.run(fails_once) == "fine"
    with pytest.raises(KeyError):
        sub.run(lambda: {}["x"])


def test_live_reads_are_neither_protected_nor_in_the_way(pair):
    pub, sub = pair(consistency="live")
    with sub.read() as section:
        put(pub, 3)
        assert section.weights["t"].tolist() == [3] * 4
    assert section.torn


def test_read_version_gives_exactly_that_version_or_an_error(pair):
    pub, sub = pair(2)
    put(pub, 1)
    with sub.read(version=2) as section:
        assert section.version == 2
        with pytest.raises(shmsync.ProtocolError), sub.read(version=1):
            pass
    with pytest.raises(shmsync.ProtocolError, match="gone"), sub.read(version=1):
        pass
    with pytest.raises(shmsync.PublishTimeout), sub.read(version=9, timeout=0.05):
        pass
    with sub.read():  # usable after each refusal
        pass


def test_wait_version_returns_when_it_is_published(pair):
    pub, sub = pair()
    got = []
    thread = threading.Thread(target=lambda: got.append(sub.wait_version(3)))
    thread.start()
    put(pub, 1)
    put(pub, 2)
    thread.join()
    assert got == [3]
    assert sub.version == 1  # waiting applies nothing
    with pytest.raises(shmsync.PublishTimeout):
        sub.wait_version(4, timeout=0.02)


def test_closing_the_publisher(pair):
    pub, sub = pair()
    pub.close()
    pub.close()
    assert not sub.refresh()
    with sub.read() as section:
        assert section.version == 1
    with pytest.raises(shmsync.ClosedError):
        sub.wait_version(2)
    with pytest.raises(shmsync.ClosedError):
        pub.publish()
    with pytest.raises(shmsync.ArenaNotFound):
        shmsync.Subscriber(pub.handle)


def test_a_closed_subscriber_frees_its_row_and_its_views_stay(pair, subscriber):
    pub, sub = pair(max_readers=1)
    view = sub.weights["t"]
    with pytest.raises(shmsync.ReaderTableFull, match="max_readers"):
        shmsync.Subscriber(pub.handle)
    sub.close()
    with pytest.raises(shmsync.ClosedError), sub.read():
        pass
    subscriber(pub)
    del sub
    assert view.tolist() == [0] * 4


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


@pytest.mark.parametrize("consistency", ["pinned", "optimistic"])
def test_snapshots_are_private_copies(pair, consistency):
    pub, sub = pair(consistency=consistency)
    put(pub, 1)
    snapshot = sub.snapshot()
    put(pub, 2)
    assert snapshot.version == 2
    assert snapshot.weights["t"].tolist() == [1] * 4
    again = sub.snapshot(out=snapshot.weights)
    assert again.version == 3
    assert again.weights is snapshot.weights
    assert snapshot.weights["t"].tolist() == [2] * 4
    with pytest.raises(ValueError, match="nothing was written"):
        sub.snapshot(out=snapshot.weights.double())


def test_attach_arguments(publisher):
    pub = publisher({"t": torch.ones(1)})
    with pytest.raises(ValueError, match="consistency"):
        shmsync.Subscriber(pub.handle, consistency="eventual")
    with pytest.raises(ValueError, match="worker"):
        shmsync.Subscriber(pub.handle, worker=-1)
    with pytest.raises(shmsync.ArenaNotFound, match="no arena 'nobody'"):
        shmsync.attach("nobody")
    with shmsync.attach(pub.name) as sub:
        assert sub.name == pub.name


def test_an_unclosed_subscriber_is_loud(publisher):
    sub = shmsync.Subscriber(publisher({"t": torch.ones(1)}).handle)
    with pytest.warns(ResourceWarning, match="not closed"):
        del sub


def test_handles_are_not_pickled_by_mistake(pair):
    import pickle

    pub, sub = pair()
    assert pickle.loads(pickle.dumps(pub.handle)) == pub.handle
    for handle in (pub, sub):
        with pytest.raises(TypeError, match="handle"):
            pickle.dumps(handle)


def test_errors_keep_their_fields_across_processes():
    import pickle

    error = pickle.loads(pickle.dumps(shmsync.AckTimeout("late", version=3, missing=[1])))
    assert (type(error), str(error), error.version, error.missing) == (shmsync.AckTimeout, "late", 3, [1])


def test_a_snapshot_into_the_arena_itself_is_refused(publisher, subscriber):
    pub = publisher({"w": torch.zeros(4)})
    sub = subscriber(pub)
    for out in (pub.weights, sub.weights):
        with pytest.raises(ValueError, match="lies in the arena itself"):
            sub.snapshot(out)


def test_versions_are_whole_numbers(publisher, subscriber):
    sub = subscriber(publisher({"w": torch.zeros(4)}))
    for wrong in (-1, 1.5, "2", True):
        with pytest.raises(ValueError, match="version"):
            sub.wait_version(wrong)
        with pytest.raises(ValueError, match="version"), sub.read(version=wrong):
            pass


def test_refused_attaches_leave_no_descriptor(publisher, subscriber):
    pub = publisher({"w": torch.zeros(4)}, max_readers=1)
    subscriber(pub)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(shmsync.ReaderTableFull):
            shmsync.Subscriber(pub.handle)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_fourth_attempt_of_run_is_pinned(publisher, subscriber):
    pub = publisher({"w": torch.zeros(4)}, slots=2)
    sub = subscriber(pub, consistency="optimistic")
    pinned = []

    def look():
        sub_pinned = pub.readers()[0].pinned
        pinned.append(sub_pinned)
        if sub_pinned is None:
            pub.publish()
            pub.publish()  # tears this call's slot
        return sub_pinned

    assert sub.run(look) is not None
    assert pinned[:3] == [None, None, None]


def test_numbers_of_numpy_are_numbers(publisher):
    pub = publisher({"w": torch.zeros(4)}, timeout=np.float32(5))
    with shmsync.Subscriber(pub.handle, worker=np.int64(3), timeout=np.float64(5)) as sub:
        assert sub.wait_version(np.int64(1)) == 1
        with sub.read(version=np.int64(1), timeout=np.float32(1)) as section:
            assert section.version == 1
        assert pub.readers()[0].worker == 3
        with pytest.raises(shmsync.AckTimeout):
            pub.publish(wait=np.array([3]), timeout=0.05)
