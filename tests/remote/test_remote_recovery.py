"""Workers that are late, stopped, or cannot take a message: calls keep their deadlines, and the next send is right."""

from __future__ import annotations

import contextlib

import pytest

import shmsync
from support.calls import naming
from support.processes import stopped
from support.remote import deadlines, members, parts, transports

TIMEOUT, ALLOWED = 0.3, 0.1  # seconds: of a call, and beyond that


def send_until_applied(group, value):
    """What was left over is answered first; the version of a send that all workers applied."""
    while True:
        with contextlib.suppress(shmsync.AckTimeout):
            return group.send(value, timeout=20.0)


def test_a_stopped_worker_is_late_and_gets_one_message_however_often_it_is_sent_to(fleet, kind):
    group = fleet(2).connect(kind).open()
    group.send(1)
    group.workers[0].stop()
    for value, workers, timeout in [(2, None, 2.0), (3, 0, 0.5), (4, [0], 0.5)]:
        with naming(shmsync.AckTimeout, [0], match="worker 0"):
            group.send(value, workers=workers, timeout=timeout)
    assert group.look(1) == [(2, 2)]
    group.workers[0].resume()
    assert group.send(5) == 5
    assert group.look() == [(5, 5), (5, 5)]
    group.workers[0].call(members.wait_applied, 5)
    assert group.workers[0].call(members.attribute, "applied") == [1, 2, 5]


def test_bytes_of_a_message_that_nobody_took_are_not_taken_for_the_next_ones(fleet):
    group = fleet(1).connect("distributed").open(loop=False)
    (worker,) = group.workers
    with pytest.raises(shmsync.AckTimeout):
        group.send(1, timeout=0.2)
    group.trainer.call(parts.make_sender_anew, "distributed")
    for value in (2, 3):
        group.trainer.start(parts.send, value)
        while not group.trainer.conn.poll():  # the lost message may come first
            worker.call(members.receive, 0.1)
        assert group.trainer.result() == value - 1
        assert group.look() == [(value, value - 1)]


def test_weights_that_cannot_be_unpickled_there_raise_in_the_send(fleet):
    group = fleet(1).connect("distributed").open()
    with pytest.raises(members.Trouble, match="not here"):
        group.trainer.call(transports.send_what_only_the_trainer_can_unpickle)
    assert group.send(2) == 2
    assert group.look() == [(2, 2)]


def test_initial_weights_that_come_after_a_time_out_are_there_at_the_next_try(fleet):
    group = fleet(1).connect("distributed")
    (worker,) = group.workers
    group.trainer.call(transports.open_transport, 1, timeout=members.FOR_EVER)
    worker.call(transports.open_transport, 1, timeout=0.3)
    with pytest.raises(TimeoutError, match="timeout="):
        worker.call(transports.receive_initial)
    group.trainer.call(transports.send_sample, "flat", "send_initial_weights")
    worker.call(transports.receive_initial_at_last)
    assert worker.call(transports.differences, "flat") == []
    group.trainer.start(transports.send_sample, "many")
    worker.call(transports.receive_sample)
    group.trainer.result()
    assert worker.call(transports.differences, "many") == []


def test_workers_that_are_stopped_before_the_first_send(fleet, kind):
    group = fleet(2, nodes=["a", "b"], home="a").connect(kind).open(fan_out="node")
    for worker in group.workers:
        worker.stop()
    for call in (deadlines.send, deadlines.send_in_halves):
        assert group.trainer.call(call, TIMEOUT) < ALLOWED
    for worker in group.workers:
        worker.resume()
    version = send_until_applied(group, 7)
    assert group.look() == [(7, version)] * 2


def test_a_stopped_worker_at_a_transport(fleet, kind):
    group = fleet(1).connect(kind).open_transport(None)
    with stopped(group.workers[0].pid):
        for call in (deadlines.send_by_hand, deadlines.send_by_hand_in_halves):
            assert group.trainer.call(call, TIMEOUT) < ALLOWED


def test_a_stopped_host_of_the_store_keeps_nobody_longer_than_the_deadline(fleet, start):
    keeper = start()
    group = fleet(1).connect("distributed", keeper=keeper).open(loop=False)
    (worker,) = group.workers
    with stopped(keeper.pid):
        for call in (deadlines.send, deadlines.send_in_halves):
            assert group.trainer.call(call, TIMEOUT) < ALLOWED
        for call in (deadlines.receive, deadlines.join):
            assert worker.call(call, TIMEOUT) < ALLOWED
    group.trainer.call(parts.make_sender_anew, "distributed")
    group.trainer.start(parts.send, 3)
    while not group.trainer.conn.poll():  # what was left over may come first
        worker.call(members.receive, 0.1)
    group.trainer.result()
    assert group.look()[0][0] == 3


def test_a_shutdown_with_a_stopped_relay(fleet, kind):
    group = fleet(1, nodes=["a"], home="home").connect(kind).open(fan_out="node")
    group.send(1)
    with stopped(group.workers[0].pid):
        assert group.trainer.call(deadlines.shut_down, 2.0) < 2 * ALLOWED
