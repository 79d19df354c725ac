"""RPCWeightSyncScheme and RPCTransport between real agents of torch.distributed.rpc."""

from __future__ import annotations

import pytest

import shmsync
from shmsync import RPCTransport, RPCWeightSyncScheme
from support.calls import naming
from support.remote import members, parts, transports


@pytest.fixture
def ends(fleet):
    return fleet(1).connect("rpc").open_transport(None).everybody


# ---- the scheme


def test_two_receivers_in_one_worker(fleet):
    group = fleet(1).connect("rpc").open(strategy="tensordict")
    group.trainer.call(parts.add_collector, 1, 500, "second")
    group.send(4)
    assert [group.workers[0].call(members.look, name) for name in ("policy", "second")] == [(4, 1), (4, 1)]
    group.workers[0].kill()
    with naming(shmsync.WorkerDied, [0, 1]):
        group.send(5)


def test_workers_that_join_and_leave_are_taken_in_at_the_next_send(fleet):
    group = fleet(3).connect("rpc").open(workers=1, context=True)
    group.send(1)
    for rank in (2, 3):
        group.trainer.call(parts.add_collector, rank, 500)
    assert group.send(2) == 2
    assert group.look() == [(2, 2)] * 3
    group.workers[0].kill()
    with pytest.raises(shmsync.WorkerDied):
        group.send(3)
    group.trainer.call(parts.remove_collector, 0)
    assert group.trainer.call(parts.dead) == [0]  # not looked at yet
    assert group.send(4) == 4
    assert group.trainer.call(parts.dead) == []  # worker 0 is another one now
    assert group.look(1, 2) == [(4, 4), (4, 4)]
    group.trainer.call(parts.remove_collector, 1)
    group.send(5)
    assert group.look(1, 2) == [(5, 5), (4, 4)]


def test_what_is_missing_or_contradictory_is_refused():
    for arguments in ({}, {"collector_infos": ["w1"], "collector_rrefs": [object()]}):
        with pytest.raises(ValueError, match="must be given"):
            RPCWeightSyncScheme().init_on_sender("policy", **arguments)
    roster = {"collector_infos": ["w1"], "collector_rrefs": [], "collector_class": members.Member}
    with pytest.raises(ValueError, match="1 collector_infos but 0 collector_rrefs"):
        RPCWeightSyncScheme().init_on_sender("policy", **roster)


# ---- the transport


def test_a_transport_is_made_of_info_rref_and_class():
    info, rref = object(), object()
    transport = RPCWeightSyncScheme().create_transport((info, rref, members.Member))
    assert isinstance(transport, RPCTransport)
    assert (transport.info, transport.rref, transport.collector_class) == (info, rref, members.Member)
    with pytest.raises(ValueError, match=r"\(info, rref, class\)"):
        RPCWeightSyncScheme().create_transport((info, rref))


def test_the_method_of_the_class_gets_the_weights_as_they_were_sent(ends):
    trainer, worker = ends
    for name in transports.SAMPLES:
        trainer.call(transports.send_sample, name)
        assert worker.call(transports.keeper_differences, name) == [], name


def test_a_send_in_two_halves_and_what_a_worker_raises(ends):
    trainer, worker = ends
    trainer.call(transports.send_sample, "flat", "send_weights_async")
    trainer.call(transports.use, "wait_ack")
    assert worker.call(transports.keeper_differences, "flat") == []
    with pytest.raises(RuntimeError, match="no send is pending"):
        trainer.call(transports.use, "wait_ack")
    worker.call(transports.keeper_trouble, "no room")
    for call in ("send_weights", "send_weights_async"):
        with pytest.raises(members.Trouble, match="no room") as caught:
            trainer.call(transports.send_sample, "flat", call)
            trainer.call(transports.use, "wait_ack")
        assert "in update_policy_weights_" in str(caught.value.__cause__)
    worker.kill()
    with pytest.raises(shmsync.WorkerDied):
        trainer.call(transports.send_sample, "flat")
