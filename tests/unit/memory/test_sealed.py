"""Sealed memory that one process writes and others copy from: what a reader checks before it believes anything."""

import gc
import os

import pytest

from shmsync.errors import NoSpace, WriterDied
from shmsync.memory.process import me
from shmsync.memory.slab import Sealed, pieces_at, reachable

DATA = [bytes(range(256)) * 40, b"", b"last"]


@pytest.fixture
def sealed():
    return Sealed([memoryview(each) for each in DATA])


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_pieces_come_back(sealed):
    assert [bytes(each) for each in pieces_at(sealed.place, sealed.spans)] == DATA


def test_nobody_can_change_or_resize_it(sealed):
    path = f"/proc/self/fd/{sealed.place.fd}"
    fd = os.open(path, os.O_RDWR)
    try:
        for refused in (lambda: os.write(fd, b"x"), lambda: os.ftruncate(fd, 1), lambda: os.ftruncate(fd, 1 << 20)):
            with pytest.raises(PermissionError):
                refused()
    finally:
        os.close(fd)


def test_no_descriptor_is_left(sealed):
    before = descriptors()
    pieces = pieces_at(sealed.place, sealed.spans)
    del pieces
    assert descriptors() == before
    place, spans = sealed.place, sealed.spans
    made = Sealed([memoryview(b"more")])
    assert descriptors() == before + 1
    del made
    assert descriptors() == before
    with pytest.raises(WriterDied):
        pieces_at(place._replace(inode=1), spans)
    assert descriptors() == before


def test_what_was_given_up_is_gone(sealed):
    place, spans = sealed.place, list(sealed.spans)
    pieces = pieces_at(place, spans)
    sealed.close()
    with pytest.raises(WriterDied, match="given these weights up"):
        pieces_at(place, spans)
    assert bytes(pieces[0]) == DATA[0]  # a process that maps it keeps it


def test_more_than_there_is_is_refused_before_it_is_taken():
    class Huge:
        nbytes = 1 << 60

    with pytest.raises(NoSpace, match="available"):
        Sealed([Huge()])  # type: ignore[list-item]


def test_reachable_is_a_process_that_runs():
    assert reachable(me().owner)
    assert not reachable(me().owner + (1 << 40))
