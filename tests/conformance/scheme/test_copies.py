"""Copies of senders and receivers: none owns the pipes of another."""

import pickle

import pytest

from shmsync.errors import ProtocolError
from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from support.calls import Call
from support.conformance.nets import Stamped
from support.conformance.rigs import PipeRig

KINDS = [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme]
COPIES = {"pickle": lambda each: pickle.loads(pickle.dumps(each))}


@pytest.fixture(params=KINDS)
def rig(request, rig_of):
    return rig_of(PipeRig, request.param)


@pytest.mark.parametrize("way", COPIES)
def test_copy_of_a_sender_says_that_it_has_no_workers(rig, way):
    rig.deliver(Stamped(1))
    made = COPIES[way](rig.sender)
    assert made.worker_ids == []
    for call in (made.send, made.send_async, made.update_weights):
        with pytest.raises(ProtocolError, match=r"has no workers; call register_worker\(\)"):
            call(Stamped(2))
    rig.deliver(Stamped(3))
    assert rig.stamps() == [3, 3]


@pytest.mark.parametrize("way", COPIES)
def test_copy_of_a_sender_sends_to_workers_of_its_own(rig, way, rig_of):
    rig.deliver(Stamped(1))
    made, other = COPIES[way](rig.sender), rig_of(PipeRig, type(rig.scheme))
    for index, pipe in enumerate(other.pipes[::2]):
        made.register_worker(index, pipe)
    other.receive_until(Call(made.send, Stamped(2), timeout=60))
    assert (rig.stamps(), other.stamps()) == ([1, 1], [2, 2])
    rig.deliver(Stamped(3))
    assert (rig.stamps(), other.stamps()) == ([3, 3], [2, 2])
    assert rig.sender.worker_ids == [0, 1]
    made._scheme.shutdown()
