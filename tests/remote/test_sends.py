"""The promises of a send over RPC and torch.distributed. Ray's are in ray/."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.distributed import HashStore

import shmsync
from shmsync import DistributedTransport, DistributedWeightSyncScheme, RPCTransport, RPCWeightSyncScheme
from shmsync.schemes.remote.packing import Packer
from support.calls import naming
from support.conformance.nets import Stamped
from support.conformance.rigs import rigs
from support.processes import until
from support.remote import fleet as parts


def test_a_send_returns_when_all_have_applied_it(fleet, kind):
    group = fleet(kind, 2).open()
    assert [group.send(5), group.send(6)] == [1, 2]
    assert group.look() == [(6, 2)] * 2
    assert group.trainer.call(parts.send_async, 7) == 3
    with pytest.raises(RuntimeError, match=r"wait_async\(\) first"):
        group.send(8)
    assert group.trainer.call(parts.wait_async) == 3
    assert group.look() == [(7, 3)] * 2
    group.send(8, workers=1)
    assert [value for value, _ in group.look()] == [7, 8]


def test_what_a_worker_raises_is_raised_in_the_send_with_its_traceback(fleet, kind):
    group = fleet(kind, 1).open()
    with pytest.raises(shmsync.ManifestMismatch, match="bias") as caught:
        group.trainer.call(parts.send_what_does_not_fit)
    assert "in apply_weights" in str(caught.value.__cause__)
    assert group.look()[0][0] == 0
    version = group.send(3)
    assert group.look() == [(3, version)]


@pytest.mark.parametrize(("kind", "node"), [("rpc", None), ("distributed", None), ("distributed", "node")])
def test_a_stopped_worker_is_late_and_owes_one_answer_however_often_it_is_sent_to(fleet, kind, node):
    group = fleet(kind, 2).open(**({"fan_out": node} if node else {}))
    group.send(1)
    group.workers[0].stop()
    for value in (2, 3, 4):
        group.trainer.call(parts.send_async, value)
        until(lambda value=value: group.look(1) == [(value, value)])
        with naming(shmsync.AckTimeout, [0], match="worker 0"):
            group.trainer.call(parts.wait_async, timeout=0.2)
    group.workers[0].resume()
    for value in (5, 6, 7):
        assert group.send(value) == value
        assert group.look() == [(value, value)] * 2
    if node is None:  # in an arena of its node a worker that goes on finds the newest
        assert not {3, 4} & set(group.workers[0].call(parts.applied))


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_killed_worker_is_named_and_another_takes_its_place(fleet, kind, when):
    group = fleet(kind, 3).open(workers=2)
    group.send(1)
    if when == "before":
        group.workers[1].kill()
        group.trainer.start(parts.send, 2)
    else:
        group.workers[1].stop()
        group.trainer.begin(parts.send, 2)
        group.workers[1].kill()
    with naming(shmsync.WorkerDied, [1], match="worker 1 "):
        group.trainer.result()
    assert group.look(0) == [(2, 2)]
    assert group.send(3) == 3
    with pytest.raises(shmsync.WorkerDied, match="nothing was sent"):
        group.send(4, workers=1)
    group.trainer.call(parts.replace, 1, 3)
    version = group.send(5)
    assert group.look(0, 2) == [(5, version)] * 2


def test_a_resend_brings_the_last_weights_with_their_version_to_those_that_joined_late(fleet, kind):
    group = fleet(kind, 2).open(workers=1)
    assert group.trainer.call(parts.resend) == 0
    assert [group.send(5), group.send(6)] == [1, 2]
    group.trainer.call(parts.replace, 1, 2)
    assert group.trainer.call(parts.resend, [1]) == 2
    assert group.look() == [(6, 2)] * 2
    assert group.trainer.call(parts.resend) == 2
    assert group.look() == [(6, 2)] * 2
    assert group.send(7) == 3
    assert group.look() == [(7, 3)] * 2


def test_a_resend_with_partial_brings_all_that_the_model_has_now():
    with rigs("call", {"partial": True}) as make:
        rig = make(given={"model": Stamped(1)})
        rig.sender.send({"layer.bias": Stamped(2).state_dict()["layer.bias"]})
        assert rig.sender.resend() == 2
        assert rig.stamps() == [1, 1]


@pytest.mark.parametrize("make", [RPCWeightSyncScheme, DistributedWeightSyncScheme])
def test_every_documented_argument_is_accepted_and_the_missing_are_named(make):
    given = {"model": torch.nn.Linear(2, 2), "pipes": None, "cached_weights": None, "num_workers": 1}
    if make is RPCWeightSyncScheme:
        with pytest.raises(ValueError, match="must be given"):
            make().init_on_sender("policy", **given)
        with pytest.raises(ValueError, match="1 collector_infos but 0 collector_rrefs"):
            make().init_on_sender(collector_infos=["w1"], collector_rrefs=[], collector_class=parts.Member)
        with pytest.raises(ValueError, match="fan_out"):
            make(fan_out="node")
        given |= {"collector_infos": ["w1"], "collector_rrefs": [None], "collector_class": parts.Member}
    else:
        with pytest.raises(ValueError, match="init_process_group"):
            make().init_on_sender("policy", **given)
        given["store"] = HashStore()
    scheme = make()
    scheme.init_on_sender("policy", **given)
    with pytest.raises(TypeError, match="nonsense="):
        scheme.init_on_sender("policy", **given, nonsense=1)
    make().init_on_worker("policy", model=given["model"], pipe=None, store=HashStore(), rank=1, actor_ref=None)
    copy = pickle.loads(pickle.dumps(scheme.get_sender()))
    with pytest.raises(shmsync.ProtocolError, match=r"unpickled.*register_worker"):
        copy.send(given["model"])


@pytest.mark.parametrize("transport", [RPCTransport(), DistributedTransport(), DistributedTransport(object(), None)])
def test_without_a_worker_every_call_of_a_transport_does_nothing(transport):
    weights = parts.linear().state_dict()
    transport.send_weights("policy", weights)
    transport.send_weights_async(weights)
    transport.wait_ack()
    with pytest.raises(RuntimeError, match="no send is pending"):
        transport.wait_ack()
    transport.send_ack()
    assert transport.receive_weights(timeout=parts.FOR_EVER) is None
    assert not transport.check_connection()


def test_receive_raises_when_the_trainer_that_has_the_store_died(fleet):
    group = fleet("distributed", 1).open(loop=False)
    (worker,) = group.workers
    worker.start(parts.receive)
    group.send(1)
    assert worker.result()
    worker.begin(parts.receive)
    group.trainer.kill()
    with pytest.raises(shmsync.WriterDied):
        worker.result()
    assert group.look() == [(1, 1)]


def test_weights_of_several_pieces_arrive_as_they_were_sent():
    large, small = torch.randn(1000, 3000), torch.randn(7)
    sent = {"first": small, "a": large, "b": large.t(), "none": torch.empty(0, 3), "tied": small, "c": large.int()}
    packed = Packer().pack(sent, "policy", 3)
    _, (_, _, *pieces) = packed.__reduce__()
    assert len(pieces) == 4 and all(piece.untyped_storage().nbytes() == piece.nbytes for piece in pieces)
    received = pickle.loads(pickle.dumps(packed))
    assert received.label == packed.label and received.keys() == sent.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in sent.items())
    assert received["first"].data_ptr() == received["tied"].data_ptr()
