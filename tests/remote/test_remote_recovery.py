"""Messages that no worker took, interrupted sends, relays that die at the wrong moment: the next send is right."""

from __future__ import annotations

import pytest

import shmsync
from support.calls import naming
from support.remote import members, parts, transports, troubles


def test_a_stopped_worker_is_late_and_gets_one_message_however_often_it_is_sent_to(fleet, kind):
    group = fleet(2).connect(kind).open()
    group.send(1)
    if kind == "distributed":
        group.trainer.call(parts.count_isends)
    group.workers[0].stop()
    for value, workers, timeout in [(2, None, 5.0), (3, 0, 0.5), (4, [0], 0.5)]:
        with naming(shmsync.AckTimeout, [0], match="worker 0"):
            group.send(value, workers=workers, timeout=timeout)
    if kind == "distributed":
        assert [rank for rank, _ in group.trainer.call(parts.isends)] == [1, 2]
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


def test_an_answer_that_was_interrupted_in_the_hearing_is_heard_by_the_next_send(fleet):
    group = fleet(2).connect("distributed").open(sync=False, strategy="tensordict")
    group.trainer.call(troubles.interrupt_when_an_answer_is_heard)
    with pytest.raises(KeyboardInterrupt):
        group.send(1)
    assert group.send(2) == 2
    assert group.look() == [(2, 2)] * 2


@pytest.mark.parametrize("where", ["while it waits", "when it has it", "while it applies", "before it answers"])
def test_a_message_whose_receipt_was_interrupted_is_given_again(fleet, where):
    group = fleet(1).connect("distributed").open(loop=False)
    (worker,) = group.workers
    worker.call(troubles.interrupt_receipt, where)
    group.trainer.start(parts.send, 1)
    with pytest.raises(KeyboardInterrupt):
        worker.call(members.receive, members.FOR_EVER)
    if where == "while it applies":  # its sender has an answer: the interrupt
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            group.trainer.result()
    else:
        assert worker.call(members.receive, members.FOR_EVER)
        assert group.trainer.result() == 1
        assert group.look() == [(1, 1)]
    group.trainer.start(parts.send, 2)
    assert worker.call(members.receive, members.FOR_EVER)
    assert group.trainer.result() == 2
    assert group.look() == [(2, 2)]


def test_weights_that_cannot_be_unpickled_there_raise_in_the_send(fleet):
    group = fleet(1).connect("distributed").open()
    with pytest.raises(members.Trouble, match="not here"):
        group.trainer.call(troubles.send_what_only_the_trainer_can_unpickle)
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


def test_weights_of_an_interrupted_send_are_not_taken_for_those_of_the_next(fleet):
    group = fleet(2, nodes=["a", "a"], home="a").connect("distributed").open(fan_out="node")
    assert group.send(1) == 1
    group.trainer.call(troubles.leave_a_version, 5)
    version = group.send(9)
    assert version > 2
    assert group.look() == [(9, version)] * 2


def test_a_relay_that_dies_before_its_workers_attached_is_named_and_replaced(fleet, kind):
    group = fleet(3, nodes=["a", "a", "a"], home="home").connect(kind).open(fan_out="node")
    group.trainer.call(troubles.kill_before_the_announcements, group.workers[0].pid)
    with naming(shmsync.WorkerDied, {"the relay on node a", 0}):
        group.send(7)
    assert group.look(1, 2) == [(7, 1)] * 2
    assert group.send(8) == 2
    assert group.look(1, 2) == [(8, 2)] * 2


@pytest.mark.full  # the tests around it have one relay
def test_whoever_waits_behind_two_relays_is_named(fleet, kind):
    group = fleet(3, nodes=["a", "a", "a"], home="home").connect(kind).open(fan_out="node")
    first, second, _ = group.workers
    group.trainer.call(troubles.kill_before_the_announcements, first.pid, stop=second.pid)
    with naming(shmsync.WorkerDied, {"the relay on node a", 0, 1, 2}):
        group.send(7, timeout=5.0)
    second.resume()
    assert group.send(8) == 2
    assert group.look(1, 2) == [(8, 2)] * 2


def test_a_death_that_only_a_look_at_the_others_found_is_named_by_the_next_send(fleet, kind):
    group = fleet(3, nodes=["a", "a", "b"], home="home").connect(kind).open(fan_out="node")
    group.workers[2].kill()
    group.send(1, workers=[0, 1], timeout=20.0)  # which has to know the other workers of their node
    with pytest.raises(shmsync.WorkerDied) as caught:
        group.send(2, timeout=20.0)
    assert 2 in caught.value.missing
    assert group.look(0, 1) == [(2, 2)] * 2
