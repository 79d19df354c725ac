"""Several threads at once: each call returns or raises in its time, and the next send reaches all workers."""

from __future__ import annotations

from support.remote import members, parts, threads, transports


def test_one_transport_in_two_threads(fleet, kind):
    group = fleet(1).connect(kind).open().open_transport(timeout=10.0)
    assert group.trainer.call(threads.send_over_one_transport, 2, 60) == [[], []]
    assert group.look()[0][0] == 5.0


def test_a_transport_that_is_busy_in_this_thread_refuses_at_once(fleet, kind):
    group = fleet(1).connect(kind).open().open_transport()
    assert group.trainer.call(threads.refuse_in_the_same_thread) == ["WriterBusy"]
    assert group.look()[0][0] == 7.0


def test_two_models_in_two_threads_over_one_store(fleet):
    group = fleet(1).connect("distributed")
    (worker,) = group.workers
    for model_id, size in (("policy", 500), ("env.value_net", 300)):
        worker.call(members.make_member, size, model_id=model_id)
    group.trainer.call(parts.make_two_senders)
    assert group.trainer.call(threads.send_two_models, 60) == [[], []]
    assert [worker.call(members.look, model_id) for model_id in ("policy", "env.value_net")] == [(59, 60)] * 2


def test_two_threads_may_receive_by_hand(fleet):
    group = fleet(1).connect("distributed")
    (worker,) = group.workers
    for each in group.everybody:
        each.call(transports.open_transport, 1, timeout=members.FOR_EVER)
    worker.start(threads.receive_in_threads, 3.0)
    for _ in range(20):
        group.trainer.call(transports.send_sample, "flat")
    assert worker.result() == 20
