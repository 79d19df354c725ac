"""Interrupts at any moment of a send or a receive: pipes stay usable, no worker counts as dead, versions come once."""

from __future__ import annotations

import contextlib
import functools
import time

import pytest

import shmsync
from support.conformance import peers
from support.conformance.nets import Stamped
from support.conformance.table import MP, in_processes, only, over_pipes
from support.faults.interrupts import alarms

pytestmark = in_processes


@contextlib.contextmanager
def storm(at_most):
    """Gives a function that runs a call with an interrupt within so many seconds, and says whether it landed."""
    ends = time.monotonic() + 0.5
    with alarms(seed=1) as interrupted:
        storm = functools.partial(interrupted, longest=at_most)
        storm.more = lambda: time.monotonic() < ends or interrupted.landed < 20
        storm.landed = lambda: interrupted.landed
        yield storm


def finish(sender):
    """After an interrupt: what was begun is over."""
    with contextlib.suppress(RuntimeError):
        sender.wait_async(timeout=60)


@over_pipes
@pytest.mark.parametrize("call", ["send", "send_async", "resend", "some"])
def test_an_interrupt_in_a_send_leaves_every_pipe_usable(fleet, call):
    sender = fleet.open(timeout=60.0, alone=call == "some")
    sender.send(Stamped(1))
    number, versions = 1, [sender.version]

    def act():
        if call == "resend":
            sender.resend()
        elif call == "send_async":
            sender.send_async(weights)
            sender.wait_async()
        else:
            sender.send(weights, [0, 2] if call == "some" else None)

    with storm(0.004) as interrupted:
        while interrupted.more():
            number += 1
            weights = Stamped(number)
            if interrupted(act):
                finish(sender)
                number += 1
                versions.append(sender.send(Stamped(number)))
                assert fleet.stamps() == [number] * 3
    assert versions == sorted(set(versions)) and interrupted.landed() >= 20
    assert not any(sender.is_dead(index) for index in range(3))
    assert not sender.send_locks()[0].lock.locked()


@pytest.mark.full  # seconds of interrupts
@over_pipes
def test_an_interrupt_in_a_workers_receive_loses_no_weights(fleet):
    sender = fleet.open(timeout=60.0)
    sender.send(Stamped(1))
    fleet.hold(1)
    fleet.workers[1].start(peers.receive_in_a_storm, 1.0)
    number = 1
    while not fleet.workers[1].done():
        number += 1
        with contextlib.suppress(shmsync.AckTimeout):
            sender.send(Stamped(number), timeout=5.0)
    assert fleet.workers[1].result() >= 5
    fleet.release(1)
    assert sender.send(Stamped(number + 1)) > 0
    assert fleet.stamps() == [number + 1] * 3


@only(MP)  # an arena that is being made may be left behind until the process ends, see docs/adr/0009
@pytest.mark.parametrize("width", [4, 1 << 16])
def test_an_interrupt_in_the_first_send_of_a_sender_leaves_every_pipe_usable(fleet, width):
    fleet.open("policy", Stamped, 0, width, timeout=60.0)
    number = 0
    with storm(0.02) as interrupted:
        while interrupted.more():
            number += 1
            scheme = fleet.make(timeout=60.0)
            fleet.init_sender(scheme)
            sender = scheme.get_sender()
            weights = Stamped(number, width)
            landed = interrupted(lambda: sender.send(weights))  # noqa: B023  # called at once
            if landed:
                number += 1
                sender.send(Stamped(number, width))
                assert fleet.stamps() == [number] * 3
            fleet.schemes.remove(scheme)
            scheme.shutdown()
