"""Readers that are killed block no process, and publishes that wait for them name them."""

import time
from math import inf as for_ever

import pytest

import shmsync
from support.calls import Call, naming
from support.jobs.engine import attach, detach, enter, read
from support.processes import until
from support.weights import stamped


def apply_until(state, version):
    """Apply version after version until this one."""
    while state.sub.version < version:
        state.sub.refresh()
        time.sleep(0.001)
    return state.sub.version


@pytest.mark.parametrize("slots", [1, 2])
def test_publisher_never_waits_for_a_killed_reader(attached, slots):
    with shmsync.Publisher(stamped(1), slots=slots, timeout=for_ever) as pub:
        reader = attached(pub, worker=5)
        reader.call(enter)
        reader.kill()
        for v in range(2, 6):
            assert pub.publish(stamped(v)) == v
        assert pub.readers() == []
        assert pub.stats().reaped == 1
        with shmsync.Subscriber(pub.handle) as sub:
            assert read(sub) == (5, 5, 5)


@pytest.mark.parametrize("wait", [None, [5]], ids=str)
@pytest.mark.parametrize("slots", [1, 2])
def test_death_of_a_reader_is_noticed_by_a_waiting_publisher(attached, slots, wait):
    """The wait for its pin takes its row; the wait for its ack must still know of it."""
    with shmsync.Publisher(stamped(1), slots=slots, timeout=for_ever) as pub:
        reader = attached(pub, worker=5)
        reader.call(enter)
        for v in range(2, slots + 1):
            pub.publish(stamped(v))
        call = Call(pub.publish, stamped(slots + 1), wait=wait)
        call.join(0.2)
        assert call.is_alive()
        reader.kill()
        if wait is None:
            assert call.result() == slots + 1
        else:
            with pytest.raises(shmsync.WorkerDied) as caught:
                call.result()
            assert caught.value.missing == [5]
        assert pub.version == slots + 1


def test_joiner_takes_the_place_of_the_killed_worker_whose_index_it_has(attached):
    with shmsync.Publisher(stamped(1), timeout=for_ever) as pub:
        alive = attached(pub, worker=1)
        victim = attached(pub, worker=2)
        other = attached(pub)
        victim.kill()
        joiner = attached(pub, worker=2)
        assert [reader.worker for reader in pub.readers()] == [1, 2, None]
        joiner.call(detach)  # as an interrupt does in the middle of read()
        other.call(detach)
        alive.start(apply_until, 2)
        assert pub.publish(stamped(2), wait="all") == 2
        alive.result()


def test_dead_worker_is_reported_once(attached):
    with shmsync.Publisher(stamped(1), timeout=for_ever) as pub:
        alive = attached(pub, worker=1)
        victim = attached(pub, worker=2)
        alive.start(apply_until, 2)
        call = Call(pub.publish, stamped(2), wait="all")
        until(lambda: pub.version == 2)
        victim.kill()
        with naming(shmsync.WorkerDied, [2], match="worker 2") as caught:
            call.result()
        assert caught.value.version == pub.version == 2
        alive.result()
        # "all" means the rows alive at commit.
        alive.start(apply_until, 3)
        assert pub.publish(stamped(3), wait="all") == 3
        alive.result()
        # Asked for by name it is missing as long as no process takes its index over.
        with pytest.raises((shmsync.WorkerDied, shmsync.AckTimeout)) as caught:
            pub.publish(stamped(4), wait=[2], timeout=0.1)
        assert caught.value.missing == [2]


def test_named_worker_may_attach_after_the_publish(start):
    late = start()
    with shmsync.Publisher(stamped(1), timeout=for_ever) as pub:
        call = Call(pub.publish, stamped(2), wait=[4])
        until(lambda: pub.version == 2)
        assert late.call(attach, pub.handle, worker=4) == 2
        assert call.result() == 2


@pytest.mark.parametrize("wait", ["all", [4]], ids=str)
def test_a_worker_that_left_without_an_ack_is_late_if_it_was_named(attached, wait):
    with shmsync.Publisher(stamped(1)) as pub:
        leaver = attached(pub, worker=4)
        call = Call(pub.publish, stamped(2), wait=wait, timeout=for_ever if wait == "all" else 1)
        until(lambda: pub.version == 2)
        leaver.call(detach)
        if wait == "all":
            assert call.result() == 2
        else:
            with pytest.raises(shmsync.AckTimeout) as caught:
                call.result()
            assert caught.value.missing == [4]
