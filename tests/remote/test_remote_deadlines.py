"""No call outlives its deadline by more than a tenth of a second, whatever does not answer; afterwards all goes on."""

from __future__ import annotations

import contextlib

import pytest

import shmsync
from support.processes import stopped
from support.remote import deadlines, members, parts, transports

ALLOWED = 0.1
TIMEOUT = 0.3


def send_until_applied(group, value):
    """What was left over is answered first; the version of a send that all workers applied."""
    while True:
        with contextlib.suppress(shmsync.AckTimeout):
            return group.send(value, timeout=20.0)


@pytest.mark.parametrize("fan_out", [None, "node"])
def test_workers_that_are_stopped_before_the_first_send(fleet, kind, fan_out):
    """conformance/trouble/test_deadlines.py stops one before a later send, over every scheme."""
    group = fleet(2, nodes=["a", "b"], home="a").connect(kind).open(fan_out=fan_out)
    for worker in group.workers:
        worker.stop()
    for call in (deadlines.send, deadlines.send_in_halves):
        assert group.trainer.call(call, TIMEOUT) < ALLOWED
    for worker in group.workers:
        worker.resume()
    version = send_until_applied(group, 7)
    assert group.look() == [(7, version)] * 2


@pytest.mark.parametrize("fan_out", [None, "node"])
def test_a_stopped_host_of_the_store_keeps_no_sender(fleet, start, fan_out):
    keeper = start()
    group = fleet(2, nodes=["a", "b"], home="a").connect("distributed", keeper=keeper).open(fan_out=fan_out)
    group.send(1)
    with stopped(keeper.pid):
        for call in (deadlines.send, deadlines.send_in_halves):
            assert group.trainer.call(call, TIMEOUT) < ALLOWED
        assert group.trainer.call(deadlines.send_while_another_does, TIMEOUT, 3.0) < ALLOWED
    version = send_until_applied(group, 7)
    assert group.look() == [(7, version)] * 2


@pytest.mark.parametrize("call", [deadlines.receive, deadlines.join])
@pytest.mark.parametrize("timeout", [0.0, TIMEOUT])
def test_a_stopped_host_of_the_store_keeps_no_worker(fleet, start, call, timeout):
    keeper = start()
    group = fleet(1).connect("distributed", keeper=keeper).open(loop=False)
    (worker,) = group.workers
    with stopped(keeper.pid):
        assert worker.call(call, timeout) < ALLOWED
    group.trainer.start(parts.send, 3)
    assert worker.call(members.receive, members.FOR_EVER)
    assert group.trainer.result() == 1
    assert group.look() == [(3, 1)]


def test_a_stopped_worker_at_a_transport(fleet, kind):
    group = fleet(1).connect(kind).open_transport(None)
    with stopped(group.workers[0].pid):
        for call in (deadlines.send_by_hand, deadlines.send_by_hand_in_halves):
            assert group.trainer.call(call, TIMEOUT) < ALLOWED


@pytest.mark.full  # seconds of waiting
def test_a_stopped_host_of_the_store_at_a_transport(fleet, start):
    keeper = start()
    group = fleet(1).connect("distributed", keeper=keeper)
    (worker,) = group.workers
    for each in group.everybody:
        each.call(transports.open_transport, 1)
    with stopped(keeper.pid):
        for call in (deadlines.send_by_hand, deadlines.send_by_hand_in_halves, deadlines.send_initial):
            assert group.trainer.call(call, TIMEOUT) < ALLOWED
        assert group.trainer.call(deadlines.use_transport, "check_ack", TIMEOUT) < ALLOWED
        assert group.trainer.call(deadlines.begin, TIMEOUT) < ALLOWED
        for call in (deadlines.receive_by_hand, deadlines.answer_by_hand):
            assert worker.call(call, TIMEOUT) < ALLOWED


def test_a_worker_that_does_not_receive_its_initial_weights(fleet):
    group = fleet(1).connect("distributed")
    assert group.trainer.call(deadlines.send_initial, TIMEOUT) < ALLOWED


def test_a_shutdown_with_stopped_relays(fleet, kind):
    group = fleet(3, nodes=["a", "b", "c"], home="home").connect(kind).open(fan_out="node")
    group.send(1)
    for worker in group.workers:
        worker.stop()
    assert group.trainer.call(deadlines.shut_down, 2.0) < ALLOWED + 0.1
    for worker in group.workers:
        worker.resume()
