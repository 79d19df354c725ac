"""A sender that was pickled owns no pipe of the other one."""

import pickle

import pytest

from shmsync.errors import ProtocolError
from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from support.calls import Call
from support.conformance.nets import Stamped
from support.conformance.rigs import PipeRig


@pytest.mark.parametrize("kind", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])
def test_a_copy_of_a_sender_has_no_workers_until_it_is_given_some(rig_of, kind):
    rig, other = rig_of(PipeRig, kind), rig_of(PipeRig, kind)
    rig.deliver(Stamped(1))
    made = pickle.loads(pickle.dumps(rig.sender))
    assert made.worker_ids == []
    for call in (made.send, made.send_async, made.update_weights):
        with pytest.raises(ProtocolError, match=r"has no workers; call register_worker\(\)"):
            call(Stamped(2))
    for index, pipe in enumerate(other.pipes[::2]):
        made.register_worker(index, pipe)
    other.receive_until(Call(made.send, Stamped(2), timeout=60))
    assert (rig.stamps(), other.stamps()) == ([1, 1], [2, 2])
    rig.deliver(Stamped(3))
    assert (rig.stamps(), other.stamps()) == ([3, 3], [2, 2])
    made._scheme.shutdown()


def test_a_copy_of_a_sender_that_has_workers_again_resends_what_it_knows(rig_of):
    rig, other = rig_of(PipeRig, MultiProcessWeightSyncScheme), rig_of(PipeRig, MultiProcessWeightSyncScheme)
    rig.deliver(Stamped(1))
    made = pickle.loads(pickle.dumps(rig.sender))
    for index, pipe in enumerate(other.pipes[::2]):
        made.register_worker(index, pipe)
    with pytest.raises(ValueError, match="no weights to send"):
        made.resend(timeout=60)
    other.receive_until(Call(made.send, Stamped(2), timeout=60))
    other.receive_until(Call(made.resend, timeout=60))
    assert other.stamps() == [2, 2]
    made._scheme.shutdown()
