"""Calls that would wait for themselves are refused."""

from math import inf as for_ever

import pytest

import shmsync
from support.calls import Call
from support.jobs.engine import read
from support.weights import stamp, stamped, stamps


@pytest.mark.parametrize("slots", [1, 2])
def test_publish_that_its_own_pin_blocks_is_refused_at_once(slots):
    with (
        shmsync.Publisher(stamped(1), slots=slots, timeout=for_ever) as pub,
        shmsync.Subscriber(pub.handle) as sub,
    ):
        with sub.read() as section:
            for v in range(2, slots + 1):
                pub.publish(stamped(v))
            with pytest.raises(shmsync.ProtocolError):
                pub.publish(stamped(slots + 1))
            with pytest.raises(shmsync.ProtocolError), pub.update():
                pass
            assert (section.version, *stamps(section.weights)) == (1, 1, 1)
        assert pub.version == slots
        assert pub.publish(stamped(slots + 1)) == slots + 1
        assert read(sub) == (slots + 1,) * 3


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
