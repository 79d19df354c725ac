"""What has the shape of a message or an answer of ours, and is none: a typed error that names the worker."""

import pytest

from shmsync.engine.outcome import Failure
from shmsync.errors import ProtocolError
from shmsync.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from shmsync.schemes.link.messages import Tag, Tagged
from support.calls import naming
from support.conformance.nets import Stamped
from support.conformance.rigs import PipeRig

KINDS = [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme]
ANSWERS = {
    "a list for a tag": Tagged((None, "updated"), ["policy", 1]),
    "a number for a tag": Tagged((None, "updated"), 7),
    "a tag of wrong types": Tagged((None, "updated"), ("policy", "1")),
    "a tag of one": Tagged((None, "updated"), ("policy",)),
    "a word for an owner": Tagged((None, "updated"), Tag("policy", 1), "me"),
    "no model for unknown": Tagged((None, "no receiver"), Tag("policy", 1)),
    "no pair for unknown": Tagged((("policy", 5), "no receiver"), Tag("policy", 1)),
    "a failure with a list for a tag": (Failure(["policy", 1], None, "it failed", "trace"), "failed"),
}
MESSAGES = {
    "a list for a tag": Tagged((("policy", {}), "update_weights"), ["policy", 1]),
    "a number for a tag": Tagged((("policy", {}), "update_weights"), 7),
    "no meeting": (((["policy"],), (1, 2, 3.0)), "prepare_weights"),
    "a meeting of one": ((("policy",), (1,)), "prepare_weights"),
    "no call to go on": ((("policy",), None), "resume"),
    "no handle": (("policy", "somewhere"), "register_shared_weights"),
}


@pytest.fixture(params=KINDS)
def rig(request, rig_of):
    made = rig_of(PipeRig, request.param)
    made.deliver(Stamped(1))
    return made


@pytest.mark.parametrize("answer", ANSWERS)
def test_foreign_answer_is_an_error_that_names_the_worker(rig, answer):
    rig.sender.send_async(Stamped(2))
    rig.pipes[3].send(ANSWERS[answer])  # worker 1
    with naming(ProtocolError, [1], match="worker 1 has sent an answer that shmsync cannot read"):
        rig.sender.wait_async(timeout=0.2)
    rig.receive()
    rig.deliver(Stamped(3))  # the pipe goes on
    assert rig.stamps() == [3, 3]


@pytest.mark.parametrize("message", MESSAGES)
def test_foreign_message_is_an_error_of_the_receiver(rig, message):
    rig.pipes[0].send(MESSAGES[message])
    with pytest.raises(ProtocolError, match="no message of shmsync"):
        rig.receivers[0].receive(timeout=60)
    rig.deliver(Stamped(2))
    assert rig.stamps() == [2, 2]
