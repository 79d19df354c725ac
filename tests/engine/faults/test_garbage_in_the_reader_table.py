"""Garbage in the reader table does not stop the writer."""

import os
import secrets
from math import inf as for_ever

import pytest

import shmsync
from support.calls import outcome
from support.faults.forged import ACKED, OWNER, PIN, ROW, rows_offset, word
from support.jobs.engine import attach, detach, enter, leave, look
from support.processes import segment_path
from support.weights import stamped


def write_row(state, offset, content, row=None):
    """Overwrite bytes of a reader row (this worker's own) as a stray pointer would."""
    fd = os.open(segment_path(state.sub.name), os.O_RDWR)
    try:
        start = rows_offset(state.sub.name) + ROW * (state.sub._reader.row if row is None else row)
        os.pwrite(fd, content, start + offset)
    finally:
        os.close(fd)


GARBAGE = {
    "pin of all ones": [(PIN, word(2**64 - 1))],
    "pin of a slot that is not there": [(PIN, word((1 << 8 | 100) + 1))],
    "pin of the future": [(PIN, word((10**9 << 8) + 1))],
    "no owner, but a pin": [(OWNER, word(0)), (PIN, word((1 << 8) + 1))],
    "an owner nobody is": [(OWNER, word(2**64 - 1)), (PIN, word((1 << 8) + 1))],
    "random bytes": [(0, secrets.token_bytes(128))],
}


@pytest.mark.parametrize("slots", [1, 2])
def test_garbage_in_the_reader_table_does_not_stop_the_writer(start, slots):
    vandal, witness = start(2)
    for what, writes in GARBAGE.items():
        with shmsync.Publisher(stamped(1), slots=slots, timeout=for_ever) as pub:
            witness.call(attach, pub.handle, worker=1)
            vandal.call(attach, pub.handle, worker=2)
            for offset, content in writes:
                vandal.call(write_row, offset, content)
            for v in range(2, 6):
                assert pub.publish(stamped(v)) == v, what
                assert witness.call(look) == (v, v, v), what
            pub.readers()
            # The process that wrote it reads right weights, or gets an error.
            vandal.start(look)
            try:
                assert vandal.result() == (5, 5, 5), what
            except shmsync.ProtocolError:
                pass
            vandal.call(detach)
            vandal.call(attach, pub.handle, worker=2)
            assert vandal.call(look) == (5, 5, 5), what
            witness.call(detach)
            vandal.call(detach)
            assert pub.publish(stamped(6)) == 6, what


def test_acknowledgement_from_the_future_is_not_believed(attached):
    with shmsync.Publisher(stamped(1)) as pub:
        vandal = attached(pub, worker=2)
        vandal.call(write_row, ACKED, word(2**63))
        for wait in ("all", [2]):
            with pytest.raises((shmsync.AckTimeout, shmsync.WorkerDied)) as caught:
                pub.publish(stamped(pub.version + 1), wait=wait, timeout=0.2)
            assert caught.value.missing == [2]


def test_evicted_reader_does_not_write_the_row_of_its_successor(attached):
    with shmsync.Publisher(stamped(1)) as pub:
        vandal = attached(pub, worker=1)
        vandal.call(enter)
        vandal.call(write_row, PIN, word(2**64 - 1))
        pub.publish(stamped(2))
        heir = attached(pub, worker=2)
        heir.call(enter)
        vandal.call(leave)
        (info,) = pub.readers()
        assert (info.worker, info.pinned) == (2, 2)
        outcome(vandal.call, detach)
        (info,) = pub.readers()
        assert (info.worker, info.pinned) == (2, 2)
        with pytest.raises(shmsync.ReaderStalled):
            pub.publish(stamped(3), timeout=0.1)
