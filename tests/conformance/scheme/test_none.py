"""NoWeightSyncScheme: every call does nothing, and answers properly."""

from shmsync.schemes import NoWeightSyncScheme
from support.conformance.contexts import Context
from support.conformance.nets import Stamped, ask
from support.conformance.table import NONE, only


@only(NONE)
def test_workers_keep_the_weights_they_came_with(fleet):
    sender = fleet.open()
    assert sender.send(Stamped(1)) == 0
    assert sender.send(Stamped(2), worker_ids=[0, 1]) == 0
    assert sender.update_weights(Stamped(3)) == 0
    assert fleet.stamps() == [0, 0, 0]
    assert fleet.versions() == [0, 0, 0]
    assert not any(pipe.poll() for pipe in fleet.pipes)


def test_receiver_answers_without_pipe_or_model():
    scheme, net = NoWeightSyncScheme(), Stamped(1)
    scheme.init_on_worker("policy", Context(policy=net))
    receiver = scheme.get_receiver()
    assert receiver.receive() is False
    assert receiver.receive(timeout=0) is False
    receiver.apply_weights(Stamped(2).state_dict())
    assert ask(net) == 1
    assert receiver.version == 0
