"""Senders that are copied or shared, and a worker that gets weights of a model that it lacks."""

from __future__ import annotations

import pickle

import pytest
from torch import nn
from torch.distributed import HashStore

import shmsync
from shmsync import DistributedTransport, DistributedWeightSyncScheme, RPCTransport, RPCWeightSyncScheme
from support.remote import members, parts, transports


@pytest.mark.parametrize("make", [RPCWeightSyncScheme, DistributedWeightSyncScheme])
def test_an_unpickled_sender_says_that_it_has_no_workers(make):
    scheme = make()
    scheme.init_on_sender("policy", **_nobody(scheme), model=nn.Linear(2, 2))
    copy = pickle.loads(pickle.dumps(scheme.get_sender()))
    assert copy.worker_ids == []
    for call in (copy.send, copy.send_async):
        with pytest.raises(shmsync.ProtocolError, match=r"unpickled.*register_worker"):
            call(nn.Linear(2, 2))
    assert copy.version == 0
    copy.close()
    scheme.shutdown()


def _nobody(scheme):
    """Arguments of a sender whose workers are not there."""
    if isinstance(scheme, DistributedWeightSyncScheme):
        return {"store": HashStore(), "num_workers": 1}
    return {"collector_infos": ["w1"], "collector_rrefs": [None], "collector_class": members.Member}


def test_a_worker_that_gets_weights_of_a_foreign_model_answers_so(fleet, kind):
    group = fleet(1).connect(kind).open().open_transport()
    with pytest.raises(shmsync.ProtocolError, match="'critic'.*'policy'"):
        group.trainer.call(transports.send_sample, "flat", model_id="critic")
    assert group.send(5) == 1
    assert group.look() == [(5, 1)]


@pytest.mark.parametrize(
    "transport",
    [RPCTransport(), DistributedTransport(), DistributedTransport(rank=None, store=object())],
    ids=["rpc", "distributed", "no rank"],
)
def test_without_a_worker_every_call_of_a_transport_does_nothing(transport):
    weights = transports.SAMPLES["flat"]()
    transport.send_weights("policy", weights)
    transport.send_weights_async("policy", weights)
    transport.wait_ack()
    with pytest.raises(RuntimeError, match="no send is pending"):
        transport.wait_ack()
    transport.send_ack()
    assert transport.receive_weights(timeout=members.FOR_EVER) is None
    assert not transport.check_connection()
    if isinstance(transport, DistributedTransport):
        transport.send_initial_weights(weights)
        assert transport.receive_initial_weights() is None
        with pytest.raises(RuntimeError, match="no send is pending"):
            transport.check_ack()
    transport.close()


def test_one_transport_in_two_threads(fleet, kind):
    group = fleet(1).connect(kind).open().open_transport(timeout=10.0)
    assert group.trainer.call(transports.send_in_threads, 2, 60) == []
    assert group.look()[0][0] == 5.0


def test_two_models_over_one_store(fleet):
    group = fleet(1).connect("distributed")
    (worker,) = group.workers
    for model_id, size in (("policy", 500), ("env.value_net", 300)):
        worker.call(members.make_member, size, model_id=model_id)
    group.trainer.call(parts.make_two_senders)
    for round in (1, 2):
        group.trainer.call(parts.send_two_models, float(round))
        assert [worker.call(members.look, model_id) for model_id in ("policy", "env.value_net")] == [
            (round, round),
            (round + 0.5, round),
        ]
