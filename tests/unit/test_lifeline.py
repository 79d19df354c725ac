"""Who is watched over a connection: what ends it, and what only cuts it. Real sockets, on this machine."""

from __future__ import annotations

import errno
import select
import socket
from types import SimpleNamespace

import pytest

from shmsync.schemes.remote.distributed import liveness as _lifeline
from shmsync.schemes.remote.distributed.liveness import Beacon, Lifeline
from shmsync.schemes.remote.location import here
from support.descriptors import exhaust, replenish
from support.processes import until

STORE = SimpleNamespace(host="127.0.0.1")


@pytest.fixture
def listener():
    made = Beacon(STORE)
    yield made
    made.close()


@pytest.fixture
def watch():
    """watch(address) -> a Lifeline to a process whose pid means nothing here."""
    made = []

    def make(address, **place):
        made.append(Lifeline(here()._replace(**{"pid_namespace": 1, **place}), address))
        return made[-1]

    yield make
    for lifeline in made:
        lifeline.close()


def until_dead(lifeline):
    until(lambda: lifeline.dead)


def until_connected(lifeline):
    until(lambda: lifeline.dead or lifeline._connected)
    assert not lifeline.dead


def test_a_listener_that_goes_is_dead(listener, watch):
    lifeline = watch(listener.address)
    until_connected(lifeline)
    assert not lifeline.dead
    listener.close()
    until_dead(lifeline)


def test_who_refuses_is_dead(listener, watch):
    listener.close()
    until_dead(watch(listener.address))


def test_a_worker_has_room_for_any_number_of_senders(listener, watch):
    for _ in range(100):
        lifeline = watch(listener.address)
        until_connected(lifeline)
        listener.tend()
        lifeline.close()
    listener.tend()
    assert len(listener._watchers) < 5  # those that ended are forgotten
    last = watch(listener.address)
    until_connected(last)
    listener.tend()
    assert not last.dead
    listener.close()
    until_dead(last)


def test_who_cannot_be_looked_at_for_lack_of_a_descriptor_is_not_dead(listener, watch):
    state = SimpleNamespace()
    exhaust(state)
    try:
        lifeline = watch(listener.address)
        assert not lifeline.dead
    finally:
        replenish(state)
    until_connected(lifeline)
    listener.close()
    until_dead(lifeline)


def test_a_loopback_address_of_another_machine_tells_nothing(listener, watch):
    listener.close()
    lifeline = watch(listener.address, boot_id="0" * 32)
    assert not lifeline.dead
    assert lifeline._socket is None  # nor will it ever ask


def test_after_its_end_it_tells_nothing(listener, watch):
    lifeline = watch(listener.address)
    until_connected(lifeline)
    lifeline.close()
    listener.close()
    assert not lifeline.dead


def cut(lifeline):
    """What the kernel says when keep-alive got no answer. It closes this end."""

    class Cut:
        def fileno(self):
            return closed.fileno()

        def recv(self, count):
            raise OSError(errno.ETIMEDOUT, "timed out")

        def close(self):
            closed.close()

    closed, other = socket.socketpair()
    other.close()
    assert select.select([closed], [], [], 1)[0]
    lifeline._socket.close()
    lifeline._socket = Cut()


def test_a_connection_that_the_network_has_cut_is_made_again(listener, watch):
    lifeline = watch(listener.address)
    until_connected(lifeline)
    cut(lifeline)
    assert not lifeline.dead
    assert lifeline._socket is None
    lifeline._connected = False
    until_connected(lifeline)
    listener.close()
    until_dead(lifeline)


def test_an_attempt_to_connect_that_gets_no_answer_is_made_again(listener, watch, monkeypatch):
    monkeypatch.setattr(_lifeline, "_PAUSE", 0.05)
    lifeline = watch(listener.address)
    deaf = socket.socket()  # never connects, as when packets are lost
    real, lifeline._socket = lifeline._socket, deaf
    real.close()
    monkeypatch.setattr(select, "poll", _Silent(select.poll, deaf))
    until_connected(lifeline)


class _Silent:
    """select.poll, for which one socket has no news."""

    def __init__(self, real, silent):
        self._real, self._fd = real, silent.fileno()

    def __call__(self):
        poller, fd = self._real(), self._fd
        register = poller.register

        class Poller:
            def register(self, what, events):
                if what.fileno() != fd:
                    register(what, events)

            def poll(self, timeout):
                return poller.poll(timeout)

        return Poller()


def test_who_cannot_be_reached_for_long_counts_as_dead(listener, watch, monkeypatch):
    monkeypatch.setattr(_lifeline, "_CUT_OFF", 0.2)
    monkeypatch.setattr(_lifeline, "_PAUSE", 3600.0)  # no attempt reaches it
    lifeline = watch(listener.address)
    until_connected(lifeline)
    cut(lifeline)
    assert not lifeline.dead
    until_dead(lifeline)
