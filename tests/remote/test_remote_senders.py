"""A sender that is made again, copied or given a wrong thing; a worker that gets weights of a model that it lacks."""

from __future__ import annotations

import pickle
import threading

import pytest
from torch import nn
from torch.distributed import HashStore

import shmsync
from shmsync import DistributedTransport, DistributedWeightSyncScheme, RPCTransport, RPCWeightSyncScheme
from shmsync.schemes.remote.packed_weights import Packer
from support.processes import until
from support.remote import members, transports


def packed(model, model_id):
    """What a call brings."""
    build, arguments = Packer().pack(model.state_dict(), model_id, 1).__reduce__()
    return build(*arguments)


@pytest.mark.parametrize("make", [RPCWeightSyncScheme, DistributedWeightSyncScheme])
@pytest.mark.parametrize("fan_out", [None, "node"])
def test_an_unpickled_sender_says_that_it_has_no_workers(make, fan_out):
    scheme = make(fan_out=fan_out)
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


def test_a_second_init_on_sender_ends_the_threads_of_the_first():
    scheme, stores = DistributedWeightSyncScheme(), [HashStore(), HashStore()]
    before = threading.active_count()
    for store in stores:
        scheme.init_on_sender("policy", store=store, num_workers=1, model=nn.Linear(2, 2))
        with pytest.raises(shmsync.AckTimeout):
            scheme.get_sender().send({"none": nn.Linear(2, 2).weight[:0].detach()}, timeout=0.1)
        assert threading.active_count() == before + 1
    scheme.shutdown()
    until(lambda: threading.active_count() == before)


def test_weights_of_another_model_are_refused_by_name():
    schemes = {name: RPCWeightSyncScheme() for name in ("policy", "env.value_net")}
    models = {name: nn.Linear(2, 2) for name in schemes}
    for name, scheme in schemes.items():
        scheme.init_on_worker(name, model=models[name])
    before = models["policy"].weight.detach().clone()
    with pytest.raises(shmsync.ProtocolError, match="'critic'.*'env.value_net', 'policy'"):
        schemes["policy"].get_receiver().apply_weights(packed(nn.Linear(2, 2), "critic"))
    assert models["policy"].weight.equal(before)
    schemes["policy"].get_receiver().apply_weights(packed(nn.Linear(2, 2), "policy"))
    assert not models["policy"].weight.equal(before)


def test_a_worker_that_gets_weights_of_a_foreign_model_answers_so(fleet, kind):
    group = fleet(1).connect(kind).open().open_transport()
    with pytest.raises(shmsync.ProtocolError, match="'critic'.*'policy'"):
        group.trainer.call(transports.send_sample, "flat", model_id="critic")
    assert group.send(5) == 1
    assert group.look() == [(5, 1)]


@pytest.mark.parametrize("make", [RPCWeightSyncScheme, DistributedWeightSyncScheme])
def test_the_default_timeout_is_a_minute_of_the_scheme_and_its_transports(make):
    scheme = make()
    transport = scheme.create_transport(None)
    assert scheme.timeout == transport.timeout == 60.0
    transport.close()


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


def test_a_word_that_no_worker_answers_is_refused():
    transport = RPCTransport()
    transport.check_ack()
    transport.check_ack("updated")
    with pytest.raises(RuntimeError, match="'done'"):
        transport.check_ack("done")
    with pytest.raises(TypeError, match="None"):
        transport.check_ack(None)
