"""Calls that would wait for themselves are refused."""

from math import inf as for_ever

import pytest

import shmsync
from support.calls import Call
from support.jobs.engine import read
from support.weights import stamp, stamped


def test_waiting_for_a_version_inside_a_section_of_an_in_place_arena_is_refused():
    with shmsync.Publisher(stamped(1)) as pub, shmsync.Subscriber(pub.handle) as sub:
        with sub.read():
            with pytest.raises(shmsync.ProtocolError):
                sub.wait_version(2, timeout=for_ever)
            assert sub.wait_version(1) == 1
        pub.publish(stamped(2))
        assert sub.wait_version(2) == 2


@pytest.mark.parametrize("slots", [1, 2])
def test_nested_writer_calls_are_refused(slots):
    with (
        shmsync.Publisher(stamped(1), slots=slots, timeout=for_ever) as pub,
        shmsync.Subscriber(pub.handle) as sub,
    ):
        with pub.update() as weights:
            stamp(weights, 2)
            with pytest.raises(shmsync.WriterBusy), pub.update():
                pass
            with pytest.raises(shmsync.WriterBusy):
                pub.publish(stamped(3))
            with pytest.raises(shmsync.WriterBusy):
                Call(pub.publish, stamped(3)).result()
            with pytest.raises(shmsync.WriterBusy):
                pub.close()
        assert pub.version == 2
        assert read(sub) == (2, 2, 2)
