"""A process that is stopped is alive: it keeps its pin, and is named when it is late."""

import math

import pytest

import shmsync
from shmsync import cli
from shmsync.memory import leftovers
from support.calls import Call
from support.jobs.engine import attach, enter, leave, look, publish, read
from support.processes import segment_path, until_waits
from support.weights import stamped


@pytest.mark.parametrize("slots", [1, 2])
def test_stopped_reader_keeps_its_pin_and_is_named(attached, slots):
    with shmsync.Publisher(stamped(1), slots=slots) as pub, shmsync.Subscriber(pub.handle) as other:
        reader = attached(pub, worker=3)
        reader.call(enter)
        reader.stop()
        for v in range(2, slots + 1):
            pub.publish(stamped(v))
        with pytest.raises(shmsync.ReaderStalled, match="worker 3") as caught:
            pub.publish(stamped(slots + 1), timeout=0.2)
        assert caught.value.missing == [3]
        with pytest.raises(shmsync.ReaderStalled), pub.update(timeout=0.2):
            pass
        assert pub.version == slots
        assert read(other) == (slots,) * 3  # the gate is open again, and nothing was written
        (info,) = [r for r in pub.readers() if r.worker == 3]
        assert (info.state, info.pinned, info.pid) == ("stopped", 1, reader.pid)
        assert info.pin_age > 0
        reader.resume()
        assert reader.call(leave) is False
        assert pub.publish(stamped(slots + 1)) == slots + 1
        assert reader.call(look) == read(other) == (slots + 1,) * 3


def test_stopped_publisher_is_alive(open_trainer, name):
    writer = open_trainer()
    with shmsync.Subscriber(writer.handle) as sub:
        writer.stop()
        with pytest.raises(shmsync.PublishTimeout):
            sub.wait_version(2, timeout=0.2)
        with pytest.raises(shmsync.ArenaExists):
            shmsync.Publisher(stamped(1), name=name)
        assert cli.main(["gc"]) == 0
        leftovers.sweep_some(math.inf)
        assert segment_path(name).exists()
        writer.resume()
        writer.call(publish, 2)
        assert read(sub) == (2, 2, 2)


def test_a_stopped_reader_keeps_no_other_reader_out(start):
    """While a stopped process holds the only slot, the gate stays open."""
    reader = start()
    with (
        shmsync.Publisher(stamped(1)) as pub,
        shmsync.Subscriber(pub.handle, timeout=20.0) as pinned,
        shmsync.Subscriber(pub.handle, timeout=20.0, consistency="optimistic") as optimistic,
    ):
        reader.call(attach, pub.handle, worker=3)
        reader.call(enter)
        reader.stop()
        writing = Call(pub.publish, stamped(2), timeout=60)
        until_waits(writing, "_wait_while_stopped")
        for _ in range(200):
            assert read(pinned) == read(optimistic) == (1, 1, 1)
        assert writing.is_alive()
        reader.resume()
        assert reader.call(leave) is False
        assert writing.result() == 2
        assert read(pinned) == read(optimistic) == (2, 2, 2)
