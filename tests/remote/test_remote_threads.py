"""Several threads at once: each call returns or raises in its time, and the next send reaches everybody."""

from __future__ import annotations

import pytest

from support.remote import members, parts, threads, transports


@pytest.fixture
def open_transport(fleet):
    """open_transport(kind, timeout) -> a fleet whose trainer has a transport to a worker with a receiver."""

    def make(kind, timeout):
        group = fleet(1).connect(kind).open(timeout=members.FOR_EVER)
        if kind == "rpc":
            group.trainer.call(transports.open_rpc_transport, 500, timeout=timeout)
        else:
            group.trainer.call(transports.open_transport, 1, timeout=timeout)
        return group

    return make


@pytest.mark.parametrize("fan_out", [None, "node"])
def test_one_sender_in_two_threads(fleet, kind, fan_out):
    group = fleet(2, nodes=["a", "a"], home="home").connect(kind).open(fan_out=fan_out)
    assert group.send(1) == 1
    results = group.trainer.call(threads.send_in_threads, 2, 60, 10.0)
    # A call whose turn did not come in its time is refused; but each turn takes a few milliseconds.
    assert [raised for raised, _ in results] == [[], []]
    version = group.send(9)
    assert group.look() == [(9, version)] * 2


def test_one_transport_in_two_threads(open_transport, kind):
    group = open_transport(kind, 10.0)
    assert group.trainer.call(threads.send_over_one_transport, 2, 60, 10.0)[0][0] == []
    assert group.look()[0][0] == 5.0


def test_a_transport_that_is_busy_in_this_thread_refuses_at_once(open_transport, kind):
    group = open_transport(kind, members.FOR_EVER)
    assert group.trainer.call(threads.refuse_in_the_same_thread) == ["WriterBusy"]
    assert group.look()[0][0] == 7.0


def test_two_models_in_two_threads_over_one_store(fleet):
    group = fleet(1).connect("distributed")
    group.workers[0].call(members.make_actor)
    group.trainer.call(parts.make_actor_senders)
    assert [raised for raised, _ in group.trainer.call(threads.send_two_models, 60)] == [[], []]
    assert group.workers[0].call(members.actor_values) == {"policy": (59, 60), "env.value_net": (59, 60)}


def test_two_threads_may_receive_by_hand(fleet):
    group = fleet(1).connect("distributed")
    (worker,) = group.workers
    for each in group.everybody:
        each.call(transports.open_transport, 1, timeout=members.FOR_EVER)
    worker.start(threads.receive_in_threads, 3.0)
    for _ in range(20):
        group.trainer.call(transports.send_sample, "flat")
    assert worker.result() == 20
